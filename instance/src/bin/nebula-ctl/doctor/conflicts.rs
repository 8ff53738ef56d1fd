//! Two hosts that have one overlay address, or one name.

use nebula_instance::host::documents::{Double, Elsewhere, Facts, SameName};

use super::{Finding, is_recent, known};

pub(super) fn doubles(facts: &Facts, peer: Option<&str>) -> Vec<Finding> {
    let of_peer = |double: &&Double| peer.is_none_or(|peer| peer == double.peer);
    facts.doubles.iter().filter(|double| is_recent(double.seconds_ago)).filter(of_peer).map(double).collect()
}

fn double(double: &Double) -> Finding {
    let Double { peer: about, endpoints, names, turns, .. } = double;
    let at = places(endpoints);
    let named = if names.is_empty() { String::new() } else { format!(" ({})", names.join(", ")) };
    let advice = "Sign a new certificate with an address of its own for one of them.";
    if *turns > 0 {
        let cause = format!("two hosts{named} take turns in this address{at}");
        return Finding::error("duplicate_address", about, cause, advice);
    }
    let cause = format!(
        "two certificates with different names{named} have this address{at}: two hosts, or one that was given another name"
    );
    let advice = format!("{advice} If it was one host with another name, all is well: this is said for ten minutes.");
    Finding::warning("duplicate_address", about, cause, &advice)
}

/// Addresses of this host that another one has as well, by what its lighthouses say.
pub(super) fn own_addresses(facts: &Facts) -> Vec<Finding> {
    facts.own_elsewhere.iter().filter(|told| is_recent(told.seconds_ago)).map(own_address).collect()
}

fn own_address(told: &Elsewhere) -> Finding {
    let Elsewhere { address: about, lighthouse, endpoints, .. } = told;
    let at = places(endpoints);
    let cause = format!("another host has this address of this host{at}: the lighthouse {lighthouse} knows both");
    let advice = "Sign a new certificate with an address of its own for one of them. `nebula ctl doctor` on the lighthouse has both names.";
    Finding::error("duplicate_address", about, cause, advice)
}

/// The end of a sentence that says where hosts are.
fn places(endpoints: &[String]) -> String {
    if endpoints.is_empty() { String::new() } else { format!(", at {}", endpoints.join(" and ")) }
}

pub(super) fn same_names(facts: &Facts, peer: Option<&str>) -> Vec<Finding> {
    let of_peer = |same: &&SameName| peer.is_none_or(|peer| same.peer.as_deref() == Some(peer));
    facts.same_names.iter().filter(of_peer).map(same_name).collect()
}

fn same_name(same: &SameName) -> Finding {
    let holder = match (same.own_name, &same.holder) {
        (true, _) => "this host has".to_owned(),
        (false, Some(holder)) => format!("{holder} has, and had it first"),
        (false, None) => "another host had until a moment ago".to_owned(),
    };
    let cause = format!("its certificate has the name {}, which {holder}: names are not answered with it", same.name);
    let advice =
        "Sign a certificate with a name of its own for one of them. If nobody meant this, find out who got it signed.";
    Finding::warning("duplicate_name", known(&same.peer), cause, advice)
}
