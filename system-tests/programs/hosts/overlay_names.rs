//! Names of the overlay on a host with systemd-resolved, or with openresolv and dnsmasq: its programs resolve them
//! like any other name, also while the lighthouse is away, and nothing stays behind when the daemon is killed.

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

/// openresolv and a dnsmasq that it configures, in a mount namespace with a /run and a /etc of their own. openresolv
/// restarts dnsmasq when other domains have other servers. What it does not know goes to 192.0.2.3.
const OPENRESOLV: &str = "set -e
mount -t tmpfs none /run
mkdir -p /run/dnsmasq /run/etc/upper /run/etc/work
for folder in sbin lib; do mount -t overlay overlay -o \"lowerdir=$0/$folder:/usr/$folder\" /usr/$folder; done
mount -t overlay overlay -o lowerdir=/etc,upperdir=/run/etc/upper,workdir=/run/etc/work /etc
rm -f /etc/resolv.conf
cat >/etc/resolvconf.conf <<'END'
name_servers=127.0.0.1
dnsmasq_conf=/run/dnsmasq/domains
dnsmasq_resolv=/run/dnsmasq/servers
dnsmasq_restart='kill $(cat /run/dnsmasq.pid)'
libc_restart=true
END
touch /run/dnsmasq/domains
echo 'nameserver 192.0.2.3' | resolvconf -a eth0 2>/dev/null || true
while :; do
  dnsmasq --keep-in-foreground --conf-file=/run/dnsmasq/domains --resolv-file=/run/dnsmasq/servers --listen-address=127.0.0.1 \
    --bind-interfaces --no-hosts --user=root --pid-file=/run/dnsmasq.pid --log-queries --log-facility=/run/dnsmasq.log || true
  sleep 0.05
done";

/// A lighthouse `l` that serves names, and a host `a` with a resolver of its own.
struct Site {
    world: World,
    /// Holds the mount namespace of the host's resolver.
    resolver: String,
    path: String,
}

impl Site {
    fn with_resolved() -> Self {
        let folder = peer("systemd-resolved");
        let daemon = folder.join("lib/systemd/systemd-resolved");
        let path = format!("{}:{}", folder.join("usr/bin").display(), std::env::var("PATH").expect("a PATH"));
        let site = Self::new(RESOLVED, &daemon, path);
        site.until("systemd-resolved runs", || site.resolve(&["status"]).is_some());
        site
    }

    fn with_openresolv() -> Self {
        let path = format!("/usr/sbin:{}", std::env::var("PATH").expect("a PATH"));
        let mut site = Self::new(OPENRESOLV, &peer("openresolv"), path);
        assert_eq!(site.world.host("b").to_string(), "192.0.2.3");
        let server = ["--keep-in-foreground", "--conf-file=/dev/null", "--no-resolv", "--no-hosts", "--user=root"];
        let other =
            ["--listen-address=192.0.2.3", "--bind-interfaces", "--pid-file=", "--address=/other.example/198.51.100.9"];
        site.world.start_in("upstream", "b", Path::new("dnsmasq"), &[&server[..], &other[..]].concat());
        site.until("dnsmasq runs", || site.address("other.example").as_deref() == Some("198.51.100.9"));
        site
    }

    /// `resolver` is a script for bash that stays, with its argument.
    fn new(resolver: &str, argument: &Path, path: String) -> Self {
        let mut world = World::new();
        let lighthouse = world.host("l");
        world.host("a");
        world.certify(&["ca", "-name", "site"]);
        for (name, address) in [("l", "10.77.0.1/24"), ("a", "10.77.0.2/24")] {
            world.certify(&["sign", "-name", name, "-ip", address, "-groups", "web"]);
        }
        let argument = argument.display().to_string();
        let private =
            ["--mount", "--propagation", "private", "env", &format!("PATH={path}"), "bash", "-c", resolver, &argument];
        world.start_in("resolver", "a", Path::new("unshare"), &private);
        let site = Self { resolver: world.pid("resolver").to_string(), world, path: format!("PATH={path}") };
        let known = format!("static_host_map: {{10.77.0.1: ['{lighthouse}:4242']}}");
        site.configure(
            "l",
            &format!("lighthouse: {{am_lighthouse: true, serve_dns: true, dns: {{domain: {DOMAIN}}}}}"),
        );
        site.configure("a", &format!("{known}\nlighthouse: {{hosts: [10.77.0.1]}}\nresolver: {{domain: {DOMAIN}}}"));
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

    /// In the mount namespace of the host's resolver.
    fn start_host(&mut self) {
        let (config, program) = (self.config("a"), ours().display().to_string());
        let arguments = ["--mount", "--target", &self.resolver, "env", &self.path, &program, "-config", &config];
        self.world.start("a", Path::new("nsenter"), &arguments);
    }

    /// Standard output of a command beside the host's resolver, if it succeeds.
    fn inside(&self, command: &[&str]) -> Option<String> {
        let output = self.world.exec("a", &[&self.entered()[..], command].concat());
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
    }

    fn entered(&self) -> [&str; 6] {
        ["nsenter", "--mount", "--target", &self.resolver, "env", &self.path]
    }

    /// Standard output of `resolvectl`, if it succeeds.
    fn resolve(&self, arguments: &[&str]) -> Option<String> {
        self.inside(&[&["resolvectl"], arguments].concat())
    }

    /// The first address that the C library gives a program for a name.
    fn address(&self, name: &str) -> Option<String> {
        let found = self.inside(&["getent", "ahostsv4", name])?;
        found.split_whitespace().next().map(str::to_owned)
    }

    /// A file as the host's resolver has it.
    fn file(&self, path: &str) -> String {
        self.inside(&["cat", path]).unwrap_or_default()
    }

    fn reload(&self) {
        kill(Pid::from_raw(self.world.pid("a").cast_signed()), Signal::SIGHUP).expect("the daemon lives");
    }

    fn until(&self, what: &str, done: impl Fn() -> bool) {
        let end = Instant::now() + SOON;
        while !done() {
            let status = self.resolve(&["status"]).unwrap_or_else(|| self.file("/run/dnsmasq.log"));
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
    let mut site = Site::with_resolved();
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
    let has_domain = || site.resolve(&["domain", "neb0"]).is_some_and(|said| said.contains(DOMAIN));
    fs::write(&config, with.replace("resolver:", "x-resolver:")).expect("write");
    site.reload();
    site.until("the domain is gone", || !has_domain());
    fs::write(&config, with).expect("write");
    site.reload();
    site.until("the domain is back", has_domain);

    site.world.stop("a", Signal::SIGKILL);
    let status = || site.resolve(&["status"]).expect("a status");
    site.until("systemd-resolved has forgotten the device", || !status().contains("neb0"));
    assert!(!status().contains(DOMAIN), "{}", status());
}

#[test]
#[ignore = "needs root, network namespaces, dnsmasq and openresolv in target/peers"]
fn with_openresolv_only_the_domain_is_asked_of_the_daemon_and_nothing_stays_behind() {
    let mut site = Site::with_openresolv();
    let domains = |site: &Site| site.file("/run/dnsmasq/domains");
    let servers = |site: &Site| {
        site.file("/etc/resolv.conf").lines().filter(|it| it.starts_with("nameserver")).collect::<String>()
    };
    site.start_lighthouse();
    site.start_host();
    let full = format!("l.{DOMAIN}");
    site.until("a name", || site.address(&full).as_deref() == Some("10.77.0.1"));
    site.until("a name of one label", || site.address("l").as_deref() == Some("10.77.0.1"));
    assert_eq!(site.address("other.example").as_deref(), Some("198.51.100.9"));
    assert_eq!(servers(&site), "nameserver 127.0.0.1");
    let log = site.file("/run/dnsmasq.log");
    for line in log.lines().filter(|line| line.contains("forwarded ") && line.ends_with("to 10.77.0.2")) {
        assert!(line.contains(DOMAIN), "{line}");
    }
    assert!(site.world.log("a").contains("Told openresolv of the overlay's names"), "{}", site.world.all_logs());

    // The last known answers, while the lighthouse is away.
    site.world.stop("l", Signal::SIGKILL);
    assert_eq!(site.address(&full).as_deref(), Some("10.77.0.1"));

    // A reload changes the domain, takes it away and brings it back.
    let (config, with) = (site.config("a"), fs::read_to_string(site.config("a")).expect("a configuration"));
    for (text, wanted) in [
        (with.replace(DOMAIN, "changed.internal"), Some("server=/changed.internal/10.77.0.2")),
        (with.replace("resolver:", "x-resolver:"), None),
        (with.clone(), Some("server=/nebula.internal/10.77.0.2")),
    ] {
        fs::write(&config, text).expect("write");
        site.reload();
        site.until("the domain of the file", || {
            let told = domains(&site);
            told.lines().find(|line| line.starts_with("server=")) == wanted
        });
    }

    // The child that takes the entry away outlives the daemon for no longer than it needs.
    site.world.stop("a", Signal::SIGKILL);
    site.until("no domain is left", || !domains(&site).contains("server="));
    site.until("no entry is left", || site.inside(&["resolvconf", "-l", "neb0"]).is_none());
    site.until("no process is left", || {
        site.inside(&["pgrep", "-f", "resolvconf -f -d neb0|resolvconf -p -m"]).is_none_or(|found| found.is_empty())
    });
    // openresolv has restarted dnsmasq, which may not run yet.
    site.until("another name", || site.address("other.example").as_deref() == Some("198.51.100.9"));

    // Without a local resolver that chooses servers by domain, the host's configuration stays as it is, and a log
    // line says what to do.
    let file = site.file("/etc/resolvconf.conf").replace("name_servers=127.0.0.1\n", "");
    let plain = site.world.write("resolvconf.conf", &file).display().to_string();
    site.inside(&["cp", &plain, "/etc/resolvconf.conf"]).expect("another configuration");
    let _ = site.inside(&["resolvconf", "-u"]);
    let before = site.file("/etc/resolv.conf");
    assert!(before.contains("nameserver 192.0.2.3"), "{before}");
    site.start_host();
    let refused = "This host has no resolver that can be told";
    site.until("the log says it", || site.world.log("a").contains(refused));
    assert_eq!(site.world.log("a").matches(refused).count(), 1, "{}", site.world.log("a"));
    assert_eq!(site.file("/etc/resolv.conf"), before);
    let doctor = ours().with_file_name("nebula-ctl").display().to_string();
    let said = site.world.exec("a", &[&site.entered()[..], &[&doctor, "doctor"]].concat());
    let said = String::from_utf8_lossy(&said.stdout).into_owned();
    assert!(said.contains("names_not_registered") && said.contains("openresolv has no local resolver"), "{said}");
}

/// As `lighthouse.dns` of the chart configures it, and as docs/cluster.md has cluster DNS ask it.
#[test]
#[ignore = "needs root, network namespaces, dnsmasq and the Go peers in target/peers"]
fn pods_resolve_overlay_names_through_cluster_dns_that_asks_the_lighthouse_for_the_domain() {
    let mut world = World::new();
    let lighthouse = world.host("l");
    world.host("a");
    world.host("pod");
    world.certify(&["ca", "-name", "cluster"]);
    world.certify(&["sign", "-name", "l", "-ip", "10.77.255.1/16"]);
    let dir = world.dir().display().to_string();
    let files = ["-out-crt", &format!("{dir}/web.crt"), "-out-key", &format!("{dir}/web.key")];
    world.certify(
        &[&["sign", "-name", "web-0.shop.pod", "-ip", "10.77.0.5/16", "-groups", "ns:shop"], &files[..]].concat(),
    );
    for (host, files, text) in [
        ("l", "l", "lighthouse: {am_lighthouse: true, serve_dns: true, dns: {host: '::', port: 5335, domain: nebula.internal}}".to_owned()),
        ("a", "web", format!("static_host_map: {{10.77.255.1: ['{lighthouse}:4242']}}\nlighthouse: {{hosts: [10.77.255.1]}}")),
    ] {
        let config = world.write(
            &format!("{host}.yml"),
            &format!(
                "pki: {{ca: {dir}/ca.crt, cert: {dir}/{files}.crt, key: {dir}/{files}.key}}\n{text}\n\
                 listen: {{host: '::', port: 4242}}\ntun: {{disabled: true}}\nfirewall: {{outbound: [], inbound: []}}\n"
            ),
        );
        world.start(host, &ours(), &["-config", &config.display().to_string()]);
    }
    let cluster_dns =
        ["--keep-in-foreground", "--conf-file=/dev/null", "--no-resolv", "--no-hosts", "--user=root", "--pid-file="];
    let asks = ["--listen-address=127.0.0.1", "--bind-interfaces", "--address=/db.shop.svc/10.96.0.7"];
    let domain = format!("--server=/nebula.internal/{lighthouse}#5335");
    world.start_in("dns", "pod", Path::new("dnsmasq"), &[&cluster_dns[..], &asks, &[domain.as_str()]].concat());
    let resolv = world.write("resolv.conf", "nameserver 127.0.0.1\n").display().to_string();
    let looks_up = |world: &World, name: &str| {
        let script = format!("mount --bind {resolv} /etc/resolv.conf && getent ahostsv4 {name}");
        let said = world.exec("pod", &["unshare", "--mount", "sh", "-c", &script]);
        String::from_utf8_lossy(&said.stdout).split_whitespace().next().map(str::to_owned)
    };
    for (name, address) in [
        ("web-0.shop.pod.nebula.internal", "10.77.0.5"),
        ("ns-shop.groups.nebula.internal", "10.77.0.5"),
        ("db.shop.svc", "10.96.0.7"),
    ] {
        let end = Instant::now() + SOON;
        while looks_up(&world, name).as_deref() != Some(address) {
            assert!(Instant::now() < end, "{name}\n{}", world.all_logs());
            sleep(Duration::from_millis(100));
        }
    }
    assert_eq!(looks_up(&world, "nobody.nebula.internal"), None);
}
