//! Two hosts that have one overlay address, or one name.

use serde_json::Value;

use super::{Finding, is_recent, list, text, texts};

pub(super) fn doubles(facts: &Value, peer: Option<&Value>) -> Vec<Finding> {
    let of_peer = |double: &&Value| peer.is_none_or(|peer| peer["peer"] == double["peer"]);
    list(&facts["doubles"]).iter().filter(|double| is_recent(double)).filter(of_peer).map(double).collect()
}

fn double(double: &Value) -> Finding {
    let (about, at, names) = (text(&double["peer"]), texts(&double["endpoints"]), texts(&double["names"]));
    let at = if at.is_empty() { String::new() } else { format!(", at {}", at.join(" and ")) };
    let named = if names.is_empty() { String::new() } else { format!(" ({})", names.join(", ")) };
    let advice = "Sign a new certificate with an address of its own for one of them.";
    if double["turns"].as_u64().unwrap_or(0) > 0 {
        let cause = format!("two hosts{named} take turns in this address{at}");
        return Finding::error("duplicate_address", about, cause, advice);
    }
    let cause = format!(
        "two certificates with different names{named} have this address{at}: two hosts, or one that was given another name"
    );
    let advice = format!("{advice} If it was one host with another name, all is well: this is said for ten minutes.");
    Finding::warning("duplicate_address", about, cause, &advice)
}

pub(super) fn same_names(facts: &Value, peer: Option<&Value>) -> Vec<Finding> {
    let of_peer = |same: &&Value| peer.is_none_or(|peer| peer["peer"] == same["peer"]);
    let same = list(&facts["same_names"]).iter().filter(of_peer);
    same.map(|same| {
        let holder = match (same["own_name"] == true, same["holder"].as_str()) {
            (true, _) => "this host has".to_owned(),
            (false, Some(holder)) => format!("{holder} has, and had it first"),
            (false, None) => "another host had until a moment ago".to_owned(),
        };
        let cause = format!("its certificate has the name {}, which {holder}: names are not answered with it", text(&same["name"]));
        let advice = "Sign a certificate with a name of its own for one of them. If nobody meant this, find out who got it signed.";
        Finding::warning("duplicate_name", text(&same["peer"]), cause, advice)
    })
    .collect()
}
