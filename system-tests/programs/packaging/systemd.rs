//! `deploy/nebula.service` under a real systemd.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use super::repository;
use crate::enrolment::join::Network;
use crate::world::cluster::{LIGHTHOUSE, binary, tool};
use crate::world::peers::ours;
use crate::world::{World, run};

/// Where systemd sees program, configuration and credentials: its own `/run`, so that `ProtectHome` and `PrivateTmp` do
/// not hide anything needed here.
pub(super) const PLACE: &str = "/run/nebula-test";

/// A systemd in separate namespaces; stopped on drop.
pub(super) struct Systemd {
    folder: tempfile::TempDir,
    pub(super) root: PathBuf,
}

impl Systemd {
    pub(super) fn new() -> Self {
        let folder = tempfile::tempdir().expect("a temporary directory");
        let pid = run(&manager(), &["start", &folder.path().display().to_string()]);
        let root = PathBuf::from(format!("/proc/{}/root", pid.trim()));
        std::fs::create_dir(root.join(&PLACE[1..])).expect("a folder in its /run");
        Self { folder, root }
    }

    pub(super) fn write(&self, name: &str, bytes: &[u8]) {
        std::fs::write(self.root.join(&PLACE[1..]).join(name), bytes).expect("write a file");
    }

    pub(super) fn call(&self, command: &[&str]) -> Output {
        Command::new(manager()).arg("sh").arg(self.folder.path()).args(command).output().expect("nsenter runs")
    }

    pub(super) fn must(&self, command: &[&str]) -> String {
        let output = self.call(command);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{command:?}: {errors}\n{}", self.log());
        String::from_utf8_lossy(&output.stdout).trim().to_owned()
    }

    pub(super) fn show(&self, property: &str) -> String {
        self.show_of("nebula.service", property)
    }

    pub(super) fn show_of(&self, unit: &str, property: &str) -> String {
        self.must(&["systemctl", "show", "-P", property, unit])
    }

    /// Puts a program of the release build where units look for it.
    pub(super) fn program(&self, name: &str) {
        self.write(name, &std::fs::read(binary(name)).expect("the program"));
        self.must(&["chmod", "755", &format!("{PLACE}/{name}")]);
    }

    /// Adds a unit that runs in a network namespace and logs to [`Systemd::log`].
    pub(super) fn unit(&self, name: &str, text: &str, namespace: &str) {
        self.add(name, text, &format!("NetworkNamespacePath=/run/netns/{namespace}\n"));
    }

    /// Like [`Systemd::unit`], for one that needs no network.
    pub(super) fn lone_unit(&self, name: &str, text: &str) {
        self.add(name, text, "");
    }

    fn add(&self, name: &str, text: &str, more: &str) {
        let units = self.folder.path().join("units");
        std::fs::write(units.join(name), text).expect("write the unit");
        let drop_ins = units.join(format!("{name}.d"));
        std::fs::create_dir(&drop_ins).expect("a folder for what this test adds");
        let added = format!("[Service]\n{more}StandardOutput=append:{PLACE}/log\nStandardError=append:{PLACE}/log\n");
        std::fs::write(drop_ins.join("test.conf"), added).expect("write the drop-in");
        self.must(&["systemctl", "daemon-reload"]);
    }

    /// Gives the processes of this systemd a folder of the machine to write to, which stays as it is for all others.
    pub(super) fn overlay(&self, folder: &str) {
        let place = format!("/run/overlay{folder}");
        let [upper, work] = ["upper", "work"].map(|name| format!("{place}/{name}"));
        self.must(&["mkdir", "-p", &upper, &work]);
        let layers = format!("lowerdir={folder},upperdir={upper},workdir={work}");
        self.must(&["mount", "-t", "overlay", "overlay", "-o", &layers, folder]);
    }

    pub(super) fn log(&self) -> String {
        std::fs::read_to_string(self.root.join(&PLACE[1..]).join("log")).unwrap_or_default()
    }
}

impl Drop for Systemd {
    fn drop(&mut self) {
        let _ = Command::new(manager()).arg("stop").arg(self.folder.path()).status();
    }
}

fn manager() -> String {
    tool("systemd-ns.sh").display().to_string()
}

/// Configuration of `host`, which the other host pings; `inbound` are its firewall rules.
fn config(folder: &Path, host: &str, inbound: &str) -> String {
    let folder = folder.display();
    format!(
        "pki: {{ca: {folder}/ca.crt, cert: {folder}/{host}.crt, key: {folder}/{host}.key}}
static_host_map: {{10.77.0.1: ['192.0.2.1:4242']}}
listen: {{host: 0.0.0.0, port: 4242}}
tun: {{dev: neb0}}
firewall: {{outbound: [{{port: any, proto: any, host: any}}], inbound: [{inbound}]}}
"
    )
}

#[test]
#[ignore = "needs root, systemd, network namespaces and the Go peers in target/peers"]
fn the_unit_is_ready_when_the_device_is_there_and_reloads_and_stops() {
    let mut world = World::new();
    world.host("u");
    world.host("p");
    world.certify(&["ca", "-name", "units"]);
    for (host, address) in [("u", "10.77.0.1/24"), ("p", "10.77.0.2/24")] {
        world.certify(&["sign", "-name", host, "-networks", address]);
    }
    let systemd = Systemd::new();
    systemd.program("nebula");
    for file in ["ca.crt", "u.crt", "u.key"] {
        systemd.write(file, &std::fs::read(world.dir().join(file)).expect("a credential"));
    }
    systemd.write("config.yml", config(Path::new(PLACE), "u", "").as_bytes());
    let unit = std::fs::read_to_string(repository("deploy/nebula.service")).expect("the unit");
    let unit = unit.replace("/usr/local/bin/nebula", &format!("{PLACE}/nebula"));
    let unit = unit.replace("/etc/nebula/config.yml", &format!("{PLACE}/config.yml"));
    let namespace = world.namespace_of("u");
    systemd.unit("nebula.service", &unit, &namespace);

    // `start` returns once READY=1 has been sent.
    systemd.must(&["systemctl", "start", "nebula.service"]);
    run("ip", &["-n", &namespace, "link", "show", "neb0"]);
    assert_eq!(systemd.show("ActiveState"), "active");
    let pid = systemd.show("MainPID");
    assert!(systemd.root.join("run/nebula/neb0.sock").exists(), "no control socket\n{}", systemd.log());
    let peer = world.write("p.yml", &config(world.dir(), "p", ""));
    world.start("p", &ours(), &["-config", &peer.display().to_string()]);
    let end = Instant::now() + Duration::from_secs(20);
    while !world.exec("p", &["ip", "link", "show", "neb0", "up"]).status.success() {
        assert!(Instant::now() < end, "{}", world.all_logs());
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(world.pings("p", "10.77.0.1", 4, "0.2"), 0, "no rule allows it yet");

    systemd.write("config.yml", config(Path::new(PLACE), "u", "{port: any, proto: icmp, host: any}").as_bytes());
    systemd.must(&["systemctl", "reload", "nebula.service"]);
    world.ping("p", "10.77.0.1", Duration::from_secs(10));

    // An invalid configuration changes nothing and stops nothing.
    systemd.write("config.yml", config(Path::new(PLACE), "u", "{port: any, proto: icpm, host: any}").as_bytes());
    systemd.must(&["systemctl", "reload", "nebula.service"]);
    let end = Instant::now() + Duration::from_secs(10);
    while !systemd.log().contains("nothing was changed") {
        assert!(Instant::now() < end, "{}", systemd.log());
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(world.pings("p", "10.77.0.1", 3, "0.1"), 3);
    assert_eq!(systemd.show("MainPID"), pid);

    // The confined daemon may repair what others remove; for a missing device, systemd restarts it.
    run("ip", &["-n", &namespace, "address", "flush", "dev", "neb0"]);
    run("ip", &["-n", &namespace, "link", "set", "neb0", "down"]);
    world.ping("p", "10.77.0.1", Duration::from_secs(3));
    assert_eq!(systemd.show("MainPID"), pid);
    systemd.write("config.yml", config(Path::new(PLACE), "u", "{port: any, proto: icmp, host: any}").as_bytes());
    run("ip", &["-n", &namespace, "link", "del", "neb0"]);
    let end = Instant::now() + Duration::from_secs(10);
    while !world.exec("u", &["ip", "link", "show", "neb0", "up"]).status.success() {
        assert!(Instant::now() < end, "{}", systemd.log());
        std::thread::sleep(Duration::from_millis(50));
    }
    assert!(systemd.log().contains("the tun device neb0 was removed by somebody else"), "{}", systemd.log());
    systemd.write("config.yml", config(Path::new(PLACE), "u", "{port: any, proto: icpm, host: any}").as_bytes());

    systemd.must(&["systemctl", "stop", "nebula.service"]);
    assert_eq!(systemd.show("Result"), "success");
    // systemd closes its descriptor some time after the last process has ended.
    let end = Instant::now() + Duration::from_secs(2);
    while world.exec("u", &["ip", "link", "show", "neb0"]).status.success() {
        assert!(Instant::now() < end, "the device is still there");
        std::thread::sleep(Duration::from_millis(10));
    }
    // With that error it does not start, and systemd learns of it.
    assert!(!systemd.call(&["systemctl", "start", "nebula.service"]).status.success());
}

#[test]
#[ignore = "needs root, systemd, network namespaces and a release build"]
fn nebula_up_starts_the_unit_whose_confined_child_renews_and_ends_with_it() {
    let mut network = Network::new();
    network.0.world.host("vm");
    let namespace = network.0.world.namespace_of("vm");
    let systemd = Systemd::new();
    // `nebula up` and `systemctl enable` write there.
    systemd.overlay("/etc");
    for name in ["nebula", "nebula-enrol"] {
        systemd.program(name);
    }
    let unit = std::fs::read_to_string(repository("deploy/nebula.service")).expect("the unit");
    systemd.unit("nebula.service", &unit.replace("/usr/local/bin/nebula", &format!("{PLACE}/nebula")), &namespace);

    let token = network.token("vm", &["--life", "6s"]);
    let program = format!("{PLACE}/nebula");
    systemd.write("token", token.as_bytes());
    let inside = format!("--net=/run/netns/{namespace}");
    let up = systemd.call(&["nsenter", &inside, &program, "up", "-token-file", &format!("{PLACE}/token")]);
    let said = String::from_utf8_lossy(&up.stdout).into_owned();
    assert!(up.status.success(), "{said}{}\n{}", String::from_utf8_lossy(&up.stderr), systemd.log());
    assert!(said.contains("started nebula.service"), "{said}");
    assert_eq!(systemd.show("ActiveState"), "active");
    systemd.must(&["test", "-L", "/etc/systemd/system/multi-user.target.wants/nebula.service"]);
    network.0.world.ping("vm", LIGHTHOUSE, Duration::from_secs(5));

    let pid = systemd.show("MainPID");
    let children = format!("for child in $(cat /proc/{pid}/task/*/children); do cat /proc/$child/status || true; done");
    let field = |name: &str| {
        let child = systemd.must(&["sh", "-c", &children]);
        child.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default().trim().to_owned()
    };
    // The unit is active before the child runs, and giving up capabilities is the last thing that it does at its
    // start. It has the unit's seccomp filter from the beginning.
    network.wait("the confined child", Duration::from_secs(10), |_| {
        ["CapEff:", "CapPrm:"].map(field) == ["0000000000000000"; 2]
    });
    assert_eq!(["Name:", "NoNewPrivs:", "Seccomp:"].map(field), ["nebula-enrol", "1", "2"]);

    // It lives for several lifetimes of its certificate.
    let certificate = || std::fs::read(systemd.root.join("etc/nebula/host.crt")).unwrap_or_default();
    let first = certificate();
    network.wait("three renewals", Duration::from_secs(40), |_| {
        systemd.log().matches("The certificate of this host was renewed").count() >= 3
    });
    assert!(![first, Vec::new()].contains(&certificate()), "the file is another one");
    network.0.world.ping("vm", LIGHTHOUSE, Duration::from_secs(5));
    let key = systemd.must(&["stat", "-c", "%U:%a", "/etc/nebula/host.key"]);
    assert_eq!((key.as_str(), systemd.show("MainPID")), ("root:600", pid), "{}", systemd.log());

    systemd.must(&["systemctl", "stop", "nebula.service"]);
    assert_eq!(systemd.show("Result"), "success");
    assert!(!systemd.log().contains("ended; it is started again"), "{}", systemd.log());
}

/// The state directory of a CA that systemd manages, on the machine's real disk; removed on drop.
struct StateDirectory(String);

impl StateDirectory {
    fn path(&self) -> String {
        format!("/var/lib/{}", self.0)
    }
}

impl Drop for StateDirectory {
    fn drop(&mut self) {
        // With DynamicUser= the first path is a symlink to the second.
        let _ = std::fs::remove_file(self.path());
        for path in [self.path(), format!("/var/lib/private/{}", self.0)] {
            let _ = std::fs::remove_dir_all(path);
        }
    }
}

#[test]
#[ignore = "needs root, systemd, network namespaces and a release build"]
fn the_unit_of_the_ca_serves_confined_and_gives_a_host_its_certificate() {
    let mut world = World::new();
    let address = world.host("ca").to_string();
    world.host("h");
    let state = StateDirectory(format!("nebula-ca-test-{}", std::process::id()));
    let systemd = Systemd::new();
    systemd.program("nebula-ca");
    let program = format!("{PLACE}/nebula-ca");
    let dir = state.path();
    // Run as root, as `deploy/README.md` says; the unit's user takes over the files.
    systemd.must(&[&program, "init", "--dir", &dir, "--tls-name", &address, "--overlay", "10.42.0.0/16"]);
    let unit = std::fs::read_to_string(repository("deploy/nebula-ca.service")).expect("the unit");
    let unit = unit.replace("/usr/local/bin/nebula-ca", &program).replace("/var/lib/nebula-ca", &dir);
    let unit = unit.replace("StateDirectory=nebula-ca", &format!("StateDirectory={}", state.0));
    systemd.unit("nebula-ca.service", &unit, &world.namespace_of("ca"));
    // Returns once the CA listens.
    let serves = || {
        systemd.must(&["systemctl", "start", "nebula-ca.service"]);
        systemd.show_of("nebula-ca.service", "MainPID")
    };
    let pid = serves();
    let process = systemd.must(&["cat", &format!("/proc/{pid}/status")]);
    let field = |name: &str| process.lines().find_map(|line| line.strip_prefix(name)).expect("a field").trim();
    assert_ne!(field("Uid:").split_whitespace().next(), Some("0"), "it runs as root");
    assert_eq!((field("CapEff:"), field("CapBnd:")), ("0000000000000000", "0000000000000000"));
    assert_eq!((field("NoNewPrivs:"), field("Seccomp:")), ("1", "2"));
    // Its files belong to its user, and nobody else can read them.
    let ledger = systemd.must(&["stat", "-c", "%U:%a", &format!("{dir}/store.redb"), &format!("{dir}/ca.key")]);
    assert!(ledger.lines().all(|line| !line.starts_with("root:") && line.ends_with("00")), "{ledger}");

    let network = "10.42.255.9/16";
    let token = systemd.must(&[&program, "token", "create", "--dir", &dir, "--name", "edge", "--network", network]);
    let (token, tls) =
        (world.write("token", &token), world.write("tls.crt", &systemd.must(&["cat", &format!("{dir}/tls.crt")])));
    let (enrol, url) = (binary("nebula-enrol").display().to_string(), format!("https://{address}:8443"));
    let [token, tls, out] = [token, tls, world.dir().join("edge")].map(|path| path.display().to_string());
    let enrolled = || {
        let ask = ["-ca-url", &url, "-tls-ca", &tls, "-token-file", &token, "-out-dir", &out];
        world.exec("h", &[&[enrol.as_str()], &ask[..]].concat())
    };
    let first = enrolled();
    assert!(first.status.success(), "{}\n{}", String::from_utf8_lossy(&first.stderr), systemd.log());
    let certificate = std::fs::read(Path::new(&out).join("host.crt")).expect("the certificate");

    // After a stop and a start, another process has the same CA and ledger.
    systemd.must(&["systemctl", "stop", "nebula-ca.service"]);
    assert_eq!(systemd.show_of("nebula-ca.service", "Result"), "success");
    // The unit's user can read what root wrote to the folder meanwhile, and signs with the next CA.
    systemd.must(&[&program, "rollover", "prepare", "--dir", &dir]);
    systemd.must(&[&program, "rollover", "switch", "--at-once", "--dir", &dir]);
    assert_ne!(serves(), pid);
    std::fs::remove_file(Path::new(&out).join("host.crt")).expect("the certificate goes");
    assert!(enrolled().status.success(), "the same token for the same key");
    assert!(std::fs::read(Path::new(&out).join("host.crt")).expect("the certificate") == certificate);
    let owners = systemd.must(&["sh", "-c", &format!("stat -c %U {dir}/*")]);
    assert!(!owners.lines().any(|owner| owner == "root"), "{owners}");
    systemd.must(&["systemctl", "stop", "nebula-ca.service"]);
}

#[test]
#[ignore = "needs systemd"]
fn units_have_no_mistake_and_leave_little_exposed() {
    for (unit, program, exposure) in [
        ("nebula.service", "nebula", 30),
        ("nebula-ca.service", "nebula-ca", 30),
        ("nebula-enrol.service", "nebula-enrol", 30),
    ] {
        let folder = tempfile::tempdir().expect("a temporary directory");
        let text = std::fs::read_to_string(repository("deploy").join(unit)).expect("the unit");
        let path = folder.path().join(unit);
        // The program need not be installed here; any existing one will do.
        std::fs::write(&path, text.replace(&format!("/usr/local/bin/{program} "), "/bin/true "))
            .expect("write the unit");
        run("systemd-analyze", &["verify", "--man=no", &path.display().to_string()]);
        let threshold = format!("--threshold={exposure}");
        run("systemd-analyze", &["security", "--offline=true", &threshold, &path.display().to_string()]);
    }
}
