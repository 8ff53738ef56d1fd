//! Why a peer cannot be reached, or cannot reach this host.

use nebula_instance::host::documents::{Endpoint, Facts, Found, LighthouseAnswer, PeerFacts, Refusal, Tried};

use super::callers::{answers_lost, answers_not_taken};
use super::conflicts::own_addresses;
use super::refusals::{recent_callers, refused, refused_call, unnamed_callers};
use super::{Finding, Severity, is_recent, known};

/// What is wrong with one peer of `facts`. If this host `is_barred`, every peer refuses it, and no further cause of a
/// silence is looked for.
pub(super) fn findings(facts: &Facts, peer: &PeerFacts, is_barred: bool) -> Vec<Finding> {
    let about = &peer.peer;
    if peer.own_address {
        let cause = "it is an address of this host itself";
        let advice = "If it should be another host, both have the same address: sign a new certificate for one.";
        let mut found = refused_caller(facts, peer);
        found.extend(own_addresses(facts).into_iter().filter(|it| it.about == *about));
        found.push(Finding::error("peer_is_self", about, cause, advice));
        return found;
    }
    if !peer.in_overlay && peer.gateways.is_empty() {
        let cause = format!(
            "it is in no network of this host's certificate ({}), and no tun.unsafe_routes entry leads there",
            facts.host.networks.join(" ")
        );
        let advice = "Check the address. Hosts reach each other only within the networks of their certificates.";
        return vec![Finding::error("not_in_overlay", about, cause, advice)];
    }
    if !peer.in_overlay {
        let advice =
            format!("`nebula ctl why {}` says whether the gateway can be reached.", peer.gateways.join(" or "));
        let named = peer.gateways.iter().map(|gateway| match peer.gateway_states.get(gateway) {
            Some(state) => format!("{gateway} ({state})"),
            None => gateway.clone(),
        });
        let cause = format!("it is behind {} (tun.unsafe_routes)", named.collect::<Vec<_>>().join(", "));
        return vec![Finding::warning("behind_gateway", about, cause, &advice)];
    }
    let mut found: Vec<_> = kernel_route(facts, peer).into_iter().collect();
    if !peer.connected && !is_barred {
        found.extend(cause(facts, peer));
    }
    found
}

/// The cause of the silence. The strongest evidence comes first; what is weaker mostly follows from the same cause,
/// and is not said as another one.
fn cause(facts: &Facts, peer: &PeerFacts) -> Vec<Finding> {
    let looks: [fn(&Facts, &PeerFacts) -> Vec<Finding>; 10] = [
        refused_answer,
        other_cipher,
        long_messages_lost,
        refused_caller,
        own_address_at_an_endpoint,
        answers_not_taken,
        heard_at_an_endpoint,
        no_usable_endpoint,
        answers_lost,
        relays,
    ];
    let found = looks.iter().map(|look| look(facts, peer)).find(|found| !found.is_empty());
    found.unwrap_or_else(|| silence(facts, peer))
}

fn kernel_route(facts: &Facts, peer: &PeerFacts) -> Option<Finding> {
    let route = peer.kernel_route.as_ref().filter(|route| !route.to_overlay)?;
    let cause = match &route.device {
        Some(other) => {
            let device = &facts.host.device;
            format!("the kernel sends packets for it by {other} and not into the overlay ({device})")
        }
        None => format!("the kernel has no route to it: {}", known(&route.text)),
    };
    let advice = "`ip route get` shows the route; remove it, or restart nebula if its own is gone.";
    Some(Finding::error("route_elsewhere", &peer.peer, cause, advice))
}

/// The peer answered, and this host refused the answer.
fn refused_answer(_: &Facts, peer: &PeerFacts) -> Vec<Finding> {
    let refusal = peer.attempt.iter().filter_map(|attempt| attempt.refusal.as_ref());
    refusal.map(|refusal| refused(&peer.peer, refusal)).collect()
}

fn other_cipher(_: &Facts, peer: &PeerFacts) -> Vec<Finding> {
    let unopened = tried(peer).filter(|tried| tried.unopened > 0);
    unopened
        .map(|tried| {
            let at = &tried.endpoint;
            let cause = format!("it answered from {at}, and the answer cannot be opened: its `cipher` is another one");
            let advice = "Set the same `cipher` (aes or chachapoly) on every host of the network, and restart them.";
            Finding::error("other_cipher", &peer.peer, cause, advice)
        })
        .collect()
}

/// The peer answered the first message, and not the long one that follows.
fn long_messages_lost(_: &Facts, peer: &PeerFacts) -> Vec<Finding> {
    let unanswered = tried(peer).filter(|tried| tried.offers > 0);
    unanswered
        .map(|tried| {
            let at = &tried.endpoint;
            let cause = format!(
                "it answered from {at}, but not the message with the ML-KEM key, a datagram of 1,216 bytes: the path loses \
                 it, or the answer of 1,120 bytes"
            );
            let advice = "Let the path carry IP packets of 1,280 bytes and their fragments; `pki.post_quantum: off` on one \
                          of the two hosts does without the exchange.";
            Finding::error("long_messages_lost", &peer.peer, cause, advice)
        })
        .collect()
}

/// The endpoints to which messages were sent.
fn tried(peer: &PeerFacts) -> impl Iterator<Item = &Tried> {
    peer.attempt.iter().flat_map(|attempt| &attempt.tried)
}

/// A caller in the peer's name that this host refused: what the peer does not hear from this host has the same cause.
fn refused_caller(facts: &Facts, peer: &PeerFacts) -> Vec<Finding> {
    let callers = recent_callers(facts).filter(|caller| caller.addresses.contains(&peer.peer));
    callers.map(|caller| refused_call(caller, Severity::Error)).collect()
}

/// A host with an address of this one called from where the peer should be: it does not answer this host either.
fn own_address_at_an_endpoint(facts: &Facts, peer: &PeerFacts) -> Vec<Finding> {
    let is_there = |caller: &&Refusal| {
        caller.reason == "own_address" && peer.endpoints.iter().any(|endpoint| endpoint.endpoint == caller.from)
    };
    recent_callers(facts).filter(is_there).map(|caller| refused_call(caller, Severity::Error)).collect()
}

/// A Nebula was heard at an endpoint of the peer, if not the handshake of the peer.
fn heard_at_an_endpoint(facts: &Facts, peer: &PeerFacts) -> Vec<Finding> {
    let about = &peer.peer;
    if let Some(at) = peer.endpoints_found(Found::Nebula).next() {
        return vec![Finding::error(
            "refused_by_peer",
            about,
            format!("a Nebula answers at {at}, and does not answer the handshake of this host"),
            "UDP passes in both directions, so the cause is there, and not known here. These are possible: it does not trust the CA of \
             this host, blocks its certificate, finds it expired by its clock, has another curve or the address of this host, its \
             remote_allow_list excludes this host, or it is not that peer. Its log and `nebula ctl doctor` there say which.",
        )];
    }
    let other = peer.endpoints_found(Found::NebulaToOtherPort).next();
    other
        .map(|at| {
            let port = facts.host.udp.rsplit(':').next().unwrap_or_default();
            let cause = format!("a Nebula answers at {at} if asked from another port of this host, and nothing comes back to port {port}");
            let advice = "UDP with that port is blocked in one direction (cloud security group, firewall, or a mapping that a NAT keeps): \
                          allow it in both, on the way and on the peer.";
            Finding::error("port_blocked", about, cause, advice)
        })
        .into_iter()
        .collect()
}

/// Nothing can be sent to any endpoint of the peer, or nothing listens there.
fn no_usable_endpoint(_: &Facts, peer: &PeerFacts) -> Vec<Finding> {
    let unusable = unusable_endpoints(peer);
    let are_all = unusable.len() == peer.endpoints.len();
    if are_all { unusable.into_iter().map(|(_, finding)| finding).collect() } else { Vec::new() }
}

/// The endpoints that certainly lead nowhere, and why.
fn unusable_endpoints(peer: &PeerFacts) -> Vec<(&str, Finding)> {
    let unusable = peer.endpoints.iter().filter_map(|endpoint| {
        let at = endpoint.endpoint.as_str();
        let errno = || tried(peer).find(|tried| tried.endpoint == at)?.errno.as_deref();
        let why = underlay(&peer.peer, endpoint).or_else(|| Some(send_error(&peer.peer, at, errno()?)));
        Some((at, why?))
    });
    unusable.collect()
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
fn underlay(about: &str, endpoint: &Endpoint) -> Option<Finding> {
    let at = &endpoint.endpoint;
    if endpoint.inside_overlay {
        let cause = format!("its endpoint {at} is itself an overlay address, and tunnels do not run inside tunnels");
        let advice = "static_host_map, or the peer's advertise_addrs, must have an address of the underlay. The \
                      lighthouse's local_allow_list can hide the other.";
        return Some(Finding::error("endpoint_inside_overlay", about, cause, advice));
    }
    if endpoint.route.to_overlay {
        let cause = format!("the route to its endpoint {at} leads into the overlay itself");
        let advice = "An unsafe route or a default route by the overlay covers it: add a route by the uplink, or use \
                      listen.so_mark with a rule.";
        return Some(Finding::error("underlay_through_overlay", about, cause, advice));
    }
    if let Some(errno) = &endpoint.route.errno {
        return Some(send_error(about, at, errno));
    }
    let refused = endpoint.probe.as_ref().filter(|probe| probe.found == Found::Refused)?;
    Some(send_error(about, at, refused.errno.as_deref().unwrap_or_default()))
}

fn relays(facts: &Facts, peer: &PeerFacts) -> Vec<Finding> {
    let (about, relays) = (&peer.peer, &peer.known.relays);
    let Some(first) = relays.first() else { return Vec::new() };
    if facts.host.use_relays == Some(false) {
        let cause = format!("it can be reached through {}, and this host uses no relays", relays.join(", "));
        return vec![Finding::error("relays_not_used", about, cause, "Set relay.use_relays to true and reload.")];
    }
    if !peer.relay_states.is_empty() && peer.relay_states.iter().all(|state| !state.connected) {
        let cause =
            format!("nothing comes back from it directly, and there is no tunnel with its relay {}", relays.join(", "));
        let advice = format!("`nebula ctl why {first}` says why the relay cannot be reached.");
        return vec![Finding::error("relay_unreachable", about, cause, &advice)];
    }
    let hops = peer.relay_hops.iter().filter(|hop| !hop.established);
    hops.map(|hop| {
        Finding::error(
            "relay_no_answer",
            about,
            format!("the relay {} did not answer the request for a way to it", hop.relay),
            "There relay.am_relay must be true, and it needs a tunnel with the peer. `nebula ctl doctor` on the relay \
             shows requests that it refused.",
        )
    })
    .collect()
}

/// Nothing came back, and nothing that this host saw explains why.
fn silence(facts: &Facts, peer: &PeerFacts) -> Vec<Finding> {
    let unnamed = unnamed_callers(facts, peer);
    if unnamed.is_empty() { vec![unexplained(peer)] } else { unnamed }
}

fn unexplained(peer: &PeerFacts) -> Finding {
    let (about, known) = (&peer.peer, &peer.known);
    if !peer.endpoints.is_empty() {
        let unusable = unusable_endpoints(peer);
        let is_usable = |at: &&str| !unusable.iter().any(|(known, _)| known == at);
        let at: Vec<_> = peer.endpoints.iter().map(|endpoint| endpoint.endpoint.as_str()).filter(is_usable).collect();
        let sent: u64 = tried(peer).map(|tried| u64::from(tried.sent)).sum();
        let sent = if sent > 0 { format!(" ({sent} messages sent)") } else { String::new() };
        let others: String = unusable.iter().map(|(_, finding)| format!("; {}", finding.cause)).collect();
        let nat = if known.relays.is_empty() { "a NAT lets nobody in and no relay is configured, " } else { "" };
        return Finding::error(
            "no_answer",
            about,
            format!("nothing comes back from {}{sent}{others}; the cause is not known here", at.join(", ")),
            &format!(
                "These are possible: UDP is blocked on the way, in one direction or both (cloud security group, firewall), {nat}the host or its \
                 nebula is down, or it refuses this host's certificate. `nebula ctl why` and `doctor` there, or `tcpdump udp port PORT`, \
                 show whether anything arrives."
            ),
        );
    }
    let relays = &known.relays;
    if !relays.is_empty() {
        // No probe goes through a relay, and what a relay answered may be old.
        let cause =
            format!("nothing comes back from it through the relay {}; the cause is not known here", relays.join(", "));
        let advice = "These are possible: it refuses this host's certificate, its relay lost it, or it or its nebula is down. `nebula ctl \
                      why` and `doctor` there and on the relay say more.";
        return Finding::error("no_answer", about, cause, advice);
    }
    let lighthouses = &known.lighthouses;
    if lighthouses.is_empty() {
        let cause = "nobody says where it is: static_host_map has no entry for it, and there is no lighthouse to ask";
        let advice = "Add it to static_host_map, or configure lighthouse.hosts.";
        return Finding::error("no_endpoint", about, cause, advice);
    }
    let name = |it: &LighthouseAnswer| it.lighthouse.clone();
    let alive: Vec<_> = lighthouses.iter().filter(|it| it.alive).map(name).collect();
    let connected: Vec<_> = lighthouses.iter().filter(|it| it.connected).map(name).collect();
    if !alive.is_empty() {
        let answered = lighthouses.iter().any(|it| it.answered);
        let cause = if answered {
            format!("the lighthouse {} knows it, and no endpoint of it that this host may use", alive.join(", "))
        } else {
            format!("the lighthouse {} answers, and does not know it", alive.join(", "))
        };
        let advice = "The peer is not connected to that lighthouse: is it running, and does `nebula ctl status` there \
                      show the lighthouse as connected? Check the address, too.";
        return Finding::error("unknown_to_lighthouse", about, cause, advice);
    }
    let which: Vec<_> = lighthouses.iter().map(name).collect();
    let cause = if connected.is_empty() {
        format!("nobody says where it is: there is no tunnel with the lighthouse {}", which.join(", "))
    } else {
        format!("nobody says where it is: the lighthouse {} does not answer", connected.join(", "))
    };
    let first = which.first().map(String::as_str).unwrap_or_default();
    Finding::error("lighthouse_silent", about, cause, &format!("`nebula ctl why {first}` says why."))
}

/// The first thing to say about each peer without a tunnel: the cause of the silence.
pub(super) fn first_causes(facts: &Facts, is_barred: bool) -> Vec<Finding> {
    let lost = facts.peers.iter().filter(|peer| !peer.connected);
    lost.filter_map(|peer| findings(facts, peer, is_barred).into_iter().next()).collect()
}

pub(super) fn unsafe_routes(facts: &Facts) -> Vec<Finding> {
    let mut found = Vec::new();
    for route in &facts.unsafe_routes {
        let network = &route.network;
        for gateway in route.gateways.iter().filter(|gateway| gateway.state.as_deref() == Some("dead")) {
            let address = &gateway.address;
            found.push(Finding::warning(
                "gateway_dead",
                format!("the network {network}"),
                format!("its gateway {address} does not answer; flows take the other gateways"),
                &format!("`nebula ctl why {address}` says whether it can be reached."),
            ));
        }
        for gateway in route.gateways.iter().filter(|gateway| gateway.covered == Some(false)) {
            let (address, name) = (&gateway.address, known(&gateway.name));
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

pub(super) fn relays_refused(facts: &Facts) -> Vec<Finding> {
    let refused = facts.relays_refused.iter().filter(|it| is_recent(it.seconds_ago));
    refused
        .map(|refused| {
            let (from, to) = (&refused.from, &refused.to);
            let (cause, advice) = if refused.am_relay {
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
