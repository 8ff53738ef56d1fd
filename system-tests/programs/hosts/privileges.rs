//! The privileges with which the daemon works: as systemd starts it with `User=` and one ambient capability, with none,
//! and as root that switches to another user (`daemon.user`). Also the processors that its threads may use.

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test ends at the first surprise, on a real clock"
)]

use crate::loopback;

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use loopback::{Network, free_udp_port, ours};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

const NOBODY: &str = "65534";

/// A daemon in a separate network namespace, run as a user without privileges except `capability`.
struct Unprivileged {
    child: Child,
    log: std::path::PathBuf,
}

impl Unprivileged {
    fn start(config: &Path, capability: &str) -> Self {
        let capabilities = format!("-all{capability}");
        Self::start_by(
            config,
            &[
                "setpriv",
                "--reuid",
                NOBODY,
                "--regid",
                NOBODY,
                "--clear-groups",
                "--no-new-privs",
                "--inh-caps",
                &capabilities,
                "--ambient-caps",
                &capabilities,
                "--bounding-set",
                &capabilities,
            ],
        )
    }

    /// Starts it as root with all of root's privileges.
    fn start_as_root(config: &Path) -> Self {
        Self::start_by(config, &["env"])
    }

    /// Starts it with `launcher`, which executes the command that follows.
    fn start_by(config: &Path, launcher: &[&str]) -> Self {
        let folder = config.parent().unwrap();
        // As a package would do it: the user may read what it needs, and nothing else.
        std::fs::set_permissions(folder, std::fs::Permissions::from_mode(0o755)).unwrap();
        let log = config.with_extension("log");
        let output = std::fs::File::create(&log).unwrap();
        let child = Command::new("unshare")
            // With the permissions that udev gives the device; in some containers only root may open it.
            .args([
                "--net",
                "--mount",
                "sh",
                "-c",
                "mount -t tmpfs none /dev/net && mknod -m 666 /dev/net/tun c 10 200 && exec \"$@\"",
                "sh",
            ])
            .args(launcher)
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

    /// `unshare` and the commands after it replace themselves with the daemon, so this is its process id.
    fn status(&self, field: &str) -> String {
        field_of(&std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap(), field)
    }

    /// Waits for the program to exit; returns its exit code.
    fn ended(&mut self) -> Option<i32> {
        let until = Instant::now() + Duration::from_secs(10);
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code();
            }
            assert!(Instant::now() < until, "it runs on: {}", self.log());
            std::thread::sleep(Duration::from_millis(50));
        }
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

fn field_of(status: &str, field: &str) -> String {
    let line = status.lines().find_map(|line| line.strip_prefix(&format!("{field}:")));
    line.unwrap().split_whitespace().collect::<Vec<_>>().join(" ")
}

/// The kernel's status of each thread of a process.
fn threads_of(process: u32) -> Vec<String> {
    let tasks = std::fs::read_dir(format!("/proc/{process}/task")).unwrap();
    // A thread may end between listing and reading.
    tasks.filter_map(|task| std::fs::read_to_string(task.unwrap().path().join("status")).ok()).collect()
}

/// Makes a copy that everybody may execute: the build folder may be in somebody's home.
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
    // CAP_NET_ADMIN is number 12.
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
fn one_capability_is_enough_to_put_back_what_others_remove() {
    let network = Network::new();
    let config = network.configure("host", &["10.42.0.7/16"], "tun: {dev: nebpriv}\ndaemon: {control_socket: false}");
    open_key(&config);
    let daemon = Unprivileged::start(&config, ",+net_admin");
    daemon.inside(&["ip", "link", "set", "nebpriv", "down"]);
    daemon.inside(&["ip", "address", "flush", "dev", "nebpriv"]);
    let until = Instant::now() + Duration::from_secs(1);
    while !daemon.inside(&["ip", "-br", "address", "show", "up"]).contains("10.42.0.7/16") {
        assert!(Instant::now() < until, "{}", daemon.log());
        std::thread::sleep(Duration::from_millis(20));
    }
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

#[test]
#[ignore = "needs root and network namespaces"]
fn daemon_user_leaves_every_thread_few_capabilities_and_reloads_work() {
    let network = Network::new();
    let folder = tempfile::tempdir().unwrap();
    std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let run = folder.path().join("run");
    std::fs::create_dir(&run).unwrap();
    let nobody: u32 = NOBODY.parse().unwrap();
    std::os::unix::fs::chown(&run, Some(nobody), Some(nobody)).unwrap();
    let socket = run.join("n.sock");
    let settings = |routes: &str, mark: u32, dns: u16| {
        format!(
            "tun: {{dev: nebuser, unsafe_routes: [{routes}]}}\nlisten: {{port: 4242, so_mark: {mark}}}\n\
             lighthouse: {{am_lighthouse: true, serve_dns: true, dns: {{host: 0.0.0.0, port: {dns}}}}}\n\
             daemon: {{user: '{NOBODY}:{NOBODY}', control_socket: {}}}",
            socket.display()
        )
    };
    let config = network.configure("host", &["10.42.0.7/16"], &settings("", 7, 53));
    open_key(&config);
    let mut daemon = Unprivileged::start_as_root(&config);
    daemon.wait("Control socket is open");
    // Numbers 10, 12 and 23: CAP_NET_BIND_SERVICE, CAP_NET_ADMIN, CAP_SYS_NICE.
    let kept = format!("{:016x}", 1_u64 << 10 | 1 << 12 | 1 << 23);
    let none = format!("{:016x}", 0);
    let everywhere = || {
        let threads = threads_of(daemon.child.id());
        assert!(threads.len() >= 4, "{threads:?}");
        for thread in threads {
            for (field, expected) in [
                ("Uid", [NOBODY; 4].join(" ")),
                ("Gid", [NOBODY; 4].join(" ")),
                ("Groups", String::new()),
                ("CapPrm", kept.clone()),
                ("CapEff", kept.clone()),
                ("CapInh", none.clone()),
                ("CapBnd", none.clone()),
                ("CapAmb", none.clone()),
                ("NoNewPrivs", "1".to_owned()),
            ] {
                assert_eq!(field_of(&thread, field), expected, "{field}\n{thread}");
            }
        }
    };
    everywhere();
    let until = |what: &str, done: &dyn Fn() -> bool| {
        let until = Instant::now() + Duration::from_secs(10);
        while !done() {
            assert!(Instant::now() < until, "{what}\n{}", daemon.log());
            std::thread::sleep(Duration::from_millis(50));
        }
    };
    let sockets = |text: &str| daemon.inside(&["ss", "-u", "-a", "-n", "-e"]).contains(text);
    until("DNS at a low port", &|| sockets("*:53 "));

    // A reload needs the capabilities that were kept.
    let text = std::fs::read_to_string(&config).unwrap();
    let pki = text.lines().next().unwrap();
    let route = "{route: 192.168.9.0/24, via: 10.42.0.1}";
    std::fs::write(&config, format!("{pki}\n{}\n", settings(route, 9, 54))).unwrap();
    daemon.hang_up();
    until("the route", &|| daemon.inside(&["ip", "route"]).contains("192.168.9.0/24 dev nebuser"));
    until("the mark", &|| sockets("fwmark:0x9"));
    until("DNS at another low port", &|| sockets("*:54 ") && !sockets("*:53 "));
    everywhere();

    // The user owns the socket, and root may use it as well.
    let found = std::fs::metadata(&socket).unwrap();
    assert_eq!((found.uid(), found.gid(), found.permissions().mode() & 0o777), (nobody, nobody, 0o600));
    let mut client = UnixStream::connect(&socket).unwrap();
    client.write_all(b"{\"command\":\"status\"}\n").unwrap();
    let mut answer = String::new();
    client.read_to_string(&mut answer).unwrap();
    assert!(answer.contains("10.42.0.7/16"), "{answer}");

    // A key that only root can read.
    std::fs::set_permissions(config.with_extension("key"), std::fs::Permissions::from_mode(0o600)).unwrap();
    daemon.hang_up();
    until("what cannot be read is named", &|| {
        daemon.log().lines().any(|line| line.contains("host.key") && line.contains("daemon.user cannot read it"))
    });
    kill(Pid::from_raw(daemon.child.id().cast_signed()), Signal::SIGTERM).unwrap();
    assert_eq!(daemon.ended(), Some(0));
    assert!(!socket.exists(), "the socket went with its daemon");
}

#[test]
#[ignore = "needs root and network namespaces"]
fn a_user_that_does_not_exist_ends_the_start_and_leaves_nothing() {
    let network = Network::new();
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("n.sock");
    let settings =
        format!("tun: {{dev: nebuser}}\ndaemon: {{user: no-such-user, control_socket: {}}}", socket.display());
    let config = network.configure("host", &["10.42.0.7/16"], &settings);
    let output = Command::new("unshare").arg("--net").arg(ours()).arg("-config").arg(&config).output().unwrap();
    let log = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(1), "{log}");
    assert!(log.contains("Failed to become daemon.user") && log.contains("no-such-user"), "{log}");
    assert!(!socket.exists());
}

#[test]
#[ignore = "needs root and network namespaces"]
fn a_device_that_is_taken_away_ends_the_daemon_and_its_control_socket() {
    let network = Network::new();
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("n.sock");
    let settings = format!("tun: {{dev: nebgone}}\ndaemon: {{control_socket: {}}}", socket.display());
    let config = network.configure("host", &["10.42.0.7/16"], &settings);
    let mut daemon = Unprivileged::start_as_root(&config);
    daemon.wait("Control socket is open");
    assert!(socket.exists());
    daemon.inside(&["ip", "link", "delete", "nebgone"]);
    assert_eq!(daemon.ended(), Some(2), "{}", daemon.log());
    assert!(daemon.log().contains("Error while running"), "{}", daemon.log());
    assert!(!socket.exists(), "{}", daemon.log());
}

#[test]
#[ignore = "needs root and network namespaces"]
fn several_instances_share_a_host_and_each_takes_only_its_own_with_it() {
    let network = Network::new();
    let run = tempfile::tempdir().unwrap();
    let socket = |device: &str| run.path().join(format!("{device}.sock"));
    let configure = |name: &str, address: &str, device: &str, port: u16| {
        let socket = socket(name);
        let settings = format!(
            "tun: {{dev: {device}, unsafe_routes: [{{route: 192.168.{port}.0/24, via: {address}}}]}}\n\
             listen: {{port: {port}}}\ndaemon: {{control_socket: {}}}",
            socket.display()
        );
        network.configure(name, &[&format!("{address}/16")], &settings)
    };
    let mut first = Unprivileged::start_as_root(&configure("one", "10.42.0.1", "neb1", 41));
    first.wait("Control socket is open");
    let second = Command::new("nsenter")
        .args(["--net", "--mount", "--target", &first.child.id().to_string()])
        .arg(first.log.with_file_name("nebula"))
        .arg("-config")
        .arg(configure("two", "10.43.0.1", "neb2", 43))
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let mut second = Unprivileged { child: second, log: first.log.clone() };
    let until = Instant::now() + Duration::from_secs(10);
    while !first.inside(&["ip", "route"]).contains("192.168.43.0/24 dev neb2") || !socket("two").exists() {
        assert!(Instant::now() < until, "{}", first.inside(&["ip", "route"]));
        std::thread::sleep(Duration::from_millis(50));
    }
    assert!(first.inside(&["ip", "route"]).contains("192.168.41.0/24 dev neb1"));

    // A daemon configured with a device that another one uses.
    let third = configure("three", "10.44.0.1", "neb1", 44);
    let log = first.inside(&[first.log.with_file_name("nebula").to_str().unwrap(), "-config", third.to_str().unwrap()]);
    assert!(log.contains("could not create tun device neb1") && log.contains("busy"), "{log}");
    assert!(!socket("three").exists());

    kill(Pid::from_raw(second.child.id().cast_signed()), Signal::SIGTERM).unwrap();
    assert_eq!(second.ended(), Some(0));
    let left = [first.inside(&["ip", "link"]), first.inside(&["ip", "route"]), first.inside(&["ss", "-u", "-a", "-n"])];
    assert!(left.iter().all(|text| !text.contains("neb2") && !text.contains(":43 ")), "{left:?}");
    assert!(left[0].contains("neb1") && left[1].contains("192.168.41.0/24 dev neb1") && left[2].contains(":41 "));
    assert!(!socket("two").exists() && UnixStream::connect(socket("one")).is_ok());

    kill(Pid::from_raw(first.child.id().cast_signed()), Signal::SIGTERM).unwrap();
    assert_eq!(first.ended(), Some(0));
    assert_eq!(std::fs::read_dir(run.path()).unwrap().count(), 0, "no socket is left");
}

/// The processors that threads of this name may use.
fn processors(threads: &[String], name: &str) -> Vec<String> {
    let named = threads.iter().filter(|thread| field_of(thread, "Name").starts_with(name));
    named.map(|thread| field_of(thread, "Cpus_allowed_list")).collect()
}

#[test]
fn data_threads_stay_on_the_processors_of_the_list_unless_one_is_wrong() {
    let of_test = std::fs::read_to_string("/proc/thread-self/status").unwrap();
    let all = field_of(&of_test, "Cpus_allowed_list");
    let first: String = all.chars().take_while(char::is_ascii_digit).collect();
    let network = Network::new();
    // One processor for both routines, and a list with a processor that no machine has.
    for (name, list, expected) in [("pinned", first.clone(), &first), ("free", format!("{first}, 1023"), &all)] {
        let more = |list: &str| {
            format!(
                "tun: {{disabled: true, cpu_affinity: [{list}]}}\nroutines: 2\nlisten: {{host: 127.0.0.1, port: 0}}"
            )
        };
        let config = network.configure(name, &["10.42.0.7/16"], &more(&list));
        let mut child = Command::new(ours()).arg("-config").arg(&config).stdout(Stdio::piped()).spawn().unwrap();
        let log = BufReader::new(child.stdout.take().unwrap());
        let mut log = log.lines().map(Result::unwrap);
        let lines: Vec<String> = log.by_ref().take_while(|line| !line.contains("Nebula interface is active")).collect();
        let expected = (vec![expected.clone(), expected.clone()], vec![all.clone()]);
        // The threads may not have started yet.
        let until = Instant::now() + Duration::from_secs(20);
        let found = loop {
            let threads = threads_of(child.id());
            let found = (processors(&threads, "nebula-in-"), processors(&threads, "nebula-control"));
            if found == expected || Instant::now() > until {
                break found;
            }
            std::thread::sleep(Duration::from_millis(20));
        };
        kill(Pid::from_raw(child.id().cast_signed()), Signal::SIGTERM).unwrap();
        child.wait().unwrap();
        assert_eq!(found, expected, "{lines:?}");
        let warned = lines.iter().any(|line| line.contains("tun.cpu_affinity") && line.contains("1023"));
        assert_eq!(warned, name == "free", "{lines:?}");
    }
}
