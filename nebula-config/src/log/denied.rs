//! The log's line about a denied flow: who and who, and which rule is nearest to allowing it.

use nebula_core::FlowKey;
use nebula_core::counters::Direction;
use nebula_core::diagnosis::{DeniedFlow, Party};
use nebula_core::firewall::NearMiss;
use serde_json::json;

use crate::log::{self, list};

/// Its text, which is that of Go Nebula.
pub(super) fn line(denied: &DeniedFlow) -> &'static str {
    match denied.direction {
        Direction::Inbound => "dropping inbound packet",
        Direction::Outbound => "dropping outbound packet",
    }
}

pub(super) fn log_one(denied: &DeniedFlow) {
    let DeniedFlow { flow, reason, own, peer, nearest, direction } = denied;
    let vpn = peer.as_ref().map_or_else(|| list(&[flow.remote]), |peer| list(&peer.addresses));
    let (name, groups) = (peer.as_ref().map(|peer| &*peer.name), peer.as_ref().map(short_groups));
    let rule = nearest.as_ref().map(|nearest| place(*direction, nearest));
    tracing::debug!(vpnAddrs = ?vpn, certName = name, groups, ownName = own.name, ownGroups = short_groups(own),
        fwPacket = ?packet(flow), reason = reason.name(), nearestRule = rule, "{}", line(denied));
}

/// Under Go's names.
fn packet(flow: &FlowKey) -> log::Structured {
    log::structured(json!({
        "LocalAddr": flow.local.to_string(),
        "RemoteAddr": flow.remote.to_string(),
        "LocalPort": flow.local_port,
        "RemotePort": flow.remote_port,
        "Protocol": flow.protocol,
    }))
}

/// The groups of a certificate, or their number where they would make a long line.
fn short_groups(party: &Party) -> String {
    let groups = party.groups.join(",");
    if groups.len() > MAX_GROUPS_BYTES { format!("{} groups", party.groups.len()) } else { groups }
}

fn place(direction: Direction, nearest: &NearMiss) -> String {
    let list = match direction {
        Direction::Inbound => "inbound",
        Direction::Outbound => "outbound",
    };
    let differs: Vec<_> = nearest.differs.iter().map(|differs| differs.name()).collect();
    format!("firewall.{list} #{} differs in {}", nearest.rule, differs.join(", "))
}

const MAX_GROUPS_BYTES: usize = 100;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_groups_are_counted_and_few_are_named() {
        let party = |groups: usize| Party {
            addresses: Vec::new(),
            name: "a".to_owned(),
            groups: (0..groups).map(|n| format!("group-{n}")).collect(),
        };
        assert_eq!(short_groups(&party(0)), "");
        assert_eq!(short_groups(&party(2)), "group-0,group-1");
        assert_eq!(short_groups(&party(40)), "40 groups");
    }
}
