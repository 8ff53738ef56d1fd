//! A simulated network of many nodes on one virtual clock: deterministic by its seed, and as fast as the machine.
//!
//! Time jumps to the next arrival or deadline, so an hour of keepalives takes milliseconds. Everything derives from the
//! seed, including keys and certificates: the same seed and the same calls give the same datagrams, byte for byte.

mod adopt;
mod authority;
mod cluster;
mod deadlines;
mod exercise;
mod flow;
mod host;
mod host_spec;
mod hosts;
mod link;
mod nat;
mod old_go;
mod operation;
mod packet;
mod ping;
mod upgrade;

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use ipnet::IpNet;
use nebula_cert::{Curve, Fingerprint, Identity, UnixTime, VerifiedCertificate, Version};
use rand_chacha::ChaCha20Rng;
use rand_chacha::rand_core::{RngCore as _, SeedableRng as _};

pub use authority::{Authority, Subject};
pub use cluster::Cluster;
pub use deadlines::Deadlines;
pub use exercise::{Exercise, REACHABLE_AGAIN_WITHIN};
pub use flow::Step;
pub use host_spec::HostSpec;
pub use link::{Gate, Link};
pub use nat::{Dependence, NatBehaviour};
pub use operation::Operation;
pub use packet::UdpPacket;
pub use ping::Ping;

use self::flow::Flow;
use self::host::Host;
use self::hosts::Hosts;
use self::nat::Nat;
use self::packet::Contents;
use crate::firewall::Rule;
use crate::lighthouse::LocalAddress;
use crate::wire::header::{HEADER_LEN, Header, MessageType};
use crate::{Config, Event, Node, PostQuantum, Seed, TableSizes, TunnelStatus, Verdict, WallClock};

/// A host of a [`SimNet`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct HostId(usize);

/// A NAT of a [`SimNet`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NatId(usize);

/// A datagram in flight.
#[derive(Debug)]
struct InFlight {
    from: SocketAddr,
    to: SocketAddr,
    datagram: Vec<u8>,
}

/// A simulated network.
pub struct SimNet {
    seed: u64,
    rng: ChaCha20Rng,
    start: Instant,
    now: Instant,
    authority: Authority,
    /// What hosts that are added begin with.
    post_quantum: PostQuantum,
    link: Link,
    /// Paths that differ from [`SimNet::link`].
    links: BTreeMap<(HostId, HostId), Link>,
    /// Paths between two endpoints that differ from those.
    paths: BTreeMap<(SocketAddr, SocketAddr), Link>,
    hosts: Hosts,
    nats: Vec<Nat>,
    in_flight: BTreeMap<(Instant, u64), InFlight>,
    sent: u64,
    /// The current second, and the number of datagrams sent by its beginning.
    second: (u64, u64),
    /// More datagrams in a second than this are taken for a loop.
    max_per_second: u64,
    cut: BTreeSet<(HostId, HostId)>,
    pings: u16,
    flow: Flow,
}

impl SimNet {
    /// A network whose hosts use Curve25519.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self::with_curve(seed, Curve::Curve25519)
    }

    /// A network whose hosts use this curve.
    #[must_use]
    pub fn with_curve(seed: u64, curve: Curve) -> Self {
        #[allow(
            clippy::disallowed_methods,
            reason = "an Instant cannot be made otherwise; the clock is virtual from here"
        )]
        let start = Instant::now();
        Self {
            seed,
            rng: ChaCha20Rng::seed_from_u64(seed),
            start,
            now: start,
            authority: Authority::seeded(curve, seed),
            post_quantum: PostQuantum::default(),
            link: Link::default(),
            links: BTreeMap::new(),
            paths: BTreeMap::new(),
            hosts: Hosts::default(),
            nats: Vec::new(),
            in_flight: BTreeMap::new(),
            sent: 0,
            second: (0, 0),
            max_per_second: MAX_DATAGRAMS_PER_SECOND,
            cut: BTreeSet::new(),
            pings: 0,
            flow: Flow::default(),
        }
    }

    /// Sets what hosts that are added from now on begin with. ML-KEM takes its randomness from the system: without it,
    /// equal seeds give equal bytes.
    pub fn set_post_quantum(&mut self, post_quantum: PostQuantum) {
        self.post_quantum = post_quantum;
    }

    /// Adds hosts that know each other's endpoints from their configuration.
    pub fn nodes<const N: usize>(&mut self, names: [&str; N]) -> [HostId; N] {
        let hosts = names.map(|name| self.add(HostSpec::new(name)));
        for a in hosts {
            for b in hosts {
                if a != b {
                    self.introduce(a, b);
                }
            }
        }
        hosts
    }

    /// Adds a host and starts it.
    pub fn add(&mut self, spec: HostSpec) -> HostId {
        let id = self.hosts.next_id();
        let [high, low] = number_of(id);
        let default_network = IpNet::new(Ipv4Addr::new(10, 42, high, low).into(), 16).expect("16 is a prefix length");
        let default_underlay = match spec.nat {
            // The first hosts are in a network for documentation (RFC 5737), all others in one for benchmarks (RFC
            // 2544).
            None if high == 0 => SocketAddr::from(([198, 51, 100, low], PORT)),
            None => SocketAddr::from(([198, 18, high, low], PORT)),
            Some(nat) => private_endpoint(nat, id),
        };
        let subject = Subject {
            name: spec.name.clone(),
            networks: spec.networks.unwrap_or_else(|| vec![default_network]),
            unsafe_networks: spec.unsafe_networks,
            groups: spec.groups,
            versions: spec.versions,
            not_after: spec.not_after,
        };
        let mut config = Config::new(self.authority.identity(&subject), self.authority.trust());
        config.listen_port = PORT;
        config.post_quantum = if spec.is_old_go { PostQuantum::Off } else { self.post_quantum };
        config.firewall.inbound = vec![Rule::any()];
        config.firewall.outbound = vec![Rule::any()];
        for host in spec.knows {
            let host = &self.hosts[host];
            for address in &host.overlay {
                config.static_hosts.insert(*address, host.endpoints().collect());
            }
        }
        config.lighthouse.hosts = spec.lighthouses.iter().map(|host| self.hosts[*host].overlay[0]).collect();
        (spec.configure)(&mut config);
        let underlay = spec.underlay.unwrap_or(default_underlay);
        let nat = spec.nat.map(|nat| nat.0);
        let (wall, seed) = (self.wall(), self.random_seed());
        self.hosts.push(Host::new(spec.name, (underlay, spec.also_at), nat, config, self.now, wall, seed));
        self.hosts.change(id, |host| host.is_old_go = spec.is_old_go);
        id
    }

    /// Adds a NAT with a public address of its own.
    pub fn add_nat(&mut self, behaviour: NatBehaviour) -> NatId {
        let number = u8::try_from(self.nats.len() + 1).expect("few NATs");
        self.nats.push(Nat::new(IpAddr::from([203, 0, 113, number]), behaviour));
        NatId(self.nats.len() - 1)
    }

    /// Tells `host` the endpoint of `peer`, as its configuration would.
    pub fn introduce(&mut self, host: HostId, peer: HostId) {
        let peer = &self.hosts[peer];
        let known: Vec<_> = peer.overlay.iter().map(|address| (*address, peer.endpoints().collect())).collect();
        let now = self.now;
        self.hosts.change(host, |host| host.add_static_hosts(now, known));
        self.dispatch(host);
    }

    /// The authority that signed every host of this network.
    #[must_use]
    pub fn authority(&self) -> &Authority {
        &self.authority
    }

    /// The certificates and key that `host` starts with.
    #[must_use]
    pub fn identity(&self, host: HostId) -> &Identity {
        self.hosts[host].identity()
    }

    /// A new certificate and key for `host`, like its present one.
    #[must_use]
    pub fn renewed_identity(&self, host: HostId, versions: &[Version]) -> Identity {
        let host = &self.hosts[host];
        let present = host.identity().primary();
        self.authority.identity(&Subject {
            name: host.name.clone(),
            networks: present.networks().to_vec(),
            unsafe_networks: present.unsafe_networks().to_vec(),
            groups: present.groups().to_vec(),
            versions: versions.to_vec(),
            not_after: authority::NOT_AFTER,
        })
    }

    /// Fingerprint of the host's certificate, as a blocklist names it.
    #[must_use]
    pub fn fingerprint(&self, host: HostId) -> Fingerprint {
        self.hosts[host].identity().primary().fingerprint()
    }

    /// How many datagrams all hosts together may send in a second before that is taken for a loop, which panics.
    /// Default: 20,000.
    pub fn allow_datagrams(&mut self, per_second: u64) {
        self.max_per_second = per_second;
    }

    /// How many of the latest datagrams are kept for [`SimNet::flow`] and [`SimNet::diagram`]. Default: 100,000.
    pub fn keep_steps(&mut self, count: usize) {
        self.flow.keep(count);
    }

    /// Makes every path behave like this from now on.
    pub fn set_link(&mut self, link: Link) {
        self.link = link;
        self.links.clear();
    }

    /// Makes the path between the two behave like this from now on, in both directions.
    pub fn set_link_between(&mut self, a: HostId, b: HostId, link: Link) {
        self.links.extend([((a, b), link), ((b, a), link)]);
    }

    /// Makes the path between two endpoints behave like this from now on, in both directions; for hosts with several.
    pub fn set_path(&mut self, a: SocketAddr, b: SocketAddr, link: Link) {
        self.paths.extend([((a, b), link), ((b, a), link)]);
    }

    /// Drops everything between the two from now on.
    pub fn cut(&mut self, a: HostId, b: HostId) {
        self.cut.extend([(a, b), (b, a)]);
    }

    /// Drops everything that one sends to the other from now on.
    pub fn cut_one_way(&mut self, from: HostId, to: HostId) {
        self.cut.insert((from, to));
    }

    /// Undoes [`SimNet::cut`].
    pub fn heal(&mut self, a: HostId, b: HostId) {
        self.cut.remove(&(a, b));
        self.cut.remove(&(b, a));
    }

    /// Moves the host to another underlay endpoint, behind no NAT; it keeps its tunnels.
    pub fn move_to(&mut self, host: HostId, underlay: &str) {
        self.hosts.relocate(host, underlay.parse().expect("an endpoint"), None);
    }

    /// As [`SimNet::move_to`], and the host notices that its interface has another address.
    pub fn roam_to(&mut self, host: HostId, underlay: &str) {
        self.move_to(host, underlay);
        let address = self.underlay(host).ip();
        let addresses = vec![LocalAddress { address, interface: "eth0".to_owned() }];
        self.control(host, |node, _| node.set_local_addresses(addresses));
    }

    /// Moves the host to a private endpoint behind `nat`; it keeps its tunnels.
    pub fn move_behind(&mut self, host: HostId, nat: NatId) {
        self.hosts.relocate(host, private_endpoint(nat, host), Some(nat.0));
    }

    /// Makes the host write this source into its datagrams from now on; `None`: its own one again.
    pub fn forge(&mut self, host: HostId, source: Option<&str>) {
        let source = source.map(|source| source.parse().expect("an endpoint"));
        self.hosts.change(host, |host| host.forges = source);
    }

    /// As a relay, has a host drop the data that it is given for others, and pass on tests and handshakes.
    pub fn drop_carried(&mut self, host: HostId, on: bool) {
        self.hosts.change(host, |host| host.drops_carried = on);
    }

    /// Makes the NAT forget its mappings; later datagrams get new ports.
    pub fn rebind(&mut self, nat: NatId) {
        self.nats[nat.0].rebind();
    }

    /// Stops the host after it closed its tunnels.
    pub fn stop(&mut self, host: HostId) {
        self.control(host, |node, now| node.close_all(now));
        self.kill(host);
    }

    /// The program of the host does not run any more, but loses no state: it is stopped, or the host sleeps.
    pub fn suspend(&mut self, host: HostId) {
        self.hosts.change(host, |host| host.is_up = false);
    }

    /// It runs again after [`SimNet::suspend`]. What it missed is lost.
    pub fn resume(&mut self, host: HostId) {
        self.hosts.change(host, |host| host.is_up = true);
        self.run_for(Duration::ZERO);
    }

    /// Stops the host without closing its tunnels; it loses all state.
    pub fn kill(&mut self, host: HostId) {
        self.hosts.change(host, |host| host.is_up = false);
    }

    /// Whether the host runs.
    #[must_use]
    pub fn is_up(&self, host: HostId) -> bool {
        self.hosts[host].is_up
    }

    /// Restarts the host without any state, as after a crash; also after [`SimNet::stop`] and [`SimNet::kill`].
    pub fn restart(&mut self, host: HostId) {
        let (now, wall, seed) = (self.now, self.wall(), self.random_seed());
        self.hosts.change(host, |host| host.restart(now, wall, seed));
        self.dispatch(host);
    }

    /// Changes the configuration that `host` will start with the next time, like an edited configuration file.
    pub fn edit_config(&mut self, host: HostId, change: impl FnOnce(&mut Config)) {
        self.hosts.change(host, |host| host.edit_config(change));
    }

    /// Calls a method of the node's control plane.
    pub fn control<T>(&mut self, host: HostId, verb: impl FnOnce(&mut Node, Instant) -> T) -> T {
        let now = self.now;
        let result = self.hosts.change(host, |host| host.control(now, |node| verb(node, now)));
        self.dispatch(host);
        result
    }

    /// First overlay address of the host.
    #[must_use]
    pub fn overlay(&self, host: HostId) -> IpAddr {
        self.hosts[host].overlay[0]
    }

    /// Endpoint of the host's socket.
    #[must_use]
    pub fn underlay(&self, host: HostId) -> SocketAddr {
        self.hosts[host].underlay
    }

    /// Live tunnels of the host.
    #[must_use]
    pub fn tunnels(&self, host: HostId) -> Vec<TunnelStatus> {
        self.hosts[host].engine.node.tunnels()
    }

    /// Tunnels of `host` to `peer`.
    #[must_use]
    pub fn tunnels_to(&self, host: HostId, peer: HostId) -> Vec<TunnelStatus> {
        let address = self.overlay(peer);
        self.tunnels(host).into_iter().filter(|tunnel| tunnel.peer.contains(&address)).collect()
    }

    /// Uses up send counters of the primary tunnel from `host` to `peer`, as `count` datagrams would.
    pub fn spend_counters(&mut self, host: HostId, peer: HostId, count: u64) {
        let peer = self.overlay(peer);
        self.hosts.change(host, |host| {
            let tunnel = host.engine.forwarder.tunnels().by_address(peer).expect("a tunnel");
            let _first = tunnel.session.reserve(count).expect("counters that are left");
        });
    }

    /// The endpoint of `peer` as `host` knows it.
    #[must_use]
    pub fn endpoint_of(&self, host: HostId, peer: HostId) -> Option<SocketAddr> {
        self.tunnels_to(host, peer).into_iter().find(|tunnel| tunnel.primary)?.endpoint
    }

    /// Sizes of the host's tables.
    #[must_use]
    pub fn table_sizes(&self, host: HostId) -> TableSizes {
        self.hosts[host].engine.node.table_sizes()
    }

    /// Everything that happened at a host.
    #[must_use]
    pub fn events(&self, host: HostId) -> &[Event] {
        &self.hosts[host].events
    }

    /// A counter of a host, summed over its lanes.
    #[must_use]
    pub fn counter(&self, host: HostId, name: &str) -> u64 {
        *self.hosts[host].engine.counters().get(name).unwrap_or_else(|| panic!("no counter named {name}"))
    }

    /// Payloads of the UDP packets a host received on an overlay port.
    #[must_use]
    pub fn payloads(&self, host: HostId, port: u16) -> Vec<Vec<u8>> {
        let received = self.hosts[host].received.iter();
        let wanted = received.filter_map(|packet| match packet::read(packet) {
            Contents::Udp { port: to, payload, .. } if to == port => Some(payload),
            _ => None,
        });
        wanted.collect()
    }

    /// The UDP packets a host received on the overlay since the last call.
    pub fn take_udp(&mut self, host: HostId) -> Vec<UdpPacket> {
        let received = self.hosts.take_received(host);
        received.iter().filter_map(|packet| packet::read_udp(packet)).collect()
    }

    /// IP packets a host received from the overlay, oldest first; answers to its own refused packets are among them.
    #[must_use]
    pub fn packets(&self, host: HostId) -> &[Vec<u8>] {
        &self.hosts[host].received
    }

    /// The IP packets a host received from the overlay since the last call, oldest first.
    pub fn take_packets(&mut self, host: HostId) -> Vec<Vec<u8>> {
        self.hosts.take_received(host)
    }

    /// The verified certificate of the host with this overlay address, if `host` has a tunnel to it.
    #[must_use]
    pub fn certificate(&self, host: HostId, peer: IpAddr) -> Option<VerifiedCertificate> {
        self.hosts[host].engine.certificate(peer)
    }

    /// IP packets that a host sent on its primary network, past the overlay, oldest first.
    #[must_use]
    pub fn bypassed(&self, host: HostId) -> &[Vec<u8>] {
        &self.hosts[host].bypassed
    }

    /// Gives a host this directory of its cluster.
    pub fn set_directory(&mut self, host: HostId, cluster: &Cluster) {
        let directory = std::sync::Arc::new(cluster.clone());
        self.control(host, |node, now| node.reconfigure(now, |config| config.capture = Some(directory)));
    }

    /// Datagrams that went over the underlay, oldest first.
    pub fn flow(&self) -> impl DoubleEndedIterator<Item = &Step> {
        self.flow.steps()
    }

    /// The packet flow as text: one column per host.
    #[must_use]
    pub fn diagram(&self) -> String {
        let names: Vec<_> = self.hosts.iter().map(|host| host.name.as_str()).collect();
        format!("seed {}\n{}", self.seed, self.flow.diagram(&names))
    }

    /// The time on the virtual clock, for programs of hosts that the test runs beside them.
    #[must_use]
    pub fn now(&self) -> Instant {
        self.now
    }

    /// Time since the start.
    #[must_use]
    pub fn elapsed(&self) -> Duration {
        self.now.saturating_duration_since(self.start)
    }

    /// A ping between the first overlay addresses.
    pub fn ping(&mut self, from: HostId, to: HostId) -> Ping<'_> {
        let addresses = (self.overlay(from), self.overlay(to));
        Ping { net: self, from, to, addresses }
    }

    /// Sends a UDP packet through the overlay.
    pub fn send_udp(&mut self, from: HostId, to: HostId, ports: (u16, u16), payload: &[u8]) -> Verdict {
        let packet = packet::udp(self.overlay(from), self.overlay(to), ports.0, ports.1, payload);
        self.send_packet(from, &packet)
    }

    /// Sends an IP packet as a program on `from` would.
    pub fn send_packet(&mut self, from: HostId, packet: &[u8]) -> Verdict {
        let now = self.now;
        let verdict = self.hosts.change(from, |host| host.send(now, packet));
        self.dispatch(from);
        verdict
    }

    /// Puts a datagram onto the underlay, as anybody on it can.
    pub fn inject(&mut self, from: SocketAddr, to: SocketAddr, datagram: &[u8]) {
        let at = self.now + self.link.latency;
        let datagram = InFlight { from, to, datagram: datagram.to_vec() };
        let receiver = self.locate(&datagram).map(|(host, _)| host);
        self.note(flow::STRANGER, receiver, &datagram, 1);
        self.post(at, datagram);
    }

    /// Runs for this long.
    pub fn run_for(&mut self, time: Duration) {
        let end = self.now + time;
        while self.next_event().is_some_and(|at| at <= end) {
            self.step();
        }
        self.now = end;
    }

    /// Runs until `done`, at most for `limit`; returns whether it is done.
    pub fn run_until(&mut self, limit: Duration, done: impl Fn(&Self) -> bool) -> bool {
        let end = self.now + limit;
        while !done(self) {
            if self.next_event().is_none_or(|at| at > end) {
                self.now = end;
                return done(self);
            }
            self.step();
        }
        true
    }

    /// Runs until `done`; panics with the packet flow if that takes longer than `limit`.
    pub fn expect(&mut self, what: &str, limit: Duration, done: impl Fn(&Self) -> bool) {
        assert!(self.run_until(limit, done), "{what}: not within {limit:?}\n{}", self.diagram());
    }

    /// Handles the next arrival or deadline; returns `false` if there is none.
    pub fn step(&mut self) -> bool {
        let Some(at) = self.next_event() else { return false };
        self.now = self.now.max(at);
        if let Some(entry) = self.in_flight.first_entry().filter(|entry| entry.key().0 <= self.now) {
            let arrived = entry.remove();
            if let Some((host, from)) = self.locate(&arrived) {
                if let Some(nat) = self.nats.iter_mut().find(|nat| nat.public == arrived.to.ip()) {
                    nat.passed(self.now, arrived.to.port());
                }
                let now = self.now;
                self.hosts.change(host, |host| host.receive(now, from, &arrived.datagram));
                self.dispatch(host);
            }
            return true;
        }
        let now = self.now;
        for id in self.hosts.due(now) {
            self.hosts.change(id, |host| {
                host.timeout(now);
                let next = host.next_deadline();
                assert!(next.is_none_or(|next| next > now), "{} leaves a deadline that is due", host.name);
            });
            self.dispatch(id);
        }
        true
    }

    /// When the next datagram arrives or a host has something to do by time.
    #[must_use]
    pub fn next_event(&self) -> Option<Instant> {
        let arrival = self.in_flight.first_key_value().map(|((at, _), _)| *at);
        self.hosts.next_deadline().into_iter().chain(arrival).min()
    }

    /// Hosts that did or got anything since the last call, for programs of hosts that the test runs beside them.
    pub fn take_changed(&mut self) -> impl Iterator<Item = HostId> + use<> {
        self.hosts.take_changed().into_iter()
    }

    /// Puts everything a host wants to send onto the underlay.
    fn dispatch(&mut self, sender: HostId) {
        while let Some(transmit) = self.hosts.next_datagram(sender) {
            let host = &self.hosts[sender];
            let from = match host.nat {
                _ if host.forges.is_some() => host.forges.unwrap_or(host.underlay),
                Some(nat) if !self.shares_nat(nat, transmit.to) => {
                    self.nats[nat].outbound(self.now, host.underlay, transmit.to)
                }
                Some(_) => host.underlay,
                None => host.source_towards(transmit.to),
            };
            let datagram = InFlight { from, to: transmit.to, datagram: transmit.datagram };
            let receiver = self.locate(&datagram).map(|(host, _)| host);
            let is_cut = receiver.is_some_and(|receiver| self.cut.contains(&(sender, receiver)));
            let blocked = is_cut || self.hosts[sender].drops_carried && carries_data(&datagram.datagram);
            let between = || receiver.and_then(|receiver| self.links.get(&(sender, receiver)));
            let link = self.paths.get(&(from, datagram.to)).or_else(between).copied().unwrap_or(self.link);
            let arrivals = match blocked {
                true => Vec::new(),
                false => link.arrivals(datagram.datagram.len(), &mut self.rng),
            };
            let name = self.hosts[sender].name.clone();
            self.note(&name, receiver, &datagram, arrivals.len());
            for delay in arrivals {
                let InFlight { from, to, ref datagram } = datagram;
                self.post(self.now + delay, InFlight { from, to, datagram: datagram.clone() });
            }
        }
    }

    /// Records a datagram for the diagram.
    fn note(&mut self, sender: &str, receiver: Option<HostId>, datagram: &InFlight, arrivals: usize) {
        self.flow.push(Step {
            at: self.elapsed(),
            sender: sender.to_owned(),
            receiver: receiver.map(|receiver| self.hosts[receiver].name.clone()),
            from: datagram.from,
            to: datagram.to,
            datagram: datagram.datagram.clone(),
            copies: if receiver.is_some() { arrivals } else { 0 },
        });
    }

    fn post(&mut self, at: Instant, datagram: InFlight) {
        self.in_flight.insert((at, self.sent), datagram);
        self.sent += 1;
        let second = self.elapsed().as_secs();
        if self.second.0 != second {
            self.second = (second, self.sent);
        }
        assert!(
            self.sent - self.second.1 < self.max_per_second,
            "{} datagrams in one second: hosts answer each other for ever",
            self.max_per_second
        );
    }

    /// The receiver of a datagram, and the source that it sees.
    fn locate(&self, datagram: &InFlight) -> Option<(HostId, SocketAddr)> {
        let to = datagram.to;
        let private = match self.nats.iter().position(|nat| nat.public == to.ip()) {
            Some(nat) => {
                let inside = self.nats[nat].inbound(self.now, to.port(), datagram.from)?;
                return self.host_at(inside, Some(nat)).map(|host| (host, datagram.from));
            }
            // A private destination can be reached only from behind the same NAT.
            None => {
                let mut senders = self.hosts.at(datagram.from).map(|id| &self.hosts[id]);
                senders.find(|host| host.underlay == datagram.from).and_then(|host| host.nat)
            }
        };
        let direct = self.host_at(to, None);
        direct.or_else(|| self.host_at(to, Some(private?))).map(|host| (host, datagram.from))
    }

    fn host_at(&self, underlay: SocketAddr, nat: Option<usize>) -> Option<HostId> {
        self.hosts.at(underlay).find(|id| self.hosts[*id].is_up && self.hosts[*id].nat == nat)
    }

    fn shares_nat(&self, nat: usize, to: SocketAddr) -> bool {
        self.host_at(to, Some(nat)).is_some()
    }

    fn wall(&self) -> WallClock {
        let start = Duration::from_secs(u64::try_from(START).unwrap_or_default());
        WallClock { at: self.now, unix: start + self.elapsed() }
    }

    fn random_seed(&mut self) -> Seed {
        let mut seed = [0; 32];
        self.rng.fill_bytes(&mut seed);
        Seed::predictable(seed)
    }
}

/// Whether a relay passes on somebody's data with this datagram, as the relay itself can tell.
fn carries_data(datagram: &[u8]) -> bool {
    let is = |at: usize, kind| {
        datagram.get(at..).and_then(|rest| Header::parse(rest).ok()).is_some_and(|header| header.kind == kind)
    };
    is(0, MessageType::Relay) && is(HEADER_LEN, MessageType::Data)
}

/// Endpoint of the n-th host behind a NAT.
fn private_endpoint(nat: NatId, host: HostId) -> SocketAddr {
    let nat = u8::try_from(nat.0).expect("few NATs");
    match number_of(host) {
        [0, low] => SocketAddr::from(([192, 168, nat, low], PORT)),
        [high, low] => SocketAddr::from(([100, nat, high, low], PORT)),
    }
}

/// The last two bytes of the addresses of a host.
fn number_of(host: HostId) -> [u8; 2] {
    let number = u16::try_from(host.0 + 1).ok().filter(|number| *number < u16::MAX);
    number.expect("at most 65,534 hosts: the next address is for broadcast").to_be_bytes()
}

const PORT: u16 = 4242;
/// More than a scenario without streams sends in a second, unless hosts answer each other in a loop.
const MAX_DATAGRAMS_PER_SECOND: u64 = 20_000;
/// Wall clock at the start, within the validity of every certificate.
const START: UnixTime = 1_800_000_000;
