//! NetworkPolicy of `networking.k8s.io/v1`.

use k8s_openapi::api::networking::v1 as api;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use super::{Unreadable, groups, is_audited, range, selector};
use crate::model::{
    Block, Direction, MAX_EXCEPTIONS, MAX_PEERS, MAX_PORTS, MAX_RULES, Namespaces, NetworkPolicy, Peer, PodSelector,
    PortMatch, Protocol, Rule, Selector,
};

impl TryFrom<&api::NetworkPolicy> for NetworkPolicy {
    type Error = Unreadable;

    fn try_from(policy: &api::NetworkPolicy) -> Result<Self, Unreadable> {
        let namespace = policy.metadata.namespace.clone().ok_or(Unreadable("namespace"))?;
        let name = policy.metadata.name.clone().ok_or(Unreadable("name"))?;
        let spec = policy.spec.as_ref().ok_or(Unreadable("spec"))?;
        let type_of = |name: &String| match name.as_str() {
            "Ingress" => Some(Direction::Ingress),
            "Egress" => Some(Direction::Egress),
            _ => None,
        };
        let types: Vec<_> = spec.policy_types.iter().flatten().map(type_of).collect();
        // It isolates in a direction that is not known; so in both.
        let types = if types.contains(&None) { Direction::ALL.to_vec() } else { types.into_iter().flatten().collect() };
        let ingress = spec.ingress.iter().flatten().map(|rule| (&rule.from, &rule.ports));
        let egress = spec.egress.iter().flatten().map(|rule| (&rule.to, &rule.ports));
        // One more than is used, so that the compiler sees that there are too many.
        let groups = groups(&policy.metadata);
        let ingress = ingress.take(MAX_RULES + 1).map(|(peers, ports)| {
            let mut rule = rule(&namespace, peers, ports);
            // A rule without peers allows everyone already.
            if !rule.peers.is_empty() {
                rule.peers.extend(groups.clone().map(Peer::Groups));
            }
            rule
        });
        let egress = egress.take(MAX_RULES + 1).map(|(peers, ports)| rule(&namespace, peers, ports));
        Ok(Self {
            is_audited: is_audited(&policy.metadata),
            // A missing selector selects everything, as an empty one does.
            subject: spec.pod_selector.as_ref().map_or_else(Selector::everything, selector),
            types,
            ingress: ingress.collect(),
            egress: egress.collect(),
            namespace,
            name,
        })
    }
}

fn rule(
    namespace: &str,
    peers: &Option<Vec<api::NetworkPolicyPeer>>,
    ports: &Option<Vec<api::NetworkPolicyPort>>,
) -> Rule {
    Rule {
        peers: peers.iter().flatten().take(MAX_PEERS + 1).map(|item| peer(namespace, item)).collect(),
        ports: ports.iter().flatten().take(MAX_PORTS + 1).map(port).collect(),
    }
}

fn peer(namespace: &str, peer: &api::NetworkPolicyPeer) -> Peer {
    let namespaces = match (&peer.namespace_selector, &peer.pod_selector, &peer.ip_block) {
        (None, None, Some(block)) => return self::block(block).map_or(Peer::Unreadable, Peer::Block),
        (Some(namespaces), _, None) => Namespaces::Matching(selector(namespaces)),
        (None, Some(_), None) => Namespaces::Named(namespace.to_owned()),
        (None, None, None) | (_, _, Some(_)) => return Peer::Unreadable,
    };
    Peer::Pods(PodSelector { namespaces, pods: peer.pod_selector.as_ref().map_or_else(Selector::everything, selector) })
}

fn block(block: &api::IPBlock) -> Option<Block> {
    let except = block.except.iter().flatten().take(MAX_EXCEPTIONS + 1).map(|text| range(text));
    Some(Block { range: range(&block.cidr)?, except: except.collect::<Option<_>>()? })
}

fn port(port: &api::NetworkPolicyPort) -> PortMatch {
    let Some(protocol) = Protocol::from_name(port.protocol.as_deref().unwrap_or("TCP")) else {
        return PortMatch::Unreadable;
    };
    let number = |port: i32| u16::try_from(port).ok().filter(|port| *port > 0);
    match (&port.port, port.end_port) {
        (None, None) => PortMatch::Protocol(protocol),
        (Some(IntOrString::String(name)), None) => PortMatch::Name { protocol: Some(protocol), name: name.clone() },
        (Some(IntOrString::Int(first)), last) => match (number(*first), number(last.unwrap_or(*first))) {
            (Some(first), Some(last)) => PortMatch::Ports { protocol, first, last },
            _ => PortMatch::Unreadable,
        },
        (None | Some(IntOrString::String(_)), Some(_)) => PortMatch::Unreadable,
    }
}
