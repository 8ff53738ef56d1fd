//! An update of the Debian package on a host whose daemons run under systemd, and the commands of `docs/operations.md`.

use std::path::{Path, PathBuf};
use std::process::Output;

use super::debian::package;
use super::repository;
use super::systemd::{PLACE, Systemd};
use crate::world::{World, run};

/// A host with systemd where dpkg may install.
struct Host {
    world: World,
    systemd: Systemd,
    namespace: String,
}

impl Host {
    fn new() -> Self {
        let mut world = World::new();
        world.host("u");
        world.certify(&["ca", "-name", "updates"]);
        world.certify(&["sign", "-name", "u", "-networks", "10.77.0.1/24"]);
        let systemd = Systemd::new();
        for folder in ["/etc", "/usr", "/var"] {
            systemd.overlay(folder);
        }
        systemd.must(&["mkdir", "-p", "/etc/nebula"]);
        // Images of containers forbid the start of services.
        systemd.must(&["rm", "-f", "/usr/sbin/policy-rc.d"]);
        let namespace = world.namespace_of("u");
        let host = Self { world, systemd, namespace };
        for file in ["ca.crt", "u.crt", "u.key"] {
            host.put(&format!("etc/nebula/{file}"), &std::fs::read(host.world.dir().join(file)).expect("a credential"));
        }
        for (name, version) in [("OLD", "0.0.1"), ("NEW", "9.0.1"), ("NEXT", "9.0.2")] {
            let made = host.package_of(version);
            host.systemd.write(&format!("nebula-overlay_{name}_amd64.deb"), &std::fs::read(made).expect("the package"));
        }
        host
    }

    /// Our package with another version, and nothing else that differs.
    fn package_of(&self, version: &str) -> PathBuf {
        let folder = self.world.dir().join(version);
        let (text, made) = (folder.display().to_string(), folder.with_extension("deb"));
        run("dpkg-deb", &["-R", &package().display().to_string(), &text]);
        let control = folder.join("DEBIAN/control");
        let written = std::fs::read_to_string(&control).expect("the control file");
        let written: Vec<_> = written
            .lines()
            .map(|line| if line.starts_with("Version: ") { format!("Version: {version}") } else { line.to_owned() })
            .collect();
        std::fs::write(&control, written.join("\n") + "\n").expect("write the control file");
        // Fast: it is unpacked at once.
        run("dpkg-deb", &["--root-owner-group", "-Znone", "--build", &text, &made.display().to_string()]);
        made
    }

    fn put(&self, path: &str, bytes: &[u8]) {
        std::fs::write(self.systemd.root.join(path), bytes).expect("write a file");
    }

    /// Writes the configuration of a unit.
    fn configure(&self, file: &str, device: &str, port: &str) {
        let text = format!(
            "pki: {{ca: /etc/nebula/ca.crt, cert: /etc/nebula/u.crt, key: /etc/nebula/u.key}}
listen: {{host: 0.0.0.0, port: {port}}}
tun: {{dev: {device}}}
"
        );
        self.put(&format!("etc/nebula/{file}"), text.as_bytes());
    }

    /// A unit of the package, in the network namespace of the host.
    fn unit(&self, name: &str) {
        let packaged = self.systemd.root.join("usr/lib/systemd/system").join(name);
        let text = std::fs::read_to_string(packaged).expect("the unit of the package");
        self.systemd.unit(name, &text, &self.namespace);
    }

    /// Runs a command as a person on that host does.
    fn try_shell(&self, command: &str) -> Output {
        let inside = format!("--net=/run/netns/{}", self.namespace);
        let script = format!("cd {PLACE} && export DEBIAN_FRONTEND=noninteractive LC_ALL=C && {command}");
        self.systemd.call(&["nsenter", &inside, "sh", "-c", &script])
    }

    /// As [`Host::try_shell`], and it must succeed; returns both outputs.
    fn shell(&self, command: &str) -> String {
        let output = self.try_shell(command);
        let said = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned()).concat();
        assert!(output.status.success(), "{command}: {said}\n{}", self.systemd.log());
        said
    }

    fn update(&self, name: &str) -> String {
        self.shell(&format!("dpkg -i nebula-overlay_{name}_amd64.deb"))
    }

    /// Process and device of a unit, and whether the process runs the installed program.
    fn running(&self, unit: &str, device: &str) -> (String, String, bool) {
        let pid = self.systemd.show_of(unit, "MainPID");
        let program = self.systemd.call(&["readlink", &format!("/proc/{pid}/exe")]);
        let is_current = String::from_utf8_lossy(&program.stdout).trim() == "/usr/bin/nebula";
        let index = self.world.exec("u", &["cat", &format!("/sys/class/net/{device}/ifindex")]);
        (pid, String::from_utf8_lossy(&index.stdout).trim().to_owned(), is_current)
    }
}

#[test]
#[ignore = "needs root, systemd, a release build, dpkg and the Go peers in target/peers"]
fn an_update_starts_a_running_daemon_again_only_if_the_new_program_takes_its_configuration() {
    let host = Host::new();
    host.update("OLD");
    host.configure("config.yml", "neb0", "4242");
    host.configure("office.yaml", "neb1", "4243");
    host.unit("nebula.service");
    host.unit("nebula@.service");
    let units = [("nebula.service", "neb0"), ("nebula@office.service", "neb1")];
    let state = || units.map(|(unit, device)| host.running(unit, device));
    let said = host.update("NEW");
    assert!(!said.contains("nebula-overlay: "), "{said}");
    assert_eq!(state().map(|(pid, ..)| pid), ["0", "0"], "an update starts nothing");

    host.systemd.must(&["systemctl", "start", "nebula.service", "nebula@office.service"]);
    let before = state();
    assert!(before.iter().all(|(_, index, is_current)| !index.is_empty() && *is_current), "{before:?}");
    let said = host.update("NEXT");
    assert!(!said.contains("nebula-overlay: "), "{said}");
    let after = state();
    for ((old_pid, old_index, _), (pid, index, is_current)) in before.iter().zip(&after) {
        assert!(pid != old_pid && index == old_index && *is_current, "{before:?} {after:?}\n{}", host.systemd.log());
    }
    assert_eq!(host.systemd.log().matches("Handed over").count(), units.len(), "{}", host.systemd.log());

    // One of them has a configuration that the new program refuses.
    host.configure("office.yaml", "neb1", "4243x");
    let said = host.update("NEW");
    let last = state();
    assert!(last[0].0 != after[0].0 && last[0].2, "{said}");
    assert_eq!((&last[1].0, last[1].2), (&after[1].0, false), "{said}");
    assert!(said.contains("nebula@office.service goes on with the old program, because the new one refuses"), "{said}");
    assert!(said.contains("/etc/nebula/office.yaml") && said.contains("listen.port"), "{said}");
    assert!(!said.contains("nebula.service goes on"), "{said}");
    assert_eq!(host.systemd.show_of("nebula@office.service", "ActiveState"), "active");

    // Where the administrator forbids restarts, there are none.
    host.put("usr/sbin/policy-rc.d", b"#!/bin/sh\nexit 101\n");
    host.systemd.must(&["chmod", "755", "/usr/sbin/policy-rc.d"]);
    let said = host.update("NEXT");
    assert_eq!(state()[0].0, last[0].0, "{said}");
    host.systemd.must(&["systemctl", "stop", "nebula.service", "nebula@office.service"]);
}

/// The commands of a page: indented lines, without remarks.
fn commands(page: &Path) -> Vec<String> {
    let text = std::fs::read_to_string(page).expect("the page");
    let lines = text.lines().filter_map(|line| line.strip_prefix("    "));
    lines.map(|line| line.split(" # ").next().unwrap_or(line).trim().to_owned()).collect()
}

/// The commands in the tables of a page.
fn commands_in_tables(page: &Path) -> Vec<String> {
    let text = std::fs::read_to_string(page).expect("the page");
    let rows = text.lines().filter(|line| line.starts_with("| ") && line.split(" | ").count() == 4);
    let cells = rows.filter_map(|line| line.split(" | ").nth(1)?.strip_prefix('`')?.strip_suffix('`'));
    cells.map(str::to_owned).collect()
}

#[test]
#[ignore = "needs root, systemd, a release build, dpkg and the Go peers in target/peers"]
fn each_command_of_the_page_about_operations_does_what_it_says() {
    let host = Host::new();
    host.update("OLD");
    host.configure("config.yml", "neb0", "4242");
    host.unit("nebula.service");
    host.systemd.must(&["systemctl", "start", "nebula.service"]);
    // Where the page has a program that was copied there.
    host.shell("cp /usr/bin/nebula ./nebula");
    let commands = commands(&repository("docs/operations.md"));
    assert!(commands.len() >= 8, "{commands:?}");
    let index = host.running("nebula.service", "neb0").1;
    // This host is alone: what asks for another one finds none (1). A command that is not there exits with 2.
    let of_tables = commands_in_tables(&repository("docs/operations.md"));
    assert!(of_tables.len() >= 7, "{of_tables:?}");
    for command in &of_tables {
        let said = host.try_shell(command);
        let text = [said.stdout, said.stderr].map(|text| String::from_utf8_lossy(&text).into_owned()).concat();
        let refers_to_nobody = command.contains("10.42.0.9");
        assert_eq!(said.status.code(), Some(i32::from(refers_to_nobody)), "{command}: {text}");
        assert!(!text.trim().is_empty() || command.contains("-test"), "{command} says nothing");
        println!("{command}\n{text}");
    }
    for command in &commands {
        let said = host.shell(command);
        let (pid, now, is_current) = host.running("nebula.service", "neb0");
        if command.contains("systemctl stop") {
            assert_eq!(pid, "0", "{command}: {said}");
        } else {
            assert!(pid != "0", "{command}: {said}");
        }
        if command.starts_with("dpkg -i") {
            assert!(is_current && now == index, "{command}: {said}");
        }
        println!("{command}\n{said}");
    }
}
