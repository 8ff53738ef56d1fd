//! The rule that comes closest to a flow that none allows, and what differs: for people, not for packets.

use std::cmp::Reverse;

use ipnet::IpNet;

use super::index::RuleIndex;
use super::{Cidr, Peer, Protocol, Rule};
use crate::wire::ip::FlowKey;

/// A rule that does not allow a flow.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NearMiss {
    /// Its place in the policy.
    pub rule: usize,
    /// What it asks for and the flow does not have.
    pub differs: Vec<Difference>,
}

/// What a rule asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Difference {
    /// Another protocol.
    Protocol,
    /// Another port.
    Port,
    /// Another peer: by host, groups or cidr.
    Peer,
    /// A peer of another CA.
    Ca,
    /// Another own address (`local_cidr`).
    Local,
}

impl Difference {
    /// Name in answers for programs; stable.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Protocol => "protocol",
            Self::Port => "port",
            Self::Peer => "peer",
            Self::Ca => "ca",
            Self::Local => "local_cidr",
        }
    }

    /// The rule reduced to this condition; the filter then tells whether the flow meets it.
    fn alone(self, rule: &Rule) -> Rule {
        let open = Rule { local_cidr: Some(Cidr::Any), ..Rule::any() };
        match self {
            Self::Protocol => Rule { protocol: rule.protocol, ..open },
            // ICMP has no ports, so the protocol stands in for them.
            Self::Port if rule.protocol == Protocol::Icmp => Rule { protocol: rule.protocol, ..open },
            Self::Port => Rule { port: rule.port, ..open },
            Self::Peer => Rule { host: rule.host.clone(), groups: rule.groups.clone(), cidr: rule.cidr, ..open },
            Self::Ca => Rule { ca_name: rule.ca_name.clone(), ca_sha: rule.ca_sha, ..open },
            Self::Local => Rule { local_cidr: rule.local_cidr, ..open },
        }
    }
}

/// The first of the rules with the fewest differences. One for another peer is nearer than one for another port: it is
/// about the same service.
pub(super) fn nearest(
    rules: &[Rule],
    default_local: Option<&[IpNet]>,
    flow: &FlowKey,
    port: u16,
    peer: Peer<'_>,
) -> Option<NearMiss> {
    let misses = rules.iter().take(MAX_RULES).enumerate().map(|(at, rule)| {
        let holds = |aspect: &Difference| {
            let alone = aspect.alone(rule);
            RuleIndex::new(std::slice::from_ref(&alone), default_local).allows(flow, port, peer)
        };
        NearMiss { rule: at, differs: ALL.into_iter().filter(|aspect| !holds(aspect)).collect() }
    });
    misses.min_by_key(|miss| (miss.differs.len(), Reverse(miss.differs.first().map(|aspect| *aspect as usize))))
}

const ALL: [Difference; 5] =
    [Difference::Protocol, Difference::Port, Difference::Peer, Difference::Ca, Difference::Local];
// Each takes some microseconds, during which the control plane does nothing else.
const MAX_RULES: usize = 2000;

#[cfg(test)]
mod tests {
    use super::super::PortRange;
    use super::*;
    use crate::tunnel::PeerIdentity;

    #[test]
    fn the_rule_for_the_same_service_is_nearer_than_one_for_the_same_peer() {
        let tcp = |port: u16, group: &str| Rule {
            protocol: Protocol::Tcp,
            port: PortRange::Range(port, port),
            groups: vec![group.to_owned()],
            ..Rule::default()
        };
        let icmp = Rule { protocol: Protocol::Icmp, ..Rule::any() };
        let rules = [icmp, tcp(22, "db"), tcp(443, "web"), tcp(443, "api")];
        let (groups, networks) = (vec!["db".to_owned()], vec!["10.42.0.7/16".parse().expect("a network")]);
        let peer = Peer {
            name: "db-1",
            groups: &groups,
            networks: &networks,
            unsafe_networks: &[],
            issuer: "00".repeat(32).parse().expect("a fingerprint"),
            issuer_name: "ca",
            identity: PeerIdentity { name: [0; 2], rights: [0; 2] },
            route: None,
            certificate: None,
            tunnel: None,
        };
        let flow = |port, protocol| FlowKey {
            local: [10, 42, 0, 1].into(),
            remote: [10, 42, 0, 7].into(),
            local_port: port,
            remote_port: 5000,
            protocol,
            fragment: false,
        };
        let miss = |rules: &[Rule], port, protocol| nearest(rules, None, &flow(port, protocol), port, peer);
        let differs = |rule, differs: &[Difference]| Some(NearMiss { rule, differs: differs.to_vec() });
        assert_eq!(miss(&rules, 443, 6), differs(2, &[Difference::Peer]));
        assert_eq!(miss(&rules, 80, 6), differs(1, &[Difference::Port]));
        assert_eq!(miss(&rules, 22, 17), differs(1, &[Difference::Protocol]));
        assert_eq!(miss(&rules[2..], 80, 17), differs(0, &[Difference::Protocol, Difference::Port, Difference::Peer]));
        assert_eq!(miss(&[], 443, 6), None);
        let local =
            Rule { local_cidr: Some(Cidr::Prefix("192.168.0.0/16".parse().expect("a network"))), ..Rule::any() };
        assert_eq!(miss(&[local], 443, 6), differs(0, &[Difference::Local]));
    }
}
