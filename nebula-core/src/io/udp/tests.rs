//! Round trips over loopback: one process sends and receives, nothing needs a privilege.

use std::time::Duration;

use super::*;
use crate::forward::{Received, Run};
use crate::io::udp::receive::Receiver;
use crate::io::udp::send::{Lost, Sender};

fn bind_local(address: &str, offloads: bool) -> UdpSocket {
    let options = SocketOptions { offloads, ..SocketOptions::default() };
    UdpSocket::bind(address.parse().unwrap(), 1, &options).unwrap().pop().unwrap()
}

/// Receives until `count` datagrams have arrived; returns each with its source.
fn receive_all(socket: &UdpSocket, receiver: &mut Receiver, count: usize) -> (Vec<(SocketAddr, Vec<u8>)>, usize) {
    let (mut datagrams, mut slots) = (Vec::new(), 0);
    while datagrams.len() < count {
        if !receiver.receive(socket).unwrap() {
            let fds = crate::io::poll::readable(socket, socket, Some(Duration::from_secs(5))).unwrap();
            assert!(fds.first, "{} of {count} datagrams arrived", datagrams.len());
            continue;
        }
        let (memory, received) = receiver.parts();
        slots += received.len();
        for Received { from, range, segment_size } in received {
            datagrams.extend(memory[range.clone()].chunks(*segment_size).map(|bytes| (*from, bytes.to_vec())));
        }
    }
    (datagrams, slots)
}

/// Bytes that make every datagram different.
fn arena(len: usize) -> Vec<u8> {
    (0..len).map(|index| (index ^ (index >> 8)) as u8).collect()
}

fn round_trip(from: &UdpSocket, to: &UdpSocket, target: SocketAddr) -> usize {
    let arena = arena(150_000);
    let runs = [
        Run { to: target, range: 0..100_050, segment_size: 1332 },
        Run { to: target, range: 100_050..100_051, segment_size: 1 },
        Run { to: target, range: 100_051..110_000, segment_size: 700 },
    ];
    let expected: Vec<Vec<u8>> =
        runs.iter().flat_map(|run| arena[run.range.clone()].chunks(run.segment_size).map(<[u8]>::to_vec)).collect();
    assert_eq!(Sender::new().send(from, &arena, &runs), Lost::default());
    let (datagrams, slots) = receive_all(to, &mut Receiver::new().unwrap(), expected.len());
    let port = from.local_addr().unwrap().port();
    assert!(datagrams.iter().all(|(source, _)| source.port() == port && source.ip() == target.ip()));
    assert!(datagrams.into_iter().map(|(_, bytes)| bytes).eq(expected), "datagrams changed or changed order");
    slots
}

#[test]
fn runs_arrive_as_the_same_datagrams_and_joined() {
    let (a, b) = (bind_local("127.0.0.1:0", true), bind_local("127.0.0.1:0", true));
    assert!(a.sends_runs() && b.receives_runs());
    let slots = round_trip(&a, &b, b.local_addr().unwrap());
    assert!(slots < 10, "92 datagrams came in {slots} slots");
}

#[test]
fn each_offload_can_be_missing_on_either_side() {
    for (sends, receives) in [(true, false), (false, true), (false, false)] {
        let (a, b) = (bind_local("127.0.0.1:0", sends), bind_local("127.0.0.1:0", receives));
        assert_eq!((a.sends_runs(), b.receives_runs()), (sends, receives));
        round_trip(&a, &b, b.local_addr().unwrap());
    }
}

#[test]
fn a_dual_stack_socket_speaks_ipv4_with_unmapped_addresses() {
    let (a, b) = (bind_local("[::]:0", true), bind_local("[::]:0", true));
    let port = b.local_addr().unwrap().port();
    round_trip(&a, &b, SocketAddr::from(([127, 0, 0, 1], port)));
    round_trip(&a, &b, format!("[::1]:{port}").parse().unwrap());
}

#[test]
fn an_ipv4_socket_refuses_ipv6_destinations_and_counts_them() {
    let a = bind_local("127.0.0.1:0", true);
    let run = Run { to: "[2001:db8::1]:4242".parse().unwrap(), range: 0..2500, segment_size: 1000 };
    assert_eq!(Sender::new().send(&a, &arena(2500), &[run]), Lost { full: 0, refused: 3 });
}

#[test]
fn a_run_the_kernel_refuses_is_sent_singly_and_the_others_still_leave() {
    let (a, b) = (bind_local("127.0.0.1:0", true), bind_local("127.0.0.1:0", true));
    let target = b.local_addr().unwrap();
    let runs = [
        Run { to: target, range: 0..100, segment_size: 60 },
        Run { to: target, range: 100..30_050, segment_size: 100 },
        Run { to: target, range: 30_050..48_050, segment_size: 9000 },
    ];
    // More datagrams than any kernel takes at once: refused with the same error as a datagram above the path MTU.
    assert_eq!(Sender::with_max_segments(1000).send(&a, &arena(50_000), &runs), Lost::default());
    let (datagrams, _) = receive_all(&b, &mut Receiver::new().unwrap(), 2 + 300 + 2);
    let lengths: Vec<_> = datagrams.iter().map(|(_, bytes)| bytes.len()).collect();
    assert_eq!(lengths, [&[60, 40][..], &[100; 299], &[50, 9000, 9000]].concat());
    assert!(a.sends_runs(), "one refused run says nothing about the socket");
}

#[test]
fn sockets_that_share_a_port_are_bound_to_the_same_one() {
    let sockets = UdpSocket::bind("127.0.0.1:0".parse().unwrap(), 3, &SocketOptions::default()).unwrap();
    let ports: Vec<_> = sockets.iter().map(|socket| socket.local_addr().unwrap().port()).collect();
    assert_eq!(ports.len(), 3);
    assert!(ports[0] != 0 && ports.iter().all(|port| *port == ports[0]));
}

#[test]
fn a_taken_port_is_named_in_the_error() {
    let first = bind_local("127.0.0.1:0", true);
    let address = first.local_addr().unwrap();
    let error = UdpSocket::bind(address, 1, &SocketOptions::default()).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
    assert!(error.to_string().contains(&address.to_string()), "{error}");
}

#[test]
fn nothing_waiting_is_not_an_error() {
    let socket = bind_local("127.0.0.1:0", true);
    assert!(!Receiver::new().unwrap().receive(&socket).unwrap());
}

#[test]
#[ignore = "needs root and network namespaces"]
fn a_run_above_the_path_mtu_is_sent_singly_and_fragmented() {
    let thread = std::thread::spawn(|| {
        nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
        for arguments in ["link set lo mtu 1400", "link set lo up"] {
            let status = std::process::Command::new("ip").args(arguments.split(' ')).status().unwrap();
            assert!(status.success(), "ip {arguments}");
        }
        let (a, b) = (bind_local("127.0.0.1:0", true), bind_local("127.0.0.1:0", true));
        let target = b.local_addr().unwrap();
        let runs = [
            Run { to: target, range: 0..30_000, segment_size: 1400 },
            Run { to: target, range: 30_000..60_000, segment_size: 1300 },
        ];
        assert_eq!(Sender::new().send(&a, &arena(60_000), &runs), Lost::default());
        let count = 30_000_usize.div_ceil(1400) + 30_000_usize.div_ceil(1300);
        let (datagrams, _) = receive_all(&b, &mut Receiver::new().unwrap(), count);
        assert_eq!(datagrams.iter().map(|(_, bytes)| bytes.len()).sum::<usize>(), 60_000);
        assert!(a.sends_runs());
    });
    thread.join().unwrap();
}

/// The mode of `IP_MTU_DISCOVER` towards each family.
fn modes(socket: &UdpSocket) -> Vec<libc::c_int> {
    let targets = ["192.0.2.1:1", "[2001:db8::1]:1"].map(|target| target.parse().unwrap());
    targets.iter().filter_map(|to| DiscoverMtu::of(socket, *to).ok()).map(|option| option.mode).collect()
}

#[test]
fn icmp_errors_about_paths_are_ignored_where_somebody_else_finds_out_their_size() {
    let (omit, want) = (DiscoverMtu::OMIT, DiscoverMtu::WANT);
    for (address, measures, expected) in [
        ("127.0.0.1:0", true, &[omit][..]),
        ("127.0.0.1:0", false, &[omit]),
        ("[::]:0", true, &[omit, omit]),
        ("[::]:0", false, &[omit, want]),
    ] {
        let socket = bind_local(address, true);
        socket.ignore_path_errors(measures).unwrap();
        assert_eq!(modes(&socket)[..expected.len()], *expected, "{address} {measures}");
        if address.starts_with("127") {
            let receiver = bind_local(address, true);
            socket.send_whole(&[0; 100], receiver.local_addr().unwrap()).unwrap();
            assert_eq!(modes(&socket)[..expected.len()], *expected, "a probe changes nothing for good");
        }
    }
}

/// A router's ICMP error that the path to `target` carries 552 bytes, about a datagram of which it knows the addresses.
fn forged_error(source: SocketAddr, target: SocketAddr) -> Vec<u8> {
    let (SocketAddr::V4(source), SocketAddr::V4(target)) = (source, target) else { unreachable!() };
    let mut quoted = vec![0x45, 0, 5, 0xdc, 0, 1, 0x40, 0, 64, 17, 0, 0];
    quoted.extend(source.ip().octets());
    quoted.extend(target.ip().octets());
    quoted.extend([source.port().to_be_bytes(), target.port().to_be_bytes(), [5, 0xc8], [0, 0]].concat());
    let mut message = vec![3, 4, 0, 0, 0, 0, 2, 0x28];
    message.extend(quoted);
    let sum: u32 = message.chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(pair[1])).sum();
    let sum = (sum & 0xffff) + (sum >> 16);
    message[2..4].copy_from_slice(&(!((sum & 0xffff) + (sum >> 16)) as u16).to_be_bytes());
    message
}

#[test]
#[ignore = "needs root and network namespaces"]
fn a_forged_icmp_error_does_not_make_the_kernel_fragment() {
    let thread = std::thread::spawn(|| {
        nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
        let ip = |arguments: &str| {
            let status = std::process::Command::new("ip").args(arguments.split(' ')).status().unwrap();
            assert!(status.success(), "ip {arguments}");
        };
        // A path with a device that counts what the kernel makes of a datagram.
        for arguments in [
            "link set lo up",
            "link add out0 type veth peer name out1",
            "addr add 192.0.2.1/24 dev out0",
            "link set out0 up",
            "link set out1 up",
        ] {
            ip(arguments);
        }
        ip("neigh add 192.0.2.2 lladdr 02:00:00:00:00:02 dev out0");
        let target: SocketAddr = "192.0.2.2:4242".parse().unwrap();
        for (ignores, datagrams) in [(false, 3), (true, 1)] {
            let socket = bind_local("192.0.2.1:0", true);
            if ignores {
                socket.ignore_path_errors(true).unwrap();
            }
            socket.send_one(&[0; 1400], target).unwrap();
            let raw = nix::sys::socket::socket(
                AddressFamily::Inet,
                SockType::Raw,
                SockFlag::empty(),
                nix::sys::socket::SockProtocol::Icmp,
            )
            .unwrap();
            let error = forged_error(socket.local_addr().unwrap(), target);
            let to = SockaddrStorage::from("192.0.2.1:0".parse::<SocketAddr>().unwrap());
            nix::sys::socket::sendto(raw.as_raw_fd(), &error, &to, nix::sys::socket::MsgFlags::empty()).unwrap();
            let before = tx_packets();
            socket.send_one(&[0; 1400], target).unwrap();
            assert_eq!(tx_packets() - before, datagrams, "ignores: {ignores}");
        }
    });
    thread.join().unwrap();
}

/// Packets that the device in the namespace of this thread has sent.
fn tx_packets() -> u64 {
    let table = std::fs::read_to_string("/proc/thread-self/net/dev").unwrap();
    let line = table.lines().find(|line| line.trim_start().starts_with("out0:")).unwrap();
    line.split_whitespace().nth(10).unwrap().parse().unwrap()
}

#[test]
fn buffers_change_on_a_bound_socket_and_the_kernel_tells_of_them() {
    let socket = UdpSocket::bind("127.0.0.1:0".parse().unwrap(), 1, &SocketOptions::default()).unwrap().remove(0);
    let control = SocketControl::of(&socket).unwrap();
    control.set_read_buffer(65_536).unwrap();
    control.set_write_buffer(131_072).unwrap();
    let memory = control.memory().unwrap();
    // The kernel doubles the requested size, to have room for its bookkeeping.
    assert_eq!((memory[1], memory[3]), (("rcvbuf", 131_072), ("sndbuf", 262_144)));
    assert_eq!(memory[8], ("drops", 0));
}
