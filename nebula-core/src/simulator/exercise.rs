//! Applies random operations to a network with every kind of host, and checks what must hold after any of them.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use nebula_cert::{Fingerprint, Identity, Version};

use super::nat::{Dependence, NatBehaviour};
use super::{HostId, HostSpec, Link, NatId, Operation, SimNet, Step};
use crate::config::{self, RecvErrorPolicy};
use crate::firewall::{Policy, PortRange, Protocol, Rule};
use crate::lighthouse::LocalAddress;
use crate::wire::header::{HEADER_LEN, Header, MessageType};
use crate::{Config, PostQuantum, TableSizes};

/// Two hosts that can and may reach each other exchange packets again at most this long after the network healed.
///
/// The worst case: the caller finds its tunnel dead 16 s after its next packet (5 s until the check, 10 s for an
/// answer, and 0.5 s of timer granularity for each). The called host, behind a symmetric NAT, responds 5 s after it was
/// asked for, but into its own dead tunnel, which takes another 16 s if the caller sends no recv_errors. The handshake
/// in flight then ends after 5.5 s, and the next one waits 5 s for the response. Meanwhile, lighthouses hear of
/// everybody within 10 s.
pub const REACHABLE_AGAIN_WITHIN: Duration = Duration::from_secs(50);

/// Two lighthouses, one of them a relay, two public hosts, two behind home routers, one behind a symmetric NAT; and a
/// model of what each may receive.
pub struct Exercise {
    net: SimNet,
    hosts: Vec<HostId>,
    nats: Vec<(NatId, NatBehaviour)>,
    /// The NAT each host is behind.
    places: Vec<Option<usize>>,
    moves: u8,
    /// Every certificate each host ever had.
    certificates: Vec<Vec<Fingerprint>>,
    /// Pairs in which the first blocks the second.
    blocked: BTreeSet<(usize, usize)>,
    guarded: BTreeSet<usize>,
    relays: BTreeSet<usize>,
    /// Packets that were sent; the payload holds the position in this list.
    sent: Vec<Sent>,
    /// Selects the hosts for the traffic of [`Operation::Run`].
    turn: usize,
}

/// A UDP packet that a host sent.
#[derive(Debug)]
struct Sent {
    from: usize,
    to: usize,
    port: u16,
    at: Duration,
    arrived: Option<Duration>,
}

impl Exercise {
    /// The network, with every host up.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        let mut net = SimNet::new(seed);
        // With even seeds, equal seeds give equal bytes.
        net.set_post_quantum(if seed.is_multiple_of(2) { PostQuantum::Off } else { PostQuantum::Prefer });
        let kinds = [
            NatBehaviour::home(),
            NatBehaviour { preserves_port: true, ..NatBehaviour::home() },
            NatBehaviour::symmetric(),
        ];
        let nats: Vec<_> = kinds.into_iter().map(|kind| (net.add_nat(kind), kind)).collect();
        let both = &[Version::V1, Version::V2][..];
        let lighthouses =
            ["l", "m"].map(|name| net.add(HostSpec::new(name).versions(both).am_lighthouse().config(common)));
        let serve = config::Relay { am_relay: true, ..config::Relay::default() };
        net.edit_config(lighthouses[RELAY], |config| config.relay = serve.clone());
        net.control(lighthouses[RELAY], |node, now| node.reconfigure(now, |config| config.relay = serve));
        // Lighthouses do not query each other.
        net.introduce(lighthouses[0], lighthouses[1]);
        net.introduce(lighthouses[1], lighthouses[0]);
        let places = [None, None, None, None, Some(0), Some(1), Some(2)];
        let mut hosts = lighthouses.to_vec();
        for (name, place) in ["a", "b", "c", "d", "e"].into_iter().zip(&places[2..]) {
            let mut spec = HostSpec::new(name).config(common);
            if name == "b" {
                // A host to which version 2 is being rolled out.
                spec = spec.versions(both);
            }
            if name == "c" {
                spec = spec.config(|config| config.send_recv_error = RecvErrorPolicy::Never);
            }
            for lighthouse in lighthouses {
                spec = spec.lighthouse(lighthouse);
            }
            let relay = net.overlay(lighthouses[RELAY]);
            spec = spec.config(move |config| config.relay.relays = vec![relay]);
            if let Some(nat) = *place {
                spec = spec.behind(nats[nat].0);
            }
            hosts.push(net.add(spec));
        }
        let certificates = hosts.iter().map(|host| fingerprints(net.identity(*host))).collect();
        Self {
            net,
            hosts,
            nats,
            places: places.to_vec(),
            moves: 0,
            certificates,
            blocked: BTreeSet::new(),
            guarded: BTreeSet::new(),
            relays: BTreeSet::from([RELAY]),
            sent: Vec::new(),
            turn: 0,
        }
    }

    /// The operation that two bytes encode.
    #[must_use]
    pub fn decode(&self, bytes: [u8; 2]) -> Operation {
        Operation::decode(bytes, self.hosts.len(), self.nats.len())
    }

    /// The network, for its diagram.
    #[must_use]
    pub fn net(&self) -> &SimNet {
        &self.net
    }

    /// Applies an operation, then checks what must hold at any time.
    ///
    /// # Errors
    /// Returns a description of what does not hold.
    pub fn apply(&mut self, operation: Operation) -> Result<(), String> {
        match operation {
            Operation::Run(time) => self.run(time)?,
            Operation::Send(from, to, guarded) => drop(self.send(from, to, if guarded { GUARDED } else { OPEN })),
            Operation::Join(host) if self.is_up(host) => {}
            Operation::Join(host) | Operation::Restart(host) => self.net.restart(self.hosts[host]),
            Operation::Leave(host) if self.is_up(host) => self.net.stop(self.hosts[host]),
            Operation::Leave(_) => {}
            Operation::Kill(host) => self.net.kill(self.hosts[host]),
            Operation::CloseAll(host) if self.is_up(host) => self.net.control(self.hosts[host], crate::Node::close_all),
            Operation::CloseAll(_) => {}
            Operation::MoveOut(host) if !is_lighthouse(host) => self.move_out(host),
            Operation::MoveBehind(host, nat) if !is_lighthouse(host) => self.move_behind(host, nat),
            Operation::MoveOut(_) | Operation::MoveBehind(..) => {}
            Operation::Rebind(nat) => self.net.rebind(self.nats[nat].0),
            Operation::Cut(a, b) => self.net.cut(self.hosts[a], self.hosts[b]),
            Operation::Isolate(host) => {
                for other in (0..self.hosts.len()).filter(|other| *other != host) {
                    self.net.cut(self.hosts[host], self.hosts[other]);
                }
            }
            Operation::Heal => self.heal(),
            Operation::Link(link) => self.net.set_link(link),
            Operation::Renew(host) => self.renew(host),
            Operation::Block(host, peer) => {
                self.blocked.insert((host, peer));
                self.reload_trust(host);
            }
            Operation::Unblock(host) => {
                self.blocked.retain(|(by, _)| *by != host);
                self.reload_trust(host);
            }
            Operation::Guard(host, closed) => self.guard(host, closed),
            Operation::Forge(from, to, byte) => self.forge(from, to, byte),
            Operation::Replay(number) => self.replay(number),
            Operation::Impersonate(from, to) => self.impersonate(from, to),
            Operation::Serve(host, serves) => self.serve(host, serves),
        }
        self.check()
    }

    /// Heals the network, expects every permitted pair to talk, stops all hosts, and expects empty tables. Returns the
    /// longest time until a pair talked.
    ///
    /// # Errors
    /// Returns a description of what does not hold.
    pub fn finish(&mut self) -> Result<Duration, String> {
        self.heal();
        self.net.set_link(Link::default());
        for host in 0..LIGHTHOUSES {
            self.apply(Operation::Join(host))?;
        }
        let longest = self.expect_conversations()?;
        self.expect_no_clear_text()?;
        self.expect_empty_tables()?;
        Ok(longest)
    }

    fn is_up(&self, host: usize) -> bool {
        self.net.is_up(self.hosts[host])
    }

    fn send(&mut self, from: usize, to: usize, port: u16) -> usize {
        let number = self.sent.len();
        let at = self.net.elapsed();
        self.sent.push(Sent { from, to, port, at, arrived: None });
        if self.is_up(from) {
            let mut payload = MARKER.to_vec();
            payload.extend(u32::try_from(number).unwrap_or(u32::MAX).to_be_bytes());
            let _verdict = self.net.send_udp(self.hosts[from], self.hosts[to], (FROM_PORT, port), &payload);
        }
        number
    }

    fn run(&mut self, mut time: Duration) -> Result<(), String> {
        while !time.is_zero() {
            let step = time.min(Duration::from_millis(500));
            self.net.run_for(step);
            self.check()?;
            time -= step;
            // Round-robin, so that dropping an operation changes little of what follows.
            let (count, turn) = (self.hosts.len(), self.turn);
            let (from, to) = (turn % count, (turn + 1 + turn / count % (count - 1)) % count);
            self.send(from, to, if turn % 5 == 0 { GUARDED } else { OPEN });
            self.turn += 1;
        }
        Ok(())
    }

    fn move_out(&mut self, host: usize) {
        self.moves = self.moves.wrapping_add(1);
        let underlay = format!("192.0.2.{}:{}", self.moves, 1000 + host);
        self.net.move_to(self.hosts[host], &underlay);
        self.places[host] = None;
        self.tell_addresses(host);
    }

    fn move_behind(&mut self, host: usize, nat: usize) {
        self.net.move_behind(self.hosts[host], self.nats[nat].0);
        self.places[host] = Some(nat);
        self.tell_addresses(host);
    }

    /// Tells a host that its interfaces have other addresses.
    fn tell_addresses(&mut self, host: usize) {
        let address = self.net.underlay(self.hosts[host]).ip();
        let addresses = vec![LocalAddress { address, interface: "eth0".to_owned() }];
        if self.is_up(host) {
            self.net.control(self.hosts[host], |node, _| node.set_local_addresses(addresses));
        }
    }

    fn heal(&mut self) {
        for a in 0..self.hosts.len() {
            for b in 0..a {
                self.net.heal(self.hosts[a], self.hosts[b]);
            }
        }
    }

    fn renew(&mut self, host: usize) {
        let id = self.hosts[host];
        let versions: Vec<_> = self.net.identity(id).certificates().map(nebula_cert::Certificate::version).collect();
        let identity = self.net.renewed_identity(id, &versions);
        self.certificates[host].extend(fingerprints(&identity));
        // The blocklists name the host's previous certificates only.
        self.blocked.retain(|(_, peer)| *peer != host);
        self.net.edit_config(id, |config| config.identity = identity.clone());
        if self.is_up(host) {
            self.net.control(id, |node, now| node.reconfigure(now, |config| config.identity = identity));
        }
    }

    fn reload_trust(&mut self, host: usize) {
        let mut trust = self.net.authority().trust();
        for (_, peer) in self.blocked.iter().filter(|(by, _)| *by == host) {
            self.certificates[*peer].iter().for_each(|certificate| trust.block(*certificate));
        }
        let id = self.hosts[host];
        self.net.edit_config(id, |config| config.trust = trust.clone());
        if self.is_up(host) {
            self.net.control(id, |node, now| node.reconfigure(now, |config| config.trust = trust));
        }
    }

    fn guard(&mut self, host: usize, closed: bool) {
        let policy = firewall(closed);
        let id = self.hosts[host];
        self.net.edit_config(id, |config| config.firewall = policy.clone());
        if self.is_up(host) {
            self.net.control(id, |node, now| node.reconfigure(now, |config| config.firewall = policy));
        }
        if closed {
            self.guarded.insert(host);
        } else {
            self.guarded.remove(&host);
        }
    }

    /// Sends a datagram from somebody on the path who knows a live index, but no key.
    fn forge(&mut self, from: usize, to: usize, byte: u8) {
        let (source, target) = (self.hosts[from], self.hosts[to]);
        let live = self.net.tunnels_to(target, source).into_iter().next();
        let (local, remote) = live.map_or((7, 7), |tunnel| (tunnel.local_index.0, tunnel.remote_index.0));
        let mut datagram = vec![0x10 | byte & 7, byte >> 7, 0, 0];
        datagram.extend(if byte & 7 == 2 { remote } else { local }.to_be_bytes());
        datagram.extend((1_u64 << (byte >> 3)).to_be_bytes());
        datagram.extend([byte; 40]);
        if byte & 7 == 2 {
            datagram.truncate(16);
        }
        let seen_as = self.net.endpoint_of(target, source).unwrap_or_else(stranger);
        self.net.inject(seen_as, self.net.underlay(target), &datagram);
    }

    fn replay(&mut self, number: u8) {
        let from_end = usize::from(number) % 32;
        let Some(step) = self.net.flow().rev().nth(from_end).cloned() else { return };
        let from = if number & 0x80 == 0 { step.from } else { stranger() };
        self.net.inject(from, step.to, &step.datagram);
    }

    /// Sends an observed first handshake message with a changed ephemeral key, so that it was never answered before.
    fn impersonate(&mut self, from: usize, to: usize) {
        let is_first = |datagram: &[u8]| {
            let first = Header { kind: MessageType::Handshake, index: 0, counter: 1 };
            datagram.len() > HEADER_LEN && Header::parse(datagram) == Ok(first)
        };
        let is_wanted = |step: &&Step| step.sender == NAMES[from] && is_first(&step.datagram);
        let seen = self.net.flow().rev().take(1000).find(is_wanted).map(|step| step.datagram.clone());
        let Some(mut datagram) = seen else { return };
        datagram[HEADER_LEN] ^= 1;
        self.net.inject(stranger(), self.net.underlay(self.hosts[to]), &datagram);
    }

    fn serve(&mut self, host: usize, serves: bool) {
        let id = self.hosts[host];
        let uses = !serves && !is_lighthouse(host);
        let relays = if uses { vec![self.net.overlay(self.hosts[RELAY])] } else { Vec::new() };
        let settings = config::Relay { am_relay: serves, relays, ..config::Relay::default() };
        self.net.edit_config(id, |config| config.relay = settings.clone());
        if self.is_up(host) {
            self.net.control(id, |node, now| node.reconfigure(now, |config| config.relay = settings));
        }
        if serves {
            self.relays.insert(host);
        } else {
            self.relays.remove(&host);
        }
    }

    /// Checks what must hold at any time.
    fn check(&mut self) -> Result<(), String> {
        for host in 0..self.hosts.len() {
            for packet in self.net.take_udp(self.hosts[host]) {
                self.arrived(host, packet.from, packet.to, packet.port, &packet.payload)?;
            }
            if self.is_up(host) {
                self.check_bounds(host)?;
            }
        }
        Ok(())
    }

    fn arrived(&mut self, host: usize, from: IpAddr, to: IpAddr, port: u16, payload: &[u8]) -> Result<(), String> {
        let name = |host: usize| NAMES[host];
        let number = payload.strip_prefix(MARKER).and_then(|number| number.try_into().ok().map(u32::from_be_bytes));
        let number = number.and_then(|number| usize::try_from(number).ok());
        let now = self.net.elapsed();
        let Some(sent) = number.and_then(|number| self.sent.get_mut(number)) else {
            return Err(format!("{} was delivered what nobody sent: {payload:?}", name(host)));
        };
        let what = format!("the packet that {} sent {} at {:?}", name(sent.from), name(sent.to), sent.at);
        let addresses = [sent.from, sent.to].map(|host| self.net.overlay(self.hosts[host]));
        if sent.to != host || addresses != [from, to] || sent.port != port {
            return Err(format!("{} was delivered {what}, as {from} -> {to} port {port}", name(host)));
        }
        if sent.arrived.replace(now).is_some() {
            return Err(format!("{} was delivered {what} twice", name(host)));
        }
        if port == GUARDED && self.guarded.contains(&host) {
            return Err(format!("{} was delivered {what}, which its firewall forbids", name(host)));
        }
        if self.blocked.contains(&(host, sent.from)) {
            return Err(format!("{} was delivered {what}, whose certificate it blocks", name(host)));
        }
        Ok(())
    }

    fn check_bounds(&self, host: usize) -> Result<(), String> {
        let others = self.hosts.len() - 1;
        let sizes = self.net.table_sizes(self.hosts[host]);
        let TableSizes { tunnels, primaries, lookups, half_open, pending, waiting_bytes, reserved, .. } = sizes;
        let holds = tunnels <= 5 * others
            && primaries <= others
            && lookups <= 3 * tunnels
            && pending <= others
            && reserved == pending + half_open
            && sizes.validations <= tunnels
            && waiting_bytes <= (pending + sizes.validations) * 100 * 100
            && sizes.candidates <= others
            && sizes.reports <= others
            && sizes.deadlines <= 3 * tunnels + sizes.validations + half_open + pending + 3
            && sizes.relay_hops <= 4 * others * others
            && sizes.punches <= 1024;
        if holds { Ok(()) } else { Err(format!("{} remembers too much: {sizes:?}", NAMES[host])) }
    }

    fn expect_conversations(&mut self) -> Result<Duration, String> {
        let healed = self.net.elapsed();
        let mut missing: Vec<_> = self.pairs().collect();
        let mut longest = Duration::ZERO;
        let first = self.sent.len();
        while !missing.is_empty() {
            let since = self.net.elapsed() - healed;
            if since > REACHABLE_AGAIN_WITHIN {
                let (from, to) = missing[0];
                return Err(format!("{} does not reach {} {since:?} after the network healed", NAMES[from], NAMES[to]));
            }
            for &(from, to) in &missing {
                self.send(from, to, OPEN);
            }
            self.net.run_for(Duration::from_millis(500));
            self.check()?;
            missing.retain(|(from, to)| {
                let arrived = self.sent[first..].iter().filter(|sent| (sent.from, sent.to) == (*from, *to));
                let arrived = arrived.filter_map(|sent| sent.arrived).min();
                longest = longest.max(arrived.map_or(Duration::ZERO, |at| at - healed));
                arrived.is_none()
            });
        }
        Ok(longest)
    }

    /// Ordered pairs that must be able to talk.
    fn pairs(&self) -> impl Iterator<Item = (usize, usize)> {
        let all = (0..self.hosts.len()).flat_map(|from| (0..self.hosts.len()).map(move |to| (from, to)));
        all.filter(|&(from, to)| {
            let introduced = (0..LIGHTHOUSES).any(|host| self.friends(host, from) && self.friends(host, to));
            let willing = from != to && self.friends(from, to) && introduced;
            // A relay uses no relays.
            let serves = |host: usize| self.relays.contains(&host);
            let relayed =
                serves(RELAY) && !serves(from) && !serves(to) && self.friends(RELAY, from) && self.friends(RELAY, to);
            willing && self.is_up(from) && self.is_up(to) && (relayed || self.connectable(from, to))
        })
    }

    /// Whether neither blocks the other.
    fn friends(&self, a: usize, b: usize) -> bool {
        !self.blocked.contains(&(a, b)) && !self.blocked.contains(&(b, a))
    }

    /// Whether hole punching can work: not if one NAT uses a new port towards the other, and the other filters by port.
    fn connectable(&self, a: usize, b: usize) -> bool {
        let (Some(a), Some(b)) = (self.places[a], self.places[b]) else { return true };
        let hides = |nat: usize| self.nats[nat].1.mapping != Dependence::EndpointIndependent;
        let looks = |nat: usize| self.nats[nat].1.filtering == Dependence::AddressAndPortDependent;
        a == b || !(hides(a) && looks(b) || hides(b) && looks(a))
    }

    fn expect_no_clear_text(&self) -> Result<(), String> {
        let in_clear = |bytes: &[u8]| bytes.windows(MARKER.len()).any(|window| window == MARKER);
        match self.net.flow().find(|step| in_clear(&step.datagram)) {
            None => Ok(()),
            Some(step) => {
                Err(format!("a payload went over the underlay in clear: {} at {:?}", step.describe(), step.at))
            }
        }
    }

    /// Leaves one lighthouse and one host running, and nobody sends anything until every timer has run out.
    fn expect_empty_tables(&mut self) -> Result<(), String> {
        const STAYING: usize = 2;
        self.apply(Operation::Join(STAYING))?;
        for host in 1..self.hosts.len() {
            let operation = if host % 2 == 0 { Operation::Leave(host) } else { Operation::Kill(host) };
            if host != STAYING {
                self.apply(operation)?;
            }
        }
        self.net.run_for(FORGOTTEN_AFTER);
        let sizes = self.net.table_sizes(self.hosts[STAYING]);
        let lighthouse = usize::from(self.friends(0, STAYING));
        let holds = (sizes.tunnels, sizes.flows, sizes.punches, sizes.waiting_bytes) == (lighthouse, 0, 0, 0)
            && sizes.candidates <= LIGHTHOUSES
            && sizes.pending <= LIGHTHOUSES;
        if !holds {
            return Err(format!("{} remembers who is gone: {sizes:?}", NAMES[STAYING]));
        }
        self.apply(Operation::Leave(STAYING))?;
        self.net.run_for(FORGOTTEN_AFTER);
        let sizes = self.net.table_sizes(self.hosts[0]);
        let fresh = TableSizes { deadlines: 1, ..TableSizes::default() };
        if sizes != fresh { Err(format!("the last one remembers who is gone: {sizes:?}")) } else { Ok(()) }
    }
}

fn common(config: &mut Config) {
    config.firewall = firewall(false);
    config.timers.inactivity_timeout = Some(Duration::from_secs(60));
    config.punchy.punch = true;
    config.punchy.respond = true;
}

/// Allows everything, or everything but the guarded port. Flows expire soon, so that the end of an exercise need not
/// wait for them.
fn firewall(guarded: bool) -> Policy {
    let ports = |from, to| Rule { protocol: Protocol::Udp, port: PortRange::Range(from, to), ..Rule::any() };
    let inbound = if guarded { vec![ports(1, GUARDED - 1), ports(GUARDED + 1, u16::MAX)] } else { vec![Rule::any()] };
    let minute = Duration::from_secs(60);
    Policy {
        inbound,
        outbound: vec![Rule::any()],
        tcp_timeout: minute,
        udp_timeout: minute,
        default_timeout: minute,
        ..Policy::default()
    }
}

fn fingerprints(identity: &Identity) -> Vec<Fingerprint> {
    identity.certificates().map(nebula_cert::Certificate::fingerprint).collect()
}

fn is_lighthouse(host: usize) -> bool {
    host < LIGHTHOUSES
}

fn stranger() -> SocketAddr {
    SocketAddr::from(([192, 0, 2, 255], 666))
}

const NAMES: [&str; 7] = ["l", "m", "a", "b", "c", "d", "e"];
const LIGHTHOUSES: usize = 2;
/// The lighthouse that is also a relay for every other host.
const RELAY: usize = 1;
const MARKER: &[u8] = b"in clear?";
const FROM_PORT: u16 = 1000;
const OPEN: u16 = 2000;
const GUARDED: u16 = 3000;
/// The inactivity timeout or that of a flow, then the next sweep, and a check of the tunnel.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(60 + 180 + 20);
