//! Why a peer cannot be reached, or cannot reach this host.

use serde_json::Value;

use super::{Finding, Severity, list, span, text, texts};

/// What is wrong with one peer of `facts`.
pub(super) fn findings(facts: &Value, peer: &Value) -> Vec<Finding> {
    let about = text(&peer["peer"]);
    if peer["own_address"] == true {
        let cause = "it is an address of this host itself";
        let advice = "If it should be another host, both have the same address: sign a new certificate for one.";
        return vec![Finding::error("peer_is_self", about, cause, advice)];
    }
    let is_overlay = peer["in_overlay"] == true;
    if !is_overlay && list(&peer["gateways"]).is_empty() {
        let cause = format!(
            "it is in no network of this host's certificate ({}), and no tun.unsafe_routes entry leads there",
            texts(&facts["host"]["networks"]).join(" ")
        );
        let advice = "Check the address. Hosts reach each other only within the networks of their certificates.";
        return vec![Finding::error("not_in_overlay", about, cause, advice)];
    }
    if !is_overlay {
        let gateways = texts(&peer["gateways"]);
        let advice = format!("`nebula ctl why {}` says whether the gateway can be reached.", gateways.join(" or "));
        let named = gateways.iter().map(|gateway| match peer["gateway_states"][gateway].as_str() {
            Some(state) => format!("{gateway} ({state})"),
            None => gateway.clone(),
        });
        let cause = format!("it is behind {} (tun.unsafe_routes)", named.collect::<Vec<_>>().join(", "));
        return vec![Finding::warning("behind_gateway", about, cause, &advice)];
    }
    let mut found: Vec<_> = kernel_route(facts, peer).into_iter().collect();
    if peer["connected"] == true {
        return found;
    }
    found.extend(attempt(peer));
    found.extend(list(&peer["endpoints"]).iter().filter_map(|endpoint| underlay(&about, endpoint)));
    found.extend(relays(facts, peer));
    // A kernel route elsewhere may not be the only reason; any other finding explains the silence better.
    let is_explained = found.iter().any(|finding| finding.code != "route_elsewhere");
    if !is_explained {
        found.push(silence(peer));
    }
    found
}

fn kernel_route(facts: &Value, peer: &Value) -> Option<Finding> {
    let route = &peer["kernel_route"];
    if route.is_null() || route["to_overlay"] == true {
        return None;
    }
    let device = text(&facts["host"]["device"]);
    let cause = match route["device"].as_str() {
        Some(other) => format!("the kernel sends packets for it by {other} and not into the overlay ({device})"),
        None => format!("the kernel has no route to it: {}", text(&route["text"])),
    };
    let advice = "`ip route get` shows the route; remove it, or restart nebula if its own is gone.";
    Some(Finding::error("route_elsewhere", text(&peer["peer"]), cause, advice))
}

/// Evaluates what came back from the endpoints that were tried.
fn attempt(peer: &Value) -> Vec<Finding> {
    let (about, attempt) = (text(&peer["peer"]), &peer["attempt"]);
    let mut found: Vec<_> =
        Some(&attempt["refusal"]).filter(|it| !it.is_null()).map(|it| refused(&about, it)).into_iter().collect();
    for tried in list(&attempt["tried"]) {
        let at = text(&tried["endpoint"]);
        if tried["unopened"].as_u64().unwrap_or(0) > 0 {
            let cause = format!("it answered from {at}, and the answer cannot be opened: its `cipher` is another one");
            let advice = "Set the same `cipher` (aes or chachapoly) on every host of the network, and restart them.";
            found.push(Finding::error("other_cipher", about.clone(), cause, advice));
        }
        if let Some(errno) = tried["errno"].as_str() {
            found.push(send_error(&about, &at, errno));
        }
    }
    found
}

/// An answer or a first message that this host refused.
fn refused(about: &str, refusal: &Value) -> Finding {
    let (from, name) = (text(&refusal["from"]), text(&refusal["name"]));
    let what = format!("this host refuses what comes from {from}: {}", text(&refusal["text"]));
    let ahead = refusal["clock_ahead_seconds"].as_i64().filter(|ahead| ahead.abs() >= 30);
    let clock = ahead.map_or_else(String::new, |ahead| {
        let way = if ahead > 0 { "ahead of" } else { "behind" };
        format!(" Its clock is {} {way} that of this host: check both (`timedatectl`).", span(ahead))
    });
    let (code, advice) = match refusal["reason"].as_str().unwrap_or_default() {
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

fn send_error(about: &str, at: &str, errno: &str) -> Finding {
    let cause = format!("this host cannot send to {at}: {errno}");
    let (code, advice) = match errno {
        "EPERM" | "EACCES" => (
            "local_firewall",
            "A packet filter of this host forbids it (`nft list ruleset`, `iptables -S OUTPUT`): allow UDP to that \
             port. EACCES: a blackhole or prohibit route, or a broadcast address.",
        ),
        "ENETUNREACH" | "EHOSTUNREACH" | "ENETDOWN" | "EHOSTDOWN" => {
            ("no_underlay_route", "This host has no route there: see `ip route get`, its uplink and default gateway.")
        }
        "EAFNOSUPPORT" | "EADDRNOTAVAIL" => (
            "listen_family",
            "listen.host has no address of that family: listen on \"::\" (both families), or use an endpoint of the \
             other family.",
        ),
        "EINVAL" => (
            "listen_host",
            "listen.host cannot send there. 127.0.0.1 reaches only this machine: use 0.0.0.0 or an address of the \
             uplink.",
        ),
        "EMSGSIZE" => ("datagram_too_large", "The MTU of the way is too small: make tun.mtu smaller."),
        "ECONNREFUSED" => ("port_closed", "Nothing listens on that port: is nebula running there, and on that port?"),
        _ => ("send_failed", "See the kernel's log, and whether the uplink is well."),
    };
    Finding::error(code, about, cause, advice)
}

/// Problems of the underlay route to an endpoint.
fn underlay(about: &str, endpoint: &Value) -> Option<Finding> {
    let at = text(&endpoint["endpoint"]);
    if endpoint["inside_overlay"] == true {
        let cause = format!("its endpoint {at} is itself an overlay address, and tunnels do not run inside tunnels");
        let advice = "static_host_map, or the peer's advertise_addrs, must have an address of the underlay. The \
                      lighthouse's local_allow_list can hide the other.";
        return Some(Finding::error("endpoint_inside_overlay", about, cause, advice));
    }
    if endpoint["to_overlay"] == true {
        let cause = format!("the route to its endpoint {at} leads into the overlay itself");
        let advice = "An unsafe route or a default route by the overlay covers it: add a route by the uplink, or use \
                      listen.so_mark with a rule.";
        return Some(Finding::error("underlay_through_overlay", about, cause, advice));
    }
    if let Some(errno) = endpoint["errno"].as_str() {
        return Some(send_error(about, &at, errno));
    }
    let probe = &endpoint["probe"];
    match probe["found"].as_str()? {
        "nebula" => Some(Finding::error(
            "refused_by_peer",
            about,
            format!("a Nebula answers at {at}, and does not answer the handshake of this host"),
            "UDP passes, so the peer refuses this host: it does not trust its CA, blocks its certificate, finds it \
             expired by its clock, or has another curve. Its log and `nebula ctl doctor` there say which.",
        )),
        "refused" => Some(send_error(about, &at, probe["errno"].as_str().unwrap_or_default())),
        _ => None,
    }
}

fn relays(facts: &Value, peer: &Value) -> Vec<Finding> {
    let about = text(&peer["peer"]);
    let known = texts(&peer["known"]["relays"]);
    if known.is_empty() {
        return Vec::new();
    }
    if facts["host"]["use_relays"] == false {
        let cause = format!("it can be reached through {}, and this host uses no relays", known.join(", "));
        return vec![Finding::error("relays_not_used", about, cause, "Set relay.use_relays to true and reload.")];
    }
    let hops = list(&peer["relay_hops"]).iter().filter(|hop| hop["established"] == false);
    hops.map(|hop| {
        Finding::error(
            "relay_no_answer",
            about.clone(),
            format!("the relay {} did not answer the request for a way to it", text(&hop["relay"])),
            "There relay.am_relay must be true, and it needs a tunnel with the peer. `nebula ctl doctor` on the relay \
             shows requests that it refused.",
        )
    })
    .collect()
}

/// Nothing came back, and no other finding explains why.
fn silence(peer: &Value) -> Finding {
    let (about, known) = (text(&peer["peer"]), &peer["known"]);
    let endpoints = list(&peer["endpoints"]);
    if !endpoints.is_empty() {
        let at: Vec<_> = endpoints.iter().map(|endpoint| text(&endpoint["endpoint"])).collect();
        let sent: u64 = list(&peer["attempt"]["tried"]).iter().filter_map(|tried| tried["sent"].as_u64()).sum();
        let sent = if sent > 0 { format!(" ({sent} messages sent)") } else { String::new() };
        return Finding::error(
            "no_answer",
            about,
            format!("nothing comes back from {}{sent}", at.join(", ")),
            "UDP is blocked on the way (cloud security group, firewall, NAT), the host is down, or it refuses this \
             host's certificate. `nebula ctl doctor` there, or `tcpdump udp port PORT`, shows whether anything \
             arrives.",
        );
    }
    let lighthouses = list(&known["lighthouses"]);
    if lighthouses.is_empty() {
        let cause = "nobody says where it is: static_host_map has no entry for it, and there is no lighthouse to ask";
        let advice = "Add it to static_host_map, or configure lighthouse.hosts.";
        return Finding::error("no_endpoint", about, cause, advice);
    }
    let named = |which: &dyn Fn(&Value) -> bool| -> Vec<String> {
        lighthouses.iter().filter(|it| which(it)).map(|it| text(&it["lighthouse"])).collect()
    };
    let (alive, connected) = (named(&|it| it["alive"] == true), named(&|it| it["connected"] == true));
    if !alive.is_empty() {
        let answered = lighthouses.iter().any(|it| it["answered"] == true);
        let cause = if answered {
            format!("the lighthouse {} knows it, and no endpoint of it that this host may use", alive.join(", "))
        } else {
            format!("the lighthouse {} answers, and does not know it", alive.join(", "))
        };
        let advice = "The peer is not connected to that lighthouse: is it running, and does `nebula ctl status` there \
                      show the lighthouse as connected? Check the address, too.";
        return Finding::error("unknown_to_lighthouse", about, cause, advice);
    }
    let which: Vec<_> = lighthouses.iter().map(|it| text(&it["lighthouse"])).collect();
    let cause = if connected.is_empty() {
        format!("nobody says where it is: there is no tunnel with the lighthouse {}", which.join(", "))
    } else {
        format!("nobody says where it is: the lighthouse {} does not answer", connected.join(", "))
    };
    let first = which.first().map(String::as_str).unwrap_or_default();
    Finding::error("lighthouse_silent", about, cause, &format!("`nebula ctl why {first}` says why."))
}

/// Hosts whose handshakes this one refuses; if `peer` is given, only those that may be that peer.
pub(super) fn callers(facts: &Value, peer: Option<&Value>) -> Vec<Finding> {
    let may_be = |caller: &&Value| {
        let Some(peer) = peer else { return true };
        let endpoints = list(&peer["endpoints"]).iter().map(|endpoint| ip(&text(&endpoint["endpoint"])));
        list(&caller["addresses"]).contains(&peer["peer"])
            || endpoints.into_iter().any(|at| at == ip(&text(&caller["from"])))
    };
    // Anybody can send unreadable messages, so only those with a name count.
    let named = |caller: &&Value| peer.is_some() || !caller["name"].is_null();
    let recent = |caller: &&Value| caller["seconds_ago"].as_u64().is_some_and(|ago| ago < RECENT_SECONDS);
    let callers = list(&facts["callers"]).iter().filter(recent).filter(named).filter(may_be);
    callers
        .map(|caller| {
            let claimed = texts(&caller["addresses"]).join(" ");
            let about = match caller["name"].as_str() {
                Some(name) => format!("a caller that says it is {name} ({claimed})"),
                None => format!("a caller at {}", text(&caller["from"])),
            };
            let finding = refused(&about, caller);
            // The claimed identity is not proven.
            if peer.is_some() { finding } else { Finding { severity: Severity::Warning, ..finding } }
        })
        .collect()
}

pub(super) fn doubles(facts: &Value, peer: Option<&Value>) -> Vec<Finding> {
    let of_peer = |double: &&Value| peer.is_none_or(|peer| peer["peer"] == double["peer"]);
    let doubles = list(&facts["doubles"]).iter().filter(of_peer);
    doubles
        .map(|double| {
            let cause =
                format!("two hosts take turns in this address, at {}", texts(&double["endpoints"]).join(" and "));
            let advice = "Sign a new certificate with an address of its own for one of them.";
            Finding::error("duplicate_address", text(&double["peer"]), cause, advice)
        })
        .collect()
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

pub(super) fn unsafe_routes(facts: &Value) -> Vec<Finding> {
    let mut found = Vec::new();
    for route in list(&facts["unsafe_routes"]) {
        let network = text(&route["network"]);
        for gateway in list(&route["gateways"]).iter().filter(|gateway| gateway["state"] == "dead") {
            let address = text(&gateway["address"]);
            found.push(Finding::warning(
                "gateway_dead",
                format!("the network {network}"),
                format!("its gateway {address} does not answer; flows take the other gateways"),
                &format!("`nebula ctl why {address}` says whether it can be reached."),
            ));
        }
        for gateway in list(&route["gateways"]).iter().filter(|gateway| gateway["covered"] == false) {
            let (address, name) = (text(&gateway["address"]), text(&gateway["name"]));
            found.push(Finding::error(
                "unsafe_route_not_covered",
                format!("the network {network}"),
                format!("the certificate of its gateway {name} ({address}) does not have it, so packets are dropped"),
                &format!("Sign the gateway's certificate with `-unsafe-networks {network}`."),
            ));
        }
    }
    found
}

pub(super) fn relays_refused(facts: &Value) -> Vec<Finding> {
    let refused = list(&facts["relays_refused"]).iter();
    let refused = refused.filter(|it| it["seconds_ago"].as_u64().is_some_and(|ago| ago < RECENT_SECONDS));
    refused
        .map(|refused| {
            let (from, to) = (text(&refused["from"]), text(&refused["to"]));
            let (cause, advice) = if refused["am_relay"] == true {
                (
                    "it asked this relay for a way to a peer that this relay has no direct tunnel with",
                    "See why with `nebula ctl why` for that peer.",
                )
            } else {
                (
                    "it asked this host to relay, which it does not do",
                    "Set relay.am_relay to true here, or remove this host from relay.relays of the peer.",
                )
            };
            Finding::warning("relay_refused", format!("{from} to {to}"), cause, advice)
        })
        .collect()
}

/// The address of an endpoint.
fn ip(endpoint: &str) -> Option<std::net::IpAddr> {
    endpoint.parse::<std::net::SocketAddr>().ok().map(|at| at.ip())
}

// An older problem may have been solved.
const RECENT_SECONDS: u64 = 600;
