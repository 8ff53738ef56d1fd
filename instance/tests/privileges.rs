//! What the daemon may do and still works: as systemd starts it with `User=` and one ambient capability, and with none.

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test ends at the first surprise, on a real clock"
)]

mod loopback;

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use loopback::{Network, free_udp_port, ours};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

const NOBODY: &str = "65534";

/// A daemon in a network namespace of its own, as a user without privileges but for `capability`.
struct Unprivileged {
    child: Child,
    log: std::path::PathBuf,
}

impl Unprivileged {
    fn start(config: &Path, capability: &str) -> Self {
        let folder = config.parent().unwrap();
        // As a package would: the user may read what it needs, and no more than that.
        std::fs::set_permissions(folder, std::fs::Permissions::from_mode(0o755)).unwrap();
        let log = config.with_extension("log");
        let output = std::fs::File::create(&log).unwrap();
        let capabilities = format!("-all{capability}");
        let child = Command::new("unshare")
            // As udev makes the device; some containers have it for root only.
            .args([
                "--net",
                "--mount",
                "sh",
                "-c",
                "mount -t tmpfs none /dev/net && mknod -m 666 /dev/net/tun c 10 200 && exec \"$@\"",
                "sh",
            ])
            .args(["setpriv", "--reuid", NOBODY, "--regid", NOBODY, "--clear-groups", "--no-new-privs"])
            .args(["--inh-caps", &capabilities, "--ambient-caps", &capabilities, "--bounding-set", &capabilities])
            .arg(program(folder))
            .arg("-config")
            .arg(config)
            .stdin(Stdio::null())
            .stdout(output.try_clone().unwrap())
            .stderr(output)
            .spawn()
            .unwrap();
        let daemon = Self { child, log };
        daemon.wait("Nebula interface is active");
        daemon
    }

    fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap()
    }

    fn wait(&self, text: &str) {
        let until = Instant::now() + Duration::from_secs(20);
        while !self.log().contains(text) {
            assert!(Instant::now() < until, "no {text} in {}", self.log());
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// `unshare` and `setpriv` become the daemon.
    fn status(&self, field: &str) -> String {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix(&format!("{field}:")));
        line.unwrap().trim().to_owned()
    }

    fn inside(&self, words: &[&str]) -> String {
        let target = self.child.id().to_string();
        let output = Command::new("nsenter").args(["--net", "--target", &target]).args(words).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    }

    fn hang_up(&self) {
        kill(Pid::from_raw(self.child.id().cast_signed()), Signal::SIGHUP).unwrap();
    }
}

impl Drop for Unprivileged {
    fn drop(&mut self) {
        let _ = kill(Pid::from_raw(self.child.id().cast_signed()), Signal::SIGTERM);
        let _ = self.child.wait();
    }
}

/// A copy that everybody may execute: the folder of the build may be in somebody's home.
fn program(folder: &Path) -> std::path::PathBuf {
    let copy = folder.join("nebula");
    std::fs::copy(ours(), &copy).unwrap();
    copy
}

fn open_key(config: &Path) {
    for suffix in ["key", "crt", "yml"] {
        let file = config.with_extension(suffix);
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o644)).unwrap();
    }
}

#[test]
#[ignore = "needs root and network namespaces"]
fn one_capability_is_enough_for_a_device_its_routes_and_marks() {
    let network = Network::new();
    let settings =
        |more: &str| format!("tun: {{dev: nebpriv{more}}}\ndaemon: {{control_socket: false}}\nlisten: {{so_mark: 7");
    let config = network.configure("host", &["10.42.0.7/16"], &(settings("") + "}"));
    open_key(&config);
    let daemon = Unprivileged::start(&config, ",+net_admin");
    assert!(daemon.status("Uid").starts_with(NOBODY));
    // CAP_NET_ADMIN is the 12th.
    assert_eq!(daemon.status("CapEff"), format!("{:016x}", 1_u64 << 12));
    assert!(daemon.inside(&["ip", "address", "show", "nebpriv"]).contains("10.42.0.7/16"));
    assert!(daemon.inside(&["ss", "-u", "-a", "-n", "-e"]).contains("fwmark:0x7"), "the socket carries the mark");

    let routed =
        settings(", unsafe_routes: [{route: 192.168.9.0/24, via: 10.42.0.1}]").replace("so_mark: 7", "so_mark: 9");
    let text = std::fs::read_to_string(&config).unwrap();
    let pki = text.lines().next().unwrap();
    std::fs::write(&config, format!("{pki}\n{routed}}}\n")).unwrap();
    daemon.hang_up();
    daemon.wait("tun.unsafe_routes has been reloaded");
    let until = Instant::now() + Duration::from_secs(10);
    while !daemon.inside(&["ip", "route"]).contains("192.168.9.0/24 dev nebpriv") {
        assert!(Instant::now() < until, "{}\n{}", daemon.inside(&["ip", "route"]), daemon.log());
        std::thread::sleep(Duration::from_millis(50));
    }
    assert!(daemon.inside(&["ss", "-u", "-a", "-n", "-e"]).contains("fwmark:0x9"));
}

#[test]
#[ignore = "needs root and network namespaces"]
fn without_a_device_no_capability_is_needed() {
    let network = Network::new();
    let port = free_udp_port();
    let settings = format!("tun: {{disabled: true}}\nlisten: {{port: {port}}}");
    let config = network.configure("host", &["10.42.0.7/16"], &settings);
    open_key(&config);
    let daemon = Unprivileged::start(&config, "");
    assert_eq!(daemon.status("CapEff"), "0000000000000000");
    assert!(daemon.status("Uid").starts_with(NOBODY));
    assert!(!daemon.log().contains("level=ERROR"), "{}", daemon.log());
}
