//! Our metrics compared with those of Go Nebula 1.11.0. Both run without a device and on loopback only.

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test ends at the first surprise, on a real clock"
)]

use crate::loopback;

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::time::{Duration, Instant};

use loopback::{Daemon, Network, free_tcp_port, go, ours};

/// Repeats the request until the response, including its head, contains this text.
fn fetch(daemon: &Daemon, port: u16, path: &str, expected: &str) -> String {
    let until = Instant::now() + Duration::from_secs(15);
    loop {
        let found = get(port, path).unwrap_or_default();
        if found.contains(expected) {
            return found;
        }
        assert!(Instant::now() < until, "no {expected} at {path}: {found}\n{}", daemon.log());
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Repeats the request until a page has the same metrics as the one before.
fn settled(daemon: &Daemon, port: u16, path: &str) -> String {
    let mut before = fetch(daemon, port, path, "200 OK");
    loop {
        std::thread::sleep(Duration::from_millis(200));
        let text = fetch(daemon, port, path, "200 OK");
        if names(&text) == names(&before) {
            return text;
        }
        before = text;
    }
}

fn start(network: &Network, program: &Path, stats: &str) -> Daemon {
    network.start(program, "host", &["10.42.0.7/16"], &with(stats))
}

fn with(stats: &str) -> String {
    format!(
        "listen: {{host: 127.0.0.1}}\nfirewall: {{inbound: [{{port: 22, proto: tcp, group: admin}}]}}\nstats: {stats}"
    )
}

fn get(port: u16, path: &str) -> std::io::Result<String> {
    let mut stream = TcpStream::connect(("127.0.0.1", port))?;
    stream.set_read_timeout(Some(Duration::from_secs(5)))?;
    // Not 1.1: Go would use chunked encoding.
    write!(stream, "GET {path} HTTP/1.0\r\n\r\n")?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    Ok(text)
}

fn prometheus(port: u16, path: &str) -> String {
    format!(
        "{{type: prometheus, listen: '127.0.0.1:{port}', path: {path}, namespace: nebula, interval: 1s, \
         message_metrics: true, lighthouse_metrics: true}}"
    )
}

fn value(text: &str, name: &str) -> f64 {
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.unwrap_or_else(|| panic!("no {name} in {text}")).parse().unwrap()
}

/// Metric names with their labels.
/// Types by name.
fn types(text: &str) -> BTreeMap<&str, &str> {
    text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' ')).collect()
}

/// Whether a metric has a name of Go Nebula's, all of which are gauges.
fn is_of_go(name: &str, kind: &str) -> bool {
    const FAMILIES: [&str; 12] = [
        "certificate_",
        "firewall_",
        "handshake_manager_",
        "handshakes",
        "hostinfo_",
        "hostmap_",
        "info",
        "lighthouse_",
        "messages_",
        "network_packets_",
        "routines",
        "udp_",
    ];
    kind == "gauge" && FAMILIES.iter().any(|family| name.strip_prefix("nebula_").unwrap_or(name).starts_with(family))
}

fn names(text: &str) -> BTreeSet<&str> {
    text.lines().filter(|line| line.starts_with("nebula_")).filter_map(|line| Some(line.rsplit_once(' ')?.0)).collect()
}

#[test]
fn metrics_are_served_and_move_when_the_configuration_changes() {
    let (first, second) = (free_tcp_port(), free_tcp_port());
    let network = Network::new();
    let daemon = start(&network, &ours(), &prometheus(first, "/metrics"));
    let text = fetch(&daemon, first, "/metrics", "200 OK");
    assert!(value(&text, "nebula_certificate_ttl_seconds") > 3e9, "{text}");
    assert_eq!(value(&text, "nebula_firewall_rules_version"), 0.0);
    assert!(value(&text, "nebula_udp_0_rcvbuf") > 0.0);
    fetch(&daemon, first, "/other", " 404 ");
    daemon.reload(&with(&prometheus(second, "/m")));
    fetch(&daemon, second, "/m", "200 OK");
    assert!(get(first, "/metrics").is_err(), "the former address still answers");
}

#[test]
fn a_client_that_sends_a_byte_now_and_then_keeps_nobody_from_the_page() {
    let port = free_tcp_port();
    let network = Network::new();
    let daemon = start(&network, &ours(), &prometheus(port, "/metrics"));
    fetch(&daemon, port, "/metrics", "200 OK");
    let mut slow = TcpStream::connect(("127.0.0.1", port)).unwrap();
    let begun = Instant::now();
    let trickle = std::thread::spawn(move || {
        // Each byte arrives within the read timeout, but the request never ends.
        while begun.elapsed() < Duration::from_secs(20) && slow.write_all(b"G").is_ok() {
            std::thread::sleep(Duration::from_millis(1500));
        }
        begun.elapsed()
    });
    std::thread::sleep(Duration::from_millis(100));
    let asked = Instant::now();
    let text = get(port, "/metrics");
    let took = asked.elapsed();
    assert!(text.is_ok_and(|text| text.contains("200 OK")), "no answer within {took:?}");
    assert!(took < Duration::from_secs(1), "{took:?}");
    let kept = trickle.join().unwrap();
    assert!(kept < Duration::from_secs(10), "the slow client was there for {kept:?}");
}

#[test]
fn a_reload_to_the_same_address_finds_it_free() {
    let port = free_tcp_port();
    let network = Network::new();
    let daemon = start(&network, &ours(), &prometheus(port, "/0"));
    fetch(&daemon, port, "/0", "200 OK");
    for n in 1..=20 {
        daemon.reload(&with(&prometheus(port, &format!("/{n}"))));
        fetch(&daemon, port, &format!("/{n}"), "200 OK");
    }
    assert!(!daemon.log().contains("Failed to start stats emitter"), "{}", daemon.log());
}

#[test]
fn a_certificate_that_ends_soon_is_warned_of_and_its_time_left_is_a_metric() {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs();
    let network = Network::ending(now.cast_signed() + 3600);
    let port = free_tcp_port();
    let daemon = start(&network, &ours(), &prometheus(port, "/metrics"));
    let text = fetch(&daemon, port, "/metrics", "200 OK");
    assert!((3000.0..=3600.0).contains(&value(&text, "nebula_certificate_ttl_seconds")), "{text}");
    let until = Instant::now() + Duration::from_secs(10);
    while !daemon.log().contains("The certificate of this host expires soon") {
        assert!(Instant::now() < until, "{}", daemon.log());
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn the_dashboard_shows_every_metric_of_our_own_and_none_that_does_not_exist() {
    let port = free_tcp_port();
    let network = Network::new();
    // Only a host with unsafe routes has metrics of gateways.
    let gateways = "tun: {disabled: true, unsafe_routes: [{route: 192.168.7.0/24, via: [{gateway: 10.42.0.8}, {gateway: 10.42.0.9}]}]}";
    let more = format!("{gateways}\n{}", with(&prometheus(port, "/metrics")));
    let daemon = network.start(&ours(), "host", &["10.42.0.7/16"], &more);
    let text = fetch(&daemon, port, "/metrics", "200 OK");
    let own: Vec<&str> =
        types(&text).into_iter().filter(|(name, kind)| !is_of_go(name, kind)).map(|(name, _)| name).collect();
    // The metrics of peers have no line without a peer.
    for name in
        ["nebula_peer_direct", "nebula_peer_bytes_sent_total", "nebula_half_open_handshakes", "nebula_gateway_up"]
    {
        assert!(own.contains(&name), "{own:?}");
    }
    // Each has a text.
    for name in types(&text).into_keys() {
        let help = format!("# HELP {name} ");
        assert!(
            text.lines().any(|line| line.strip_prefix(&help).is_some_and(|help| help.ends_with('.'))),
            "{name}\n{text}"
        );
    }
    let mut known: BTreeSet<&str> = names(&text).iter().map(|name| name.split('{').next().unwrap()).collect();
    known.extend(&own);
    let dashboard = include_str!("../../../deploy/grafana-dashboard.json");
    let mut used = 0;
    for rest in dashboard.split("nebula_").skip(1) {
        let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(rest.len());
        let name = format!("nebula_{}", &rest[..end]);
        assert!(known.contains(name.as_str()), "{name} is in the dashboard and nowhere else");
        used += 1;
    }
    assert!(used > 5);
    let shown: BTreeSet<&str> = dashboard.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').collect();
    let unseen: Vec<_> = own.into_iter().filter(|name| !shown.contains(name)).collect();
    assert!(unseen.is_empty(), "no panel shows {unseen:?}");
    // So do the alerts, which also have metrics of the CA and the agent.
    let sources = [
        include_str!("../../../ca/src/metrics.rs"),
        include_str!("../../../agent/src/listener.rs"),
        include_str!("../../../agent/src/metrics/flows.rs"),
        include_str!("../../../agent/src/metrics/mod.rs"),
        include_str!("../../../agent/src/metrics/table.rs"),
        include_str!("../../../agent/src/metrics/upgrade.rs"),
    ];
    let rules = include_str!("../../../deploy/prometheus-rules.yaml");
    let mut used = 0;
    for line in rules.lines().filter_map(|line| line.trim().strip_prefix("expr: ")) {
        for word in
            line.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').filter(|word| word.starts_with("nebula_"))
        {
            let is_elsewhere = sources
                .iter()
                .any(|source| source.contains(&format!("\"{word}\"")) || source.contains(&format!("{word} ")));
            assert!(known.contains(word) || is_elsewhere, "{word} is in an alert and nowhere else");
            used += 1;
        }
    }
    assert!(used > 15);
    // Those of agents are held against their own pages.
    let of_hosts = rules.lines().filter(|line| !line.contains("nebula_cni_"));
    let reasons: Vec<_> =
        of_hosts.flat_map(|line| line.split("reason=\"").skip(1)).filter_map(|rest| rest.split('"').next()).collect();
    assert!(!reasons.is_empty());
    for reason in reasons {
        assert!(text.contains(&format!("reason=\"{reason}\"")), "{reason}");
    }
}

#[test]
fn peers_beyond_the_configured_number_have_no_series() {
    let [port, peer_port] = [free_tcp_port(), loopback::free_udp_port()];
    let network = Network::new();
    let stats =
        |max: u32| prometheus(port, "/metrics").replace("interval: 1s", &format!("interval: 1s, max_peers: {max}"));
    let map =
        format!("static_host_map: {{10.42.0.8: ['127.0.0.1:{peer_port}']}}\nlighthouse: {{hosts: [10.42.0.8]}}\n");
    let daemon = network.start(&ours(), "host", &["10.42.0.7/16"], &format!("{map}{}", with(&stats(1))));
    let _peer = network.start(
        &ours(),
        "peer",
        &["10.42.0.8/16"],
        &format!("listen: {{host: 127.0.0.1, port: {peer_port}}}\nlighthouse: {{am_lighthouse: true}}"),
    );
    let text = fetch(&daemon, port, "/metrics", "nebula_peer_direct{");
    assert_eq!(value(&text, "nebula_peers_not_listed"), 0.0);
    assert!(text.contains("nebula_peer_bytes_sent_total{address=\"10.42.0.8\",peer=\"peer\"} 0"), "{text}");
    daemon.reload(&format!("{map}{}", with(&stats(0))));
    let text = fetch(&daemon, port, "/metrics", "nebula_peers_not_listed 1");
    assert!(!text.contains("10.42.0.8"), "{text}");
}

#[test]
fn graphite_gets_lines() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let host = listener.local_addr().unwrap();
    let network = Network::new();
    let _daemon = start(&network, &ours(), &format!("{{type: graphite, host: '{host}', prefix: p, interval: 200ms}}"));
    let mut text = String::new();
    listener.accept().unwrap().0.read_to_string(&mut text).unwrap();
    assert!(text.lines().any(|line| line.starts_with("p.certificate.ttl_seconds.value ")), "{text}");
    assert!(text.lines().any(|line| line.starts_with("p.packets_in.count 0 ")), "{text}");
}

#[test]
#[ignore = "needs Go Nebula, which .ci/go-nebula fetches"]
fn names_and_hashes_are_those_of_go() {
    let (network, go_network) = (Network::new(), Network::new());
    let (port, go_port) = (free_tcp_port(), free_tcp_port());
    let (daemon, go) =
        (start(&network, &ours(), &prometheus(port, "/m")), start(&go_network, &go(), &prometheus(go_port, "/m")));
    let text = fetch(&daemon, port, "/m", "200 OK");
    // Go puts its metrics on the page one after another, in no order.
    let all_of_go = ["nebula_firewall_rules_hash", "nebula_runtime_NumGoroutine", "nebula_udp_0_rcvbuf"];
    for name in all_of_go {
        fetch(&go, go_port, "/m", name);
    }
    let go_text = settled(&go, go_port, "/m");
    let documented = include_str!("../../../docs/metrics.md");
    let own = names(&text);
    let missing = names(&go_text).into_iter().filter(|name| {
        !own.contains(name)
            && !name.starts_with("nebula_info")
            && !["_runtime_", "_debug_"].iter().any(|part| name.contains(part))
            && !documented.contains(&format!("`{}`", name.trim_start_matches("nebula_")))
    });
    let missing: Vec<_> = missing.collect();
    assert!(missing.is_empty(), "neither here nor in docs/metrics.md: {missing:?}");
    let kinds = types(&text);
    for (name, kind) in types(&go_text).into_iter().filter(|(name, _)| kinds.contains_key(name)) {
        assert_eq!((kinds[name], is_of_go(name, kind)), (kind, true), "{name}");
    }
    for name in ["nebula_firewall_rules_hash", "nebula_certificate_max_version", "nebula_routines"] {
        assert_eq!(value(&text, name), value(&go_text, name), "{name}");
    }
}
