//! Finds problems of this host itself: certificate, clock, device, routes, lighthouses, configuration.

use nebula_enrolment::renewal_health::RenewalState;
use nebula_instance::host::documents::{
    Clock, Configuration, Facts, Host, Link, NetworkRoute, OfferedRelay, RegisteredNames, ReplacedRoute, Status,
    TrustedCa, UnderlayPath, Unmet, Validity,
};

use super::{Finding, known, span};

const HERE: &str = "this host";

/// Whether this alone makes every peer refuse this host.
pub(super) fn bars(finding: &Finding) -> bool {
    let codes =
        ["certificate_revoked", "certificate_expired", "certificate_not_yet_valid", "ca_expired", "ca_not_yet_valid"];
    codes.contains(&finding.code)
}

pub(super) fn findings(facts: &Facts) -> Vec<Finding> {
    let (host, enrolment) = (&facts.host, facts.unmet.enrolment.as_ref());
    let mut found = Vec::new();
    found.extend(host.certificate.as_ref().and_then(|it| certificate(it, enrolment.is_some(), &facts.clocks)));
    found.extend(enrolment.and_then(renewal));
    found.extend(host.cas.iter().filter(|ca| ca.own).filter_map(ca));
    found.extend(clock(facts));
    found.extend(host.link.as_ref().map(|link| device(link, host)).unwrap_or_default());
    found.extend(host.routes.iter().filter_map(|route| kernel_route(route, host)));
    found.extend(host.routes_replaced.iter().map(|replaced| replaced_route(replaced, host)));
    found.extend(lighthouses(host));
    found.extend(host.names.as_ref().and_then(names));
    found.extend(relays(host));
    found.extend(facts.paths.iter().filter_map(|path| path_mtu(path, host)));
    found
}

/// What the configuration asks for and the daemon does not do now.
pub(super) fn unmet(unmet: &Unmet) -> Vec<Finding> {
    let mut found = listeners(unmet);
    if !unmet.at_next_start.is_empty() {
        let waiting = unmet.at_next_start.join(", ");
        found.push(Finding::warning(
            "at_next_start",
            HERE,
            format!("the configuration changed settings that only a start takes over: {waiting}"),
            "Restart nebula. Until then the values before are in force.",
        ));
    }
    if let Some(table) = &unmet.full_flow_table {
        found.push(Finding::error(
            "full_flow_table",
            HERE,
            format!(
                "the flow table is full of live flows: {} packets of new flows were refused, the last {} s ago",
                table.refused, table.seconds_ago
            ),
            "Raise firewall.conntrack.max_flows, or lower its time-outs, and run `nebula ctl reload`. `nebula ctl peers` shows who has \
             tunnels.",
        ));
    }
    found
}

/// What the configuration asks to listen, and does not.
fn listeners(unmet: &Unmet) -> Vec<Finding> {
    let missing = unmet.missing_listeners.iter();
    missing
        .map(|missing| {
            let span = span(missing.for_seconds.try_into().unwrap_or(i64::MAX));
            let cause = format!("nobody has listened there for {span}: {}", missing.error);
            let advice = "It is tried again by itself. If another program has the port, `ss -lntup` names it; if the address is not there \
                          yet, `ip address` shows when it is.";
            Finding::error("not_listening", &missing.section, cause, advice)
        })
        .collect()
}

pub(super) fn configuration(told: &Configuration) -> Vec<Finding> {
    let refused = told.refused.iter().map(|line| {
        Finding::error(
            "configuration_refused",
            "the configuration on disk",
            line,
            "A reload or restart would fail. Correct it, and try `nebula -test -config PATH`.",
        )
    });
    let remarks =
        told.remarks.iter().map(|line| Finding::warning("configuration_remark", "the configuration on disk", line, ""));
    let reload = told.last_reload.iter().filter_map(|last| last.error.as_deref()).map(reload_refused);
    refused.chain(remarks).chain(reload.filter(|_| told.refused.is_empty())).collect()
}

pub(super) fn of_status(status: &Status) -> Vec<Finding> {
    let mut found = Vec::new();
    let enrolment = status.unmet.enrolment.as_ref();
    let validity = Validity {
        seconds_left: status.certificate_seconds_left,
        begins_in_seconds: status.certificate_begins_in_seconds.unwrap_or(0),
        ..Validity::default()
    };
    found.extend(certificate(&validity, enrolment.is_some(), &[]));
    found.extend(enrolment.and_then(renewal));
    found.extend(unmet(&status.unmet));
    found.extend(status.last_reload.iter().filter_map(|last| last.error.as_deref()).map(reload_refused));
    if status.device_up == Some(false) {
        found.push(device_down(&status.device));
    }
    let needs_them = !status.am_lighthouse && !status.lighthouses.is_empty();
    if needs_them && status.lighthouses.iter().all(|lighthouse| !lighthouse.connected) {
        let all: Vec<_> = status.lighthouses.iter().map(|lighthouse| lighthouse.address.as_str()).collect();
        found.push(all_unreachable(&all));
    }
    found
}

/// The relays that this host may choose.
fn relays(host: &Host) -> Vec<Finding> {
    let mut found = Vec::new();
    if host.relay_groups.is_empty() || host.am_relay || host.am_lighthouse {
        return found;
    }
    if host.relays.is_empty() {
        found.push(Finding::error(
            "no_relay_offered",
            HERE,
            format!("relay.groups is {}, and no lighthouse offers a relay", host.relay_groups.join(", ")),
            "Set relay.groups on the lighthouses, too (Go Nebula offers none), and relay.am_relay on hosts with the group that \
             have a direct tunnel to a lighthouse.",
        ));
        return found;
    }
    let with = |trouble: &str| -> Vec<&str> {
        let is_in = |relay: &&OfferedRelay| relay.trouble.as_deref() == Some(trouble);
        host.relays.iter().filter(is_in).map(|relay| relay.relay.as_str()).collect()
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
    if host.relays.iter().all(|relay| !relay.chosen && !relay.tried) {
        found.push(Finding::error(
            "no_relay_chosen",
            HERE,
            format!("none of the {} relays that lighthouses offer can be used", host.relays.len()),
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

/// `clocks` are those of peers.
fn certificate(certificate: &Validity, renews_itself: bool, clocks: &[Clock]) -> Option<Finding> {
    let left = certificate.seconds_left?;
    let begins = certificate.begins_in_seconds;
    let lifetime = certificate.lifetime_seconds.unwrap_or(i64::MAX);
    if begins > 0 {
        let clock = own_clock(clocks).map_or_else(String::new, |behind| format!(", and {behind}"));
        return Some(Finding::error(
            "certificate_not_yet_valid",
            HERE,
            format!("its certificate becomes valid in {}{clock}", span(begins)),
            "Check the clock (`timedatectl`) of this host, and of the one that signed the certificate.",
        ));
    }
    let advice = if renews_itself {
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
fn renewal(enrolment: &RenewalState) -> Option<Finding> {
    let failing = enrolment.failing_seconds?.try_into().unwrap_or(i64::MAX);
    let error = known(&enrolment.error);
    if enrolment.code.as_deref() == Some("certificate_revoked") {
        let cause = format!("the CA has revoked its certificate, so peers refuse it: {error}");
        let advice = "If it may come back, make a token for its name at the CA (`nebula-ca token create`), and give that to `nebula up` here.";
        return Some(Finding::error("certificate_revoked", HERE, cause, advice));
    }
    let cause = format!("its certificate could not be renewed for {}: {error}", span(failing));
    let advice = match enrolment.code.as_deref() {
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

fn ca(ca: &TrustedCa) -> Option<Finding> {
    let ca = &ca.validity;
    let left = ca.seconds_left?;
    let name = format!("the CA {}", ca.name);
    let advice = "Make a new CA, add it to pki.ca of every host, then sign every host's certificate with it.";
    if ca.begins_in_seconds > 0 {
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
fn clock(facts: &Facts) -> Vec<Finding> {
    let mut found: Vec<_> = own_clock(&facts.clocks)
        .map(|cause| {
            let advice = "Set the clock (`timedatectl`, chrony or ntpd): certificates are judged by it.";
            Finding::error("clock_wrong", HERE, cause, advice)
        })
        .into_iter()
        .collect();
    if found.is_empty() {
        let wrong = facts.clocks.iter().filter(|clock| is_off(ahead(clock)));
        found.extend(wrong.take(3).map(|clock| {
            Finding::warning(
                "peer_clock_wrong",
                &clock.peer,
                format!("its clock differs from that of this host by {}", span(ahead(clock))),
                "Set the clock there: certificates are judged by it.",
            )
        }));
    }
    if let Some(step) = &facts.host.clock_step
        && step.by_ms.abs() >= 5000
        && step.seconds_ago < 3600
    {
        let way = if step.by_ms < 0 { "back" } else { "forward" };
        let cause = format!("its clock jumped {way} by {} {} s ago", span(step.by_ms / 1000), step.seconds_ago);
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
fn own_clock(clocks: &[Clock]) -> Option<String> {
    let (of_lighthouses, of_peers): (Vec<_>, Vec<_>) = clocks.iter().partition(|clock| clock.lighthouse);
    let judges = if of_lighthouses.is_empty() && of_peers.len() >= 3 { of_peers } else { of_lighthouses };
    let mut ahead: Vec<_> = judges.into_iter().map(ahead).collect();
    ahead.sort_unstable();
    let median = *ahead.get(ahead.len() / 2)?;
    let way = if median > 0 { "behind" } else { "ahead of" };
    is_off(median).then(|| format!("its clock is {} {way} those of its lighthouses and peers", span(median)))
}

/// In seconds.
fn ahead(clock: &Clock) -> i64 {
    clock.ahead_ms / 1000
}

fn is_off(seconds: i64) -> bool {
    seconds.abs() >= CLOCK_SECONDS
}

fn device_down(name: &str) -> Finding {
    let advice = format!("`ip link set {name} up`, or restart nebula. Find out who took it down.");
    Finding::error("device_down", format!("the device {name}"), "it is down", &advice)
}

fn device(link: &Link, host: &Host) -> Vec<Finding> {
    let name = &host.device;
    let about = format!("the device {name}");
    if !link.present {
        let cause = "it does not exist any more";
        return vec![Finding::error("device_missing", about, cause, "Restart nebula. Find out who removed it.")];
    }
    let mut found = Vec::new();
    if !link.up {
        found.push(device_down(name));
    }
    let is_off = |network: &str| link.ipv6_off && network.contains(':');
    if let Some(network) = host.networks.iter().find(|network| is_off(network)) {
        let cause = format!("the kernel has no IPv6 on it, so it goes without {network}");
        let advice = format!(
            "`sysctl -w net.ipv6.conf.{name}.disable_ipv6=0` and restart nebula; without the module ipv6 only IPv4 is left."
        );
        found.push(Finding::warning("ipv6_off", &about, cause, &advice));
    }
    for network in host.networks.iter().filter(|network| !is_off(network)) {
        let address = network.split('/').next().unwrap_or_default();
        if !link.addresses.iter().any(|has| has == address) {
            let advice = format!("`ip address add {network} dev {name}`, or restart nebula. Find out who removed it.");
            let cause = format!("it does not have the overlay address {address}");
            found.push(Finding::error("address_missing", &about, cause, &advice));
        }
    }
    if let (Some(wanted), Some(mtu)) = (host.mtu.device, link.mtu)
        && wanted != mtu
    {
        let cause = format!("its MTU is {mtu}, and the configuration (tun.mtu) says {wanted}");
        let advice = "Somebody changed it. Restart nebula, or change tun.mtu.";
        found.push(Finding::warning("mtu_differs", about, cause, advice));
    }
    found
}

fn kernel_route(route: &NetworkRoute, host: &Host) -> Option<Finding> {
    let NetworkRoute { route, network, .. } = route;
    let has_no_v6 = host.link.as_ref().is_some_and(|link| link.ipv6_off);
    if route.to_overlay || network.contains(':') && has_no_v6 {
        return None;
    }
    let device = &host.device;
    let about = format!("the network {network}");
    let advice = format!(
        "`ip route add {network} dev {device}`, or restart nebula. `ip route get` shows which interface has it."
    );
    Some(match &route.device {
        Some(other) => {
            let cause = format!("the kernel sends it by {other} and not into the overlay ({device})");
            Finding::error("route_elsewhere", about, cause, &advice)
        }
        None => {
            let cause = format!("the kernel has no route to it: {}", known(&route.text));
            Finding::error("route_missing", about, cause, &advice)
        }
    })
}

fn replaced_route(replaced: &ReplacedRoute, host: &Host) -> Finding {
    let ReplacedRoute { route, network, interface } = replaced;
    let about = format!("the network {network} of {interface}");
    let cause = format!(
        "tun.unsafe_routes leads {route} into the overlay ({}), so the machines on that link are not reached directly",
        host.device
    );
    let advice = "On hosts of that network take the route out of tun.unsafe_routes, or give it `install: false`; then restart \
                  nebula, and bring the link's own route back (`ip route`).";
    Finding::warning("lan_replaced", about, cause, advice)
}

fn lighthouses(host: &Host) -> Vec<Finding> {
    let (lighthouses, am_lighthouse) = (&host.lighthouses, host.am_lighthouse);
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
        let about = format!("the lighthouse {}", lighthouse.address);
        if lighthouse.own_address {
            let advice = "Remove it from lighthouse.hosts, or give this host its own certificate.";
            found.push(Finding::error("lighthouse_is_self", about, "it has the address of this host", advice));
        } else if !lighthouse.connected && lighthouse.endpoints.is_empty() {
            found.push(if lighthouse.configured {
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
    let lost: Vec<_> = lighthouses.iter().filter(|it| !it.connected).map(|it| it.address.as_str()).collect();
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

fn all_unreachable(addresses: &[&str]) -> Finding {
    let first = addresses.first().copied().unwrap_or_default();
    Finding::error(
        "all_lighthouses_unreachable",
        format!("the lighthouse {}", addresses.join(", ")),
        "there is no tunnel with any lighthouse: this host finds nobody and nobody finds it",
        &format!("`nebula ctl why {first}` says why."),
    )
}

fn names(names: &RegisteredNames) -> Option<Finding> {
    let RegisteredNames { domain, server, .. } = names;
    let error = names.error.as_ref()?;
    let about = format!("the names of {domain}");
    let cause = format!("programs of this host do not resolve them, because no resolver could be told: {error}");
    let advice = format!(
        "Install systemd-resolved, or dnsmasq with openresolv, and restart nebula. Or forward the domain to {server} in the resolver \
         that this host has, and set resolver.register to false."
    );
    Some(Finding::warning("names_not_registered", about, cause, &advice))
}

fn path_mtu(path: &UnderlayPath, host: &Host) -> Option<Finding> {
    let (mtu, overhead, wanted) = (path.route.mtu?, path.overhead, host.mtu.tun?);
    let datagram = wanted.saturating_add(overhead);
    // With discovery the host finds out by itself, and says so to who sends what is too large.
    (datagram > mtu && !path.route.local && !host.mtu.discovery).then(|| {
        let cause = format!(
            "packets of tun.mtu {wanted} become datagrams of {datagram}, and the way to {} ({}) carries {mtu}: large packets are cut \
             or lost",
            path.endpoint,
            known(&path.route.device),
        );
        let advice =
            format!("Set tun.mtu to {} or less on both hosts, or tun.path_mtu_discovery to true.", mtu.saturating_sub(overhead));
        Finding::warning("path_mtu", known(&path.peer), cause, &advice)
    })
}

// A handshake message may be some seconds old when it arrives.
const CLOCK_SECONDS: i64 = 30;
const CA_SOON_SECONDS: i64 = 60 * 86_400;
