// One TCP stream between two programs through wireguard-go with gVisor's TCP instead of a device: the peer of `measure listen` and
// `measure dial` in nebula-net's examples.
//
//	netstack listen PORT
//	netstack dial PORT PEER_PORT SECONDS
//
// Debian carries wireguard-go without its package tun/netstack, so the device is ours. It is meant to be the best case: it hands over
// many packets at once, where that package hands over one, and its queue holds all that a connection can have on the way.
package main

import (
	"context"
	"crypto/ecdh"
	"errors"
	"fmt"
	"log"
	"net/netip"
	"os"
	"strconv"

	"golang.zx2c4.com/wireguard/conn"
	"golang.zx2c4.com/wireguard/device"
	"golang.zx2c4.com/wireguard/tun"
	"gvisor.dev/gvisor/pkg/buffer"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/link/channel"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
)

const (
	mtu   = 1300
	queue = 8192
	nic   = 1
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		log.Fatal(err)
	}
}

func run(arguments []string) error {
	switch {
	case len(arguments) == 2 && arguments[0] == "listen":
		node, err := newNode(2, 1, arguments[1], "")
		if err != nil {
			return err
		}
		listener, err := gonet.ListenTCP(node.stack, address(2), ipv4.ProtocolNumber)
		if err != nil {
			return err
		}
		return listen(listener)
	case len(arguments) == 4 && arguments[0] == "dial":
		node, err := newNode(1, 2, arguments[1], arguments[2])
		if err != nil {
			return err
		}
		stream, err := gonet.DialTCP(node.stack, address(2), ipv4.ProtocolNumber)
		if err != nil {
			return err
		}
		return dial(stream, arguments[3])
	}
	return errors.New("usage: netstack listen PORT | netstack dial PORT PEER_PORT SECONDS")
}

// The address of a host in the tunnel, and the port of the stream.
func address(number byte) tcpip.FullAddress {
	return tcpip.FullAddress{NIC: nic, Addr: overlay(number), Port: port}
}

func overlay(number byte) tcpip.Address {
	return tcpip.AddrFrom4([4]byte{10, 42, 0, number})
}

// A key that both programs know: nothing that is measured is secret.
func key(number byte) (*ecdh.PrivateKey, error) {
	var bytes [32]byte
	for at := range bytes {
		bytes[at] = number
	}
	return ecdh.X25519().NewPrivateKey(bytes[:])
}

// A device whose packets come from, and go to, a TCP stack.
type node struct {
	stack  *stack.Stack
	link   *channel.Endpoint
	events chan tun.Event
}

// Starts the host with this number, and tells it about its peer.
func newNode(number, peer byte, listenPort, peerPort string) (*node, error) {
	made := &node{
		stack: stack.New(stack.Options{
			NetworkProtocols:   []stack.NetworkProtocolFactory{ipv4.NewProtocol},
			TransportProtocols: []stack.TransportProtocolFactory{tcp.NewProtocol},
		}),
		link:   channel.New(queue, mtu, ""),
		events: make(chan tun.Event, 1),
	}
	sack := tcpip.TCPSACKEnabled(true)
	if err := made.stack.SetTransportProtocolOption(tcp.ProtocolNumber, &sack); err != nil {
		return nil, fmt.Errorf("cannot enable selective acknowledgements: %v", err)
	}
	if err := made.stack.CreateNIC(nic, made.link); err != nil {
		return nil, fmt.Errorf("cannot make the interface: %v", err)
	}
	own := tcpip.ProtocolAddress{Protocol: ipv4.ProtocolNumber, AddressWithPrefix: overlay(number).WithPrefix()}
	if err := made.stack.AddProtocolAddress(nic, own, stack.AddressProperties{}); err != nil {
		return nil, fmt.Errorf("cannot set the address: %v", err)
	}
	made.stack.SetRouteTable([]tcpip.Route{{Destination: header.IPv4EmptySubnet, NIC: nic}})

	private, err := key(number)
	if err != nil {
		return nil, err
	}
	other, err := key(peer)
	if err != nil {
		return nil, err
	}
	settings := fmt.Sprintf("private_key=%x\nlisten_port=%s\npublic_key=%x\nallowed_ip=10.42.0.%d/32\n",
		private.Bytes(), listenPort, other.PublicKey().Bytes(), peer)
	if peerPort != "" {
		number, err := strconv.ParseUint(peerPort, 10, 16)
		if err != nil {
			return nil, err
		}
		settings += fmt.Sprintf("endpoint=%s\n", netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), uint16(number)))
	}
	wireguard := device.NewDevice(made, conn.NewDefaultBind(), device.NewLogger(device.LogLevelError, ""))
	if err := wireguard.IpcSet(settings); err != nil {
		return nil, err
	}
	made.events <- tun.EventUp
	return made, wireguard.Up()
}

// Waits for one packet of the stack, and takes those that are there already.
func (made *node) Read(buffers [][]byte, sizes []int, offset int) (int, error) {
	packet := made.link.ReadContext(context.Background())
	for count := range buffers {
		if packet == nil {
			return count, nil
		}
		view := packet.ToView()
		packet.DecRef()
		sizes[count] = copy(buffers[count][offset:], view.AsSlice())
		view.Release()
		if count+1 == len(buffers) {
			break
		}
		packet = made.link.Read()
	}
	return len(buffers), nil
}

func (made *node) Write(packets [][]byte, offset int) (int, error) {
	for _, packet := range packets {
		inbound := stack.NewPacketBuffer(stack.PacketBufferOptions{Payload: buffer.MakeWithData(packet[offset:])})
		made.link.InjectInbound(header.IPv4ProtocolNumber, inbound)
		inbound.DecRef()
	}
	return len(packets), nil
}

func (made *node) File() *os.File           { return nil }
func (made *node) MTU() (int, error)        { return mtu, nil }
func (made *node) Name() (string, error)    { return "netstack", nil }
func (made *node) Events() <-chan tun.Event { return made.events }
func (made *node) Close() error             { return nil }
func (made *node) BatchSize() int           { return conn.IdealBatchSize }
