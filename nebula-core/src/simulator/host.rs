//! One simulated host: an engine, and a tiny IP stack that answers pings.

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::time::Instant;

use nebula_cert::Identity;

use super::old_go;
use super::packet::{self, Contents};
use crate::forward::Offload;
use crate::lighthouse::LocalAddress;
use crate::{Config, Engine, Event, Node, Output, Seed, Transmit, Verdict, WallClock};

/// A host as the network sees it.
pub(super) struct Host {
    pub(super) name: String,
    pub(super) overlay: Vec<IpAddr>,
    /// Address of its socket; private if it is behind a NAT.
    pub(super) underlay: SocketAddr,
    /// More addresses of its socket.
    pub(super) also_at: Vec<SocketAddr>,
    pub(super) nat: Option<usize>,
    /// It answers test requests as old releases of Go Nebula do.
    pub(super) is_old_go: bool,
    /// The source that it writes into its datagrams, if that is not its own.
    pub(super) forges: Option<SocketAddr>,
    /// As a relay, it drops the data of others, and passes on what it takes for a test.
    pub(super) drops_carried: bool,
    pub(super) is_up: bool,
    pub(super) engine: Engine,
    /// Configuration for the next start.
    config: Config,
    pub(super) events: Vec<Event>,
    /// Packets delivered to the host.
    pub(super) received: Vec<Vec<u8>>,
    /// Packets that the host sent on its primary network.
    pub(super) bypassed: Vec<Vec<u8>>,
    outgoing: VecDeque<Transmit>,
}

impl Host {
    pub(super) fn new(
        name: String,
        (underlay, also_at): (SocketAddr, Vec<SocketAddr>),
        nat: Option<usize>,
        config: Config,
        now: Instant,
        wall: WallClock,
        seed: Seed,
    ) -> Self {
        let overlay = config.identity.networks().iter().map(ipnet::IpNet::addr).collect();
        // Some scenarios begin with a configuration that is completed later.
        let engine = Engine::unchecked(config.clone(), WallClock { at: now, unix: wall.unix_at(now) }, seed);
        let mut host = Self {
            name,
            overlay,
            underlay,
            also_at,
            nat,
            is_old_go: false,
            forges: None,
            drops_carried: false,
            is_up: true,
            engine,
            config,
            events: Vec::new(),
            received: Vec::new(),
            bypassed: Vec::new(),
            outgoing: VecDeque::new(),
        };
        let addresses = host.endpoints().map(|at| LocalAddress { address: at.ip(), interface: "eth0".to_owned() });
        let addresses = addresses.collect();
        host.control(now, |node| node.set_local_addresses(addresses));
        host
    }

    /// Loses all state, as after a crash.
    pub(super) fn restart(&mut self, now: Instant, wall: WallClock, seed: Seed) {
        let (name, config) = (self.name.clone(), self.config.clone());
        let at = (self.underlay, std::mem::take(&mut self.also_at));
        *self = Self { is_old_go: self.is_old_go, ..Self::new(name, at, self.nat, config, now, wall, seed) };
    }

    /// The configuration for the next start.
    pub(super) fn start_config(&self) -> &Config {
        &self.config
    }

    /// Every address of its socket.
    pub(super) fn endpoints(&self) -> impl Iterator<Item = SocketAddr> {
        std::iter::once(self.underlay).chain(self.also_at.iter().copied())
    }

    /// The address from which a datagram to `to` leaves.
    pub(super) fn source_towards(&self, to: SocketAddr) -> SocketAddr {
        self.endpoints().find(|own| is_one_network(own.ip(), to.ip())).unwrap_or(self.underlay)
    }

    /// Certificates it started with.
    pub(super) fn identity(&self) -> &Identity {
        &self.config.identity
    }

    /// Adds to its configuration, for the next start as well.
    pub(super) fn add_static_hosts(&mut self, now: Instant, hosts: Vec<(IpAddr, Vec<SocketAddr>)>) {
        self.config.static_hosts.extend(hosts);
        let hosts = self.config.static_hosts.clone();
        self.control(now, |node| node.reconfigure(now, |config| config.static_hosts = hosts));
    }

    /// Changes its configuration for the next start.
    pub(super) fn edit_config(&mut self, change: impl FnOnce(&mut Config)) {
        change(&mut self.config);
    }

    /// Calls the node and collects its output.
    pub(super) fn control<T>(&mut self, now: Instant, change: impl FnOnce(&mut Node) -> T) -> T {
        let (result, output) = self.engine.control(now, change);
        let collected = Collected::from(output);
        self.collect(now, collected);
        result
    }

    /// When [`Host::timeout`] is due.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.engine.poll_timeout().filter(|_| self.is_up)
    }

    pub(super) fn timeout(&mut self, now: Instant) {
        let collected = Collected::from(self.engine.timeout(now));
        self.collect(now, collected);
    }

    /// Handles a datagram from the underlay.
    pub(super) fn receive(&mut self, now: Instant, from: SocketAddr, datagram: &[u8]) {
        let collected = Collected::from(self.engine.receive(now, from, &mut datagram.to_vec()));
        self.collect(now, collected);
    }

    /// Sends a packet as a program on the host would.
    pub(super) fn send(&mut self, now: Instant, packet: &[u8]) -> Verdict {
        let output = self.engine.send(now, &mut packet.to_vec(), Offload::default());
        let verdict = output.verdict().expect("the packet was taken");
        let collected = Collected::from(output);
        self.collect(now, collected);
        verdict
    }

    /// Next datagram for the underlay.
    pub(super) fn next_datagram(&mut self) -> Option<Transmit> {
        self.outgoing.pop_front()
    }

    fn collect(&mut self, now: Instant, mut collected: Collected) {
        if self.is_old_go {
            collected.datagrams.iter_mut().for_each(|transmit| old_go::garble(&self.engine, &mut transmit.datagram));
        }
        self.outgoing.extend(collected.datagrams);
        self.bypassed.extend(collected.bypassed);
        self.events.extend(collected.events);
        for packet in collected.packets {
            self.deliver(now, packet);
        }
    }

    fn deliver(&mut self, now: Instant, packet: Vec<u8>) {
        if let Contents::EchoRequest { from, to, identifier, sequence } = packet::read(&packet) {
            let _verdict = self.send(now, &packet::echo(to, from, true, identifier, sequence));
        }
        self.received.push(packet);
    }
}

/// Whether two addresses are in the same /24 or /64.
fn is_one_network(a: IpAddr, b: IpAddr) -> bool {
    match (a, b) {
        (IpAddr::V4(a), IpAddr::V4(b)) => a.to_bits() >> 8 == b.to_bits() >> 8,
        (IpAddr::V6(a), IpAddr::V6(b)) => a.to_bits() >> 64 == b.to_bits() >> 64,
        _ => false,
    }
}

/// An output that borrows nothing.
struct Collected {
    datagrams: Vec<Transmit>,
    packets: Vec<Vec<u8>>,
    bypassed: Vec<Vec<u8>>,
    events: Vec<Event>,
}

impl From<Output<'_>> for Collected {
    fn from(output: Output<'_>) -> Self {
        let datagrams = output.datagrams().map(|datagram| Transmit {
            to: datagram.to,
            datagram: datagram.bytes.to_vec(),
            must_be_whole: datagram.must_be_whole,
        });
        Self {
            datagrams: datagrams.collect(),
            packets: output.packets().map(|packet| packet.to_vec()).collect(),
            bypassed: output.bypassed().iter().map(|packet| packet.bytes.clone()).collect(),
            events: output.events().to_vec(),
        }
    }
}
