//! Explains dropped packets: which rule is nearest to allowing them, and what differs.

use nebula_instance::host::documents::{Drop, Facts};

use super::{Finding, Severity, is_recent, known};

/// Drops in the last minutes; if `peer` is given, only those of that peer.
pub(super) fn findings(facts: &Facts, peer: Option<&str>) -> Vec<Finding> {
    let of_peer = |drop: &&Drop| peer.is_none_or(|peer| drop.peer.as_deref() == Some(peer) || drop.remote == peer);
    facts.drops.iter().filter(|drop| is_recent(drop.seconds_ago)).filter(of_peer).map(finding).collect()
}

/// What arrives here, a peer can send as it likes, and a rule is there to refuse it: only what this host itself sends
/// is an error.
fn finding(drop: &Drop) -> Finding {
    let found = of_reason(drop);
    let severity = if is_inbound(drop) { Severity::Warning } else { found.severity };
    Finding { severity, ..found }
}

fn is_inbound(drop: &Drop) -> bool {
    drop.direction == "inbound"
}

fn of_reason(drop: &Drop) -> Finding {
    let inbound = is_inbound(drop);
    let (local, remote) = (&drop.local, &drop.remote);
    let about = match &drop.peer_name {
        Some(name) => format!("{} with {name} ({remote})", service(drop)),
        None => format!("{} with {remote}", service(drop)),
    };
    let times = format!("{} sampled, {} s ago", drop.times, drop.seconds_ago);
    let way = if inbound { format!("from {remote} to {local}") } else { format!("from {local} to {remote}") };
    match drop.reason.as_str() {
        "no_rule" => {
            let list = if inbound { "firewall.inbound" } else { "firewall.outbound" };
            let cause = format!("no rule of {list} allows packets {way} ({times}){}", near(drop));
            let advice = format!(
                "If they should pass, add or widen a rule in {list} of this host, and run `nebula ctl reload`. If not, all is well."
            );
            Finding::error("firewall_drop", about, cause, &advice)
        }
        "network_policy" => Finding::error(
            "network_policy",
            about,
            format!(
                "policies of the network refuse packets {way} ({times}): {}",
                drop.policy.as_deref().unwrap_or("they have changed since")
            ),
            "If they should pass, change the policy. If not, all is well.",
        ),
        "remote_address" => Finding::error(
            "remote_address",
            about,
            format!("packets {way} are dropped ({times}): the peer's certificate does not have {remote}"),
            "For a network behind the peer, sign its certificate with `-unsafe-networks`.",
        ),
        "local_address" => Finding::error(
            "local_address",
            about,
            format!("packets {way} are dropped ({times}): this host's certificate does not have {local}"),
            "For a network behind this host, sign its certificate with `-unsafe-networks`. For its own traffic, see \
             which source address the route has.",
        ),
        _ => Finding::warning(
            "no_route",
            about,
            format!("packets {way} come into the device and have no route in the overlay ({times})"),
            "tun.unsafe_routes has no entry for that network, and it is not in the certificate's networks.",
        ),
    }
}

/// Describes the nearest rule and its conditions.
fn near(drop: &Drop) -> String {
    let Some(near) = &drop.nearest else { return ", and there is no rule at all".to_owned() };
    let groups = drop.peer_groups.as_deref().unwrap_or_default();
    let groups = if groups.is_empty() { "no groups".to_owned() } else { format!("the groups {}", groups.join(", ")) };
    let differs = near.differs.iter().map(|aspect| match aspect.as_str() {
        "peer" => format!("the peer is {} with {groups}", known(&drop.peer_name)),
        "port" => format!("the port is {}", drop.port),
        "protocol" => format!("the protocol is {}", protocol(drop)),
        "ca" => "the peer's CA is another one".to_owned(),
        _ if near.text.contains("local_cidr: ") => format!("its local_cidr does not have {}", drop.local),
        _ => format!(
            "it is for this host's own addresses only, and {} is behind it: the rule needs a local_cidr with that address, or any",
            drop.local
        ),
    });
    let differs: Vec<_> = differs.collect();
    format!("; nearest is #{} {}, but {}", near.index, near.text, differs.join(", and "))
}

fn service(drop: &Drop) -> String {
    if drop.port > 0 { format!("{} port {}", protocol(drop), drop.port) } else { protocol(drop) }
}

fn protocol(drop: &Drop) -> String {
    match drop.protocol {
        1 => "icmp".to_owned(),
        6 => "tcp".to_owned(),
        17 => "udp".to_owned(),
        58 => "icmpv6".to_owned(),
        other => format!("protocol {other}"),
    }
}
