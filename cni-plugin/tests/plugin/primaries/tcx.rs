//! A program of eBPF that comes to a pod's link after ADD, as that of a network policy agent: it passes the rules.
//! CHECK and the reconciliation say so.

use super::{Laid, PRIMARIES, TCX};
use crate::harness::PLUGIN;

/// Frames for another node that arrived there.
fn arrived(laid: &Laid) -> u64 {
    let text = laid.site.inside("other", &["nft", "list", "table", "netdev", "count"]);
    let packets = text.split("packets ").nth(1).and_then(|rest| rest.split(' ').next());
    packets.unwrap().parse().unwrap()
}

#[test]
#[ignore = "needs root, network namespaces and tcx (Linux 6.6)"]
fn a_program_that_is_attached_later_passes_the_rules_and_is_named() {
    let kind = PRIMARIES.iter().find(|primary| primary.name == "kind").unwrap();
    let mut laid = Laid::isolated(kind);
    let count = format!(
        "table netdev count {{\nchain in {{\ntype filter hook ingress device under priority 0;\nip saddr {} ip daddr {} counter\n}}\n}}",
        laid.address, kind.remote
    );
    laid.site.inside("other", &["nft", &count]);
    laid.add();
    laid.check().expect_ok();
    let reconcile = |laid: &Laid| {
        let state = laid.site.node.entry["stateDir"].as_str().unwrap().to_owned();
        laid.site.succeeds("node", &[PLUGIN, "reconcile", &state])
    };
    assert!(reconcile(&laid));
    assert!(!laid.answers("pod", kind.remote));
    assert_eq!(arrived(&laid), 0);
    laid.site.inside("node", &["python3", TCX, "veth1a2b3c4d", "ingress", "under"]);
    // It has the wrong Ethernet address there, and nobody answers.
    assert!(!laid.answers("pod", kind.remote));
    assert!(arrived(&laid) > 0, "the rules do not see what the program sends on");
    assert!(!reconcile(&laid), "reconcile does not report it to the node agent");
    let error = laid.check().error();
    assert!(error["msg"].as_str().unwrap().contains("traffic control on veth1a2b3c4d (tcx, 1 of eBPF's"), "{error}");
    laid.remove();
    assert_eq!(laid.site.rules(), "");
}
