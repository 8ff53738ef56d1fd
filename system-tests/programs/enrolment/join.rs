//! `nebula up`: a bare host joins with a single token, and its daemon keeps it in the network.

#![allow(clippy::disallowed_methods, reason = "these tests watch real processes on a real clock")]

use crate::enrolment::renewal::renewer_of;
use crate::world;

use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::Output;
use std::time::{Duration, Instant};

use nebula_cert::{Identity, JoinToken};
use nebula_enrolment::enrol::limits::Limits;
use nebula_enrolment::enrol::{self, Files};
use nebula_linux::clock::unix_now;
use nix::sys::signal::Signal;
use serde_json::json;
use world::cluster::{Cluster, LIGHTHOUSE, binary, capabilities};
use world::peers::ours;
use world::run;

/// A network whose CA has a pool of addresses and announces its lighthouse.
pub(crate) struct Network(pub(crate) Cluster);

impl Network {
    pub(crate) fn new() -> Self {
        let mut cluster = Cluster::new();
        let endpoint = cluster.ca_url().trim_start_matches("https://").replace("8443", "4242");
        cluster.change_policy(|policy| {
            policy["hosts"] = json!({
                "pool": ["10.42.200.0/24"],
                "overlay": ["10.42.0.0/16"],
                "lighthouses": {LIGHTHOUSE: [endpoint]},
            });
        });
        Self(cluster)
    }

    /// Runs the first command, on the CA: creates a join token.
    pub(crate) fn token(&self, name: &str, options: &[&str]) -> String {
        let (dir, url) = (self.0.ca_file(""), self.0.ca_url());
        let create = ["token", "create", "--dir", &dir, "--name", name, "--join", "--url", &url];
        run(&binary("nebula-ca").display().to_string(), &[&create, options].concat()).trim().to_owned()
    }

    fn folder(&self, host: &str) -> PathBuf {
        self.0.world.dir().join(host)
    }

    /// Runs the second command, on the host.
    pub(crate) fn up(&self, host: &str, token: &str) -> Output {
        self.up_with(host, token, &[])
    }

    fn up_with(&self, host: &str, token: &str, more: &[&str]) -> Output {
        let (program, folder) = (ours().display().to_string(), self.folder(host).display().to_string());
        let file = self.0.world.write(&format!("{host}.token"), token).display().to_string();
        let words = [&program, "up", "-token-file", &file, "-dir", &folder, "-no-start"];
        self.0.world.exec(host, &[&words, more].concat())
    }

    fn start(&mut self, host: &str) {
        let config = self.folder(host).join("config.yml").display().to_string();
        self.0.world.start(host, &ours(), &["-config", &config]);
    }

    /// Adds a host that has joined and runs.
    pub(crate) fn joined(&mut self, host: &str, life: &str) {
        self.0.world.host(host);
        let output = self.up(host, &self.token(host, &["--life", life]));
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        self.start(host);
    }

    fn fingerprint(&self, host: &str) -> String {
        let folder = self.folder(host);
        let identity = Identity::read(folder.join("host.crt"), folder.join("host.key"));
        identity.map_or_else(|_| String::new(), |identity| identity.primary().fingerprint().to_string())
    }

    fn announced(&self, host: &str) -> String {
        std::fs::read_to_string(self.folder(host).join("announced.json")).unwrap()
    }

    pub(crate) fn wait(&self, what: &str, within: Duration, is_so: impl Fn(&Self) -> bool) {
        let end = Instant::now() + within;
        while !is_so(self) {
            assert!(Instant::now() < end, "{what}\n{}", self.0.world.all_logs());
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

#[test]
#[ignore = "needs root and network namespaces"]
fn a_bare_host_is_in_the_network_after_two_commands_and_follows_what_the_ca_announces() {
    let mut network = Network::new();
    network.0.world.host("vm");
    let begun = Instant::now();
    let token = network.token("vm", &[]);
    let output = network.up("vm", &token);
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    network.start("vm");
    network.0.world.ping("vm", LIGHTHOUSE, Duration::from_secs(5));
    let took = begun.elapsed();
    println!("from the first command to the first reply: {took:?}");
    assert!(took < Duration::from_secs(5), "{took:?}");

    assert!(said.contains("as 10.42.200.1/16"), "an address of the pool: {said}");
    let folder = network.folder("vm");
    let secret = token.parse::<JoinToken>().unwrap().secret().clone();
    for entry in std::fs::read_dir(&folder).unwrap().map(Result::unwrap) {
        let text = String::from_utf8_lossy(&std::fs::read(entry.path()).unwrap()).into_owned();
        assert!(!text.contains(&**secret) && !text.contains(&token), "{:?} has the secret", entry.path());
        let mode = entry.metadata().unwrap().permissions().mode() & 0o777;
        assert!(mode & 0o022 == 0 && (entry.file_name() != "host.key" || mode == 0o600), "{entry:?}: {mode:o}");
    }
    assert!(!network.0.world.log("vm").contains(&**secret));
    let again = network.up("vm", &token);
    assert!(String::from_utf8_lossy(&again.stderr).contains("refusing to overwrite"), "{again:?}");

    // Changes to the trust bundle and the lighthouses arrive within seconds.
    let policy = std::fs::read_to_string(network.0.ca_file("policy.jsonc")).unwrap();
    let other = format!("{LIGHTHOUSE}\":");
    let policy = policy.replace(&other, &format!("10.42.255.9\":[\"192.0.2.9:4242\"],\"{other}"));
    std::fs::write(network.0.ca_file("policy.jsonc"), policy).unwrap();
    let (ca, dir) = (binary("nebula-ca").display().to_string(), network.0.ca_file(""));
    run(&ca, &["reload", "--dir", &dir]);
    network.wait("the new lighthouse", Duration::from_secs(15), |net| net.announced("vm").contains("10.42.255.9"));
    network.wait("the reload", Duration::from_secs(5), |net| {
        net.0.world.log("vm").contains("static_host_map has been reloaded")
    });
    run(&ca, &["certificate", "revoke", "--dir", &dir, "lighthouse"]);
    network.wait("the block", Duration::from_secs(15), |net| net.announced("vm").contains("blocklist\":[\""));
    network.wait("the end of the tunnel", Duration::from_secs(15), |net| {
        net.0.world.pings("vm", LIGHTHOUSE, 1, "0.2") == 0
    });
}

#[test]
#[ignore = "needs root and network namespaces"]
fn what_a_host_uses_already_is_not_taken_unless_it_is_named() {
    let mut network = Network::new();
    network.0.world.host("vm");
    let ip = |words: &str| network.0.world.run("vm", &[&["ip"], &*words.split(' ').collect::<Vec<_>>()].concat());
    ip("link add docker0 type veth peer name inside");
    ip("link set docker0 up");
    ip("addr add 172.17.0.1/16 dev docker0");
    ip("route add default via 172.17.0.254 dev docker0");
    ip("route add 10.9.0.0/16 via 172.17.0.253 dev docker0 table 52");
    ip("route add blackhole 10.77.0.0/24");
    // The token is for 10.42.0.0/16, and this service was taken over, or another one made the token.
    let token = network.token("gate", &["--unsafe-networks", "192.168.7.0/24"]);
    let good: JoinToken = token.parse().unwrap();
    for (overlay, said) in [
        ("172.17.0.254/32", "a gateway by docker0"),
        ("172.17.5.0/24", "the route by docker0"),
        ("10.9.3.0/24", "the route by docker0"),
        ("10.77.0.0/16", "the route which leads nowhere"),
        ("128.0.0.0/1", "default route"),
        ("10.43.0.0/16", "for which the join token was made"),
    ] {
        let networks = [overlay.parse().unwrap()];
        let other = JoinToken::new(good.url(), *good.fingerprint(), good.secret(), &networks).unwrap();
        let refused = network.up("vm", &other.to_text());
        let text = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(!refused.status.success() && text.contains(said), "{overlay}: {text}");
        assert!(!network.folder("vm").join("host.crt").exists());
    }
    ip("route add 10.42.7.0/24 via 172.17.0.253 dev docker0");
    for (accepted, missing) in [("10.1.0.0/16", "10.42.0.0/16"), ("10.42.0.0/16", "192.168.7.0/24")] {
        let refused = network.up_with("vm", &token, &["-accept-networks", accepted]);
        let text = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(text.ends_with(&format!("-accept-networks {missing}\n")), "{text}");
        assert!(!network.folder("vm").join("host.crt").exists());
    }
    let named = network.up_with("vm", &token, &["-accept-networks", "10.42.0.0/16,192.168.7.0/24"]);
    assert!(named.status.success(), "{}", String::from_utf8_lossy(&named.stderr));
}

#[test]
#[ignore = "needs root and network namespaces"]
fn a_daemon_renews_for_ten_lifetimes_without_a_timer() {
    let mut network = Network::new();
    network.joined("vm", "3s");
    let begun = Instant::now();
    let mut seen = std::collections::BTreeSet::new();
    while begun.elapsed() < Duration::from_secs(30) {
        seen.insert(network.fingerprint("vm"));
        std::thread::sleep(Duration::from_millis(100));
    }
    seen.remove("");
    assert!(seen.len() > 10, "{} certificates\n{}", seen.len(), network.0.world.all_logs());
    network.0.world.ping("vm", LIGHTHOUSE, Duration::from_secs(5));
    assert!(!network.0.world.log("vm").contains("has expired, and peers refuse it"), "{}", network.0.world.log("vm"));
}

/// As with `daemon.user`: the folder belongs to the user that daemon and child are.
#[test]
#[ignore = "needs root and network namespaces"]
fn a_daemon_that_is_another_user_renews_by_a_child_without_privileges_or_files_of_the_daemon() {
    const USER: u32 = 65534;
    let mut network = Network::new();
    network.0.world.host("vm");
    let output = network.up("vm", &network.token("vm", &["--life", "3s"]));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let folder = network.folder("vm");
    let config = folder.join("config.yml");
    let text = std::fs::read_to_string(&config).unwrap();
    std::fs::write(&config, format!("{text}daemon: {{user: '{USER}:{USER}', control_socket: false}}\n")).unwrap();
    // The build folder may be in somebody's home.
    let programs = network.folder("programs");
    std::fs::create_dir(&programs).unwrap();
    for name in ["nebula", "nebula-enrol"] {
        std::fs::copy(binary(name), programs.join(name)).unwrap();
    }
    for folder in [network.0.world.dir(), &programs] {
        std::fs::set_permissions(folder, std::fs::Permissions::from_mode(0o755)).unwrap();
    }
    let entries = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path());
    entries.chain([folder.clone()]).for_each(|path| chown(path, Some(USER), Some(USER)).unwrap());
    let first = network.fingerprint("vm");
    network.0.world.start("vm", &programs.join("nebula"), &["-config", &config.display().to_string()]);
    network.wait("a renewal", Duration::from_secs(10), |net| {
        ![first.clone(), String::new()].contains(&net.fingerprint("vm"))
    });
    network.0.world.ping("vm", LIGHTHOUSE, Duration::from_secs(5));
    let child = renewer_of(network.0.world.pid("vm")).expect("the child");
    let status = std::fs::read_to_string(format!("/proc/{child}/status")).unwrap();
    let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).unwrap().trim();
    assert!(field("Uid:").starts_with(&USER.to_string()), "{status}");
    assert_eq!((field("NoNewPrivs:"), capabilities(&status)), ("1", Vec::<String>::new()), "{status}");
    let files = std::fs::read_dir(format!("/proc/{child}/fd")).unwrap();
    let files: Vec<_> = files.filter_map(|file| std::fs::read_link(file.ok()?.path()).ok()).collect();
    // Its own are pipes, and a socket if it is just talking to the CA; others may come from whoever started the daemon.
    let count = |kind: &str| files.iter().filter(|file| file.display().to_string().contains(kind)).count();
    assert_eq!((count("tun"), count("anon_inode")), (0, 0), "{files:?}");
    assert!(count("socket:") <= 1, "{files:?}");
    for name in ["host.key", "host.crt", "ca.crt"] {
        let metadata = std::fs::metadata(folder.join(name)).unwrap();
        let mode = if name == "host.key" { 0o600 } else { 0o644 };
        assert_eq!((metadata.uid(), metadata.permissions().mode() & 0o777), (USER, mode), "{name}");
    }
}

#[test]
#[ignore = "needs root and network namespaces"]
fn a_ca_that_is_away_for_half_a_life_costs_no_reply() {
    let mut network = Network::new();
    network.joined("vm", "20s");
    network.0.world.ping("vm", LIGHTHOUSE, Duration::from_secs(5));
    let (joined, first) = (Instant::now(), network.fingerprint("vm"));
    std::thread::sleep(Duration::from_secs(6));
    network.0.world.stop("control", Signal::SIGTERM);
    let answered = network.0.world.pings("vm", LIGHTHOUSE, 50, "0.2");
    assert_eq!(answered, 50, "without the CA");
    assert_eq!(network.fingerprint("vm"), first);
    network.0.start_ca();
    network.wait("a renewal", Duration::from_secs(4), |net| {
        ![first.clone(), String::new()].contains(&net.fingerprint("vm"))
    });
    assert!(joined.elapsed() < Duration::from_secs(20), "in time: {:?}", joined.elapsed());
    network.0.world.ping("vm", LIGHTHOUSE, Duration::from_secs(5));
    let log = network.0.world.log("vm");
    assert!(log.contains("could not be renewed; it is tried again"), "{log}");
}

#[test]
#[ignore = "needs root and network namespaces"]
fn a_service_with_another_key_is_told_nothing_and_a_wrong_clock_is_named() {
    let mut network = Network::new();
    network.0.world.host("vm");
    let token = network.token("vm", &[]);
    let good: JoinToken = token.parse().unwrap();
    let (ca, dir) = (binary("nebula-ca").display().to_string(), network.0.ca_file(""));
    let audit = || std::fs::read_to_string(network.0.ca_file("audit.log")).unwrap();
    let before = audit();
    let forged = JoinToken::new(good.url(), [7; 32], good.secret(), good.networks()).unwrap().to_text();
    let refused = network.up("vm", &forged);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && said.contains("shows another key"), "{said}");
    assert_eq!(audit(), before, "the CA saw no request");
    assert!(run(&ca, &["token", "list", "--dir", &dir]).contains("open for"), "the token is as good as before");
    assert!(!network.folder("vm").join("host.crt").exists(), "no certificate");

    let namespace = network.0.world.namespace_of("vm");
    let clock = |folder: &Path, ahead: i64| {
        let (files, good, namespace) = (Files::new(folder), good.clone(), namespace.clone());
        let joined = std::thread::spawn(move || {
            world::enter(&namespace);
            enrol::join(&good, &files, &Limits::default(), unix_now() + ahead).map_err(|error| error.to_string())
        });
        joined.join().unwrap()
    };
    let behind = clock(&network.folder("behind"), -3_600).unwrap_err();
    assert!(behind.contains("minutes behind that of the CA"), "{behind}");
    // The key of the first attempt has used the token.
    clock(&network.folder("behind"), 0).unwrap();
    let folder = network.folder("behind");
    let renewed = std::thread::spawn(move || {
        world::enter(&namespace);
        enrol::renew(None, &Files::new(&folder), true, unix_now() + 3_600).map_err(|error| error.to_string())
    });
    let ahead = renewed.join().unwrap().unwrap_err();
    assert!(ahead.contains("the clocks differ") && ahead.contains("clock_differs"), "{ahead}");
}
