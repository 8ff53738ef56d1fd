//! What every tunnel with a tun device, a UDP socket and AES-256-GCM has to do, and nothing else: no handshake, no
//! routes, no firewall, no headers of inner segments. `benches/profile` measures it beside `nebula`. Not for use as
//! a tunnel.
//!
//!     limit DEVICE LOCAL PEER BYTES      LOCAL and PEER: ADDRESS:PORT; BYTES: what a datagram carries
//!
//! The sender cuts a super-packet of the device, with its virtio_net header, into pieces, seals each, and sends them as
//! one run that the kernel cuts into datagrams (`UDP_SEGMENT`). The receiver gets the datagrams joined (`UDP_GRO`) and
//! writes the same super-packet.
//!
//!     counter (8 bytes), size of the super-packet (4), offset of the piece (4), sealed piece, tag (16)

use std::error::Error;
use std::fs::File;
use std::io::{IoSlice, IoSliceMut, Read, Write};
use std::net::{SocketAddrV4, UdpSocket};
use std::os::fd::AsRawFd;

use nebula_core::config::Cipher;
use nebula_core::internals::AeadKey;
use nebula_core::io::Tun;
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, recvmsg, sendmsg, setsockopt, sockopt};

const HEADER: usize = 16;
const TAG: usize = 16;
/// A super-packet and its virtio_net header.
const LARGEST: usize = 65_536 + 10;
/// What the kernel takes in one call.
const RUN: usize = 65_507;

fn key() -> AeadKey {
    AeadKey::new(Cipher::Aes256Gcm, &[7; 32])
}

/// Sends what the device hands over.
fn outbound(mut device: File, socket: &UdpSocket, bytes: usize) -> Result<(), Box<dyn Error>> {
    let (key, mut counter) = (key(), 0_u64);
    let (mut packet, mut run) = (vec![0; LARGEST], Vec::with_capacity(RUN));
    let datagram = HEADER + bytes + TAG;
    let send = |run: &mut Vec<u8>| {
        let segment = u16::try_from(datagram)?;
        let cut = [ControlMessage::UdpGsoSegments(&segment)];
        // A datagram that the other end has no room for is lost, as in any tunnel.
        let _ = sendmsg::<()>(socket.as_raw_fd(), &[IoSlice::new(run)], &cut, MsgFlags::empty(), None);
        run.clear();
        Ok::<(), Box<dyn Error>>(())
    };
    loop {
        let size = device.read(&mut packet)?;
        for (number, piece) in packet[..size].chunks(bytes).enumerate() {
            if run.len() + datagram > RUN {
                send(&mut run)?;
            }
            counter += 1;
            let begins = run.len();
            run.extend_from_slice(&counter.to_be_bytes());
            run.extend_from_slice(&u32::try_from(size)?.to_be_bytes());
            run.extend_from_slice(&u32::try_from(number * bytes)?.to_be_bytes());
            run.extend_from_slice(piece);
            let (header, sealed) = run[begins..].split_at_mut(HEADER);
            let tag = key.seal(counter, header, sealed);
            run.extend_from_slice(&tag);
        }
        send(&mut run)?;
    }
}

/// Writes what arrives to the device.
fn inbound(mut device: File, socket: &UdpSocket) -> Result<(), Box<dyn Error>> {
    let key = key();
    let (mut buffer, mut packet) = (vec![0; LARGEST], Vec::with_capacity(LARGEST));
    let mut control = nix::cmsg_space!(i32);
    loop {
        let (size, segment) = {
            let mut parts = [IoSliceMut::new(&mut buffer)];
            let received = recvmsg::<()>(socket.as_raw_fd(), &mut parts, Some(&mut control), MsgFlags::empty());
            let message = match received {
                // The other end does not listen yet.
                Err(Errno::ECONNREFUSED) => continue,
                received => received?,
            };
            let joined = message.cmsgs()?.find_map(|control| match control {
                ControlMessageOwned::UdpGroSegments(size) => usize::try_from(size).ok(),
                _ => None,
            });
            (message.bytes, joined.unwrap_or(message.bytes))
        };
        for datagram in buffer[..size].chunks_mut(segment.max(1)) {
            if datagram.len() < HEADER + TAG {
                continue;
            }
            let (header, sealed) = datagram.split_at_mut(HEADER);
            let counter = u64::from_be_bytes(header[..8].try_into()?);
            if !key.open(counter, header, sealed) {
                continue;
            }
            let total = u32::from_be_bytes(header[8..12].try_into()?) as usize;
            let offset = u32::from_be_bytes(header[12..].try_into()?) as usize;
            if offset != packet.len() {
                // A piece was lost, and with it the super-packet.
                packet.clear();
            }
            if offset == packet.len() {
                packet.extend_from_slice(&sealed[..sealed.len() - TAG]);
            }
            if packet.len() == total {
                // The device may be down.
                let _ = device.write(&packet);
                packet.clear();
            }
        }
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [device, local, peer, bytes] = words.as_slice() else {
        return Err("usage: limit DEVICE LOCAL PEER BYTES".into());
    };
    let queue = Tun::create(device, 1, true)?.into_queues().pop().ok_or("the device has no queue")?;
    let flags = OFlag::from_bits_retain(fcntl(&queue, FcntlArg::F_GETFL)?);
    fcntl(&queue, FcntlArg::F_SETFL(flags - OFlag::O_NONBLOCK))?;
    let device = File::from(queue);
    let socket = UdpSocket::bind(local.parse::<SocketAddrV4>()?)?;
    socket.connect(peer.parse::<SocketAddrV4>()?)?;
    setsockopt(&socket, sockopt::UdpGroSegment, &true)?;
    // As `nebula` has them.
    setsockopt(&socket, sockopt::RcvBufForce, &(8 << 20))?;
    setsockopt(&socket, sockopt::SndBufForce, &(8 << 20))?;
    let (bytes, sender, receiver) = (bytes.parse()?, device.try_clone()?, socket.try_clone()?);
    std::thread::spawn(move || {
        if let Err(error) = outbound(sender, &socket, bytes) {
            eprintln!("limit: {error}");
            std::process::exit(1);
        }
    });
    inbound(device, &receiver)
}
