//! Hosts that call again and again although this host answers.

use nebula_instance::host::documents::{Facts, Found, PeerFacts, Unheard};

use super::{Finding, Severity};

/// The peer repeats its call although this host answers it and UDP passes.
pub(super) fn answers_not_taken(_: &Facts, peer: &PeerFacts) -> Vec<Finding> {
    let Some(unheard) = &peer.unheard else { return Vec::new() };
    if unheard.udp_passes != Some(true) && peer.endpoints_found(Found::Nebula).next().is_none() {
        return Vec::new();
    }
    let from = &unheard.from;
    let cause = format!(
        "it calls from {from} and does not take the answers of this host, although UDP passes in both directions"
    );
    let advice = "Its `cipher` is another one (see both configurations), or its lighthouse.remote_allow_list excludes this host: \
                  `nebula ctl doctor` there says which.";
    vec![Finding::error("answers_not_taken", &peer.peer, cause, advice)]
}

/// The peer repeats its call although this host answers it, and what was sent to where it calls from came to nothing.
pub(super) fn answers_lost(_: &Facts, peer: &PeerFacts) -> Vec<Finding> {
    let Some(caller) = &peer.unheard else { return Vec::new() };
    if caller.udp_passes != Some(false) {
        return vec![caller_repeats(&peer.peer, caller, Severity::Error)];
    }
    let Unheard { from, repeats, .. } = caller;
    let cause =
        format!("it calls from {from}, and the answers of this host do not reach it ({repeats} calls repeated)");
    let advice = "UDP passes only in the direction to this host: allow it to leave here (`nft list ruleset`, cloud security group), and to \
                  arrive there. If `nebula ctl why` there names another `cipher`, it is that.";
    vec![Finding::error("answers_lost", &peer.peer, cause, advice)]
}

/// A host repeats its call although this host answers it. Without a probe, nothing tells why.
fn caller_repeats(about: &str, caller: &Unheard, severity: Severity) -> Finding {
    let Unheard { peer, from, repeats, .. } = caller;
    let cause = format!("it calls from {from} again and again, although this host answers ({repeats} calls repeated)");
    let advice = format!(
        "Either the answers do not reach it, or it does not take them (another `cipher`, its lighthouse.remote_allow_list): \
         `nebula ctl why {peer}` probes which it is."
    );
    Finding { severity, ..Finding::error("caller_repeats", about, cause, &advice) }
}

/// Hosts that repeat their calls although this host answers.
pub(super) fn all_unheard(facts: &Facts) -> Vec<Finding> {
    let is_told = |caller: &Unheard| facts.peers.iter().any(|peer| peer.peer == caller.peer);
    let others = facts.unheard.iter().filter(|caller| !is_told(caller));
    others
        .map(|caller| {
            let about = format!("a caller that says it is {} ({})", caller.name, caller.peer);
            caller_repeats(&about, caller, Severity::Warning)
        })
        .collect()
}
