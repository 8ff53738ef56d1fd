//! Looks at each link of the chain, and stops at the first one that is broken.

use std::net::{IpAddr, SocketAddr};

use crate::columns::span;
use crate::instance_status::{DroppedPacket, InstanceState, LostPeer, Status, TableState};

use super::causes::{AtEnd, Cause, End, Link};
use super::facts::{Facts, InTable, Listener, PodEnd, PodTunnel, PolicySays, Target, Way};

/// What is known of one link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Verdict {
    /// It holds.
    Fine(String),
    /// It is not known, and what would tell.
    Unknown(String),
    /// It does not hold.
    Broken(Cause, String),
}

use Verdict::{Broken, Fine, Unknown};

pub(super) fn judge(facts: &Facts, link: Link) -> Verdict {
    if facts.target == Target::Hidden {
        // What the node of the source knows of a packet is not.
        let is_of_packet = matches!(link, Link::Table | Link::Egress) && facts.way.is_some();
        if !is_of_packet && !matches!(link, Link::Source | Link::SourceTunnel) {
            return Unknown("not shown: it is in a namespace that you may not look at".to_owned());
        }
    }
    match link {
        Link::Source => source(facts),
        Link::Name => name(facts),
        Link::Service => service(facts),
        Link::Endpoints => endpoints(facts),
        Link::SourceTunnel => end(facts, End::Source),
        Link::DestinationTunnel => end(facts, End::Destination),
        Link::Table => table(facts),
        Link::Egress => decision(facts, End::Source),
        Link::Tunnel => tunnel(facts),
        Link::Ingress => decision(facts, End::Destination),
        Link::Listener => listener(facts),
    }
}

fn source(facts: &Facts) -> Verdict {
    let pod = &facts.source;
    let name = pod.full_name();
    if !pod.is_found {
        return Broken(Cause::SourceUnknown, format!("there is no pod {name}"));
    }
    if pod.phase != RUNNING || pod.addresses.is_empty() {
        return Broken(Cause::SourceNotRunning, format!("pod {name} is {}", phase(&pod.phase)));
    }
    Fine(format!("pod {name} runs on node {}", pod.node))
}

fn name(facts: &Facts) -> Verdict {
    match &facts.target {
        Target::Unknown | Target::Hidden => Unknown("the API server was not asked".to_owned()),
        Target::Nothing { namespace, name } => {
            Broken(Cause::TargetUnknown, format!("there is neither a pod nor a Service {namespace}/{name}"))
        }
        Target::Service(service) => match &service.external_name {
            Some(name) => {
                Broken(Cause::ExternalName, format!("Service {}/{} stands for {name}", service.namespace, service.name))
            }
            None if service.addresses.is_empty() => {
                Fine(format!("Service {}/{} is headless: its name is its endpoints", service.namespace, service.name))
            }
            None => {
                of_one_family(facts, &service.addresses, &format!("Service {}/{}", service.namespace, service.name))
            }
        },
        Target::Pod(pod) => {
            let name = pod.full_name();
            if pod.phase != RUNNING || pod.addresses.is_empty() {
                return Broken(Cause::TargetNotRunning, format!("pod {name} is {}", phase(&pod.phase)));
            }
            of_one_family(facts, &pod.addresses, &format!("pod {name}"))
        }
        Target::Address(address) => of_one_family(facts, &[*address], "it"),
    }
}

fn of_one_family(facts: &Facts, addresses: &[IpAddr], what: &str) -> Verdict {
    let has = |of: &IpAddr| facts.source.addresses.iter().any(|own| own.is_ipv4() == of.is_ipv4());
    match addresses.iter().find(|address| has(address)) {
        Some(address) => Fine(format!("{what} has the address {address}")),
        None => Broken(Cause::NoCommonFamily, format!("{what} has no address of a family that the source has")),
    }
}

fn service(facts: &Facts) -> Verdict {
    let Target::Service(service) = &facts.target else { return Fine("no Service is asked".to_owned()) };
    match service.target_port {
        Some(port) if port == facts.port => Fine(format!("port {port}")),
        Some(port) => Fine(format!("port {} leads to port {port} of the pods", facts.port)),
        None => Broken(
            Cause::ServiceWithoutPort,
            format!("the Service has no port {}; it has {}", facts.port, list(&service.ports)),
        ),
    }
}

fn endpoints(facts: &Facts) -> Verdict {
    let Target::Service(service) = &facts.target else { return Fine("no Service is asked".to_owned()) };
    match (service.ready, service.not_ready) {
        (0, 0) if !service.has_selector => {
            Broken(Cause::ServiceWithoutSelector, "the Service has neither a selector nor endpoints".to_owned())
        }
        (0, 0) => Broken(Cause::NoPodSelected, "the Service's selector matches no pod".to_owned()),
        (0, some) => Broken(Cause::NoEndpointReady, format!("the Service has {some} endpoints, and none is ready")),
        (ready, _) => match &service.endpoint {
            Some(pod) => Fine(format!("{ready} ready; what follows is about {} on node {}", pod.full_name(), pod.node)),
            None => Fine(format!("{ready} ready, and none is a pod")),
        },
    }
}

/// Whether one end has a tunnel that carries packets.
fn end(facts: &Facts, of: End) -> Verdict {
    let pod = match of {
        End::Source => Some(&facts.source),
        End::Destination => facts.destination(),
    };
    let Some(pod) = pod else { return Fine("it is no pod of this cluster".to_owned()) };
    if pod.is_on_host_network {
        return Fine("it has the network of its node, and no tunnel of its own".to_owned());
    }
    let Some(PodEnd { tunnel, .. }) = of_end(facts, of) else {
        return not_asked(&pod.node);
    };
    let broken = |at, text: String| Broken(Cause::At(of, at), text);
    match tunnel {
        PodTunnel::Unknown => Unknown(format!("node {} does not say", pod.node)),
        PodTunnel::NotMeant => Fine("it is not enrolled: its packets go in clear".to_owned()),
        PodTunnel::Missing => broken(AtEnd::TunnelMissing, "it is to have a tunnel, and has none".to_owned()),
        PodTunnel::Silent { problem } => {
            broken(AtEnd::InstanceSilent, format!("its instance does not answer: {problem}"))
        }
        PodTunnel::Answers(status) => match of_status(status, facts.at) {
            Some((at, text)) => broken(at, text),
            None => Fine(well(status, facts.at)),
        },
    }
}

/// What keeps an instance from carrying packets.
fn of_status(status: &Status, now: i64) -> Option<(AtEnd, String)> {
    let error = status.last_error.as_deref().unwrap_or("it does not say why");
    if let Some(certificate) = &status.certificate {
        if certificate.not_after <= now {
            let ago = span(now.saturating_sub(certificate.not_after));
            return Some((AtEnd::CertificateExpired, format!("its certificate expired {ago} ago: {error}")));
        }
        if certificate.not_before > now {
            let until = span(certificate.not_before.saturating_sub(now));
            return Some((AtEnd::CertificateNotYetValid, format!("its certificate is not valid for another {until}")));
        }
    }
    match status.state {
        InstanceState::Waiting if status.init_overdue => {
            return Some((AtEnd::InitOverdue, "its init container has not shown the pod's token".to_owned()));
        }
        InstanceState::Waiting if status.denied => {
            return Some((AtEnd::CertificateDenied, format!("the CA refuses it a certificate: {error}")));
        }
        InstanceState::Waiting => {
            return Some((AtEnd::CaNotReached, format!("it has no certificate yet: {error}")));
        }
        InstanceState::Closed => {
            let why = status.closed.as_deref().unwrap_or(error);
            return Some((AtEnd::Closed, format!("it lets nothing pass: {why}")));
        }
        InstanceState::Running | InstanceState::Provisional | InstanceState::Unknown => {}
    }
    let table = status.table.as_ref()?;
    if table.state == TableState::Missing {
        let why = table.problem.as_deref().unwrap_or("there is none");
        return Some((AtEnd::TableMissing, format!("its instance has no cluster table: {why}")));
    }
    let closed = table.closed.as_ref()?;
    Some((AtEnd::PoliciesMissing, format!("its network policies are not known, so it is closed: {closed}")))
}

fn well(status: &Status, now: i64) -> String {
    let certificate = status.certificate.as_ref();
    let left = certificate
        .map_or_else(String::new, |of| format!(", certificate for another {}", span(of.not_after.saturating_sub(now))));
    format!("{} as {}{left}", status.state.word(), list(&status.overlay))
}

fn table(facts: &Facts) -> Verdict {
    let Some(Way { table, sent_to, pod }) = &facts.way else {
        return not_asked(&facts.source.node);
    };
    let Some(version) = table else { return Fine("pods of that node are not captured".to_owned()) };
    let is_enrolled = matches!(facts.destination_end.as_ref().map(|end| &end.tunnel), Some(PodTunnel::Answers(_)));
    match (sent_to, pod) {
        (InTable::NoEndpoint, _) => {
            Broken(Cause::TableWithoutEndpoint, format!("version {version} has no endpoint for that port"))
        }
        (InTable::Unknown, _) => {
            Broken(Cause::TableWithoutDestination, format!("version {version} does not have that address"))
        }
        (InTable::Clear, _) | (_, InTable::Clear) if is_enrolled => {
            Broken(Cause::TableSaysClear, format!("version {version} says that the destination is not enrolled"))
        }
        (InTable::Clear, _) => Fine(format!("version {version}: packets go in clear")),
        (InTable::Enrolled | InTable::Service, _) => Fine(format!("version {version} leads into a tunnel")),
    }
}

/// What rules and network policies of one end say.
fn decision(facts: &Facts, of: End) -> Verdict {
    let Some(PodEnd { policy, tunnel, node, .. }) = of_end(facts, of) else {
        let node = match of {
            End::Source => Some(&facts.source.node),
            End::Destination => facts.destination().map(|pod| &pod.node),
        };
        return match node {
            Some(node) => not_asked(node),
            None => Fine("it is no pod of this cluster".to_owned()),
        };
    };
    let (by_policy, by_rule) = match of {
        End::Source => (Cause::EgressPolicy, Cause::EgressRule),
        End::Destination => (Cause::IngressPolicy, Cause::IngressRule),
    };
    if let PolicySays::Refuses { text } = policy {
        return Broken(by_policy, text.clone());
    }
    if let PodTunnel::Answers(status) = tunnel
        && let Some(packet) = dropped(facts, status, of)
    {
        let ago = span(i64::try_from(packet.seconds_ago).unwrap_or(i64::MAX));
        let near = packet.nearest_rule.map_or_else(String::new, |rule| format!(", number {rule} is nearest"));
        return Broken(by_rule, format!("no rule of Nebula allows it{near}: a packet was dropped {ago} ago"));
    }
    match policy {
        PolicySays::Allows { text, would_deny: Some(audit) } => Fine(format!("{text}; in audit: {audit}")),
        PolicySays::Allows { text, would_deny: None } => Fine(text.clone()),
        PolicySays::Nothing | PolicySays::Refuses { .. } => {
            Fine(format!("node {node} has no program for network policies of that pod"))
        }
    }
}

/// A packet of this flow that Nebula's rules dropped lately.
fn dropped<'a>(facts: &Facts, status: &'a Status, of: End) -> Option<&'a DroppedPacket> {
    let (sources, destinations) = (addresses(facts, End::Source), addresses(facts, End::Destination));
    let is_of = |text: &str, addresses: &[IpAddr], port: Option<u16>| {
        let Ok(end) = text.parse::<SocketAddr>() else { return false };
        addresses.contains(&end.ip()) && port.is_none_or(|port| port == end.port())
    };
    let port = Some(facts.destination_port());
    status.trouble.as_ref()?.dropped.iter().find(|packet| {
        let is_mine =
            packet.reason == "no_rule" && packet.seconds_ago <= LATELY_SECONDS && packet.protocol == facts.protocol;
        is_mine
            && match of {
                End::Source => packet.direction == "outbound" && is_of(&packet.remote, &destinations, port),
                End::Destination => {
                    packet.direction == "inbound"
                        && is_of(&packet.local, &destinations, port)
                        && is_of(&packet.remote, &sources, None)
                }
            }
    })
}

fn tunnel(facts: &Facts) -> Verdict {
    let of = |end| match of_end(facts, end).map(|end| &end.tunnel) {
        Some(PodTunnel::Answers(status)) => Some(&**status),
        _ => None,
    };
    let (source, destination) = (of(End::Source), of(End::Destination));
    let Some(source) = source else { return Fine("packets go in clear".to_owned()) };
    let peers = addresses(facts, End::Destination);
    if destination.is_none() && !matches!(facts.way, Some(Way { pod: InTable::Enrolled, .. })) {
        return Fine("packets go in clear".to_owned());
    }
    let is_peer =
        |text: &str| text.split('/').next().and_then(|bare| bare.parse().ok()).is_some_and(|ip| peers.contains(&ip));
    if let Some(tunnel) = source.tunnels.iter().find(|tunnel| tunnel.peer.iter().any(|peer| is_peer(peer))) {
        return Fine(match &tunnel.endpoint {
            Some(endpoint) => format!("a tunnel with {} at {endpoint}", tunnel.name),
            None => format!("a tunnel with {}, through a relay", tunnel.name),
        });
    }
    let trouble = source.trouble.as_ref();
    let lost = trouble.and_then(|trouble| {
        trouble.lost_peers.iter().find(|lost| is_peer(&lost.peer) && lost.seconds_ago <= LATELY_SECONDS)
    });
    let Some(lost) = lost else { return Unknown("no packet has asked for a tunnel yet".to_owned()) };
    if let Some(refusal) = destination.and_then(|status| refusal(source, status)) {
        return Broken(Cause::RefusedByPeer, refusal);
    }
    Broken(of_lost(lost), lost.cause.clone())
}

/// That the destination refuses a caller at the port of the source's instance.
fn refusal(source: &Status, destination: &Status) -> Option<String> {
    let port = source.port?;
    let callers = &destination.trouble.as_ref()?.refused_callers;
    let is_source = |from: &str| from.parse::<SocketAddr>().is_ok_and(|from| from.port() == port);
    let found = callers.iter().find(|caller| is_source(&caller.from) && caller.seconds_ago <= LATELY_SECONDS);
    found.map(|caller| format!("the destination refuses it: {}", caller.text))
}

fn of_lost(lost: &LostPeer) -> Cause {
    match lost.reason.as_str() {
        LostPeer::NOBODY_KNOWS => Cause::PeerUnknown,
        LostPeer::CANNOT_SEND => Cause::CannotSend,
        LostPeer::OTHER_CIPHER => Cause::OtherCipher,
        LostPeer::REFUSED => Cause::PeerRefused,
        _ => Cause::PeerSilent,
    }
}

fn listener(facts: &Facts) -> Verdict {
    let port = facts.destination_port();
    let Some(end) = &facts.destination_end else {
        return match facts.destination() {
            Some(pod) => not_asked(&pod.node),
            None => Fine("it is no pod of this cluster".to_owned()),
        };
    };
    match end.listener {
        None => Unknown("its sockets could not be seen".to_owned()),
        Some(Listener::Reachable) => Fine(format!("a program listens at port {port}")),
        Some(Listener::Nobody) => Broken(Cause::NobodyListens, format!("nobody listens at port {port}")),
        Some(Listener::LoopbackOnly) => {
            Broken(Cause::ListensOnLoopback, format!("port {port} is open for loopback only"))
        }
        Some(Listener::OtherFamily) => {
            Broken(Cause::ListensOnOtherFamily, format!("port {port} is open for the other family only"))
        }
    }
}

fn of_end(facts: &Facts, of: End) -> Option<&PodEnd> {
    match of {
        End::Source => facts.source_end.as_ref(),
        End::Destination => facts.destination_end.as_ref(),
    }
}

/// The addresses of an end, in the primary network and in the overlay.
fn addresses(facts: &Facts, of: End) -> Vec<IpAddr> {
    let mut all = match of {
        End::Source => facts.source.addresses.clone(),
        End::Destination => facts.destination().map_or_else(Vec::new, |pod| pod.addresses.clone()),
    };
    if let Some(PodTunnel::Answers(status)) = of_end(facts, of).map(|end| &end.tunnel) {
        all.extend(status.addresses());
    }
    all
}

fn not_asked(node: &str) -> Verdict {
    Unknown(if node.is_empty() { "its node was not asked".to_owned() } else { format!("node {node} was not asked") })
}

fn list(words: &[String]) -> String {
    if words.is_empty() { "none".to_owned() } else { words.join(", ") }
}

fn phase(phase: &str) -> &str {
    match phase {
        "" => "unknown",
        RUNNING => "without an address",
        other => other,
    }
}

const RUNNING: &str = "Running";
/// What happened longer ago says nothing of now.
const LATELY_SECONDS: u64 = 300;
