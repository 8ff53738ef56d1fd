// One TCP stream between two programs through the service package of Go Nebula: the peer of `measure listen` and
// `measure dial` in nebula-net's examples.
//
//	go-nebula listen CONFIG [WINDOW]
//	go-nebula dial CONFIG ADDRESS SECONDS [WINDOW]
//
// The service queues at most 512 packets for Nebula and drops what does not fit. A window, in bytes, bounds what its TCP has on the
// way, so that the queue never overflows. The package has no such setting, so the program sets it behind its back.
package main

import (
	"fmt"
	"log"
	"os"
	"reflect"
	"strconv"
	"unsafe"

	"github.com/slackhq/nebula"
	"github.com/slackhq/nebula/config"
	"github.com/slackhq/nebula/logging"
	"github.com/slackhq/nebula/overlay"
	"github.com/slackhq/nebula/service"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		log.Fatal(err)
	}
}

func run(arguments []string) error {
	if len(arguments) < 2 || arguments[0] == "dial" && len(arguments) < 4 {
		return fmt.Errorf("usage: go-nebula listen CONFIG [WINDOW] | go-nebula dial CONFIG ADDRESS SECONDS [WINDOW]")
	}
	text, err := os.ReadFile(arguments[1])
	if err != nil {
		return err
	}
	settings := config.NewC(logging.NewLogger(os.Stderr))
	if err := settings.LoadString(string(text)); err != nil {
		return err
	}
	control, err := nebula.Main(settings, false, "stream", logging.NewLogger(os.Stderr), overlay.NewUserDeviceFromConfig)
	if err != nil {
		return err
	}
	node, err := service.New(control)
	if err != nil {
		return err
	}
	if arguments[0] == "listen" {
		if err := bound(node, arguments[2:]); err != nil {
			return err
		}
		listener, err := node.Listen("tcp", fmt.Sprintf(":%d", port))
		if err != nil {
			return err
		}
		return listen(listener)
	}
	if err := bound(node, arguments[4:]); err != nil {
		return err
	}
	stream, err := node.Dial("tcp", fmt.Sprintf("%s:%d", arguments[2], port))
	if err != nil {
		return err
	}
	return dial(stream, arguments[3])
}

// Bounds the buffers of all connections.
func bound(node *service.Service, window []string) error {
	if len(window) == 0 {
		return nil
	}
	size, err := strconv.Atoi(window[0])
	if err != nil {
		return err
	}
	ip := (*stack.Stack)(unsafe.Pointer(reflect.ValueOf(node).Elem().FieldByName("ipstack").Pointer()))
	receive := tcpip.TCPReceiveBufferSizeRangeOption{Min: 4096, Default: size, Max: size}
	send := tcpip.TCPSendBufferSizeRangeOption{Min: 4096, Default: size, Max: size}
	for _, option := range []tcpip.SettableTransportProtocolOption{&receive, &send} {
		if err := ip.SetTransportProtocolOption(tcp.ProtocolNumber, option); err != nil {
			return fmt.Errorf("cannot bound the window: %v", err)
		}
	}
	return nil
}
