//! A network address translator: mapping, filtering, expiry (RFC 4787).

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

/// How much of the remote endpoint matters; used for mapping and for filtering.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dependence {
    /// Nothing of it.
    EndpointIndependent,
    /// Its address.
    AddressDependent,
    /// Its address and port.
    AddressAndPortDependent,
}

impl Dependence {
    /// The part of the remote endpoint that matters.
    fn part(self, remote: SocketAddr) -> (Option<IpAddr>, Option<u16>) {
        match self {
            Self::EndpointIndependent => (None, None),
            Self::AddressDependent => (Some(remote.ip()), None),
            Self::AddressAndPortDependent => (Some(remote.ip()), Some(remote.port())),
        }
    }
}

/// Behaviour of a NAT.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NatBehaviour {
    /// Which remote endpoints get a public port of their own.
    pub mapping: Dependence,
    /// Sources that may send to a public port.
    pub filtering: Dependence,
    /// Mappings expire when they were not used for this long.
    pub expiry: Duration,
    /// Whether inbound datagrams keep a mapping open, too.
    pub inbound_refresh: bool,
    /// Whether hosts behind the NAT reach each other by their public endpoints.
    pub hairpinning: bool,
    /// Whether the public port equals the private one, unless it is taken.
    pub preserves_port: bool,
}

impl NatBehaviour {
    /// The usual home router: one public port per socket; lets in only endpoints to which something was sent.
    #[must_use]
    pub fn home() -> Self {
        Self {
            mapping: Dependence::EndpointIndependent,
            filtering: Dependence::AddressAndPortDependent,
            expiry: Duration::from_secs(30),
            inbound_refresh: false,
            hairpinning: true,
            preserves_port: false,
        }
    }

    /// A new public port for every destination ("symmetric"): punching fails between two of them.
    #[must_use]
    pub fn symmetric() -> Self {
        Self { mapping: Dependence::AddressAndPortDependent, ..Self::home() }
    }
}

type Key = (SocketAddr, (Option<IpAddr>, Option<u16>));

#[derive(Debug)]
struct Mapping {
    port: u16,
    used: Instant,
    contacted: BTreeSet<SocketAddr>,
}

#[derive(Debug)]
pub(super) struct Nat {
    pub(super) public: IpAddr,
    behaviour: NatBehaviour,
    mappings: BTreeMap<Key, Mapping>,
    last_port: u16,
}

impl Nat {
    pub(super) fn new(public: IpAddr, behaviour: NatBehaviour) -> Self {
        Self { public, behaviour, mappings: BTreeMap::new(), last_port: FIRST_PORT }
    }

    /// Handles an outbound datagram; returns its public source.
    pub(super) fn outbound(&mut self, now: Instant, source: SocketAddr, remote: SocketAddr) -> SocketAddr {
        let expiry = self.behaviour.expiry;
        self.mappings.retain(|_, mapping| now < mapping.used + expiry);
        let key = (source, self.behaviour.mapping.part(remote));
        let port = match self.mappings.get(&key) {
            Some(mapping) => mapping.port,
            None => self.free_port(source.port()),
        };
        let mapping = self.mappings.entry(key).or_insert(Mapping { port, used: now, contacted: BTreeSet::new() });
        mapping.used = now;
        mapping.contacted.insert(remote);
        SocketAddr::new(self.public, port)
    }

    /// Handles an inbound datagram at a public port; returns the private destination if it may pass.
    pub(super) fn inbound(&self, now: Instant, port: u16, remote: SocketAddr) -> Option<SocketAddr> {
        // A datagram from the NAT's own address was sent from behind it.
        if remote.ip() == self.public && !self.behaviour.hairpinning {
            return None;
        }
        let live = |mapping: &&Mapping| now < mapping.used + self.behaviour.expiry;
        let filtering = self.behaviour.filtering;
        let (key, mapping) = self.mappings.iter().find(|(_, mapping)| mapping.port == port)?;
        let mapping = Some(mapping).filter(live)?;
        let known = mapping.contacted.iter().any(|seen| filtering.part(*seen) == filtering.part(remote));
        known.then_some(key.0)
    }

    /// Records that a datagram passed to a public port.
    pub(super) fn passed(&mut self, now: Instant, port: u16) {
        if self.behaviour.inbound_refresh
            && let Some(mapping) = self.mappings.values_mut().find(|mapping| mapping.port == port)
        {
            mapping.used = now;
        }
    }

    /// Forgets every mapping, like a router that restarts; new ones get new ports.
    pub(super) fn rebind(&mut self) {
        self.mappings.clear();
    }

    fn free_port(&mut self, private: u16) -> u16 {
        let taken = |port: u16| self.mappings.values().any(|mapping| mapping.port == port);
        if self.behaviour.preserves_port && !taken(private) {
            return private;
        }
        let mut port = self.last_port;
        loop {
            port = if port == u16::MAX { FIRST_PORT } else { port + 1 };
            if !taken(port) {
                self.last_port = port;
                return port;
            }
        }
    }
}

const FIRST_PORT: u16 = 40_000;

#[cfg(test)]
mod tests {
    use super::*;

    #[allow(clippy::disallowed_methods, reason = "a base for virtual time")]
    fn base() -> Instant {
        Instant::now()
    }

    fn at(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    #[test]
    fn a_home_router_keeps_the_port_but_lets_in_only_who_was_contacted() {
        let now = base();
        let mut nat = Nat::new("203.0.113.1".parse().unwrap(), NatBehaviour::home());
        let inside = at("192.168.1.2:4242");
        let public = nat.outbound(now, inside, at("198.51.100.1:1"));
        assert_eq!(nat.outbound(now, inside, at("198.51.100.2:2")), public);
        assert_eq!(nat.inbound(now, public.port(), at("198.51.100.2:2")), Some(inside));
        assert_eq!(nat.inbound(now, public.port(), at("198.51.100.2:3")), None);
    }

    #[test]
    fn a_symmetric_nat_uses_a_port_per_destination() {
        let now = base();
        let mut nat = Nat::new("203.0.113.1".parse().unwrap(), NatBehaviour::symmetric());
        let inside = at("192.168.1.2:4242");
        let first = nat.outbound(now, inside, at("198.51.100.1:1"));
        assert_ne!(nat.outbound(now, inside, at("198.51.100.1:2")), first);
    }

    #[test]
    fn an_unused_mapping_expires() {
        let now = base();
        let mut nat = Nat::new("203.0.113.1".parse().unwrap(), NatBehaviour::home());
        let public = nat.outbound(now, at("192.168.1.2:4242"), at("198.51.100.1:1"));
        let later = now + Duration::from_secs(31);
        assert_eq!(nat.inbound(later, public.port(), at("198.51.100.1:1")), None);
    }

    /// A NAT with one mapping: from the inside to 198.51.100.1:1.
    fn opened(behaviour: NatBehaviour) -> (Nat, Instant, SocketAddr) {
        let now = base();
        let mut nat = Nat::new("203.0.113.1".parse().unwrap(), behaviour);
        let public = nat.outbound(now, at("192.168.1.2:4242"), at("198.51.100.1:1"));
        (nat, now, public)
    }

    const KINDS: [Dependence; 3] =
        [Dependence::EndpointIndependent, Dependence::AddressDependent, Dependence::AddressAndPortDependent];

    #[test]
    fn a_new_port_is_used_as_the_mapping_says() {
        for (mapping, [same_address, other_address]) in
            KINDS.into_iter().zip([[true, true], [true, false], [false, false]])
        {
            let (mut nat, now, public) = opened(NatBehaviour { mapping, ..NatBehaviour::home() });
            let mut again = |remote| nat.outbound(now, at("192.168.1.2:4242"), at(remote)) == public;
            assert!(again("198.51.100.1:1"), "{mapping:?}");
            assert_eq!(again("198.51.100.1:2"), same_address, "{mapping:?}");
            assert_eq!(again("198.51.100.2:1"), other_address, "{mapping:?}");
        }
    }

    #[test]
    fn datagrams_come_in_as_the_filtering_says() {
        for (filtering, [other_port, other_address]) in
            KINDS.into_iter().zip([[true, true], [true, false], [false, false]])
        {
            let (nat, now, public) = opened(NatBehaviour { filtering, ..NatBehaviour::home() });
            let passes = |remote| nat.inbound(now, public.port(), at(remote)).is_some();
            assert!(passes("198.51.100.1:1"), "{filtering:?}");
            assert_eq!(passes("198.51.100.1:2"), other_port, "{filtering:?}");
            assert_eq!(passes("198.51.100.2:1"), other_address, "{filtering:?}");
        }
    }

    #[test]
    fn only_a_hairpinning_nat_lets_its_own_hosts_in_from_outside() {
        for hairpinning in [true, false] {
            let filtering = Dependence::EndpointIndependent;
            let (mut nat, now, public) = opened(NatBehaviour { hairpinning, filtering, ..NatBehaviour::home() });
            let other = nat.outbound(now, at("192.168.1.3:4242"), public);
            assert_eq!(nat.inbound(now, public.port(), other).is_some(), hairpinning);
        }
    }

    #[test]
    fn a_port_is_preserved_unless_another_host_has_it() {
        let (mut nat, now, public) = opened(NatBehaviour { preserves_port: true, ..NatBehaviour::home() });
        assert_eq!(public.port(), 4242);
        let second = nat.outbound(now, at("192.168.1.3:4242"), at("198.51.100.1:1"));
        assert_ne!(second.port(), 4242);
    }

    #[test]
    fn datagrams_that_come_in_keep_a_mapping_open_only_if_the_nat_says_so() {
        for inbound_refresh in [true, false] {
            let (mut nat, now, public) = opened(NatBehaviour { inbound_refresh, ..NatBehaviour::home() });
            nat.passed(now + Duration::from_secs(20), public.port());
            let later = now + Duration::from_secs(40);
            assert_eq!(nat.inbound(later, public.port(), at("198.51.100.1:1")).is_some(), inbound_refresh);
        }
    }

    #[test]
    fn a_rebound_nat_uses_new_ports_and_forgets_the_old_ones() {
        let (mut nat, now, public) = opened(NatBehaviour::home());
        nat.rebind();
        assert_eq!(nat.inbound(now, public.port(), at("198.51.100.1:1")), None);
        assert_ne!(nat.outbound(now, at("192.168.1.2:4242"), at("198.51.100.1:1")), public);
    }
}
