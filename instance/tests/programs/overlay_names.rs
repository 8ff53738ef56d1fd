//! Names of the overlay on a host with systemd-resolved: its programs resolve them like any other name, also while the lighthouse
//! is away, and nothing stays behind when the daemon is killed.

#![allow(clippy::disallowed_methods, reason = "these tests watch real processes on a real clock")]

use crate::world;

use std::fs;
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use world::World;
use world::peers::{ours, peer};

const SOON: Duration = Duration::from_secs(20);
const DOMAIN: &str = "nebula.internal";

/// A bus and systemd-resolved, in a mount namespace with a /run of their own and without the machine's servers.
const RESOLVED: &str = "set -e
mount -t tmpfs none /run
mkdir -p /run/dbus /run/systemd/resolve
for file in passwd group; do
  cp /etc/$file /run/$file
  grep -q ^systemd-resolve: /run/$file || echo 'systemd-resolve:x:987:987::/:/usr/sbin/nologin' >>/run/$file
  mount --bind /run/$file /etc/$file
done
: >/run/resolv.conf
mount --bind /run/resolv.conf \"$(realpath /etc/resolv.conf)\"
chown 987:987 /run/systemd/resolve
cat >/run/bus.conf <<'END'
<busconfig><type>system</type><listen>unix:path=/run/dbus/system_bus_socket</listen><auth>EXTERNAL</auth>
<policy context=\"default\"><allow user=\"*\"/><allow own=\"*\"/><allow send_destination=\"*\"/><allow eavesdrop=\"true\"/></policy></busconfig>
END
trap 'kill $(jobs -p); wait' EXIT
dbus-daemon --config-file=/run/bus.conf --nofork --nopidfile &
until [[ -S /run/dbus/system_bus_socket ]]; do sleep 0.05; done
\"$0\" &
wait";

/// A lighthouse `l` that serves names, and a host `a` with systemd-resolved.
struct Site {
    world: World,
    /// Holds the mount namespace of systemd-resolved.
    resolved: String,
    /// For `resolvectl`.
    path: String,
}

impl Site {
    fn start() -> Self {
        let mut world = World::new();
        let lighthouse = world.host("l");
        world.host("a");
        world.certify(&["ca", "-name", "site"]);
        for (name, address) in [("l", "10.77.0.1/24"), ("a", "10.77.0.2/24")] {
            world.certify(&["sign", "-name", name, "-ip", address, "-groups", "web"]);
        }
        let folder = peer("systemd-resolved");
        let daemon = folder.join("lib/systemd/systemd-resolved").display().to_string();
        world.start_in(
            "resolved",
            "a",
            Path::new("unshare"),
            &["--mount", "--propagation", "private", "bash", "-c", RESOLVED, &daemon],
        );
        let path = format!("PATH={}:{}", folder.join("usr/bin").display(), std::env::var("PATH").expect("a PATH"));
        let site = Self { resolved: world.pid("resolved").to_string(), world, path };
        let known = format!("static_host_map: {{10.77.0.1: ['{lighthouse}:4242']}}");
        site.configure(
            "l",
            &format!("lighthouse: {{am_lighthouse: true, serve_dns: true, dns: {{domain: {DOMAIN}}}}}"),
        );
        site.configure("a", &format!("{known}\nlighthouse: {{hosts: [10.77.0.1]}}\nresolver: {{domain: {DOMAIN}}}"));
        site.until("systemd-resolved runs", || site.resolve(&["status"]).is_some());
        site
    }

    fn configure(&self, host: &str, text: &str) {
        let dir = self.world.dir().display();
        let text = format!(
            "pki: {{ca: {dir}/ca.crt, cert: {dir}/{host}.crt, key: {dir}/{host}.key}}\n{text}\n\
             listen: {{host: 0.0.0.0, port: 4242}}\ntun: {{dev: neb0}}\nlogging: {{level: debug}}\n\
             firewall: {{inbound: [{{port: any, proto: any, host: any}}], outbound: [{{port: any, proto: any, host: any}}]}}\n"
        );
        self.world.write(&format!("{host}.yml"), &text);
    }

    fn config(&self, host: &str) -> String {
        self.world.dir().join(format!("{host}.yml")).display().to_string()
    }

    fn start_lighthouse(&mut self) {
        let config = self.config("l");
        self.world.start("l", &ours(), &["-config", &config]);
    }

    /// In the mount namespace of systemd-resolved.
    fn start_host(&mut self) {
        let (config, program) = (self.config("a"), ours().display().to_string());
        let arguments = ["--mount", "--target", &self.resolved, "env", &self.path, &program, "-config", &config];
        self.world.start("a", Path::new("nsenter"), &arguments);
    }

    /// Standard output of `resolvectl`, if it succeeds.
    fn resolve(&self, arguments: &[&str]) -> Option<String> {
        let inside = ["nsenter", "--mount", "--target", &self.resolved, "env", &self.path, "resolvectl"];
        let output = self.world.exec("a", &[&inside[..], arguments].concat());
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
    }

    fn until(&self, what: &str, done: impl Fn() -> bool) {
        let end = Instant::now() + SOON;
        while !done() {
            let status = self.resolve(&["status"]).unwrap_or_default();
            assert!(Instant::now() < end, "{what}\n{status}\n{}", self.world.all_logs());
            sleep(Duration::from_millis(50));
        }
    }

    /// Waits until systemd-resolved answers a query with this text.
    fn answers(&self, query: &str, wanted: &str) {
        let has = |text: String| text.contains(wanted);
        self.until(&format!("{query} is {wanted}"), || self.resolve(&["query", query]).is_some_and(has));
    }
}

#[test]
#[ignore = "needs root, network namespaces, dbus and systemd-resolved in target/peers"]
fn overlay_names_are_resolved_like_any_other_and_nothing_stays_behind() {
    let mut site = Site::start();
    site.start_lighthouse();
    site.start_host();
    let full = format!("l.{DOMAIN}");
    site.answers(&full, "10.77.0.1");
    site.answers("l", "10.77.0.1");
    site.answers("10.77.0.1", &full);
    let group = format!("web.groups.{DOMAIN}");
    for address in ["10.77.0.1", "10.77.0.2"] {
        site.answers(&group, address);
    }
    let certificate = site.resolve(&["query", "--type=TXT", &format!("a.{DOMAIN}")]).expect("a certificate");
    assert!(certificate.contains("isCa"), "{certificate}");
    // Other names do not come to the lighthouse.
    let domains = site.resolve(&["domain", "neb0"]).expect("domains");
    assert!(domains.contains(DOMAIN) && domains.contains("~0.77.10.in-addr.arpa"), "{domains}");
    assert!(site.resolve(&["default-route", "neb0"]).expect("a default route").contains("no"));

    // The last known answers, while the lighthouse is away.
    site.world.stop("l", Signal::SIGKILL);
    site.resolve(&["flush-caches"]).expect("flush");
    site.answers(&full, "10.77.0.1");

    // Without the domain in its configuration, the host forgets it, and with it, the host knows it again.
    let (config, with) = (site.config("a"), fs::read_to_string(site.config("a")).expect("a configuration"));
    let hang_up = || kill(Pid::from_raw(site.world.pid("a").cast_signed()), Signal::SIGHUP).expect("the daemon lives");
    let has_domain = || site.resolve(&["domain", "neb0"]).is_some_and(|said| said.contains(DOMAIN));
    fs::write(&config, with.replace("resolver:", "x-resolver:")).expect("write");
    hang_up();
    site.until("the domain is gone", || !has_domain());
    fs::write(&config, with).expect("write");
    hang_up();
    site.until("the domain is back", has_domain);

    site.world.stop("a", Signal::SIGKILL);
    let status = || site.resolve(&["status"]).expect("a status");
    site.until("systemd-resolved has forgotten the device", || !status().contains("neb0"));
    assert!(!status().contains(DOMAIN), "{}", status());
}
