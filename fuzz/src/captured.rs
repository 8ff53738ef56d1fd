//! A pod under capture: any packet of its own, and any packet from its peer.

use std::cell::RefCell;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use nebula_core::capture::Target;
use nebula_core::forward::{Offload, Received, Segment, SegmentKind};
use nebula_core::internals::ip::{inbound_flow, outbound_flow};
use nebula_core::simulator::Cluster;
use nebula_core::{Punt, Verdict};

use crate::pair::Pair;

const SERVICE: [u8; 4] = [10, 96, 0, 7];

fn cluster() -> Cluster {
    let mut cluster = Cluster::default();
    let address = |n: u8| IpAddr::from([10, 9, 0, n]);
    cluster.pod(address(1), 1);
    cluster.pod(address(2), 2);
    cluster.clear(address(3));
    for protocol in [6, 17] {
        let target = |port| Target { address: SERVICE.into(), port, protocol };
        cluster.service(target(80), &[(address(2), 8080)], 1, None);
        cluster.service(target(81), &[(address(1), 8080), (address(2), 8080)], 2, Some(Duration::from_secs(5)));
        cluster.service(target(82), &[(address(2), 8080)], 1, None);
        cluster.clear_endpoints(target(82), 1);
    }
    cluster
}

fn with_pair(run: impl FnOnce(&mut Pair)) {
    thread_local! {
        static PAIR: RefCell<Option<(u32, Pair)>> = const { RefCell::new(None) };
    }
    PAIR.with_borrow_mut(|slot| {
        let (uses, pair) = slot.get_or_insert_with(|| {
            let mut pair = Pair::new();
            let directory = Arc::new(cluster());
            pair.a.node.reconfigure(pair.now, |config| config.capture = Some(directory));
            (0, pair)
        });
        *uses += 1;
        pair.now += Duration::from_millis(10);
        run(pair);
        if *uses >= 500 {
            *slot = None;
        }
    });
}

/// The head says which way the packet goes, how it is to be cut, and where to. Whatever arrives anywhere has addresses
/// that may be there, and a packet that bypasses the overlay is unchanged.
pub fn captured_packet(data: &[u8]) {
    let Some((head, packet)) = data.split_at_checked(8) else { return };
    let number = |at: usize| u16::from_be_bytes([head[at], head[at + 1]]);
    let kind = if head[0] & 1 == 0 { SegmentKind::Tcp } else { SegmentKind::Udp };
    let offload = Offload {
        segment: (head[0] & 2 != 0).then(|| Segment { kind, size: number(2) }),
        checksum: (head[0] & 4 != 0).then(|| (number(4), number(6))),
    };
    let is_outbound = head[0] & 8 == 0;
    let mut packet = packet.to_vec();
    if packet.len() >= 20 && packet[0] >> 4 == 4 {
        let (own, other) = if is_outbound { (12, 16) } else { (16, 12) };
        packet[own..own + 4].copy_from_slice(&[10, 9, 0, 1]);
        match head[1] & 3 {
            _ if !is_outbound => packet[other..other + 4].copy_from_slice(&[10, 9, 0, 2]),
            0 | 1 => packet[other..other + 4].copy_from_slice(&SERVICE),
            2 => packet[other..other + 4].copy_from_slice(&[10, 9, 0, 2]),
            _ => {}
        }
    }
    with_pair(|pair| if is_outbound { send(pair, &mut packet, offload) } else { receive(pair, &mut packet, offload) });
}

fn send(pair: &mut Pair, packet: &mut [u8], offload: Offload) {
    let (now, a) = (pair.now, &mut pair.a);
    let before = packet.to_vec();
    let verdict = a.forwarder.outbound(&mut a.lane, now, packet, offload);
    assert!(verdict == Verdict::Transmit || a.lane.runs().is_empty());
    if matches!(verdict, Verdict::Bypass | Verdict::Punt) {
        assert_eq!(packet, before, "a packet that goes elsewhere was changed");
    }
    for delivery in a.lane.deliveries() {
        let flow = inbound_flow(&a.lane.headers()[delivery.header.clone()]).expect("an IP packet");
        let sent = outbound_flow(&before).expect("it was parsed");
        assert_eq!((flow.local, flow.remote), (sent.local, sent.remote), "for the pod, from where it sent to");
    }
    let runs: Vec<_> =
        a.lane.runs().iter().map(|run| (a.lane.arena()[run.range.clone()].to_vec(), run.segment_size)).collect();
    for (mut datagrams, segment_size) in runs {
        let received = [Received { from: pair.a.at, range: 0..datagrams.len(), segment_size: segment_size.max(1) }];
        let b = &mut pair.b;
        b.forwarder.inbound(&mut b.lane, now, &mut datagrams, &received);
        for delivery in b.lane.deliveries() {
            let pieces = &b.lane.pieces()[delivery.pieces.clone()];
            let head = match delivery.header.is_empty() {
                true => &datagrams[pieces[0].clone()],
                false => &b.lane.headers()[delivery.header.clone()],
            };
            let flow = inbound_flow(head).expect("an IP packet");
            assert_ne!(flow.local, IpAddr::from(SERVICE), "a Service's address in a tunnel");
        }
        b.lane.clear();
    }
    finish(pair);
}

fn receive(pair: &mut Pair, packet: &mut [u8], offload: Offload) {
    let (now, b) = (pair.now, &mut pair.b);
    if b.forwarder.outbound(&mut b.lane, now, packet, offload) == Verdict::Transmit {
        let mut datagrams = b.lane.arena().to_vec();
        let received: Vec<_> = b
            .lane
            .runs()
            .iter()
            .map(|run| Received { from: b.at, range: run.range.clone(), segment_size: run.segment_size.max(1) })
            .collect();
        let a = &mut pair.a;
        a.forwarder.inbound(&mut a.lane, now, &mut datagrams, &received);
        for delivery in a.lane.deliveries() {
            let pieces = &a.lane.pieces()[delivery.pieces.clone()];
            let head = match delivery.header.is_empty() {
                true => &datagrams[pieces[0].clone()],
                false => &a.lane.headers()[delivery.header.clone()],
            };
            let remote = inbound_flow(head).expect("an IP packet").remote;
            assert!([[10, 9, 0, 2], SERVICE].map(IpAddr::from).contains(&remote), "from {remote}");
        }
    }
    pair.b.lane.clear();
    finish(pair);
}

fn finish(pair: &mut Pair) {
    let now = pair.now;
    for side in [&mut pair.a, &mut pair.b] {
        side.lane.clear();
        let punts: Vec<Punt> = side.lane.take_punts().collect();
        for punt in punts {
            side.node.handle_punt(now, punt);
        }
        if side.node.poll_timeout().is_some_and(|due| due <= now) {
            side.node.handle_timeout(now);
        }
        let _ = side.drain();
        while side.node.poll_packet().is_some() || side.node.poll_bypass().is_some() {}
    }
}
