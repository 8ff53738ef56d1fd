//! `deploy/nebula.service` under a real systemd.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use crate::repository;
use crate::world::cluster::shared;
use crate::world::peers::ours;
use crate::world::{World, run};

/// Where systemd sees program, configuration and credentials: its own `/run`, so that `ProtectHome` and `PrivateTmp` hide
/// nothing that is tested here.
const PLACE: &str = "/run/nebula-test";

/// A systemd in namespaces; ended on drop.
struct Systemd {
    folder: tempfile::TempDir,
    root: PathBuf,
}

impl Systemd {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a temporary directory");
        let pid = run(&tool(), &["start", &folder.path().display().to_string()]);
        let root = PathBuf::from(format!("/proc/{}/root", pid.trim()));
        std::fs::create_dir(root.join(&PLACE[1..])).expect("a folder in its /run");
        Self { folder, root }
    }

    fn write(&self, name: &str, bytes: &[u8]) {
        std::fs::write(self.root.join(&PLACE[1..]).join(name), bytes).expect("write a file");
    }

    fn call(&self, command: &[&str]) -> Output {
        Command::new(tool()).arg("sh").arg(self.folder.path()).args(command).output().expect("nsenter runs")
    }

    fn must(&self, command: &[&str]) -> String {
        let output = self.call(command);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{command:?}: {errors}\n{}", self.log());
        String::from_utf8_lossy(&output.stdout).trim().to_owned()
    }

    fn show(&self, property: &str) -> String {
        self.must(&["systemctl", "show", "-P", property, "nebula.service"])
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.root.join(&PLACE[1..]).join("log")).unwrap_or_default()
    }
}

impl Drop for Systemd {
    fn drop(&mut self) {
        let _ = Command::new(tool()).arg("stop").arg(self.folder.path()).status();
    }
}

fn tool() -> String {
    shared("tools/systemd-ns.sh").display().to_string()
}

/// Configuration of `host`, which the other host pings; `inbound` are its rules.
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
    systemd.write("nebula", &std::fs::read(ours()).expect("the program"));
    systemd.must(&["chmod", "755", &format!("{PLACE}/nebula")]);
    for file in ["ca.crt", "u.crt", "u.key"] {
        systemd.write(file, &std::fs::read(world.dir().join(file)).expect("a credential"));
    }
    systemd.write("config.yml", config(Path::new(PLACE), "u", "").as_bytes());
    let unit = std::fs::read_to_string(repository("deploy/nebula.service")).expect("the unit");
    let unit = unit.replace("/usr/local/bin/nebula", &format!("{PLACE}/nebula"));
    let unit = unit.replace("/etc/nebula/config.yml", &format!("{PLACE}/config.yml"));
    let units = systemd.folder.path().join("units");
    std::fs::write(units.join("nebula.service"), unit).expect("write the unit");
    std::fs::create_dir(units.join("nebula.service.d")).expect("a folder for what this test adds");
    let namespace = world.namespace_of("u");
    let added = format!(
        "[Service]\nNetworkNamespacePath=/run/netns/{namespace}\nStandardOutput=append:{PLACE}/log\nStandardError=append:{PLACE}/log\n"
    );
    std::fs::write(units.join("nebula.service.d/test.conf"), added).expect("write the drop-in");
    systemd.must(&["systemctl", "daemon-reload"]);

    // `start` returns when READY=1 was said.
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

    // A mistake changes nothing and ends nothing.
    systemd.write("config.yml", config(Path::new(PLACE), "u", "{port: any, proto: icpm, host: any}").as_bytes());
    systemd.must(&["systemctl", "reload", "nebula.service"]);
    let end = Instant::now() + Duration::from_secs(10);
    while !systemd.log().contains("nothing was changed") {
        assert!(Instant::now() < end, "{}", systemd.log());
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(world.pings("p", "10.77.0.1", 3, "0.1"), 3);
    assert_eq!(systemd.show("MainPID"), pid);

    systemd.must(&["systemctl", "stop", "nebula.service"]);
    assert_eq!(systemd.show("Result"), "success");
    assert!(!world.exec("u", &["ip", "link", "show", "neb0"]).status.success(), "the device is still there");
    // With that mistake it does not start, and systemd is told.
    assert!(!systemd.call(&["systemctl", "start", "nebula.service"]).status.success());
}

#[test]
#[ignore = "needs systemd"]
fn units_have_no_mistake_and_leave_little_exposed() {
    for (unit, program, exposure) in [("nebula.service", "nebula", 30), ("nebula-ca.service", "nebula-ca", 30)] {
        let folder = tempfile::tempdir().expect("a temporary directory");
        let text = std::fs::read_to_string(repository("deploy").join(unit)).expect("the unit");
        let path = folder.path().join(unit);
        // The program need not be installed here; any that exists will do.
        std::fs::write(&path, text.replace(&format!("/usr/local/bin/{program} "), "/bin/true "))
            .expect("write the unit");
        run("systemd-analyze", &["verify", "--man=no", &path.display().to_string()]);
        let threshold = format!("--threshold={exposure}");
        run("systemd-analyze", &["security", "--offline=true", &threshold, &path.display().to_string()]);
    }
}
