//! The SSH debug console: OpenSSH's client with our server and, for comparison, with Go Nebula's. On loopback, without
//! devices.

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test ends at the first surprise, on a real clock"
)]

use crate::loopback;

use std::io::Write as _;
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use loopback::{Daemon, Network, free_tcp_port, free_udp_port, go, ours};
use serde_json::Value;

/// Keys and certificates made with OpenSSH.
struct Keys(tempfile::TempDir);

impl Keys {
    fn new(names: &[&str]) -> Self {
        let keys = Self(tempfile::tempdir().unwrap());
        for name in names {
            keygen(&["-q", "-t", "ed25519", "-N", "", "-C", name, "-f", &keys.path(name).display().to_string()]);
        }
        keys
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn public(&self, name: &str) -> String {
        std::fs::read_to_string(self.path(&format!("{name}.pub"))).unwrap().trim().to_owned()
    }

    /// Signs a certificate of `authority` for the key `name`, with more options.
    fn sign(&self, authority: &str, name: &str, more: &[&str]) {
        let (authority, public) = (self.path(authority), self.path(&format!("{name}.pub")));
        let (authority, public) = (authority.display().to_string(), public.display().to_string());
        keygen(&[&["-q", "-s", &authority, "-I", "test"], more, &[public.as_str()]].concat());
    }
}

fn keygen(words: &[&str]) {
    assert!(Command::new("ssh-keygen").args(words).status().unwrap().success());
}

/// A lighthouse, and a client that has a console and a tunnel to the lighthouse.
struct Pair {
    _network: Network,
    _lighthouse: Daemon,
    client: Daemon,
    lighthouse_port: u16,
    port: u16,
}

impl Pair {
    fn start(program: &Path, keys: &Keys, sshd: &str) -> Self {
        let (network, lighthouse_port, port) = (Network::new(), free_udp_port(), free_tcp_port());
        let rules = "firewall: {outbound: [{port: any, proto: any, host: any}]}";
        let listen = format!("listen: {{host: 127.0.0.1, port: {lighthouse_port}}}");
        let lighthouse = format!("{listen}\nlighthouse: {{am_lighthouse: true}}\n{rules}\n{NO_SOCKET}");
        let lighthouse = network.start(&ours(), "lighthouse", &["10.42.0.1/16"], &lighthouse);
        let settings = settings(lighthouse_port, &console(keys, port, sshd));
        let client = network.start(program, "client", &["10.42.0.7/16"], &settings);
        let pair = Self { _network: network, _lighthouse: lighthouse, client, lighthouse_port, port };
        pair.wait("console", || TcpStream::connect(("127.0.0.1", port)).is_ok());
        pair
    }

    fn wait(&self, what: &str, mut done: impl FnMut() -> bool) {
        let until = Instant::now() + Duration::from_secs(30);
        while !done() {
            assert!(Instant::now() < until, "no {what}\n{}", self.client.log());
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn ssh(&self, user: &str, key: &Path, more: &[&str]) -> Command {
        ssh(self.port, user, key, more)
    }

    /// Runs a command; returns its exit code and output.
    fn run(&self, keys: &Keys, command: &str) -> (i32, String) {
        let Output { status, stdout, stderr } =
            self.ssh("admin", &keys.path("user"), &[command]).stdin(Stdio::null()).output().unwrap();
        let code = status.code().unwrap();
        assert!(code == 0 || code == 255, "{}", String::from_utf8_lossy(&stderr));
        (code, String::from_utf8(stdout).unwrap())
    }

    fn logs_in(&self, user: &str, key: &Path) -> bool {
        self.ssh(user, key, &["version"]).stdin(Stdio::null()).output().unwrap().status.success()
    }
}

fn settings(lighthouse_port: u16, sshd: &str) -> String {
    format!(
        "listen: {{host: 127.0.0.1}}\nstatic_host_map: {{10.42.0.1: ['127.0.0.1:{lighthouse_port}']}}\n\
         lighthouse: {{hosts: [10.42.0.1], interval: 1}}\nhandshakes: {{try_interval: 3s}}\n\
         firewall: {{outbound: [{{port: any, proto: any, host: any}}]}}\n{NO_SOCKET}\n{sshd}"
    )
}

fn console(keys: &Keys, port: u16, more: &str) -> String {
    format!("sshd:\n  enabled: true\n  listen: 127.0.0.1:{port}\n  host_key: {}\n{more}", keys.path("host").display())
}

/// One user with one key.
fn one_user(keys: &Keys) -> String {
    format!("  authorized_users: [{{user: admin, keys: ['{}']}}]\n", keys.public("user"))
}

fn ssh(port: u16, user: &str, key: &Path, more: &[&str]) -> Command {
    let mut command = Command::new("ssh");
    let port = port.to_string();
    let options = [
        "BatchMode=yes",
        "IdentitiesOnly=yes",
        "IdentityAgent=none",
        "StrictHostKeyChecking=no",
        "LogLevel=ERROR",
        "UserKnownHostsFile=/dev/null",
        "ConnectTimeout=10",
    ];
    command.args(["-F", "/dev/null", "-p", &port, "-l", user, "-i"]).arg(key);
    for option in options {
        command.args(["-o", option]);
    }
    command.arg("127.0.0.1").args(more);
    command
}

// Otherwise both pairs would open a control socket with the same name.
const NO_SOCKET: &str = "daemon: {control_socket: false}";

/// Removes what differs between two networks and two programs.
fn normal(text: &str, lighthouse_port: u16) -> String {
    let text = text.replace(&format!("127.0.0.1:{lighthouse_port}"), "LIGHTHOUSE");
    match serde_json::from_str::<Value>(&text) {
        Ok(mut document) if document.is_object() || document.is_array() => {
            mask(&mut document);
            // Keeps whether it is indented and whether it ends with a newline.
            let shape = (text.lines().count(), text.ends_with('\n'));
            format!("{shape:?} {document}")
        }
        _ => text,
    }
}

fn mask(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            for (name, value) in fields {
                let varies =
                    ["localIndex", "remoteIndex", "messageCounter", "publicKey", "signature", "fingerprint", "issuer"];
                if varies.contains(&name.as_str()) {
                    *value = name.as_str().into();
                } else {
                    mask(value);
                }
            }
        }
        Value::Array(items) => items.iter_mut().for_each(mask),
        _ => {}
    }
}

#[test]
#[ignore = "needs OpenSSH's client and Go Nebula: part config of ./test"]
fn every_command_answers_as_gos_does() {
    let keys = Keys::new(&["host", "user"]);
    let pairs = [ours(), go()].map(|program| Pair::start(&program, &keys, &one_user(&keys)));
    for pair in &pairs {
        pair.wait("a tunnel", || {
            let map = pair.run(&keys, "list-lighthouse-addrmap").1;
            pair.run(&keys, "list-hostmap").1.starts_with("[10.42.0.1]") && map.contains("learned")
        });
    }
    let both = |command: &str| pairs.each_ref().map(|pair| pair.run(&keys, command));
    for command in [
        "list-hostmap",
        "list-hostmap -json",
        "list-hostmap -pretty",
        "list-hostmap -by-index -json",
        "list-hostmap -by-index",
        "list-pending-hostmap",
        "list-pending-hostmap -json",
        "list-pending-hostmap -pretty",
        "list-lighthouse-addrmap",
        "list-lighthouse-addrmap -json",
        "list-lighthouse-addrmap -pretty",
        "device-info",
        "device-info -json",
        "device-info -pretty",
        "print-cert",
        "print-cert -json",
        "print-cert -pretty",
        "print-cert 10.42.0.1",
        "print-cert -json 10.42.0.1",
        "print-cert 10.42.0.1 -json",
        "print-cert 10.42.9.9",
        "print-cert nonsense",
        "print-tunnel",
        "print-tunnel 10.42.0.1",
        "print-tunnel -pretty 10.42.0.1",
        "print-tunnel nonsense",
        "print-tunnel 10.42.9.9",
        "print-relays",
        "print-relays -pretty",
        "query-lighthouse",
        "query-lighthouse nonsense",
        "query-lighthouse 10.42.0.1",
        "query-lighthouse 10.42.9.9",
        "create-tunnel",
        "create-tunnel nonsense",
        "create-tunnel 10.42.0.1",
        "create-tunnel -address nonsense 10.42.0.9",
        "change-remote",
        "change-remote 10.42.0.1",
        "change-remote -address nonsense 10.42.0.1",
        "change-remote -address 127.0.0.1:9 nonsense",
        "change-remote -address 127.0.0.1:9 10.42.9.9",
        "close-tunnel",
        "close-tunnel nonsense",
        "close-tunnel 10.42.9.9",
        "log-level",
        "log-level nonsense",
        "log-level DEBUG",
        "log-level info",
        "log-format",
        "log-format json",
        "log-format TEXT",
        "start-cpu-profile",
        "save-heap-profile",
        "save-mutex-profile",
        "start-cpu-profile /etc/passwd",
        "save-heap-profile ../x",
        "save-mutex-profile .",
        "stop-cpu-profile",
        "print-cert \"10.42.0.1\" ''",
        "'log-level'",
    ] {
        let [own, theirs] = both(command);
        let [own_port, their_port] = pairs.each_ref().map(|pair| pair.lighthouse_port);
        let (own, theirs) = ((own.0, normal(&own.1, own_port)), (theirs.0, normal(&theirs.1, their_port)));
        assert_eq!(own, theirs, "{command}: ours is left");
    }
    let lines_with = |text: &str, start: &str| -> Vec<String> {
        text.lines().filter(|line| line.starts_with(start)).map(str::to_owned).collect()
    };
    // Our descriptions are our own, but names and flags are the same.
    let names = |text: &str| -> Vec<String> {
        text.lines()
            .skip_while(|line| !line.starts_with("Available"))
            .filter_map(|line| Some(line.split_once(" - ")?.0.to_owned()))
            .collect()
    };
    for command in ["help", "shutdown now", " "] {
        let [own, theirs] = both(command);
        let mut listed = names(&own.1);
        // Go's help omits it, but its list after a mistake does not.
        listed.retain(|name| name != "logout" || command != "help");
        assert_eq!((own.0, listed), (theirs.0, names(&theirs.1)), "{command}");
        assert_eq!(own.1.lines().next(), theirs.1.lines().next());
        assert!(names(&own.1).len() > 20 && own.1.ends_with("\n\n") && theirs.1.ends_with("\n\n"));
    }
    for name in names(&pairs[1].run(&keys, "help").1) {
        let [own, theirs] = both(&format!("help {name}"));
        assert_eq!(lines_with(&own.1, "  -"), lines_with(&theirs.1, "  -"), "{name}");
        assert!(own.1.starts_with(&format!("{name} - ")) && theirs.1.starts_with(&format!("{name} - ")));
    }
    for command in ["help nonsense", "list-hostmap -nonsense", "list-hostmap -json=maybe", "create-tunnel -address"] {
        let [own, theirs] = both(command);
        let first = |text: &str| text.lines().take(2).map(str::to_owned).collect::<Vec<_>>();
        assert_eq!((own.0, first(&own.1)), (theirs.0, first(&theirs.1)), "{command}");
        assert_eq!(lines_with(&own.1, "  -"), lines_with(&theirs.1, "  -"), "{command}");
    }
    // Things that change: a handshake without an answer, closed tunnels, and new ones.
    for command in [
        "create-tunnel 10.42.0.9",
        "create-tunnel 10.42.0.9",
        "list-pending-hostmap",
        "close-tunnel -local-only 10.42.0.1",
        "reload",
    ] {
        let [own, theirs] = both(command);
        if command == "reload" {
            // Go closes the session.
            assert_eq!((own, theirs.1.as_str()), ((0, "Reloading config\n".to_owned()), "Reloading config\n"));
        } else {
            assert_eq!(own, theirs, "{command}\n{}", pairs[1].client.log());
        }
    }
    for pair in &pairs {
        pair.wait("a tunnel again", || pair.run(&keys, "list-hostmap").1.starts_with("[10.42.0.1]"));
        assert_eq!(pair.run(&keys, "change-remote -address 127.0.0.1:9 10.42.0.1").1, "Changed\n");
        assert_eq!(pair.run(&keys, "close-tunnel 10.42.0.1").1, "Closed\n");
        let (_, pem) = pair.run(&keys, "print-cert -raw");
        assert!(pem.starts_with("-----BEGIN NEBULA CERTIFICATE V2-----\n") && pem.ends_with("-----\n"), "{pem}");
    }
    // Go crashes with a nil pointer here.
    assert_eq!(pairs[0].run(&keys, "create-tunnel -address 127.0.0.1:9 10.42.0.8").1, "Created\n");
    let pending = pairs[0].run(&keys, "list-pending-hostmap").1;
    assert!(pending.contains("[10.42.0.8]: [127.0.0.1:9]\n"), "{pending}");
    assert_eq!(both("logout").map(|(_, said)| said), [String::new(), String::new()]);
    assert_eq!(pairs[0].run(&keys, "version").1, format!("{}\n", env!("CARGO_PKG_VERSION")));
    assert!(pairs[0].run(&keys, "save-heap-profile x").1.contains("no profiles"));
}

#[test]
#[ignore = "needs OpenSSH's client: part config of ./test"]
fn only_keys_and_authorities_of_the_configuration_log_in_and_a_reload_obeys_it() {
    let keys = Keys::new(&["host", "user", "other", "authority", "certified", "expired", "elsewhere", "server"]);
    let more = format!("{}  trusted_cas: ['{}']\n", one_user(&keys), keys.public("authority"));
    keys.sign("authority", "certified", &["-n", "admin,auditor", "-V", "-1m:+10m"]);
    keys.sign("authority", "expired", &["-n", "admin", "-V", "-10m:-1m"]);
    keys.sign("authority", "elsewhere", &["-n", "admin", "-O", "source-address=192.0.2.0/24"]);
    keys.sign("authority", "server", &["-h", "-n", "admin"]);
    let pair = Pair::start(&ours(), &keys, &more);
    for (user, key, expected) in [
        ("admin", "user", true),
        ("root", "user", false),
        ("admin", "other", false),
        ("admin", "certified", true),
        ("auditor", "certified", true),
        ("root", "certified", false),
        ("admin", "expired", false),
        ("admin", "elsewhere", false),
        ("admin", "server", false),
        ("admin", "authority", false),
    ] {
        assert_eq!(pair.logs_in(user, &keys.path(key)), expected, "{user} with {key}\n{}", pair.client.log());
    }
    assert!(pair.client.log().contains("ssh user logged in"), "{}", pair.client.log());

    // The host key is the configured one, and nothing but the console is offered.
    let known = keys.path("known");
    std::fs::write(&known, format!("[127.0.0.1]:{} {}\n", pair.port, keys.public("host"))).unwrap();
    let known = format!("UserKnownHostsFile={}", known.display());
    let strict = Command::new("ssh")
        .args([
            "-F",
            "/dev/null",
            "-o",
            &known,
            "-o",
            "StrictHostKeyChecking=yes",
            "-o",
            "BatchMode=yes",
            "-l",
            "admin",
            "-i",
        ])
        .arg(keys.path("user"))
        .args(["-p", &pair.port.to_string(), "127.0.0.1", "version"])
        .output()
        .unwrap();
    assert!(strict.status.success(), "{}", String::from_utf8_lossy(&strict.stderr));
    let target = format!("127.0.0.1:{}", pair.port);
    for refused in [&["-W", &target][..], &["-s", "sftp"]] {
        let mut command = ssh(pair.port, "admin", &keys.path("user"), &[]);
        assert!(!command.args(refused).stdin(Stdio::null()).output().unwrap().status.success(), "{refused:?}");
    }

    // A session survives a reload that leaves the console unchanged, and ends with one that removes its key.
    let logins = || pair.client.log().matches("ssh user logged in").count();
    let before = logins();
    let mut shell = pair.ssh("admin", &keys.path("user"), &[]);
    let mut shell = shell.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    pair.wait("a session", || logins() > before);
    pair.client.reload(&settings(pair.lighthouse_port, &console(&keys, pair.port, &more)));
    pair.wait("a reload", || pair.client.log().contains("Client certificate(s) refreshed"));
    assert!(pair.logs_in("admin", &keys.path("user")));
    assert!(shell.try_wait().unwrap().is_none(), "the session lives");
    let other = more.replace(&keys.public("user"), &keys.public("other"));
    pair.client.reload(&settings(pair.lighthouse_port, &console(&keys, pair.port, &other)));
    pair.wait("the other key", || pair.logs_in("admin", &keys.path("other")));
    pair.wait("an end of the session", || shell.try_wait().unwrap().is_some());
    assert!(!pair.logs_in("admin", &keys.path("user")));
    pair.client.reload(&settings(pair.lighthouse_port, "sshd: {enabled: false}"));
    pair.wait("a closed port", || TcpStream::connect(("127.0.0.1", pair.port)).is_err());
    assert!(!pair.client.log().contains("PRIVATE"), "no secret is logged");
}

#[test]
#[ignore = "needs OpenSSH's client: part config of ./test"]
fn a_shell_edits_its_line_completes_commands_and_ends() {
    let keys = Keys::new(&["host", "user"]);
    let pair = Pair::start(&ours(), &keys, &one_user(&keys));
    let mut shell = pair.ssh("admin", &keys.path("user"), &["-tt"]);
    let mut shell = shell.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let typed = b"vex\x7frs\t\rlist-l\t\rnonsense\r\rlog-\t\x15logout\r";
    shell.stdin.take().unwrap().write_all(typed).unwrap();
    let Output { status, stdout, .. } = shell.wait_with_output().unwrap();
    let shown = String::from_utf8(stdout).unwrap();
    assert!(status.success(), "{shown}");
    for expected in [
        "admin@nebula > ",
        &format!("\r\n{}\r\n", env!("CARGO_PKG_VERSION")),
        "list-lighthouse-addrmap \r\n",
        "10.42.0.1: {",
        "did not understand: nonsense\r\n",
        "\r\nlog-format\r\nlog-level\r\n",
    ] {
        assert!(shown.contains(expected), "{expected:?} not in {shown:?}");
    }
}

#[test]
#[ignore = "needs OpenSSH's client: part config of ./test"]
fn who_does_not_log_in_keeps_out_nobody_who_does() {
    let keys = Keys::new(&["host", "user", "other"]);
    let pair = Pair::start(&ours(), &keys, &one_user(&keys));
    // All earlier sessions have ended.
    assert!(pair.logs_in("admin", &keys.path("user")));
    // More connections than may log in at once, and none of them sends anything.
    // One that must give way at once may see that as an error.
    let silent: Vec<_> = (0..100).filter_map(|_| TcpStream::connect(("127.0.0.1", pair.port)).ok()).collect();
    for _ in 0..3 {
        assert!(pair.logs_in("admin", &keys.path("user")), "there is no place\n{}", pair.client.log());
    }
    drop(silent);
    let text = "x".repeat(10_000);
    assert_eq!(pair.run(&keys, &text).1, "the command is too long, or no text\n");
}
