//! Many connections at once, of peers and of attackers.

use std::task::Poll;
use std::time::Duration;

use nebula_cert::{CaPool, Curve, SigningKey, Template, VerifiedCertificate};
use nebula_core::forward::cut_packet;

use super::tests::context;
use super::*;
use crate::tcp::segment::{Flags, Options};

const SERVER: &str = "10.0.0.1";
/// When all certificates are valid.
const TODAY: nebula_cert::UnixTime = 1_800_000_000;

/// A server that listens on port 80, and peers each with a certificate.
struct Crowd {
    now: Instant,
    server: Stack,
    peers: Vec<Peer>,
}

struct Peer {
    address: IpAddr,
    stack: Stack,
    certificate: VerifiedCertificate,
    /// Packets of the server to it are lost.
    deaf: bool,
}

impl Crowd {
    fn new(peers: usize, limits: Limits) -> Self {
        #[allow(clippy::disallowed_methods, reason = "where virtual time begins")]
        let now = Instant::now();
        let options = StackOptions { limits, ..StackOptions::default() };
        let key = SigningKey::generate(Curve::Curve25519).unwrap();
        let validity = TODAY - 10..=TODAY + 10;
        let authority = Template { public_key: key.public_key(), ..Template::new("ca", validity.clone()) };
        let authority = authority.self_sign(&key).unwrap();
        let mut pool = CaPool::new();
        pool.add(authority.clone()).unwrap();
        let peer = |number: usize| {
            let address = IpAddr::from([10, 0, 0, 2 + number as u8]);
            let template = Template {
                networks: vec![format!("{address}/16").parse().unwrap()],
                unsafe_networks: vec!["192.0.2.0/24".parse().unwrap()],
                public_key: [7; 32].to_vec(),
                ..Template::new(format!("peer-{number}"), validity.clone())
            };
            let certificate = pool.verify(template.sign(&authority, &key).unwrap(), TODAY).unwrap();
            let stack = Stack::new(now, vec![address], StackOptions::default(), [number as u8; 32]);
            Peer { address, stack, certificate, deaf: false }
        };
        let mut server = Stack::new(now, vec![SERVER.parse().unwrap()], options, [99; 32]);
        server.listen(None, 80).unwrap();
        Self { now, server, peers: (0..peers).map(peer).collect() }
    }

    fn connect(&mut self, peer: usize) -> Id {
        self.peers[peer].stack.connect(self.now, SocketAddr::new(SERVER.parse().unwrap(), 80)).unwrap()
    }

    /// Carries everything that the peers have to send to the server, and only then its answers, until there is
    /// nothing more.
    fn carry(&mut self) {
        let mut packet = Vec::new();
        loop {
            let mut idle = true;
            for peer in &mut self.peers {
                while let Some(offload) = peer.stack.poll_packet(self.now, &mut packet) {
                    idle = false;
                    cut_packet(&packet, offload, |piece| {
                        self.server.receive(self.now, &[piece], Offload::default());
                        admit_all(&mut self.server, self.now, &peer.certificate);
                    });
                }
            }
            while let Some(offload) = self.server.poll_packet(self.now, &mut packet) {
                idle = false;
                let to = IpPacket::parse(&packet).unwrap().destination;
                let Some(peer) = self.peers.iter_mut().find(|peer| peer.address == to && !peer.deaf) else { continue };
                cut_packet(&packet, offload, |piece| peer.stack.receive(self.now, &[piece], Offload::default()));
                while let Some((id, _)) = peer.stack.next_opened() {
                    peer.stack.set_sender(id, None);
                }
            }
            if idle {
                return;
            }
        }
    }

    fn pass(&mut self, time: Duration) {
        self.now += time;
        let now = self.now;
        self.server.timeout(now);
        self.peers.iter_mut().for_each(|peer| peer.stack.timeout(now));
        self.carry();
    }

    fn is_open(&mut self, peer: usize, id: Id) -> bool {
        self.peers[peer].stack.poll_open(id, &mut context()) == Poll::Ready(Ok(()))
    }

    fn accept_all(&mut self) -> Vec<Id> {
        let accept = || match self.server.poll_accept(None, 80, &mut context()) {
            Poll::Ready(id) => id,
            Poll::Pending => None,
        };
        std::iter::from_fn(accept).collect()
    }

    /// A SYN of a host in the network behind a peer.
    fn flood(&mut self, peer: usize, number: u32) {
        let from = SocketAddr::from(([192, 0, 2, number as u8], 1024 + (number >> 8) as u16));
        let options = Options { mss: Some(1260), ..Options::default() };
        let header = Header {
            source: from.port(),
            destination: 80,
            sequence: number,
            flags: Flags::SYN,
            options,
            ..Header::default()
        };
        let mut packet = Vec::new();
        packet::begin(from.ip(), SERVER.parse().unwrap(), protocol::TCP, &mut packet);
        header.emit(&mut packet);
        let start = packet::finish(&mut packet, TCP_CHECKSUM) as u16;
        let offload = Offload { segment: None, checksum: Some((start, TCP_CHECKSUM as u16)) };
        cut_packet(&packet, offload, |piece| self.server.receive(self.now, &[piece], Offload::default()));
        admit_all(&mut self.server, self.now, &self.peers[peer].certificate);
    }
}

fn admit_all(server: &mut Stack, now: Instant, sender: &VerifiedCertificate) {
    while let Some(asked) = server.next_asked() {
        server.admit(now, asked, Some(sender.clone()));
    }
}

#[test]
fn a_flood_from_a_network_behind_a_gateway_keeps_nobody_out_and_ends_nothing() {
    let mut crowd = Crowd::new(3, Limits { half_open: 64, ..Limits::default() });
    // The gateway has a connection of its own.
    let own = crowd.connect(0);
    crowd.carry();
    assert!(crowd.is_open(0, own));
    let served = crowd.accept_all()[0];
    for round in 0..10 {
        for number in 0..200 {
            crowd.flood(0, round * 200 + number);
        }
        crowd.carry();
        for peer in 1..3 {
            let id = crowd.connect(peer);
            crowd.carry();
            assert!(crowd.is_open(peer, id), "round {round}, peer {peer}");
            assert_eq!(crowd.accept_all().len(), 1);
        }
        let Crowd { now, server, .. } = &mut crowd;
        assert_eq!(server.poll_write(*now, served, &mut context(), b"alive"), Poll::Ready(Ok(5)));
        crowd.carry();
        let mut out = [0; 10];
        let read = crowd.peers[0].stack.poll_read(crowd.now, own, &mut context(), &mut out);
        assert_eq!(read, Poll::Ready(Ok(5)));
        crowd.pass(Duration::from_millis(2000));
    }
    assert!(crowd.server.half_open.len() <= 64);
    assert!(crowd.server.counters().half_open_evicted > 1000);
}

/// The peer's certificate counts: it has many addresses, and the others wait with one connection each.
#[test]
fn who_has_most_half_open_connections_loses_its_oldest() {
    let mut crowd = Crowd::new(3, Limits { half_open: 10, ..Limits::default() });
    (0..8).for_each(|number| crowd.flood(0, number));
    crowd.peers[1].deaf = true;
    let slow = crowd.connect(1);
    crowd.carry();
    (8..100).for_each(|number| crowd.flood(0, number));
    let mut packet = Vec::new();
    while crowd.server.poll_packet(crowd.now, &mut packet).is_some() {}
    assert_eq!((crowd.server.half_open.len(), crowd.server.counters().half_open_evicted), (10, 91));
    // That of the other peer is still there, and its lost answer is repeated, without another SYN.
    crowd.peers[1].deaf = false;
    crowd.now += Duration::from_millis(999);
    assert!(!crowd.is_open(1, slow));
    crowd.now += Duration::from_millis(1);
    crowd.server.timeout(crowd.now);
    crowd.carry();
    assert!(crowd.is_open(1, slow));
}

#[test]
fn a_burst_of_one_peer_is_open_at_once_though_few_are_remembered() {
    let mut crowd = Crowd::new(1, Limits { half_open: 16, ..Limits::default() });
    let dialled: Vec<_> = (0..2000).map(|_| crowd.connect(0)).collect();
    crowd.carry();
    for id in &dialled {
        assert!(crowd.is_open(0, *id));
    }
    let accepted = crowd.accept_all();
    assert_eq!(accepted.len(), 2000);
    let Counters { half_open_evicted, resumed, .. } = crowd.server.counters();
    assert_eq!((half_open_evicted, resumed), (1984, 1984));
    // A connection that was forgotten and finished is as good as another one: it has its certificate, window scale
    // and the rest.
    let now = crowd.now;
    for id in [accepted[0], accepted[1999]] {
        assert_eq!(crowd.server.certificate(id).unwrap().name(), "peer-0");
        let flow = crowd.server.flow(id).unwrap();
        let near = *dialled.iter().find(|id| crowd.peers[0].stack.flow(**id).unwrap().local == flow.remote).unwrap();
        let (mut sent, mut read, mut out) = (0, 0, vec![0; 1 << 20]);
        while read < 1_000_000 {
            if let Poll::Ready(Ok(count)) = crowd.peers[0].stack.poll_write(now, near, &mut context(), &[1; 50_000]) {
                sent += count;
            }
            crowd.carry();
            if let Poll::Ready(result) = crowd.server.poll_read(now, id, &mut context(), &mut out) {
                read += result.unwrap();
            }
        }
        assert!(sent >= read);
        let connection = &crowd.server.connections.get(id).unwrap().connection;
        assert!(format!("{connection:?}").contains("sack: true"), "selective acknowledgements");
    }
}

#[test]
fn an_answer_that_is_too_old_or_invented_is_reset() {
    let mut crowd = Crowd::new(1, Limits { half_open: 1, ..Limits::default() });
    crowd.peers[0].deaf = true;
    crowd.connect(0);
    crowd.carry();
    crowd.flood(0, 1);
    let mut packet = Vec::new();
    while crowd.server.poll_packet(crowd.now, &mut packet).is_some() {}
    let from = SocketAddr::new(crowd.peers[0].address, 1000);
    let flow = Flow { local: SocketAddr::new(SERVER.parse().unwrap(), 80), remote: from };
    let header = |acknowledgement| Header { sequence: 5, acknowledgement, flags: Flags::ACK, ..Header::default() };
    let invented =
        (0..1000_u32).filter(|number| crowd.server.ask(crowd.now, flow, &header(number.wrapping_mul(0x0400_0001))));
    assert_eq!(invented.count(), 0);
    // The true one is good for a minute.
    let offered = Options::default();
    let exchange = crowd.server.exchange(crowd.now, flow, 4);
    let cookie = header(exchange.make(&crowd.server.secret, &offered).wrapping_add(1));
    assert!(crowd.server.ask(crowd.now, flow, &cookie));
    assert!(!crowd.server.ask(crowd.now + 2 * cookies::PERIOD, flow, &cookie));
}

#[test]
fn a_full_backlog_is_shared_among_those_who_wait() {
    let mut crowd = Crowd::new(3, Limits { backlog: 10, ..Limits::default() });
    let first: Vec<_> = (0..30).map(|_| crowd.connect(0)).collect();
    crowd.carry();
    let mut open = first.iter().filter(|id| crowd.peers[0].stack.poll_open(**id, &mut context()).is_ready()).count();
    assert!(open >= 10);
    for peer in 1..3 {
        let id = crowd.connect(peer);
        crowd.carry();
        assert!(crowd.is_open(peer, id));
    }
    let accepted = crowd.accept_all();
    let names = accepted.iter().map(|id| crowd.server.certificate(*id).unwrap().name().to_owned());
    let names: Vec<_> = names.collect();
    assert_eq!(names.len(), 10);
    assert_eq!(names.iter().filter(|name| *name == "peer-0").count(), 8);
    // Those who were left out try again, and find room.
    for _ in 0..20 {
        crowd.pass(Duration::from_secs(1));
        open += crowd.accept_all().len();
    }
    assert!(open >= 18, "{open}");
}

#[test]
fn one_peer_does_not_take_all_connections_of_a_node() {
    let mut crowd = Crowd::new(3, Limits { connections: 100, ..Limits::default() });
    for peer in 0..2 {
        let dialled: Vec<_> = (0..100).map(|_| crowd.connect(peer)).collect();
        crowd.carry();
        let open = dialled.into_iter().filter(|id| crowd.is_open(peer, *id)).count();
        assert_eq!(open, [50, 25][peer]);
        crowd.accept_all();
    }
    let id = crowd.connect(2);
    crowd.carry();
    assert!(crowd.is_open(2, id));
    assert!(crowd.server.counters().over_share >= 125);
}

/// A segment of a peer's connection, as another stack than the peer's would send it: this far behind what it sent.
fn segment(crowd: &Crowd, peer: usize, id: Id, after: u32, payload: &[u8]) -> Vec<u8> {
    let flow = crowd.peers[peer].stack.flow(id).unwrap();
    let mut sent = Vec::new();
    packet::begin(flow.local.ip(), flow.remote.ip(), protocol::TCP, &mut sent);
    let begin = crowd.peers[peer].stack.begin(crowd.now, flow);
    let header = Header {
        source: flow.local.port(),
        destination: flow.remote.port(),
        sequence: begin.initial.wrapping_add(1 + after),
        acknowledgement: crowd.server.connections.get(crowd.server.flows[&swapped(flow)]).unwrap().connection.next(),
        flags: Flags::ACK,
        window: 1000,
        options: Options { timestamps: Some((begin.timestamp_offset, 0)), ..Options::default() },
    };
    header.emit(&mut sent);
    sent.extend_from_slice(payload);
    let start = packet::finish(&mut sent, TCP_CHECKSUM) as u16;
    let offload = Offload { segment: None, checksum: Some((start, TCP_CHECKSUM as u16)) };
    let mut whole = Vec::new();
    cut_packet(&sent, offload, |piece| whole = piece.to_vec());
    whole
}

fn swapped(Flow { local, remote }: Flow) -> Flow {
    Flow { local: remote, remote: local }
}

#[test]
fn single_bytes_out_of_order_count_with_what_they_take() {
    let limits = Limits { receive_memory: 1 << 20, ..Limits::default() };
    let mut crowd = Crowd::new(2, limits);
    let dialled: Vec<_> = (0..100).map(|_| crowd.connect(0)).collect();
    crowd.carry();
    crowd.accept_all();
    for id in &dialled {
        for piece in 0..2100 {
            let packet = segment(&crowd, 0, *id, 1 + 2 * piece, b"x");
            crowd.server.receive(crowd.now, &[&packet], Offload::default());
        }
        crowd.server.audit();
    }
    assert!(crowd.server.counters().out_of_memory > 100_000);
    // Half of the limit, and a little for each connection. It would be 20 MB otherwise.
    let most = (1 << 19) + 100 * RESERVE + (1 << 16);
    assert!((1 << 19..most).contains(&crowd.server.buffered()), "{}", crowd.server.buffered());
    // Another peer has room, also for data out of order.
    let id = crowd.connect(1);
    crowd.carry();
    let before = crowd.server.buffered();
    for piece in 0..200 {
        let packet = segment(&crowd, 1, id, 1000 * (1 + 2 * piece), &[7; 1000]);
        crowd.server.receive(crowd.now, &[&packet], Offload::default());
    }
    crowd.server.audit();
    assert!(crowd.server.buffered() > before + 30_000, "{}", crowd.server.buffered() - before);
}

#[test]
fn a_hole_is_filled_though_the_memory_is_used_up() {
    let limits = Limits { receive_memory: 40_000, ..Limits::default() };
    let mut crowd = Crowd::new(1, limits);
    let id = crowd.connect(0);
    crowd.carry();
    let far = crowd.accept_all()[0];
    for piece in 1..60 {
        let packet = segment(&crowd, 0, id, 1000 * piece, &[7; 1000]);
        crowd.server.receive(crowd.now, &[&packet], Offload::default());
    }
    let full = crowd.server.buffered();
    assert!(crowd.server.counters().out_of_memory > 0);
    // The rest of the stream arrives in order, as often as necessary.
    let (mut read, mut out) = (0, [0; 100_000]);
    for piece in 0..60 {
        let packet = segment(&crowd, 0, id, 1000 * piece, &[7; 1000]);
        crowd.server.receive(crowd.now, &[&packet], Offload::default());
        crowd.server.audit();
        assert!(crowd.server.buffered() <= full.max(RESERVE) + 1000);
        if let Poll::Ready(count) = crowd.server.poll_read(crowd.now, far, &mut context(), &mut out) {
            read += count.unwrap();
        }
    }
    assert_eq!(read, 60_000);
}
