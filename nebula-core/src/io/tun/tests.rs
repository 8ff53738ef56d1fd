//! Devices in network namespaces of their own: each test thread leaves the host's namespace, and the kernel removes the
//! new one when nothing refers to it any more.

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, TcpListener, TcpStream, UdpSocket};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use nix::sched::{CloneFlags, unshare};

use super::*;
use crate::io::poll::readable;

/// Runs `body` on a thread in a new network namespace and returns what it returns.
fn in_new_namespace<T: Send>(body: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            unshare(CloneFlags::CLONE_NEWNET).unwrap();
            body()
        });
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

fn ip(arguments: &str) {
    let output = Command::new("ip").args(arguments.split_whitespace()).output().unwrap();
    assert!(output.status.success(), "ip {arguments}: {}", String::from_utf8_lossy(&output.stderr));
}

fn bring_up(tun: &Tun, address: &str) {
    ip(&format!("addr add {address} dev {}", tun.name()));
    ip(&format!("link set {} mtu 1300 up", tun.name()));
}

#[test]
#[ignore = "needs root and network namespaces"]
fn a_device_made_in_one_namespace_is_used_from_another() {
    let (tun, sender) = in_new_namespace(|| {
        let tun = Tun::create("overlay7", 1, true).unwrap();
        bring_up(&tun, "10.77.0.1/24");
        (tun, UdpSocket::bind("10.77.0.1:700").unwrap())
    });
    assert_eq!(tun.name(), "overlay7");
    sender.send_to(b"hello", "10.77.0.2:800").unwrap();
    let queue = &tun.queues[0];
    let mut buffer = ReadBuffer::new().unwrap();
    loop {
        readable(queue, queue, Some(Duration::from_secs(5))).unwrap();
        match queue.read(&mut buffer).unwrap() {
            // Multicast reports of the kernel itself.
            Read::Packet(packet, _) if packet[0] >> 4 == 6 => {}
            Read::Packet(packet, offload) => {
                assert_eq!(&packet[16..20], &[10, 77, 0, 2]);
                assert_eq!(&packet[28..], b"hello");
                assert_eq!(offload, Offload { segment: None, checksum: Some((20, 6)) });
                break;
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
#[ignore = "needs root and network namespaces"]
fn names_that_cannot_be_used_are_refused_with_the_reason() {
    in_new_namespace(|| {
        let _first = Tun::create("overlay7", 1, true).unwrap();
        let taken = Tun::create("overlay7", 1, true).unwrap_err().to_string();
        assert!(taken.contains("overlay7") && taken.contains("exists already"), "{taken}");
        let long = Tun::create("sixteen-letters!", 1, true).unwrap_err();
        assert_eq!(long.kind(), io::ErrorKind::InvalidInput);
        let slash = Tun::create("a/b", 1, true).unwrap_err().to_string();
        assert!(slash.contains("not a usable interface name"), "{slash}");
        assert!(Tun::create("", 1, true).unwrap().name().starts_with("tun"));
    });
}

#[test]
#[ignore = "needs root and network namespaces"]
fn a_persistent_device_that_is_free_is_used_and_stays() {
    for (kind, queues, has) in
        [("", 1, 1), ("vnet_hdr", 1, 1), ("pi", 1, 1), ("multi_queue", 2, 2), ("multi_queue", 1, 1), ("", 2, 1)]
    {
        for state in ["down", "up"] {
            in_new_namespace(|| {
                ip(&format!("tuntap add dev overlay7 mode tun {kind}"));
                ip(&format!("link set overlay7 {state}"));
                let tun =
                    Tun::create("overlay7", queues, true).unwrap_or_else(|error| panic!("{kind:?} {state}: {error}"));
                assert_eq!((tun.name(), tun.queues.len()), ("overlay7", has), "{kind:?} {state}");
                assert_ne!(tun.offloads(), TunOffloads::None);
                let second = Tun::create("overlay7", queues, true);
                assert!(second.is_err() || state == "down" && kind == "multi_queue", "{kind:?} {state}: it is in use");
                drop((tun, second));
                ip("link show overlay7");
            });
        }
    }
    in_new_namespace(|| {
        ip("tuntap add dev overlay7 mode tap");
        assert!(Tun::create("overlay7", 1, true).unwrap_err().to_string().contains("exists already"));
    });
}

#[test]
#[ignore = "needs root and network namespaces"]
fn the_device_lives_as_long_as_its_queues_wherever_they_go() {
    in_new_namespace(|| {
        let tun = Tun::create("overlay7", 2, true).unwrap();
        let agreed = tun.offloads();
        let queues = tun.into_queues();
        assert_eq!(queues.len(), 2);
        let adopted = Tun::from_queues(queues).unwrap();
        assert_eq!((adopted.name(), adopted.offloads()), ("overlay7", agreed));
        // The offloads that a kernel without UDP super-packets accepts.
        let ladder = [TunOffloads::Tcp, TunOffloads::None];
        let mut adopted = Tun::negotiate(adopted.into_queues(), "overlay7".into(), &ladder).unwrap();
        assert_eq!(adopted.offloads(), TunOffloads::Tcp);
        adopted.disable_offloads().unwrap();
        assert_eq!(adopted.offloads(), TunOffloads::None);
        drop(adopted);
        Tun::create("overlay7", 1, false).unwrap();
    });
}

#[test]
fn a_descriptor_that_is_no_tun_queue_is_refused() {
    let file = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
    let error = Tun::from_queues(vec![file]).unwrap_err().to_string();
    assert!(error.contains("queue 0 is not an attached tun queue"), "{error}");
    assert!(Tun::from_queues(Vec::new()).is_err());
}

#[test]
#[ignore = "needs root and network namespaces"]
fn a_removed_device_is_an_error_and_not_a_dry_queue() {
    in_new_namespace(|| {
        let tun = Tun::create("overlay7", 1, true).unwrap();
        let mut buffer = ReadBuffer::new().unwrap();
        assert!(matches!(tun.queues[0].read(&mut buffer), Ok(Read::Dry)));
        ip("link del overlay7");
        assert!(readable(&tun.queues[0], &tun.queues[0], Some(Duration::from_secs(5))).unwrap().first);
        assert!(tun.queues[0].read(&mut buffer).is_err());
        let packet = [0x45, 0, 0, 20];
        let written = tun.queues[0].write(&Offload::default(), 0, &[], &packet, std::slice::from_ref(&(0..4)));
        assert_eq!(written, Err(Errno::EBADFD));
    });
}

/// Copies packets between two devices, as a tunnel without a cipher would. Returns how many were super-packets.
fn bridge(a: &Queue, b: &Queue, stop: &AtomicBool) -> usize {
    let mut supers = 0;
    let mut buffer = ReadBuffer::new().unwrap();
    // Ends even if the test fails before it can set `stop`.
    let end = crate::io::clock::now() + Duration::from_secs(30);
    while !stop.load(Ordering::Relaxed) && crate::io::clock::now() < end {
        readable(a, b, Some(Duration::from_millis(20))).unwrap();
        for (from, to) in [(a, b), (b, a)] {
            while let Read::Packet(packet, offload) = from.read(&mut buffer).unwrap() {
                supers += usize::from(offload.segment.is_some());
                // Cut as by a coalescer: the headers apart, the payload in pieces.
                let head =
                    if packet[0] >> 4 == 4 && packet[9] == 6 { 20 + usize::from(packet[32] >> 4) * 4 } else { 0 };
                let pieces: Vec<_> =
                    (head..packet.len()).step_by(1000).map(|at| at..(at + 1000).min(packet.len())).collect();
                match to.write(&offload, head as u16, &packet[..head], packet, &pieces) {
                    Ok(()) | Err(Errno::EIO) => {}
                    Err(errno) => panic!("{errno} for {offload:?}"),
                }
            }
        }
    }
    supers
}

fn transfer_between_devices(offloads: bool) -> usize {
    const LEN: usize = 8 << 20;
    // Sockets stay in the namespace in which they were made.
    let (a, listener) = in_new_namespace(|| {
        let a = Tun::create("overlay7", 1, offloads).unwrap();
        bring_up(&a, "10.77.0.1/24");
        (a, TcpListener::bind((Ipv4Addr::new(10, 77, 0, 1), 5000)).unwrap())
    });
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (ready, is_ready) = std::sync::mpsc::channel();
        let client = scope.spawn(move || {
            unshare(CloneFlags::CLONE_NEWNET).unwrap();
            let b = Tun::create("overlay7", 1, offloads).unwrap();
            bring_up(&b, "10.77.0.2/24");
            ready.send(b).unwrap();
            let mut stream =
                TcpStream::connect_timeout(&"10.77.0.1:5000".parse().unwrap(), Duration::from_secs(5)).unwrap();
            let sent: Vec<u8> = (0..LEN).map(|at| (at ^ (at >> 8) ^ (at >> 16)) as u8).collect();
            stream.write_all(&sent).unwrap();
            drop(stream);
            sent
        });
        let b = is_ready.recv().unwrap();
        let bridge = scope.spawn(|| {
            let (a, b) = (a, b);
            bridge(&a.queues[0], &b.queues[0], &stop)
        });
        assert!(readable(&listener, &listener, Some(Duration::from_secs(10))).unwrap().first, "nobody connected");
        let (mut stream, _) = listener.accept().unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        let mut received = Vec::new();
        stream.read_to_end(&mut received).unwrap();
        assert!(received == client.join().unwrap(), "the bytes changed on the way");
        stop.store(true, Ordering::Relaxed);
        bridge.join().unwrap()
    })
}

#[test]
#[ignore = "needs root and network namespaces"]
fn a_stream_passes_in_super_packets() {
    let supers = transfer_between_devices(true);
    assert!(supers > 50, "only {supers} super-packets in 8 MiB");
}

#[test]
#[ignore = "needs root and network namespaces"]
fn a_stream_passes_in_single_packets_without_offloads() {
    assert_eq!(transfer_between_devices(false), 0);
}

#[test]
fn a_super_packet_of_the_best_size_fills_one_send() {
    for (mtu, segments) in [(1300, 48), (1420, 44), (8800, 7)] {
        let size = Tun::best_super_packet(mtu).unwrap();
        assert_eq!((size - 400) / (mtu - 52), segments, "{mtu}");
        assert!(segments * (mtu + 32) <= 65_000 && (segments + 1) * (mtu + 32) > 65_000, "{mtu}");
        assert!(size < 1 << 16);
    }
    assert_eq!(Tun::best_super_packet(40_000), None);
    assert_eq!(Tun::best_super_packet(0), None);
}

#[test]
#[ignore = "needs root and network namespaces"]
fn a_kept_device_goes_on_with_its_packets_if_it_is_the_configured_one() {
    let queues_of = |queues: usize| Tun::create("overlay7", queues, true).unwrap().into_queues();
    in_new_namespace(|| {
        for queues in [1, 2] {
            let tun = Tun::create("overlay7", queues, true).unwrap();
            bring_up(&tun, "10.77.0.1/24");
            let sender = UdpSocket::bind("10.77.0.1:700").unwrap();
            let kept = tun.into_queues();
            sender.send_to(b"waiting", "10.77.0.2:800").unwrap();
            let tun = Tun::adopt(kept, "overlay7", queues, true).unwrap();
            assert_eq!((tun.name(), tun.queues.len()), ("overlay7", queues));
            assert!(!tun.is_persistent().unwrap());
            let mut buffer = ReadBuffer::new().unwrap();
            let mut found = false;
            for queue in &tun.queues {
                while let Read::Packet(packet, _) = queue.read(&mut buffer).unwrap() {
                    found |= packet.ends_with(b"waiting");
                }
            }
            assert!(found, "the packet is lost");
            let tun = Tun::adopt(tun.into_queues(), "overlay7", queues, false).unwrap();
            assert_eq!(tun.offloads(), TunOffloads::None);
        }
        let refused = |kept, name: &str, queues| Tun::adopt(kept, name, queues, true).unwrap_err().to_string();
        assert!(refused(queues_of(1), "overlay8", 1).contains("the device is overlay7"));
        assert!(refused(queues_of(1), "overlay7", 2).contains("has 1 queues, and 2"));
        assert!(refused(queues_of(2), "overlay7", 1).contains("has 2 queues, and 1"));
        // One queue of a device that may have several.
        let mut kept = queues_of(2);
        kept.pop();
        assert!(refused(kept, "overlay7", 1).contains("queues"));
        let kept = queues_of(1);
        ip("link del overlay7");
        assert!(refused(kept, "overlay7", 1).contains("not an attached tun queue"));
        let kept = queues_of(1);
        let elsewhere = in_new_namespace(|| refused(kept, "overlay7", 1));
        assert!(elsewhere.contains("another network namespace"), "{elsewhere}");

        ip("tuntap add dev overlay9 mode tun");
        let kept = Tun::create("overlay9", 2, true).unwrap().into_queues();
        let tun = Tun::adopt(kept, "overlay9", 2, true).unwrap();
        assert!(tun.is_persistent().unwrap() && tun.queues.len() == 1);
    });
}
