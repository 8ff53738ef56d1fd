//! The control socket of running daemons, queried by `nebula ctl`. On loopback, without devices or privileges.

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test ends at the first surprise, on a real clock"
)]

use crate::loopback;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use loopback::{Daemon, Network, built, free_tcp_port, free_udp_port, ours};
use serde_json::Value;

/// A lighthouse and a client that has a tunnel with it.
struct Pair {
    _network: Network,
    _lighthouse: Daemon,
    client: Daemon,
    sockets: tempfile::TempDir,
    /// The client's configuration, except for device and credentials.
    settings: String,
}

impl Pair {
    fn start() -> Self {
        let (network, sockets, port) = (Network::new(), tempfile::tempdir().unwrap(), free_udp_port());
        let at = |name: &str| sockets.path().join(name).display().to_string();
        let rules =
            "firewall: {outbound: [{port: 80, proto: tcp, host: any}, {port: any, proto: icmp, host: lighthouse}]}";
        let lighthouse = network.start(
            &ours(),
            "lighthouse",
            &["10.42.0.1/16"],
            &format!(
                "listen: {{host: 127.0.0.1, port: {port}}}\nlighthouse: {{am_lighthouse: true}}\n\
                 daemon: {{control_socket: {}}}\n{rules}",
                at("lighthouse")
            ),
        );
        let settings = format!(
            "listen: {{host: 127.0.0.1}}\nstatic_host_map: {{10.42.0.1: ['127.0.0.1:{port}']}}\n\
             lighthouse: {{hosts: [10.42.0.1], interval: 1}}\ndaemon: {{control_socket: {}, whois_socket: {}}}\n{rules}",
            at("client"),
            at("whois")
        );
        let client = network.start(&ours(), "client", &["10.42.0.7/16"], &settings);
        let pair = Self { _network: network, _lighthouse: lighthouse, client, sockets, settings };
        pair.wait("a tunnel", || {
            let Ok(peers) = pair.json("client", &["peers"]) else { return false };
            peers["peers"].as_array().is_some_and(|peers| peers.len() == 1)
        });
        pair
    }

    fn socket(&self, of: &str) -> PathBuf {
        self.sockets.path().join(of)
    }

    fn wait(&self, what: &str, done: impl Fn() -> bool) {
        let until = Instant::now() + Duration::from_secs(20);
        while !done() {
            assert!(Instant::now() < until, "no {what}\n{}", self.client.log());
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn ctl(&self, of: &str, words: &[&str]) -> (i32, String, String) {
        ctl(&self.socket(of), words)
    }

    /// The answer, or else what is printed to standard error.
    fn json(&self, of: &str, words: &[&str]) -> Result<Value, String> {
        let (code, stdout, stderr) = self.ctl(of, &[words, &["--json"]].concat());
        if stdout.is_empty() { Err(format!("{code}: {stderr}")) } else { Ok(serde_json::from_str(&stdout).unwrap()) }
    }
}

/// Runs `nebula ctl`, which finds `nebula-ctl` in its own folder.
fn ctl(socket: &Path, words: &[&str]) -> (i32, String, String) {
    let Output { status, stdout, stderr } =
        Command::new(ours()).arg("ctl").arg("--socket").arg(socket).args(words).output().unwrap();
    (status.code().unwrap(), String::from_utf8(stdout).unwrap(), String::from_utf8(stderr).unwrap())
}

#[test]
fn other_programs_learn_who_has_an_address_and_nothing_else() {
    let pair = Pair::start();
    let mode = |of: &str| std::fs::metadata(pair.socket(of)).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode("client"), mode("whois")), (0o600, 0o666), "without a group, everybody may ask");
    for socket in ["client", "whois"] {
        let peer = pair.json(socket, &["whois", "10.42.0.1:49152"]).unwrap();
        assert_eq!(
            (&peer["name"], &peer["addresses"][0], &peer["own"]),
            (&"lighthouse".into(), &"10.42.0.1".into(), &false.into())
        );
        assert_eq!(peer["fingerprint"].as_str().unwrap().len(), 64);
        assert!(pair.ctl(socket, &["whois", "10.42.0.7"]).1.contains("client (this host)"));
        let (code, _, stderr) = pair.ctl(socket, &["whois", "10.42.9.9"]);
        assert!(
            code == 1 && stderr.contains("no host of the overlay with a tunnel has the address 10.42.9.9"),
            "{stderr}"
        );
    }
    for words in [&["peers"][..], &["reload"], &["close", "lighthouse"], &["log-level", "debug"]] {
        let (code, _, stderr) = pair.ctl("whois", words);
        assert!(code == 1 && stderr.contains("answers whois only"), "{words:?}: {stderr}");
    }
}

#[test]
fn every_command_answers_in_words_and_in_json() {
    // It is built next to nebula.
    assert!(built("nebula-ctl").exists());
    let pair = Pair::start();
    let status = pair.json("client", &["status"]).unwrap();
    assert_eq!((&status["name"], &status["peers"]), (&"client".into(), &1.into()));
    assert_eq!(status["lighthouses"][0]["connected"], true);
    assert!(pair.ctl("client", &["status"]).1.contains(" 10.42.0.1 (connected)"));

    let (code, table, _) = pair.ctl("client", &["peers"]);
    assert!(code == 0 && table.starts_with("NAME ") && table.contains("lighthouse  10.42.0.1"), "{table}");

    for peer in ["10.42.0.1", "lighthouse"] {
        let tunnel = pair.json("client", &["tunnel", peer]).unwrap();
        assert_eq!(tunnel["tunnels"][0]["certificate"]["details"]["name"], "lighthouse");
        assert_eq!(tunnel["tunnels"][0]["primary"], true);
    }
    let (code, _, stderr) = pair.ctl("client", &["tunnel", "10.42.9.9"]);
    assert_eq!((code, stderr.as_str()), (1, "nebula-ctl: there is no tunnel with 10.42.9.9\n"));

    // A lighthouse knows the client; on loopback, the client has no addresses to report.
    let query = pair.json("lighthouse", &["query", "10.42.0.7"]).unwrap();
    assert_eq!(query["peer"], "10.42.0.7");
    let unknown = pair.json("client", &["query", "10.42.9.9"]).unwrap();
    let lighthouse = &unknown["lighthouses"][0];
    assert_eq!((&lighthouse["answered"], &lighthouse["alive"]), (&false.into(), &true.into()), "{unknown}");
    assert!(pair.ctl("client", &["query", "10.42.9.9"]).1.contains("alive, and does not know it"));

    let cert = pair.json("client", &["cert"]).unwrap();
    assert_eq!(
        (&cert["certificates"][0]["details"]["name"], &cert["cas"][0]["details"]["isCa"]),
        (&"client".into(), &true.into())
    );
    assert!(pair.ctl("client", &["cert"]).1.contains("10.42.0.7/16"));

    assert_eq!(pair.ctl("client", &["log-level"]).1, "info\n");
    assert_eq!(pair.ctl("client", &["log-level", "debug"]).1, "debug\n");
    assert_eq!(pair.ctl("client", &["reload"]), (0, "reloaded\n".to_owned(), String::new()));
    assert_eq!(pair.ctl("client", &["log-level"]).1, "info\n", "a reload brings the configured one back");

    let before = pair.json("client", &["peers"]).unwrap()["peers"][0]["local_index"].clone();
    assert_eq!(pair.ctl("client", &["close", "lighthouse"]), (0, "closed 1 tunnel(s)\n".to_owned(), String::new()));
    pair.wait("new tunnel", || {
        let peers = pair.json("client", &["peers"]).unwrap();
        peers["peers"][0]["local_index"].is_number() && peers["peers"][0]["local_index"] != before
    });
}

#[test]
fn a_trace_tells_which_rule_lets_a_packet_pass() {
    let pair = Pair::start();
    let (code, text, _) = pair.ctl("client", &["trace", "tcp", "10.42.0.1:80"]);
    assert!(code == 0 && text.contains("firewall.outbound #0 {port: 80, proto: tcp, host: any}"), "{text}");
    let icmp = pair.json("client", &["trace", "icmp", "10.42.0.7", "10.42.0.1"]).unwrap();
    assert_eq!((&icmp["firewall"]["rule"]["index"], &icmp["outcome"]), (&1.into(), &"passes".into()));
    let (code, text, _) = pair.ctl("client", &["trace", "tcp", "10.42.0.1:81"]);
    assert!(code == 1 && text.contains("dropped: no_rule"), "{text}");
    let inbound = pair.json("client", &["trace", "tcp", "10.42.0.1:999", "10.42.0.7:80"]).unwrap();
    assert_eq!((&inbound["direction"], &inbound["reason"]), (&"inbound".into(), &"no_rule".into()));
    assert_eq!(pair.json("client", &["trace", "udp", "10.42.5.5:1"]).unwrap()["outcome"], "waits for a tunnel");
    let (code, _, stderr) = pair.ctl("client", &["trace", "tcp", "somewhere"]);
    assert!(code == 1 && stderr.contains("somewhere is no address"), "{stderr}");
}

#[test]
fn flows_are_asked_for_by_conditions_that_are_checked_and_not_at_the_socket_for_names() {
    let pair = Pair::start();
    let all = ["flows", "--peer", "web", "--port", "443", "--protocol", "tcp", "--verdict", "audit", "--since", "15m"];
    let (code, table, _) = pair.ctl("client", &all);
    // Nobody sends anything without a device.
    assert!(code == 0 && table.starts_with("SEEN ") && table.lines().count() == 1, "{table}");
    assert_eq!(pair.ctl("client", &["flows", "--json"]), (0, String::new(), String::new()));
    for (flag, wrong) in [("--port", "70000"), ("--protocol", "tpc"), ("--verdict", "denied"), ("--since", "soon")] {
        let (code, _, stderr) = pair.ctl("client", &["flows", flag, wrong]);
        assert!(code == 2 && stderr.contains(wrong), "{stderr}");
    }
    let (code, _, stderr) = pair.ctl("whois", &["flows"]);
    assert!(code == 1 && stderr.contains("whois only"), "{stderr}");
}

#[test]
fn a_configuration_that_is_refused_is_told_to_who_asked() {
    let pair = Pair::start();
    std::fs::write(pair.client.config(), "cipher: des\n").unwrap();
    let (code, _, stderr) = pair.ctl("client", &["reload"]);
    assert!(code == 1 && stderr.contains("it must be aes or chachapoly"), "{stderr}");
    let place = format!("{}:1: cipher: ", pair.client.config().display());
    assert!(stderr.contains(&place), "with file and line, as -test: {stderr}");
    let status = pair.json("client", &["status"]).unwrap();
    assert!(status["last_reload"]["error"].as_str().unwrap().contains("cipher"), "{status}");
    assert_eq!(status["peers"], 1, "nothing changed");
    let (code, text, _) = pair.ctl("client", &["status"]);
    assert!(code == 1 && text.contains("[reload_refused]"), "{text}");
    let (code, text, _) = pair.ctl("client", &["doctor"]);
    assert!(code == 1 && text.contains(&place) && text.contains("[configuration_refused]"), "{text}");
}

#[test]
fn doctor_and_why_name_the_cause_in_words_and_in_json() {
    let pair = Pair::start();
    let codes = |words: &[&str]| {
        let answer = pair.json("client", words).unwrap();
        let found = answer["findings"].as_array().unwrap().iter().map(|it| it["code"].as_str().unwrap().to_owned());
        found.collect::<Vec<_>>()
    };
    let (code, text, _) = pair.ctl("client", &["why", "lighthouse"]);
    assert!(code == 0 && text.contains("there is a tunnel with lighthouse (10.42.0.1)"), "{text}");
    let (code, text, _) = pair.ctl("client", &["doctor"]);
    assert!(code == 0, "{text}");
    assert_eq!(codes(&["why", "10.42.9.9"]), ["unknown_to_lighthouse"]);
    assert_eq!(codes(&["why", "10.99.0.1"]), ["not_in_overlay"]);
    assert_eq!(codes(&["why", "10.42.0.7"]), ["peer_is_self"]);
    let (code, text, _) = pair.ctl("client", &["why", "10.42.9.9"]);
    assert!(code == 1 && text.starts_with("there is no tunnel with 10.42.9.9\nERROR: "), "{text}");

    // A host with another CA, and a port that nothing listens on.
    let (strangers, port, closed) = (Network::new(), free_udp_port(), free_udp_port());
    let _stranger =
        strangers.start(&ours(), "stranger", &["10.42.0.8/16"], &format!("listen: {{host: 127.0.0.1, port: {port}}}"));
    let map = format!("static_host_map: {{10.42.0.8: ['127.0.0.1:{port}'], 10.42.0.9: ['127.0.0.1:{closed}'],");
    pair.client.write(&pair.settings.replacen("static_host_map: {", &map, 1));
    assert_eq!(pair.ctl("client", &["reload"]).0, 0);
    assert_eq!(pair.ctl("client", &["log-level", "debug"]).0, 0);
    pair.wait("refusal by the stranger", || codes(&["why", "10.42.0.8"]) == ["refused_by_peer"]);
    assert_eq!(codes(&["why", "10.42.0.9"]), ["port_closed"]);
    pair.wait("cause in the log", || pair.client.log().contains("cause=\"no answer to"));
    let line = format!("udpAddrs=[127.0.0.1:{port}] attempt=3");
    pair.wait("line for each attempt", || pair.client.log().contains(&line));
    let facts = pair.json("client", &["doctor"]).unwrap()["facts"].clone();
    assert!(facts["peers"].as_array().unwrap().iter().any(|peer| peer["peer"] == "10.42.0.8"), "{facts}");
}

/// Whether the daemon still waits for what a client says.
fn is_served(mut client: &UnixStream) -> bool {
    client.set_nonblocking(true).unwrap();
    matches!(client.read(&mut [0]), Err(error) if error.kind() == std::io::ErrorKind::WouldBlock)
}

#[test]
fn hostile_clients_cost_neither_others_nor_the_daemon_its_answers() {
    let pair = Pair::start();
    let path = pair.socket("client");
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    let mut long = UnixStream::connect(&path).unwrap();
    let _ = long.write_all(&vec![b'x'; 1 << 16]);
    for socket in ["client", "whois"] {
        // The answer comes while the daemon still waits for silent clients: one that serves others after them has ended
        // all of them by then. A busy machine may need the daemon's two seconds for something else: hence the rounds.
        let before_they_are_left = (0..5).any(|_| {
            let silent: Vec<_> = (0..60).map(|_| UnixStream::connect(pair.socket(socket)).unwrap()).collect();
            let answer = pair.json(socket, &["whois", "10.42.0.1"]);
            answer.is_ok() && silent.iter().any(is_served)
        });
        assert!(before_they_are_left, "{socket}");
    }
    let silent: Vec<_> = (0..60).filter_map(|_| UnixStream::connect(&path).ok()).collect();
    // Signals are handled meanwhile.
    pair.client.reload(&pair.settings);
    pair.wait("reload", || pair.client.log().contains("Caught HUP"));
    pair.wait("answer", || pair.json("client", &["status"]).is_ok());
    drop(silent);
}

#[test]
fn a_listener_that_could_not_be_opened_is_named_and_opened_as_soon_as_it_can_be() {
    let pair = Pair::start();
    let (stats, names) = (TcpListener::bind("127.0.0.1:0").unwrap(), UdpSocket::bind("127.0.0.1:0").unwrap());
    let (page, dns) = (stats.local_addr().unwrap(), names.local_addr().unwrap());
    let more = format!(
        "stats: {{type: prometheus, listen: '{page}', path: /m, interval: 1s}}\n\
         resolver: {{domain: n, listen: '{dns}', servers: ['127.0.0.1:9'], register: false}}\n"
    );
    let settings = format!("{more}{}", pair.settings);
    pair.client.reload(&settings);
    let missing = || {
        let told = pair.json("client", &["doctor"]).unwrap();
        let findings = told["findings"].as_array().unwrap().clone();
        let missing = findings.into_iter().filter(|finding| finding["code"] == "not_listening");
        missing.map(|finding| finding["about"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    pair.wait("both missing", || missing() == ["stats", "resolver"]);
    drop(names);
    pair.wait("the resolver by itself", || missing() == ["stats"]);
    drop(stats);
    pair.client.reload(&settings);
    pair.wait("the page after a reload without a change", || TcpStream::connect(page).is_ok() && missing().is_empty());
    assert_eq!(pair.client.log().matches("Failed to start stats emitter").count(), 1, "{}", pair.client.log());
}

#[test]
fn the_socket_goes_with_the_daemon() {
    let pair = Pair::start();
    let path = pair.socket("client");
    let Pair { client, sockets: _sockets, .. } = pair;
    drop(client);
    assert!(!path.exists());
    let (code, _, stderr) = ctl(&path, &["status"]);
    assert!(code == 3 && stderr.contains("does nebula run?"), "{stderr}");
}

#[test]
fn completions_know_the_commands_of_nebula_ctl() {
    for shell in ["bash", "zsh", "fish"] {
        let (code, script, _) = ctl(Path::new("/nonexistent"), &["completion", shell]);
        assert!(code == 0 && script.contains("log-level") && script.contains("nebula-ctl"), "{shell}: {script}");
    }
    let (code, _, stderr) = ctl(Path::new("/nonexistent"), &["dance"]);
    assert!(code == 2 && stderr.contains("dance"), "{stderr}");
    assert_eq!(ctl(Path::new("/nonexistent"), &["--help"]).0, 0);
}

#[test]
fn changed_files_are_obeyed_without_a_signal_and_bad_ones_refused() {
    let pair = Pair::start();
    let settings = pair.settings.replace("daemon: {", "daemon: {watch_files: 100ms, ");
    pair.client.reload(&settings);
    pair.wait("reload", || pair.client.log().contains("Caught HUP"));
    pair.client.replace("cipher: des\n");
    pair.wait("refusal", || pair.client.log().contains("nothing was changed"));
    pair.client.write(&settings.replace("port: 80", "port: 81"));
    pair.wait("new rules", || pair.client.log().contains("New firewall has been installed"));
    let (code, text, _) = pair.ctl("client", &["trace", "tcp", "10.42.0.1:81"]);
    assert!(code == 0, "{text}");
    assert_eq!(pair.client.log().matches("Files of the configuration changed").count(), 2, "{}", pair.client.log());
    // What a signal has applied already is not read again.
    pair.client.reload(&settings.replace("port: 80", "port: 82"));
    pair.wait("reload", || pair.client.log().matches("New firewall has been installed").count() > 1);
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(pair.client.log().matches("Files of the configuration changed").count(), 2, "{}", pair.client.log());
}

#[test]
fn what_the_configuration_asks_for_and_a_daemon_does_not_do_is_in_status_doctor_and_metrics() {
    let (network, sockets) = (Network::new(), tempfile::tempdir().unwrap());
    let path = sockets.path().join("x.sock");
    let settings = |stats: u16, listen: u16| {
        format!(
            "listen: {{host: 127.0.0.1, port: {listen}}}\n\
             stats: {{type: prometheus, listen: '127.0.0.1:{stats}', path: /m, namespace: nebula, interval: 1s}}\n\
             daemon: {{control_socket: {}}}",
            path.display()
        )
    };
    let metric = |port: u16, name: &str| {
        let mut page = String::new();
        let mut client = TcpStream::connect(("127.0.0.1", port)).ok()?;
        client.write_all(b"GET /m HTTP/1.0\r\n\r\n").ok()?;
        client.read_to_string(&mut page).ok()?;
        page.lines().find_map(|line| Some(line.strip_prefix(name)?.strip_prefix(' ')?.to_owned()))
    };
    let until = |what: &str, done: &dyn Fn() -> bool| {
        let end = Instant::now() + Duration::from_secs(20);
        while !done() {
            assert!(Instant::now() < end, "{what}");
            std::thread::sleep(Duration::from_millis(50));
        }
    };
    let ask = |command: &str| {
        let output = Command::new(ours()).args(["ctl", "--socket"]).arg(&path).arg(command).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    let (first_stats, second_stats) = (free_tcp_port(), free_tcp_port());
    let first = network.start(&ours(), "first", &["10.42.0.1/16"], &settings(first_stats, 0));
    until("the first socket", &|| path.exists() && metric(first_stats, "nebula_config_missing_listeners").is_some());
    assert_eq!(metric(first_stats, "nebula_config_missing_listeners").as_deref(), Some("0"));

    // Another daemon that wants the same control socket.
    let second = network.start(&ours(), "second", &["10.42.0.2/16"], &settings(second_stats, 0));
    until("a metric", &|| metric(second_stats, "nebula_config_missing_listeners").as_deref() == Some("1"));
    assert!(second.log().contains("Failed to open the control socket"), "{}", second.log());
    drop(second);

    // A port that a reload cannot change.
    assert!(ask("status").lines().any(|line| line == "at next start: -"), "{}", ask("status"));
    first.reload(&settings(first_stats, free_udp_port()));
    until("a metric", &|| metric(first_stats, "nebula_config_at_next_start").as_deref() == Some("1"));
    assert!(first.log().contains("takes effect at the next start"), "{}", first.log());
    let (status, doctor) = (ask("status"), ask("doctor"));
    assert!(status.lines().any(|line| line.starts_with("at next start") && line.contains("listen.port")), "{status}");
    assert!(doctor.contains("[at_next_start]") && doctor.contains("listen.port"), "{doctor}");
    first.reload(&settings(first_stats, 0));
    until("a metric", &|| metric(first_stats, "nebula_config_at_next_start").as_deref() == Some("0"));
}
