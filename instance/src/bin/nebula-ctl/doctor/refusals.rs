//! Handshake messages that this host refused: what was wrong with them, and who says that it sent them.

use nebula_instance::host::documents::{Facts, PeerFacts, Refusal};

use super::{Finding, Severity, is_recent, known, span};

/// An answer or a first message that this host refused.
pub(super) fn refused(about: &str, refusal: &Refusal) -> Finding {
    let (from, name) = (&refusal.from, known(&refusal.name));
    let what = format!("this host refuses what comes from {from}: {}", refusal.text);
    let ahead = refusal.clock_ahead_seconds.filter(|ahead| ahead.abs() >= 30);
    let clock = ahead.map_or_else(String::new, |ahead| {
        let way = if ahead > 0 { "ahead of" } else { "behind" };
        format!(" Its clock is {} {way} that of this host: check both (`timedatectl`).", span(ahead))
    });
    let (code, advice) = match refusal.reason.as_str() {
        "expired" => ("peer_certificate_expired", format!("Sign a new certificate for {name}.{clock}")),
        "not_yet_valid" => (
            "peer_certificate_not_yet_valid",
            match clock.trim() {
                "" => "Check the clocks of both hosts (`timedatectl`).".to_owned(),
                clock => clock.to_owned(),
            },
        ),
        "blocked" => (
            "peer_blocked",
            format!("If {name} should be let in, remove its fingerprint from pki.blocklist and run `nebula ctl reload`."),
        ),
        "unknown_ca" => (
            "unknown_ca",
            "Add the CA's certificate to pki.ca here, or have the peer's certificate signed by a CA that is there \
             (`nebula ctl cert` lists them)."
                .to_owned(),
        ),
        "ca_expired" => ("peer_ca_expired", format!("Replace that CA, and sign a new certificate.{clock}")),
        "beyond_ca" => (
            "certificate_beyond_ca",
            format!("Sign {name} with networks, groups and validity that the CA itself has."),
        ),
        "bad_signature" => (
            "bad_signature",
            "The certificate was altered, or the CA was made again under the same name. Sign it again.".to_owned(),
        ),
        "other_curve" | "unreadable" => (
            "other_curve",
            "The hosts of a network need the same curve (`nebula-cert print` shows it), or it is not Nebula that sends \
             this."
                .to_owned(),
        ),
        "not_post_quantum" => (
            "not_post_quantum",
            format!(
                "Only `pki.post_quantum: prefer` here lets hosts in that do not offer ML-KEM, as Go Nebula does not; or give \
                 {name} this program."
            ),
        ),
        "own_address" => (
            "duplicate_address",
            "Two hosts have the same overlay address, or the same certificate was copied to both. Sign a new \
             certificate with an address of its own for one of them."
                .to_owned(),
        ),
        "other_host" => (
            "wrong_host",
            format!("Another host than {about} lives at {from}: correct static_host_map, or the port forwarding."),
        ),
        "address_not_allowed" => (
            "address_not_allowed",
            "lighthouse.remote_allow_list (or remote_allow_ranges) of this host excludes that address.".to_owned(),
        ),
        _ => ("malformed_handshake", "Compare the versions of both programs.".to_owned()),
    };
    Finding::error(code, about, what, &advice)
}

/// Hosts whose handshakes this one refuses; if `peer` is given, only those in the name of that peer.
pub(super) fn callers(facts: &Facts, peer: Option<&PeerFacts>) -> Vec<Finding> {
    let claims = |caller: &&Refusal| peer.is_none_or(|peer| caller.addresses.contains(&peer.peer));
    // Anybody can send unreadable messages, so only those with a name count.
    let callers = recent_callers(facts).filter(|caller| caller.name.is_some()).filter(claims);
    // The claimed identity is not proven.
    callers.map(|caller| refused_call(caller, Severity::Warning)).collect()
}

/// Refused messages without a name from where the peer is.
pub(super) fn unnamed_callers(facts: &Facts, peer: &PeerFacts) -> Vec<Finding> {
    let endpoints: Vec<_> = peer.endpoints.iter().map(|endpoint| ip(&endpoint.endpoint)).collect();
    let is_there = |caller: &&Refusal| caller.name.is_none() && endpoints.contains(&ip(&caller.from));
    recent_callers(facts).filter(is_there).map(|caller| refused_call(caller, Severity::Error)).collect()
}

pub(super) fn recent_callers(facts: &Facts) -> impl Iterator<Item = &Refusal> {
    facts.callers.iter().filter(|caller| is_recent(caller.seconds_ago))
}

pub(super) fn refused_call(caller: &Refusal, severity: Severity) -> Finding {
    let about = match &caller.name {
        Some(name) => format!("a caller that says it is {name} ({})", caller.addresses.join(" ")),
        None => format!("a caller at {}", caller.from),
    };
    Finding { severity, ..refused(&about, caller) }
}

/// The address of an endpoint.
fn ip(endpoint: &str) -> Option<std::net::IpAddr> {
    endpoint.parse::<std::net::SocketAddr>().ok().map(|at| at.ip())
}
