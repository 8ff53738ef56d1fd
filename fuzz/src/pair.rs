//! Two nodes with a live tunnel, and hostile input to every entry point of one of them.

use std::cell::RefCell;
use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use nebula_cert::{Curve, Identity, Version};
use nebula_core::MessageType;
use nebula_core::config::Cipher;
use nebula_core::firewall::{Policy, Rule};
use nebula_core::forward::{Offload, Received, Segment, SegmentKind};
use nebula_core::simulator::{Authority, Subject};
use nebula_core::{Config, Forwarder, Lane, Node, Punt, Seed, Transmit, Verdict, WallClock};

const UNIX: u64 = 1_800_000_000;

pub(crate) struct Side {
    pub(crate) node: Node,
    pub(crate) forwarder: Arc<Forwarder>,
    pub(crate) lane: Lane,
    passed_on: Vec<Transmit>,
    pub(crate) at: SocketAddr,
}

pub(crate) struct Pair {
    pub(crate) now: Instant,
    pub(crate) a: Side,
    pub(crate) b: Side,
}

fn authority() -> &'static (Authority, Identity, Identity) {
    static AUTHORITY: OnceLock<(Authority, Identity, Identity)> = OnceLock::new();
    AUTHORITY.get_or_init(|| {
        let authority = Authority::new(Curve::Curve25519);
        let of = |name: &str, network: &str| {
            authority.identity(&Subject {
                name: name.to_owned(),
                networks: vec![network.parse().expect("a network")],
                unsafe_networks: Vec::new(),
                groups: Vec::new(),
                versions: vec![Version::V2],
                not_after: 1_900_000_000,
            })
        };
        let (a, b) = (of("a", "10.9.0.1/24"), of("b", "10.9.0.2/24"));
        (authority, a, b)
    })
}

/// An identity from the same authority for another overlay address.
pub(crate) fn identity(network: &str) -> Identity {
    authority().0.identity(&Subject {
        name: network.to_owned(),
        networks: vec![network.parse().expect("a network")],
        groups: Vec::new(),
        versions: vec![Version::V2],
        unsafe_networks: Vec::new(),
        not_after: 1_900_000_000,
    })
}

#[allow(clippy::disallowed_methods, reason = "a first instant has to come from somewhere")]
pub(crate) fn start() -> Instant {
    Instant::now()
}

impl Side {
    pub(crate) fn new(identity: Identity, at: &str, peer: Option<(&str, &str)>, now: Instant, seed: u8) -> Self {
        let mut config = Config::new(identity, authority().0.trust());
        config.cipher = Cipher::Aes256Gcm;
        config.lighthouse.am_lighthouse = true;
        config.firewall = Policy { inbound: vec![Rule::any()], outbound: vec![Rule::any()], ..Policy::default() };
        if let Some((overlay, endpoint)) = peer {
            config
                .static_hosts
                .insert(overlay.parse().expect("an address"), vec![endpoint.parse().expect("an endpoint")]);
        }
        let wall = WallClock { at: now, unix: Duration::from_secs(UNIX) };
        let (node, forwarder) = Node::new(config, now, wall, Seed::predictable([seed; 32]));
        let lane = forwarder.lane();
        Self { node, forwarder, lane, passed_on: Vec::new(), at: at.parse().expect("an endpoint") }
    }

    /// Receives datagrams in one buffer, split into pieces of `segment` bytes; returns what the control plane sends.
    fn receive(&mut self, now: Instant, from: SocketAddr, datagram: &[u8], segment: usize) -> Vec<Vec<u8>> {
        let mut buffer = datagram.to_vec();
        let received = [Received { from, range: 0..buffer.len(), segment_size: segment.max(1) }];
        self.forwarder.inbound(&mut self.lane, now, &mut buffer, &received);
        for delivery in self.lane.deliveries() {
            let pieces = &self.lane.pieces()[delivery.pieces.clone()];
            let length: usize = pieces.iter().map(|piece| buffer[piece.clone()].len()).sum();
            assert!(length + delivery.header.len() <= 65_535 && length > 0);
        }
        let punts: Vec<Punt> = self.lane.take_punts().collect();
        self.lane.clear();
        for punt in punts {
            self.node.handle_punt(now, punt);
        }
        self.drain()
    }

    /// Like [`Side::receive`] for one datagram, but queues everything it sends for [`Side::take_transmits`].
    pub(crate) fn take(&mut self, now: Instant, from: SocketAddr, datagram: &[u8]) {
        let mut buffer = datagram.to_vec();
        let received = [Received { from, range: 0..buffer.len(), segment_size: buffer.len().max(1) }];
        self.forwarder.inbound(&mut self.lane, now, &mut buffer, &received);
        for run in self.lane.runs() {
            for datagram in self.lane.arena()[run.range.clone()].chunks(run.segment_size.max(1)) {
                self.passed_on.push(Transmit { to: run.to, datagram: datagram.to_vec(), must_be_whole: false });
            }
        }
        let punts: Vec<Punt> = self.lane.take_punts().collect();
        self.lane.clear();
        for punt in punts {
            self.node.handle_punt(now, punt);
        }
    }

    /// Takes the datagrams queued for the underlay.
    pub(crate) fn take_transmits(&mut self) -> Vec<Transmit> {
        while self.node.poll_event().is_some() {}
        let mut transmits = std::mem::take(&mut self.passed_on);
        transmits.extend(std::iter::from_fn(|| self.node.poll_transmit()));
        transmits
    }

    pub(crate) fn drain(&mut self) -> Vec<Vec<u8>> {
        let mut out = Vec::new();
        while let Some(transmit) = self.node.poll_transmit() {
            out.push(transmit.datagram);
        }
        while self.node.poll_event().is_some() {}
        out
    }
}

impl Pair {
    #[allow(clippy::disallowed_methods, reason = "a first instant has to come from somewhere")]
    pub(crate) fn new() -> Self {
        let now = Instant::now();
        let (_, a, b) = authority();
        let mut a = Side::new(a.clone(), "192.0.2.1:4242", Some(("10.9.0.2", "192.0.2.2:4242")), now, 1);
        let mut b = Side::new(b.clone(), "192.0.2.2:4242", None, now, 2);
        a.node.connect(now, "10.9.0.2".parse().expect("an address"));
        let mut calls = a.drain();
        while !calls.is_empty() {
            let answers: Vec<_> = calls.iter().flat_map(|call| b.receive(now, a.at, call, call.len())).collect();
            calls = answers.iter().flat_map(|answer| a.receive(now, b.at, answer, answer.len())).collect();
        }
        // Confirms the tunnel, as the first datagram from the initiator would.
        let punt = Punt::Confirmed { tunnel: b.node.half_open()[0], from: a.at.into() };
        b.node.handle_punt(now, punt);
        let _ = b.drain();
        assert_eq!((a.node.tunnels().len(), b.node.tunnels().len()), (1, 1), "the handshake completes");
        Self { now, a, b }
    }
}

/// Runs with a pair that is replaced every 500 inputs, so that state accumulated from hostile input does not mask the
/// effects of later input.
fn with_pair(run: impl FnOnce(&mut Pair)) {
    thread_local! {
        static PAIR: RefCell<Option<(u32, Pair)>> = const { RefCell::new(None) };
    }
    PAIR.with_borrow_mut(|slot| {
        let (uses, pair) = slot.get_or_insert_with(|| (0, Pair::new()));
        *uses += 1;
        pair.now += Duration::from_millis(10);
        run(pair);
        if *uses >= 500 {
            *slot = None;
        }
    });
}

/// Overlay packets with any offload description. The peer must accept the tag and counter of everything that is sent.
pub fn overlay_packet(data: &[u8]) {
    let Some((head, packet)) = data.split_at_checked(8) else { return };
    let number = |at: usize| u16::from_be_bytes([head[at], head[at + 1]]);
    let kind = if head[0] & 1 == 0 { SegmentKind::Tcp } else { SegmentKind::Udp };
    let offload = Offload {
        segment: (head[0] & 2 != 0).then(|| Segment { kind, size: number(2) }),
        checksum: (head[0] & 4 != 0).then(|| (number(4), number(6))),
    };
    with_pair(|pair| {
        let mut packet = packet.to_vec();
        // Address IPv4 packets to the peer unless a bit of the input says otherwise, so that the fuzzer need not guess
        // addresses.
        if head[0] & 8 == 0 && packet.len() >= 20 && packet[0] >> 4 == 4 {
            packet[12..16].copy_from_slice(&[10, 9, 0, 1]);
            packet[16..20].copy_from_slice(&[10, 9, 0, 2]);
        }
        let (now, a) = (pair.now, &mut pair.a);
        let verdict = a.forwarder.outbound(&mut a.lane, now, &mut packet, offload);
        let runs = a.lane.runs().to_vec();
        assert!(verdict == Verdict::Transmit || runs.is_empty());
        for run in runs {
            let datagrams = pair.a.lane.arena()[run.range].to_vec();
            let before = pair.b.forwarder.counters();
            let _ = pair.b.receive(now, pair.a.at, &datagrams, run.segment_size);
            let after = pair.b.forwarder.counters();
            for (name, count) in &after {
                if name.contains("bad_tag") || name.contains("replay") {
                    assert_eq!(Some(count), before.get(name), "the peer refused what we sealed");
                }
            }
        }
        pair.a.lane.clear();
        let punts: Vec<Punt> = pair.a.lane.take_punts().collect();
        for punt in punts {
            pair.a.node.handle_punt(now, punt);
        }
        let _ = pair.a.drain();
    });
}

/// Arbitrary datagrams, also split into pieces of any size.
pub fn underlay(data: &[u8]) {
    let Some((head, datagram)) = data.split_at_checked(3) else { return };
    let segment = usize::from(u16::from_be_bytes([head[0], head[1]]));
    with_pair(|pair| {
        let mut datagram = datagram.to_vec();
        // Aim half of the inputs at the live tunnel.
        if head[2] & 1 == 1 && datagram.len() >= 8 {
            let index = pair.b.node.tunnels().first().map_or(0, |tunnel| tunnel.local_index.0);
            datagram[4..8].copy_from_slice(&index.to_be_bytes());
        }
        let (now, from) = (pair.now, pair.a.at);
        let _ = pair.b.receive(now, from, &datagram, segment);
        if pair.b.node.poll_timeout().is_some_and(|due| due <= now) {
            pair.b.node.handle_timeout(now);
            let _ = pair.b.drain();
        }
    });
}

/// A first handshake message with a hostile certificate and payload, which in this message Noise does not authenticate.
pub fn handshake_payload(data: &[u8]) {
    let mut datagram = vec![0x10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1];
    // Any 32 bytes are a valid X25519 key; 9 is the base point.
    for byte in [9_u8, 5] {
        datagram.push(byte);
        datagram.extend([0; 31]);
    }
    datagram.extend(data.iter().take(8_900));
    with_pair(|pair| {
        let now = pair.now;
        let answers = pair.b.receive(now, "192.0.2.9:1".parse().expect("an endpoint"), &datagram, datagram.len());
        assert!(answers.is_empty(), "a handshake with a hostile payload was answered");
    });
}

/// Arbitrary plaintext as an authenticated lighthouse message.
pub fn lighthouse_message(data: &[u8]) {
    with_pair(|pair| {
        let Some(tunnel) = pair.b.node.tunnels().first().map(|tunnel| tunnel.local_index) else { return };
        let (now, from) = (pair.now, pair.a.at.into());
        let plaintext = data.to_vec();
        pair.b.node.handle_punt(now, Punt::Message { tunnel, from, kind: MessageType::Lighthouse, plaintext });
        let answers = pair.b.drain();
        assert!(answers.len() <= 4, "one message makes {} datagrams", answers.len());
    });
}

/// Arbitrary plaintext as an authenticated test request and reply, to a node that measures paths.
pub fn test_message(data: &[u8]) {
    with_pair(|pair| {
        let (now, from) = (pair.now, pair.a.at.into());
        let Some(tunnel) = pair.b.node.tunnels().first().map(|tunnel| tunnel.local_index) else { return };
        pair.b.node.reconfigure(now, |config| config.measure_paths = true);
        let _ = pair.b.drain();
        for kind in [MessageType::TestRequest, MessageType::TestReply] {
            let plaintext = data.to_vec();
            pair.b.node.handle_punt(now, Punt::Message { tunnel, from, kind, plaintext });
            let answers = pair.b.drain();
            assert!(answers.len() <= 1, "one message makes {} datagrams", answers.len());
        }
        assert_eq!(pair.b.node.tunnels().first().and_then(|tunnel| tunnel.endpoint), Some(pair.a.at), "it stays there");
    });
}
