//! Peers that an instance called in vain lately, and callers that it refused.

use std::collections::BTreeMap;

use nebula_cni_contract::agent_api::Finding;
use nebula_cni_contract::instance_status::{LostPeer, RefusedCaller, Trouble};

/// One finding for each kind of trouble, with some of those that have it.
pub(super) fn of_trouble(about: &str, trouble: &Trouble) -> Vec<Finding> {
    let mut lost: BTreeMap<Kind, Named<'_>> = BTreeMap::new();
    for peer in trouble.lost_peers.iter().filter(|peer| peer.seconds_ago < RECENT_SECONDS) {
        lost.entry(lost_kind(peer)).or_default().add(&peer.peer, &peer.cause);
    }
    let mut refused: BTreeMap<Kind, Named<'_>> = BTreeMap::new();
    for caller in trouble.refused_callers.iter().filter(|caller| caller.seconds_ago < RECENT_SECONDS) {
        if let Some(kind) = caller_kind(caller) {
            refused.entry(kind).or_default().add(&caller.from, &caller.text);
        }
    }
    let lost = lost.iter().map(|((code, remedy), named)| {
        let cause = format!("it does not reach {}: {}", named.names(), named.why);
        Finding::warning(about, code, cause, remedy)
    });
    let refused = refused.iter().map(|((code, remedy), named)| {
        let cause = format!("it refuses what comes from {}: {}", named.names(), named.why);
        Finding::warning(about, code, cause, remedy)
    });
    lost.chain(refused).collect()
}

/// Code and remedy.
type Kind = (&'static str, &'static str);

/// Peers or callers with the same trouble.
#[derive(Default)]
struct Named<'a> {
    first: Vec<&'a str>,
    count: usize,
    why: &'a str,
}

impl<'a> Named<'a> {
    fn add(&mut self, name: &'a str, why: &'a str) {
        if self.count == 0 {
            self.why = why;
        }
        if self.first.len() < MOST_NAMES {
            self.first.push(name);
        }
        self.count += 1;
    }

    fn names(&self) -> String {
        let more = self.count - self.first.len();
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        self.first.join(", ") + &more
    }
}

fn lost_kind(peer: &LostPeer) -> Kind {
    match peer.reason.as_str() {
        LostPeer::NOBODY_KNOWS => (
            "peer_unknown",
            "No lighthouse, and no cluster table, has an endpoint of that peer: see whether its pod or host runs and has a \
             certificate (kubectl nebula pods -A), and whether lighthouses answer (condition underlay of the node).",
        ),
        LostPeer::CANNOT_SEND => (
            "peer_cannot_send",
            "The node itself sends nothing there: see its routes and packet filters (ip route get, nft list ruleset).",
        ),
        LostPeer::OTHER_CIPHER => (
            "peer_other_cipher",
            "Set the same cipher (nebula.cipher in the chain entry, cipher in a host's configuration) on both sides.",
        ),
        LostPeer::REFUSED => (
            "peer_refused",
            "Its certificate is not accepted here: see kubectl nebula cert, the clocks of both nodes, and whether both follow \
             the same CA.",
        ),
        _ => (
            "peer_silent",
            "Allow UDP between the nodes on the ports of instances (61000 to 65535), and see whether the peer runs. \
             nebula-cni-agent why on the node compares both ends.",
        ),
    }
}

/// `None`: anybody can send that, and it says nothing about a peer.
fn caller_kind(caller: &RefusedCaller) -> Option<Kind> {
    Some(match caller.reason.as_str() {
        "expired" | "not_yet_valid" | "ca_expired" => (
            "caller_out_of_time",
            "Compare the clocks of both nodes (timedatectl). If they agree, the caller does not renew its certificate: see \
             kubectl nebula cert -A.",
        ),
        "blocked" => (
            "caller_revoked",
            "Its certificate was revoked. nebula-ca certificate readmit lets a pod in again that was kept out.",
        ),
        "unknown_ca" | "beyond_ca" | "bad_signature" | "other_curve" => (
            "caller_of_other_ca",
            "Its certificate is from another CA, or was altered: see whether both follow the same CA, and whether a rollover of \
             the CA was finished too early.",
        ),
        "own_address" => (
            "duplicate_address",
            "Two hold a certificate with the same overlay address. Revoke the one that should not have it \
             (nebula-ca certificate revoke).",
        ),
        _ => return None,
    })
}

/// What is older may have been solved.
const RECENT_SECONDS: u64 = 600;
const MOST_NAMES: usize = 3;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trouble_of_one_kind_is_one_finding_and_what_is_old_or_from_anybody_is_none() {
        let lost = |peer: usize, reason: &str, seconds_ago| LostPeer {
            peer: format!("10.1.0.{peer}"),
            cause: "no answer".into(),
            reason: reason.into(),
            seconds_ago,
            ..LostPeer::default()
        };
        let refused = |reason: &str| RefusedCaller {
            from: "192.0.2.1:4242".into(),
            reason: reason.into(),
            text: "its certificate expired".into(),
            seconds_ago: 1,
        };
        let trouble = Trouble {
            lost_peers: (0..50)
                .map(|peer| lost(peer, "no_answer", 1))
                .chain([lost(77, "nobody_knows", 1), lost(78, "cannot_send", RECENT_SECONDS)])
                .collect(),
            refused_callers: vec![refused("expired"), refused("unreadable"), refused("x\u{1b}")],
            ..Trouble::default()
        };
        let found = of_trouble("shop/web", &trouble);
        let codes: Vec<_> = found.iter().map(|found| found.code.as_str()).collect();
        assert_eq!(codes, ["peer_silent", "peer_unknown", "caller_out_of_time"]);
        assert_eq!(found[0].cause, "it does not reach 10.1.0.0, 10.1.0.1, 10.1.0.2 and 47 more: no answer");
        assert!(found.iter().all(|found| found.about == "shop/web" && !found.remedy.is_empty()), "{found:?}");
    }
}
