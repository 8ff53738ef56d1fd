//! `deploy/nebula-proxy.service` under the systemd of a user without rights.

use std::process::Output;
use std::thread::sleep;
use std::time::{Duration, Instant};

use super::repository;
use super::systemd::{PLACE, Systemd};
use crate::proxy::{NOBODY, curl, network, serve_name};
use crate::world::World;

pub(super) const UNIT: &str = "nebula-proxy.service";
pub(super) const SOON: Duration = Duration::from_secs(20);

/// The user's manager, which runs as a service of the system's as after a login, in the network namespace of host `p`.
pub(super) struct User {
    pub(super) systemd: Systemd,
    home: String,
}

impl User {
    fn log_in(systemd: Systemd, namespace: &str) -> Self {
        let home = format!("{PLACE}/home");
        let user = Self { systemd, home };
        let home = &user.home;
        let folders = format!("mkdir -p {home}/run {home}/.config/nebula {home}/.config/systemd/user/{UNIT}.d");
        user.systemd.must(&[
            "sh",
            "-c",
            &format!("{folders} && chown -R {NOBODY}:{NOBODY} {home} && chmod 700 {home}/run"),
        ]);
        let manager = format!(
            "[Service]\nType=notify\nUser={NOBODY}\nGroup={NOBODY}\nDelegate=yes\n\
             Environment=HOME={home} XDG_RUNTIME_DIR={home}/run\nExecStart=/lib/systemd/systemd --user\n"
        );
        user.systemd.unit("user-manager.service", &manager, namespace);
        user.systemd.must(&["systemctl", "start", "user-manager.service"]);
        user
    }

    /// The same with program and unit of the proxy, and `more` in the unit's drop-in.
    pub(super) fn with_unit(world: &World, more: &str) -> Self {
        let systemd = Systemd::new();
        systemd.program("nebula-proxy");
        let user = Self::log_in(systemd, &world.namespace_of("p"));
        let unit = std::fs::read_to_string(repository("deploy").join(UNIT)).expect("the unit");
        user.write(&format!(".config/systemd/user/{UNIT}"), &unit.replace("/usr/local/bin", PLACE));
        let added =
            format!("[Service]\nStandardOutput=append:{0}/log\nStandardError=append:{0}/log\n{more}", user.home);
        user.write(&format!(".config/systemd/user/{UNIT}.d/test.conf"), &added);
        user.must(&["daemon-reload"]);
        user
    }

    /// A file of the user's.
    pub(super) fn write(&self, name: &str, text: &str) {
        self.systemd.write(&format!("home/{name}"), text.as_bytes());
        self.systemd.must(&["chown", &format!("{NOBODY}:{NOBODY}"), &format!("{}/{name}", self.home)]);
    }

    pub(super) fn call(&self, words: &[&str]) -> Output {
        let (id, runtime) = (NOBODY.to_string(), format!("XDG_RUNTIME_DIR={}/run", self.home));
        let user =
            ["setpriv", "--reuid", &id, "--regid", &id, "--clear-groups", "env", &runtime, "systemctl", "--user"];
        self.systemd.call(&[&user[..], words].concat())
    }

    pub(super) fn must(&self, words: &[&str]) -> String {
        let output = self.call(words);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{words:?}: {errors}\n{}\n{}", self.systemd.log(), self.log());
        String::from_utf8_lossy(&output.stdout).trim().to_owned()
    }

    pub(super) fn log(&self) -> String {
        std::fs::read_to_string(self.systemd.root.join(&self.home[1..]).join("log")).unwrap_or_default()
    }

    pub(super) fn until(&self, what: &str, done: impl Fn() -> bool) {
        let end = Instant::now() + SOON;
        while !done() {
            assert!(Instant::now() < end, "{what}: no\n{}\n{}", self.systemd.log(), self.log());
            sleep(Duration::from_millis(50));
        }
    }
}

#[test]
#[ignore = "needs root, systemd, network namespaces, curl and the Go peers in target/peers"]
fn the_unit_of_the_proxy_is_ready_for_its_user_reloads_and_is_started_again() {
    let mut world = network();
    serve_name(&mut world, "d", "10.77.0.1");
    let user = User::with_unit(&world, "");
    let good = std::fs::read_to_string(world.dir().join("p.yml")).expect("a configuration");

    // A configuration with an error is refused before it starts.
    user.write(".config/nebula/config.yml", &good.replace("outbound:", "outbound: {"));
    assert!(!user.call(&["start", UNIT]).status.success(), "{}", user.log());
    user.must(&["stop", UNIT]);
    user.write(".config/nebula/config.yml", &good);

    // `start` returns once it listens.
    user.must(&["start", UNIT]);
    let asks = |world: &World| {
        let arguments = ["--max-time", "2", "--socks5-hostname", "127.0.0.1:1080", "http://10.77.0.1:8000/who"];
        curl(world, "p", &arguments)
    };
    let refused = asks(&world);
    assert_ne!(refused, Err(7), "nobody listens (CURLE_COULDNT_CONNECT)\n{}", user.log());
    user.until("an answer by the proxy", || asks(&world).is_ok_and(|said| said == "d"));
    let pid = user.must(&["show", "-P", "MainPID", UNIT]);
    let status = user.systemd.must(&["cat", &format!("/proc/{pid}/status")]);
    let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).expect("a field").trim();
    assert_eq!(field("Uid:").split_whitespace().next(), Some(NOBODY.to_string().as_str()));
    assert_eq!((field("CapEff:"), field("NoNewPrivs:"), field("Seccomp:")), ("0000000000000000", "1", "2"));

    user.write(".config/nebula/config.yml", &good.replace("outbound: [{port: any", "outbound: [{port: 53"));
    user.must(&["reload", UNIT]);
    user.until("refused by the new rules", || asks(&world).is_err());
    assert_eq!(user.must(&["show", "-P", "MainPID", UNIT]), pid);
    user.write(".config/nebula/config.yml", &good);
    user.must(&["reload", UNIT]);
    user.until("an answer by the old rules", || asks(&world).is_ok());

    user.must(&["kill", "--signal", "KILL", UNIT]);
    user.until("another process", || {
        ![pid.as_str(), "0"].contains(&user.must(&["show", "-P", "MainPID", UNIT]).as_str())
    });
    user.until("an answer by it", || asks(&world).is_ok());
    user.must(&["stop", UNIT]);
    assert_eq!(user.must(&["show", "-P", "Result", UNIT]), "success", "{}", user.log());
    assert!(user.log().contains("Goodbye"), "{}", user.log());
}
