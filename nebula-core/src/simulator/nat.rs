//! A network address translator: mapping, filtering, expiry (RFC 4787).

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

/// How much of the remote end matters; used for mapping and for filtering.
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
    /// The part of the remote end that matters.
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
    /// When a new public port is used.
    pub mapping: Dependence,
    /// Who may send to a public port.
    pub filtering: Dependence,
    /// A mapping that sent nothing for this long is gone.
    pub expiry: Duration,
}

impl NatBehaviour {
    /// The usual home router: one public port per socket, answers only from where something was sent to.
    #[must_use]
    pub fn home() -> Self {
        Self {
            mapping: Dependence::EndpointIndependent,
            filtering: Dependence::AddressAndPortDependent,
            expiry: Duration::from_secs(30),
        }
    }
    /// A new public port for every destination ("symmetric"): punching fails towards its like.
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
    next_port: u16,
}

impl Nat {
    pub(super) fn new(public: IpAddr, behaviour: NatBehaviour) -> Self {
        Self { public, behaviour, mappings: BTreeMap::new(), next_port: 40_000 }
    }

    /// A datagram leaves; returns its public source.
    pub(super) fn outbound(&mut self, now: Instant, source: SocketAddr, remote: SocketAddr) -> SocketAddr {
        let expiry = self.behaviour.expiry;
        self.mappings.retain(|_, mapping| now < mapping.used + expiry);
        let key = (source, self.behaviour.mapping.part(remote));
        let next_port = &mut self.next_port;
        let mapping = self.mappings.entry(key).or_insert_with(|| {
            *next_port += 1;
            Mapping { port: *next_port, used: now, contacted: BTreeSet::new() }
        });
        mapping.used = now;
        mapping.contacted.insert(remote);
        SocketAddr::new(self.public, mapping.port)
    }

    /// A datagram arrives at a public port; returns the private destination if it may pass.
    pub(super) fn inbound(&self, now: Instant, port: u16, remote: SocketAddr) -> Option<SocketAddr> {
        let live = |mapping: &&Mapping| now < mapping.used + self.behaviour.expiry;
        let filtering = self.behaviour.filtering;
        let (key, mapping) = self.mappings.iter().find(|(_, mapping)| mapping.port == port)?;
        let mapping = Some(mapping).filter(live)?;
        let known = mapping.contacted.iter().any(|seen| filtering.part(*seen) == filtering.part(remote));
        known.then_some(key.0)
    }
}

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
}
