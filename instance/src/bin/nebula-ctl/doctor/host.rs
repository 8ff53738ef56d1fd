//! Finds problems of this host itself: certificate, clock, device, routes, lighthouses, configuration.

use serde_json::Value;

use super::{Finding, list, span, text, texts};

const HERE: &str = "this host";

/// Whether this alone makes every peer refuse this host.
pub(super) fn bars(finding: &Finding) -> bool {
    let codes =
        ["certificate_revoked", "certificate_expired", "certificate_not_yet_valid", "ca_expired", "ca_not_yet_valid"];
    codes.contains(&finding.code)
}

pub(super) fn findings(facts: &Value) -> Vec<Finding> {
    let host = &facts["host"];
    let mut found = Vec::new();
    found.extend(certificate(&host["certificate"], facts));
    found.extend(renewal(&facts["enrolment"]));
    found.extend(list(&host["cas"]).iter().filter(|ca| ca["own"] == true).filter_map(ca));
    found.extend(clock(facts));
    found.extend(device(host));
    found.extend(list(&host["routes"]).iter().filter_map(|route| kernel_route(route, host)));
    found.extend(list(&host["routes_replaced"]).iter().map(|replaced| replaced_route(replaced, host)));
    found.extend(lighthouses(host));
    found.extend(names(&host["names"]));
    found.extend(relays(host));
    found.extend(list(&facts["paths"]).iter().filter_map(|path| path_mtu(path, host)));
    found
}

/// What the configuration asks for and the daemon does not do now.
pub(super) fn unmet(facts: &Value) -> Vec<Finding> {
    let mut found = listeners(facts);
    let waiting = texts(&facts["at_next_start"]);
    if !waiting.is_empty() {
        found.push(Finding::warning(
            "at_next_start",
            HERE,
            format!("the configuration changed settings that only a start takes over: {}", waiting.join(", ")),
            "Restart nebula. Until then the values before are in force.",
        ));
    }
    if let Some(refused) = facts["full_flow_table"]["refused"].as_u64() {
        let ago = text(&facts["full_flow_table"]["seconds_ago"]);
        found.push(Finding::error(
            "full_flow_table",
            HERE,
            format!("the flow table is full of live flows: {refused} packets of new flows were refused, the last {ago} s ago"),
            "Raise firewall.conntrack.max_flows, or lower its time-outs, and run `nebula ctl reload`. `nebula ctl peers` shows who has \
             tunnels.",
        ));
    }
    found
}

/// What the configuration asks to listen, and does not.
fn listeners(facts: &Value) -> Vec<Finding> {
    let missing = list(&facts["missing_listeners"]).iter();
    missing
        .map(|missing| {
            let span = span(missing["for_seconds"].as_i64().unwrap_or(0));
            let cause = format!("nobody has listened there for {span}: {}", text(&missing["error"]));
            let advice = "It is tried again by itself. If another program has the port, `ss -lntup` names it; if the address is not there \
                          yet, `ip address` shows when it is.";
            Finding::error("not_listening", text(&missing["section"]), cause, advice)
        })
        .collect()
}

pub(super) fn configuration(facts: &Value) -> Vec<Finding> {
    let told = &facts["configuration"];
    let refused = texts(&told["refused"]).into_iter().map(|line| {
        Finding::error(
            "configuration_refused",
            "the configuration on disk",
            line,
            "A reload or restart would fail. Correct it, and try `nebula -test -config PATH`.",
        )
    });
    let remarks = texts(&told["remarks"])
        .into_iter()
        .map(|line| Finding::warning("configuration_remark", "the configuration on disk", line, ""));
    let reload = told["last_reload"]["error"].as_str().map(reload_refused);
    let nothing_refused = list(&told["refused"]).is_empty();
    refused.chain(remarks).chain(reload.filter(|_| nothing_refused)).collect()
}

pub(super) fn of_status(status: &Value) -> Vec<Finding> {
    let mut found = Vec::new();
    let validity = serde_json::json!({
        "seconds_left": status["certificate_seconds_left"],
        "begins_in_seconds": status["certificate_begins_in_seconds"],
    });
    found.extend(certificate(&validity, &serde_json::json!({"enrolment": status["enrolment"]})));
    found.extend(renewal(&status["enrolment"]));
    found.extend(unmet(status));
    found.extend(status["last_reload"]["error"].as_str().map(reload_refused));
    if status["device_up"] == false {
        found.push(device_down(&text(&status["device"])));
    }
    let lighthouses = list(&status["lighthouses"]);
    let needs_them = status["am_lighthouse"] != true && !lighthouses.is_empty();
    if needs_them && lighthouses.iter().all(|lighthouse| lighthouse["connected"] == false) {
        let all: Vec<_> = lighthouses.iter().map(|lighthouse| text(&lighthouse["address"])).collect();
        found.push(all_unreachable(&all));
    }
    found
}

/// The relays that this host may choose.
fn relays(host: &Value) -> Vec<Finding> {
    let groups = texts(&host["relay_groups"]);
    let mut found = Vec::new();
    if host["relay_force"] == true {
        found.push(Finding::warning(
            "relay_forced",
            HERE,
            "relay.force is set, so no peer is reached directly",
            "It is for tests. Remove it and reload.",
        ));
    }
    if groups.is_empty() || host["am_relay"] == true || host["am_lighthouse"] == true {
        return found;
    }
    let relays = list(&host["relays"]);
    if relays.is_empty() {
        found.push(Finding::error(
            "no_relay_offered",
            HERE,
            format!("relay.groups is {}, and no lighthouse offers a relay", groups.join(", ")),
            "Set relay.groups on the lighthouses, too (Go Nebula offers none), and relay.am_relay on hosts with the group that \
             have a direct tunnel to a lighthouse.",
        ));
        return found;
    }
    let with = |trouble: &str| -> Vec<String> {
        relays.iter().filter(|relay| relay["trouble"] == trouble).map(|relay| text(&relay["relay"])).collect()
    };
    let strangers = with("not_member");
    if !strangers.is_empty() {
        found.push(Finding::warning(
            "relay_without_group",
            HERE,
            format!("{} offered as relay, without a group of relay.groups in the certificate", strangers.join(", ")),
            "relay.groups of the lighthouses and of this host differ; or a lighthouse is not to be trusted.",
        ));
    }
    let refuse = with("refuses");
    if !refuse.is_empty() {
        found.push(Finding::warning(
            "offered_relay_refuses",
            HERE,
            format!("{} has the group of relays and does not answer requests for a hop", refuse.join(", ")),
            "Set relay.am_relay to true there, or issue its certificate without the group.",
        ));
    }
    if relays.iter().all(|relay| relay["chosen"] == false && relay["tried"] == false) {
        found.push(Finding::error(
            "no_relay_chosen",
            HERE,
            format!("none of the {} relays that lighthouses offer can be used", relays.len()),
            "`nebula ctl status` says why for each of them.",
        ));
    }
    found
}

fn reload_refused(error: &str) -> Finding {
    Finding::error(
        "reload_refused",
        "the last reload",
        format!("was refused, the configuration before is in force: {error}"),
        "Correct it and run `nebula ctl reload`.",
    )
}

fn certificate(certificate: &Value, facts: &Value) -> Option<Finding> {
    let left = certificate["seconds_left"].as_i64()?;
    let begins = certificate["begins_in_seconds"].as_i64().unwrap_or(0);
    let lifetime = certificate["lifetime_seconds"].as_i64().unwrap_or(i64::MAX);
    if begins > 0 {
        let clock = own_clock(facts).map_or_else(String::new, |behind| format!(", and {behind}"));
        return Some(Finding::error(
            "certificate_not_yet_valid",
            HERE,
            format!("its certificate becomes valid in {}{clock}", span(begins)),
            "Check the clock (`timedatectl`) of this host, and of the one that signed the certificate.",
        ));
    }
    let advice = if facts["enrolment"].is_object() {
        "It is renewed by itself, also for a while after its end (hosts.renewal_grace of the CA's policy). If it should be valid, check \
         the clock."
    } else {
        "Sign a new one, replace pki.cert and run `nebula ctl reload`. If it should be valid, check the clock."
    };
    if left <= 0 {
        return Some(Finding::error(
            "certificate_expired",
            HERE,
            format!("its certificate expired {} ago, so every peer refuses it", span(left)),
            advice,
        ));
    }
    let soon = left < (lifetime / 4).min(30 * 86_400);
    (soon && lifetime != i64::MAX).then(|| {
        Finding::warning("certificate_expires_soon", HERE, format!("its certificate expires in {}", span(left)), advice)
    })
}

/// An enrolled host that cannot renew its certificate.
fn renewal(enrolment: &Value) -> Option<Finding> {
    let failing = enrolment["failing_seconds"].as_i64()?;
    if enrolment["code"] == "certificate_revoked" {
        let cause = format!("the CA has revoked its certificate, so peers refuse it: {}", text(&enrolment["error"]));
        let advice = "If it may come back, make a token for its name at the CA (`nebula-ca token create`), and give that to `nebula up` here.";
        return Some(Finding::error("certificate_revoked", HERE, cause, advice));
    }
    let cause = format!("its certificate could not be renewed for {}: {}", span(failing), text(&enrolment["error"]));
    let advice = match enrolment["code"].as_str() {
        Some("renewal_too_late" | "unknown_certificate") => {
            "It does not come back by itself: if it may, make a token for its name at the CA (`nebula-ca token create`), and give that \
             to `nebula up` here."
        }
        Some("clock_differs") => "Set the clock (`timedatectl`) of this host, or of the CA.",
        Some(_) => "It is tried again by itself. The CA's log and its audit.log say more about what it refuses.",
        None => {
            "It is tried again by itself. See whether the CA runs (`nebula-ca serve`), and whether this host reaches it: the address is in \
             the log, and in the enrolment's folder."
        }
    };
    Some(Finding::error("not_renewed", HERE, cause, advice))
}

fn ca(ca: &Value) -> Option<Finding> {
    let left = ca["seconds_left"].as_i64()?;
    let name = format!("the CA {}", text(&ca["name"]));
    let advice = "Make a new CA, add it to pki.ca of every host, then sign every host's certificate with it.";
    if ca["begins_in_seconds"].as_i64().unwrap_or(0) > 0 {
        let cause = "its certificate is not valid yet, by the clock of this host";
        return Some(Finding::error("ca_not_yet_valid", name, cause, "Check the clock (`timedatectl`)."));
    }
    match left {
        ..=0 => {
            let cause = format!("its certificate expired {} ago, and with it those that it signed", span(left));
            Some(Finding::error("ca_expired", name, cause, advice))
        }
        1..CA_SOON_SECONDS => {
            let cause = format!("its certificate expires in {}", span(left));
            Some(Finding::warning("ca_expires_soon", name, cause, advice))
        }
        _ => None,
    }
}

/// Finds out whose clock is wrong, from the times that peers sent in their handshakes.
fn clock(facts: &Value) -> Vec<Finding> {
    let mut found: Vec<_> = own_clock(facts)
        .map(|cause| {
            let advice = "Set the clock (`timedatectl`, chrony or ntpd): certificates are judged by it.";
            Finding::error("clock_wrong", HERE, cause, advice)
        })
        .into_iter()
        .collect();
    if found.is_empty() {
        let wrong = list(&facts["clocks"]).iter().filter(|clock| is_off(ahead(clock)));
        found.extend(wrong.take(3).map(|clock| {
            Finding::warning(
                "peer_clock_wrong",
                text(&clock["peer"]),
                format!("its clock differs from that of this host by {}", span(ahead(clock))),
                "Set the clock there: certificates are judged by it.",
            )
        }));
    }
    let step = &facts["host"]["clock_step"];
    let by = step["by_ms"].as_i64().unwrap_or(0) / 1000;
    if by.abs() >= 5 && step["seconds_ago"].as_i64().is_some_and(|ago| ago < 3600) {
        let way = if by < 0 { "back" } else { "forward" };
        let cause = format!("its clock jumped {way} by {} {} s ago", span(by), text(&step["seconds_ago"]));
        found.push(Finding::warning(
            "clock_jumped",
            HERE,
            cause,
            "The host slept, or something sets its clock: two time services may fight.",
        ));
    }
    found
}

/// Judges this host's clock by the median of the lighthouses' clocks or, without lighthouses, of those of at least
/// three peers.
fn own_clock(facts: &Value) -> Option<String> {
    let clocks = list(&facts["clocks"]);
    let (of_lighthouses, of_peers): (Vec<_>, Vec<_>) = clocks.iter().partition(|clock| clock["lighthouse"] == true);
    let judges = if of_lighthouses.is_empty() && of_peers.len() >= 3 { of_peers } else { of_lighthouses };
    let mut ahead: Vec<_> = judges.into_iter().map(ahead).collect();
    ahead.sort_unstable();
    let median = *ahead.get(ahead.len() / 2)?;
    let way = if median > 0 { "behind" } else { "ahead of" };
    is_off(median).then(|| format!("its clock is {} {way} those of its lighthouses and peers", span(median)))
}

fn ahead(clock: &Value) -> i64 {
    clock["ahead_ms"].as_i64().unwrap_or(0) / 1000
}

fn is_off(seconds: i64) -> bool {
    seconds.abs() >= CLOCK_SECONDS
}

fn device_down(name: &str) -> Finding {
    let advice = format!("`ip link set {name} up`, or restart nebula. Find out who took it down.");
    Finding::error("device_down", format!("the device {name}"), "it is down", &advice)
}

fn device(host: &Value) -> Vec<Finding> {
    let (link, name) = (&host["link"], text(&host["device"]));
    let about = format!("the device {name}");
    if link["present"] == false {
        let cause = "it does not exist any more";
        return vec![Finding::error("device_missing", about, cause, "Restart nebula. Find out who removed it.")];
    }
    if link["present"] != true {
        return Vec::new();
    }
    let mut found = Vec::new();
    if link["up"] == false {
        found.push(device_down(&name));
    }
    let has = texts(&link["addresses"]);
    let is_off = |network: &str| link["ipv6_off"] == true && network.contains(':');
    let networks = texts(&host["networks"]);
    if let Some(network) = networks.iter().find(|network| is_off(network)) {
        let cause = format!("the kernel has no IPv6 on it, so it goes without {network}");
        let advice = format!(
            "`sysctl -w net.ipv6.conf.{name}.disable_ipv6=0` and restart nebula; without the module ipv6 only IPv4 is left."
        );
        found.push(Finding::warning("ipv6_off", about.clone(), cause, &advice));
    }
    for network in networks.into_iter().filter(|network| !is_off(network)) {
        let address = network.split('/').next().unwrap_or_default().to_owned();
        if !has.contains(&address) {
            let advice = format!("`ip address add {network} dev {name}`, or restart nebula. Find out who removed it.");
            let cause = format!("it does not have the overlay address {address}");
            found.push(Finding::error("address_missing", about.clone(), cause, &advice));
        }
    }
    let (wanted, mtu) = (host["mtu"]["device"].as_i64(), link["mtu"].as_i64());
    if let (Some(wanted), Some(mtu)) = (wanted, mtu)
        && wanted != mtu
    {
        let cause = format!("its MTU is {mtu}, and the configuration (tun.mtu) says {wanted}");
        let advice = "Somebody changed it. Restart nebula, or change tun.mtu.";
        found.push(Finding::warning("mtu_differs", about, cause, advice));
    }
    found
}

fn kernel_route(route: &Value, host: &Value) -> Option<Finding> {
    let is_v6 = text(&route["network"]).contains(':');
    if route["to_overlay"] == true || is_v6 && host["link"]["ipv6_off"] == true {
        return None;
    }
    let (network, device) = (text(&route["network"]), text(&host["device"]));
    let about = format!("the network {network}");
    let advice = format!(
        "`ip route add {network} dev {device}`, or restart nebula. `ip route get` shows which interface has it."
    );
    Some(match route["device"].as_str() {
        Some(other) => {
            let cause = format!("the kernel sends it by {other} and not into the overlay ({device})");
            Finding::error("route_elsewhere", about, cause, &advice)
        }
        None => {
            let cause = format!("the kernel has no route to it: {}", text(&route["text"]));
            Finding::error("route_missing", about, cause, &advice)
        }
    })
}

fn replaced_route(replaced: &Value, host: &Value) -> Finding {
    let (route, network) = (text(&replaced["route"]), text(&replaced["network"]));
    let about = format!("the network {network} of {}", text(&replaced["interface"]));
    let cause = format!(
        "tun.unsafe_routes leads {route} into the overlay ({}), so the machines on that link are not reached directly",
        text(&host["device"])
    );
    let advice = "On hosts of that network take the route out of tun.unsafe_routes, or give it `install: false`; then restart \
                  nebula, and bring the link's own route back (`ip route`).";
    Finding::warning("lan_replaced", about, cause, advice)
}

fn lighthouses(host: &Value) -> Vec<Finding> {
    let lighthouses = list(&host["lighthouses"]);
    let am_lighthouse = host["am_lighthouse"] == true;
    if lighthouses.is_empty() {
        let cause = "no lighthouse is configured: only hosts in static_host_map can be found";
        let advice = "Name the lighthouse in lighthouse.hosts, and its address and port in static_host_map.";
        return if am_lighthouse { Vec::new() } else { vec![Finding::warning("no_lighthouse", HERE, cause, advice)] };
    }
    if am_lighthouse {
        let cause =
            "it is a lighthouse (lighthouse.am_lighthouse) and has lighthouse.hosts, which a lighthouse ignores";
        let advice = "Make lighthouse.hosts empty, or set am_lighthouse to false.";
        return vec![Finding::warning("lighthouse_with_hosts", HERE, cause, advice)];
    }
    let mut found = Vec::new();
    for lighthouse in lighthouses {
        let about = format!("the lighthouse {}", text(&lighthouse["address"]));
        if lighthouse["own_address"] == true {
            let advice = "Remove it from lighthouse.hosts, or give this host its own certificate.";
            found.push(Finding::error("lighthouse_is_self", about, "it has the address of this host", advice));
        } else if lighthouse["connected"] != true && list(&lighthouse["endpoints"]).is_empty() {
            let configured = lighthouse["configured"] == true;
            found.push(if configured {
                let cause = "its static_host_map entry leads to no address: the name cannot be looked up, or the \
                             address is not allowed";
                let advice = "Look the name up here (`getent hosts NAME`), and see static_map.network and \
                              lighthouse.remote_allow_list.";
                Finding::error("lighthouse_name_unresolved", about, cause, advice)
            } else {
                let advice = "Add its public address and UDP port to static_host_map.";
                Finding::error("lighthouse_not_mapped", about, "it has no entry in static_host_map", advice)
            });
        }
    }
    let lost: Vec<_> = lighthouses.iter().filter(|it| it["connected"] != true).map(|it| text(&it["address"])).collect();
    if lost.len() == lighthouses.len() {
        found.push(all_unreachable(&lost));
    } else {
        found.extend(lost.iter().map(|address| {
            let advice = format!("`nebula ctl why {address}` says why.");
            let about = format!("the lighthouse {address}");
            Finding::warning("lighthouse_unreachable", about, "there is no tunnel with it", &advice)
        }));
    }
    found
}

fn all_unreachable(addresses: &[String]) -> Finding {
    let first = addresses.first().map(String::as_str).unwrap_or_default();
    Finding::error(
        "all_lighthouses_unreachable",
        format!("the lighthouse {}", addresses.join(", ")),
        "there is no tunnel with any lighthouse: this host finds nobody and nobody finds it",
        &format!("`nebula ctl why {first}` says why."),
    )
}

fn names(names: &Value) -> Option<Finding> {
    let error = names["error"].as_str()?;
    let (domain, server) = (text(&names["domain"]), text(&names["server"]));
    let about = format!("the names of {domain}");
    let cause = format!("programs of this host do not resolve them, because no resolver could be told: {error}");
    let advice = format!(
        "Install systemd-resolved, or dnsmasq with openresolv, and restart nebula. Or forward the domain to {server} in the resolver \
         that this host has, and set resolver.register to false."
    );
    Some(Finding::warning("names_not_registered", about, cause, &advice))
}

fn path_mtu(path: &Value, host: &Value) -> Option<Finding> {
    let (mtu, overhead) = (path["mtu"].as_i64()?, path["overhead"].as_i64()?);
    let wanted = host["mtu"]["tun"].as_i64()?;
    // The host finds out by itself, and says so to who sends what is too large.
    let is_found = host["mtu"]["discovery"] == true;
    (wanted + overhead > mtu && path["local"] != true && !is_found).then(|| {
        let cause = format!(
            "packets of tun.mtu {wanted} become datagrams of {}, and the way to {} ({}) carries {mtu}: large packets \
             are cut or lost",
            wanted + overhead,
            text(&path["endpoint"]),
            text(&path["device"]),
        );
        let advice =
            format!("Set tun.mtu to {} or less on both hosts, or tun.path_mtu_discovery to true.", mtu - overhead);
        Finding::warning("path_mtu", text(&path["peer"]), cause, &advice)
    })
}

// A handshake message may be some seconds old when it arrives.
const CLOCK_SECONDS: i64 = 30;
const CA_SOON_SECONDS: i64 = 60 * 86_400;
