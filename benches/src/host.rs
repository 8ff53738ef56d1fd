//! A node without sockets, whose datagrams the benchmarks pass from one node to another.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ipnet::IpNet;
use nebula_cert::{CaPool, Curve, Identity, Version};
use nebula_core::LocalIndex;
use nebula_core::firewall::Rule;
use nebula_core::forward::{Offload, Received};
use nebula_core::simulator::{Authority, Subject};
use nebula_core::{Config, Forwarder, Lane, Node, PostQuantum, Punt, Seed, Transmit, Verdict, WallClock};

/// Control plane, data plane and one lane of a node.
pub struct Host {
    pub node: Node,
    pub forwarder: Arc<Forwarder>,
    pub lane: Lane,
    /// The current time, which stands still unless a benchmark changes it.
    pub now: Instant,
    pub overlay: IpAddr,
    pub underlay: SocketAddr,
}

impl Host {
    /// The `number`th host of 10.0.0.0/8; its firewall lets everything through unless `configure` says otherwise.
    #[must_use]
    pub fn new(authority: &Authority, trust: &CaPool, number: u32, configure: impl FnOnce(&mut Config)) -> Self {
        Self::with_identity(identity(authority, number), trust, number, configure)
    }
    /// Like [`Host::new`], with an existing certificate.
    #[must_use]
    pub fn with_identity(identity: Identity, trust: &CaPool, number: u32, configure: impl FnOnce(&mut Config)) -> Self {
        let mut config = Config::new(identity, trust.clone());
        config.firewall.inbound = vec![Rule::any()];
        config.firewall.outbound = vec![Rule::any()];
        // As Go does it; what ML-KEM costs is measured where it is turned on.
        config.post_quantum = PostQuantum::Off;
        configure(&mut config);
        #[allow(clippy::disallowed_methods, reason = "any moment will do as the beginning")]
        let now = Instant::now();
        let wall = WallClock { at: now, unix: Duration::from_secs(1_800_000_000) };
        let mut seed = [7; 32];
        seed[..4].copy_from_slice(&number.to_be_bytes());
        let (node, forwarder) = Node::new(config, now, wall, Seed::predictable(seed));
        let lane = forwarder.lane();
        Self { node, forwarder, lane, now, overlay: overlay(number).into(), underlay: underlay(number) }
    }
    /// Adds the endpoint of a peer to the configuration.
    pub fn learn(&mut self, peer: &Self) {
        self.node.reconfigure(self.now, |config| config.static_hosts = [(peer.overlay, vec![peer.underlay])].into());
    }
    /// Starts a handshake with a peer whose endpoint is known; returns its first message.
    pub fn call(&mut self, peer: &Self) -> Transmit {
        self.node.connect(self.now, peer.overlay);
        self.node.poll_transmit().expect("the first message of the handshake")
    }
    /// Passes a handshake message to the control plane; returns the answer, if any.
    pub fn handshake(&mut self, from: SocketAddr, datagram: Vec<u8>) -> Option<Transmit> {
        self.node.handle_punt(self.now, Punt::Handshake { from: from.into(), datagram });
        self.node.poll_transmit()
    }
    /// Local index of the only tunnel.
    #[must_use]
    pub fn tunnel(&self) -> LocalIndex {
        self.node.tunnels()[0].local_index
    }
    /// Discards queued datagrams and events that a benchmark does not measure.
    pub fn drain(&mut self) {
        while self.node.poll_transmit().is_some() {}
        while self.node.poll_event().is_some() {}
        self.lane.clear();
    }
    /// Seals a packet into the lane.
    pub fn send(&mut self, packet: &mut [u8], offload: Offload) -> Verdict {
        self.forwarder.outbound(&mut self.lane, self.now, packet, offload)
    }
    /// Opens datagrams into the lane.
    pub fn receive(&mut self, buffer: &mut [u8], received: &[Received]) {
        self.forwarder.inbound(&mut self.lane, self.now, buffer, received);
    }
    /// Takes the datagrams that the lane sealed, in the form in which a socket with receive offload delivers them.
    pub fn sent(&mut self) -> (Vec<u8>, Vec<Received>) {
        let from = self.underlay;
        let runs = self.lane.runs().iter();
        let received =
            runs.map(|run| Received { from, range: run.range.clone(), segment_size: run.segment_size }).collect();
        let sealed = (self.lane.arena().to_vec(), received);
        self.lane.clear();
        sealed
    }
}

/// Two hosts with a tunnel between them.
#[must_use]
pub fn network(configure: impl Fn(&mut Config)) -> (Host, Host) {
    let authority = Authority::new(Curve::Curve25519);
    let trust = authority.trust();
    let mut a = Host::new(&authority, &trust, 1, &configure);
    let mut b = Host::new(&authority, &trust, 2, &configure);
    connect(&mut a, &mut b);
    // Confirms the tunnel, as the first datagram from the initiator would.
    let (tunnel, from) = (b.node.half_open()[0], a.underlay.into());
    b.node.handle_punt(b.now, Punt::Confirmed { tunnel, from });
    (a, b)
}

/// Runs a handshake from `a` to `b`.
pub fn connect(a: &mut Host, b: &mut Host) {
    a.learn(b);
    let first = a.call(b);
    let second = b.handshake(a.underlay, first.datagram).expect("the answer");
    let _packets_that_waited = a.handshake(b.underlay, second.datagram);
    a.drain();
    b.drain();
    assert!(!a.node.tunnels().is_empty());
}

/// The certificate and the key of the `number`th host.
#[must_use]
pub fn identity(authority: &Authority, number: u32) -> Identity {
    authority.identity(&Subject {
        name: format!("host-{number}"),
        networks: vec![IpNet::new(overlay(number).into(), 8).expect("8 is a prefix length")],
        unsafe_networks: Vec::new(),
        groups: vec!["pods".to_owned(), "default".to_owned()],
        versions: vec![Version::V2],
        not_after: 2_000_000_000,
    })
}

fn overlay(number: u32) -> Ipv4Addr {
    Ipv4Addr::from_bits(10 << 24 | number)
}

fn underlay(number: u32) -> SocketAddr {
    SocketAddr::from((Ipv4Addr::from_bits(198 << 24 | 18 << 16 | number), 4242))
}
