//! What outlives the daemon under a real systemd: its device, addresses, routes and UDP port, for which systemd holds
//! the descriptors.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::repository;
use super::systemd::{PLACE, Systemd};
use crate::world::peers::ours;
use crate::world::traffic::Flow;
use crate::world::{World, run};

pub(super) const U: &str = "10.77.0.1";
pub(super) const P: &str = "10.77.0.2";
pub(super) const SOON: Duration = Duration::from_secs(20);

/// The daemon of `u` under systemd, and its peer `p`.
pub(super) struct Site {
    pub(super) world: World,
    pub(super) systemd: Systemd,
    pub(super) namespace: String,
}

/// What a test changes in the configuration of `u`.
#[derive(Clone)]
pub(super) struct Wanted {
    pub(super) certificate: &'static str,
    pub(super) listen: &'static str,
    pub(super) tun: &'static str,
    /// What the firewall lets in.
    pub(super) inbound: &'static str,
    /// What it lets out.
    pub(super) outbound: &'static str,
    pub(super) more: &'static str,
}

pub(super) const FIRST: Wanted = Wanted {
    certificate: "u",
    listen: "port: 4242",
    // The device has the largest MTU of these, and the network's own route a special one.
    tun: "dev: neb0, routes: [{route: 10.77.0.128/25, mtu: 1500}],
  unsafe_routes: [{route: 10.98.0.0/24, via: 10.77.0.2}, {route: 10.97.0.0/24, via: 10.77.0.2, mtu: 1200}]",
    inbound: "any",
    outbound: "any",
    more: "",
};

impl Site {
    fn new() -> Self {
        let mut world = World::new();
        world.host("u");
        world.host("p");
        world.certify(&["ca", "-name", "kept"]);
        for (name, address) in [("u", "10.77.0.1/24"), ("p", "10.77.0.2/24"), ("moved", "10.77.0.9/24")] {
            world.certify(&["sign", "-name", name, "-networks", address]);
        }
        let systemd = Systemd::new();
        systemd.program("nebula");
        for file in ["ca.crt", "u.crt", "u.key", "moved.crt", "moved.key"] {
            systemd.write(file, &std::fs::read(world.dir().join(file)).expect("a credential"));
        }
        let namespace = world.namespace_of("u");
        let site = Self { world, systemd, namespace };
        site.configure(&FIRST);
        let unit = std::fs::read_to_string(repository("deploy/nebula.service")).expect("the unit");
        let unit = unit.replace("/usr/local/bin/nebula", &format!("{PLACE}/nebula"));
        let unit = unit.replace("/etc/nebula/config.yml", &format!("{PLACE}/config.yml"));
        site.systemd.unit("nebula.service", &unit, &site.namespace);
        site.control("start");
        site
    }

    /// Also starts the daemon of `p` and waits until they find each other.
    pub(super) fn with_peer() -> Self {
        let mut site = Self::new();
        let folder = site.world.dir().to_owned();
        let peer = site.world.write("p.yml", &config(&folder, &Wanted { certificate: "p", tun: "dev: neb0", ..FIRST }));
        site.world.start("p", &ours(), &["-config", &peer.display().to_string()]);
        site.world.ping("p", U, SOON);
        site
    }

    pub(super) fn configure(&self, wanted: &Wanted) {
        self.systemd.write("config.yml", config(Path::new(PLACE), wanted).as_bytes());
    }

    pub(super) fn control(&self, verb: &str) {
        self.systemd.must(&["systemctl", verb, "nebula.service"]);
    }

    pub(super) fn restart_as(&self, wanted: &Wanted) {
        self.configure(wanted);
        self.control("restart");
    }

    pub(super) fn show(&self, property: &str) -> String {
        self.systemd.show(property)
    }

    pub(super) fn pid(&self) -> i32 {
        self.show("MainPID").parse().expect("a process id")
    }

    /// What `ip` says in the namespace of `u`; nothing if it refuses.
    fn ip(&self, arguments: &str) -> String {
        let words: Vec<_> = ["ip"].into_iter().chain(arguments.split_whitespace()).collect();
        String::from_utf8_lossy(&self.world.exec("u", &words).stdout).trim().to_owned()
    }

    /// Interface index of a device; `None` if there is none.
    fn index(&self, device: &str) -> Option<u32> {
        self.ip(&format!("-o link show dev {device}")).split(':').next()?.parse().ok()
    }

    /// Inodes of the UDP sockets that are bound to a port.
    fn sockets(&self, port: u16) -> Vec<String> {
        let shown = self.world.run("u", &["ss", "-uanHe", "sport", "=", &format!(":{port}")]);
        let inode = |line: &str| line.split_whitespace().find(|word| word.starts_with("ino:")).map(str::to_owned);
        shown.lines().filter_map(inode).collect()
    }

    pub(super) fn stored(&self) -> String {
        self.show("NFileDescriptorStore")
    }

    pub(super) fn wait(&self, what: &str, within: Duration, mut is_so: impl FnMut(&Self) -> bool) {
        let end = Instant::now() + within;
        while !is_so(self) {
            assert!(Instant::now() < end, "{what}\n{}\n{}", self.systemd.log(), self.world.all_logs());
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

fn config(folder: &Path, Wanted { certificate, listen, tun, inbound, outbound, more }: &Wanted) -> String {
    let folder = folder.display();
    format!(
        "pki: {{ca: {folder}/ca.crt, cert: {folder}/{certificate}.crt, key: {folder}/{certificate}.key}}
static_host_map: {{10.77.0.1: ['192.0.2.1:4242'], 10.77.0.2: ['192.0.2.2:4242']}}
listen: {{host: 0.0.0.0, {listen}}}
tun: {{{tun}}}
{more}
firewall: {{outbound: [{{port: any, proto: {outbound}, host: any}}], inbound: [{{port: any, proto: {inbound}, host: any}}]}}
"
    )
}

/// Every change of links, addresses and routes in a namespace.
struct Changes {
    child: Child,
    lines: Arc<Mutex<Vec<String>>>,
}

impl Changes {
    fn watch(namespace: &str) -> Self {
        let mut child = Command::new("ip")
            .args(["-n", namespace, "monitor", "link", "address", "route"])
            .stdout(Stdio::piped())
            .spawn()
            .expect("ip runs");
        let lines = Arc::new(Mutex::new(Vec::new()));
        let (output, into) = (child.stdout.take().expect("its output"), Arc::clone(&lines));
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                into.lock().expect("nobody panics").push(line);
            }
        });
        let changes = Self { child, lines };
        // Until it listens.
        for probe in 0.. {
            run("ip", &["-n", namespace, "link", "set", "lo", "mtu", &(60_000 + probe).to_string()]);
            std::thread::sleep(Duration::from_millis(20));
            if !changes.lines.lock().expect("nobody panics").is_empty() {
                break;
            }
            assert!(probe < 200, "ip monitor says nothing");
        }
        changes
    }

    /// What was taken away.
    fn losses(&self) -> Vec<String> {
        let lines = self.lines.lock().expect("nobody panics");
        lines.iter().filter(|line| line.starts_with("Deleted")).cloned().collect()
    }
}

impl Drop for Changes {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
#[ignore = "needs root, systemd, network namespaces and the Go peers in target/peers"]
fn a_restart_and_a_kill_keep_device_addresses_routes_and_port_and_traffic_goes_on() {
    let site = Site::with_peer();
    let flow = Flow::start(&site.world, "p", "u", U.parse().expect("an address"));
    // A person's route.
    run("ip", &["-n", &site.namespace, "route", "add", "10.99.0.0/24", "dev", "neb0"]);
    let (index, sockets, routes) = (site.index("neb0"), site.sockets(4242), site.ip("route show"));
    assert!(index.is_some() && sockets.len() == 1, "{index:?} {sockets:?}");
    for network in ["10.77.0.0/24", "10.97.0.0/24", "10.98.0.0/24", "10.99.0.0/24"] {
        assert!(routes.contains(network), "{routes}");
    }
    assert_eq!(site.stored(), "2");
    let changes = Changes::watch(&site.namespace);
    for (what, bound) in [("systemctl restart", 1000), ("kill -9", 2500), ("systemctl restart", 1000)] {
        let before = site.pid();
        site.wait("traffic", SOON, |_| {
            flow.watch();
            std::thread::sleep(Duration::from_millis(200));
            let (tcp, udp) = flow.answers();
            tcp > 5 && udp > 5
        });
        flow.watch();
        if what == "kill -9" {
            site.systemd.must(&["kill", "-9", &before.to_string()]);
            site.wait("another process", SOON, |site| {
                site.show("ActiveState") == "active" && ![0, before].contains(&site.pid())
            });
        } else {
            site.control("restart");
        }
        let (_, answers) = flow.answers();
        site.wait("traffic again", SOON, |_| flow.answers().1 > answers + 20);
        let (tcp, udp) = flow.silence();
        println!("{what}: silence of probes {udp:?}, of TCP {tcp:?}; {} probes lost", flow.lost());
        assert_ne!(site.pid(), before);
        assert_eq!(flow.broken(), None);
        assert!(udp < Duration::from_millis(bound), "{what}: {udp:?}");
        assert_eq!(
            (site.index("neb0"), site.sockets(4242)),
            (index, sockets.clone()),
            "{what}\n{}",
            site.systemd.log()
        );
        assert_eq!((site.ip("route show"), site.stored()), (routes.clone(), "2".to_owned()), "{what}");
        assert_eq!(changes.losses(), Vec::<String>::new(), "{what}");
        let log = site.systemd.log();
        assert!(log.contains("The tun device of the last run goes on") && log.contains("The UDP port of the last run"));
        assert!(!log.contains("does not fit"), "{log}");
    }
}

#[test]
#[ignore = "needs root, systemd, network namespaces and the Go peers in target/peers"]
fn after_an_upgrade_the_unit_is_the_same_with_another_main_process_and_a_restart_keeps_as_much() {
    let site = Site::with_peer();
    site.systemd.program("nebula-ctl");
    let flow = Flow::start(&site.world, "p", "u", U.parse().expect("an address"));
    let (index, sockets) = (site.index("neb0"), site.sockets(4242));
    let same = |site: &Site, what: &str| {
        assert_eq!(
            (site.index("neb0"), site.sockets(4242)),
            (index, sockets.clone()),
            "{what}\n{}",
            site.systemd.log()
        );
        assert_eq!((site.show("ActiveState"), site.stored()), ("active".to_owned(), "2".to_owned()), "{what}");
        assert_eq!(flow.broken(), None, "{what}");
    };
    for _ in 0..3 {
        let before = site.pid();
        flow.watch();
        let said = site.systemd.must(&[&format!("{PLACE}/nebula"), "ctl", "upgrade"]);
        site.wait("another main process", SOON, |site| ![0, before].contains(&site.pid()));
        assert!(said.starts_with(&format!("upgraded to process {} ", site.pid())), "{said}");
        site.wait("the end of the old process", SOON, |site| {
            !site.systemd.call(&["test", "-d", &format!("/proc/{before}")]).status.success()
        });
        std::thread::sleep(Duration::from_millis(300));
        assert_eq!((flow.lost(), site.show("NRestarts")), (0, "0".to_owned()), "{}", site.systemd.log());
        assert!(flow.silence().1 < Duration::from_millis(200), "{:?}", flow.silence());
        same(&site, "upgrade");
    }
    site.control("restart");
    let (_, answers) = flow.answers();
    site.wait("traffic again", SOON, |_| flow.answers().1 > answers + 20);
    same(&site, "restart");
    // The process that took over is supervised as the first one was.
    let before = site.pid();
    site.systemd.must(&[&format!("{PLACE}/nebula"), "ctl", "upgrade"]);
    site.wait("another main process", SOON, |site| ![0, before].contains(&site.pid()));
    let upgraded = site.pid();
    site.systemd.must(&["kill", "-9", &upgraded.to_string()]);
    site.wait("another process", SOON, |site| {
        site.show("ActiveState") == "active" && ![0, upgraded].contains(&site.pid())
    });
    same(&site, "kill -9");
    drop(flow);
    site.control("stop");
    site.wait("the end of the device", SOON, |site| site.index("neb0").is_none());
}

#[test]
#[ignore = "needs root, systemd, network namespaces and the Go peers in target/peers"]
fn what_is_configured_otherwise_is_made_anew_and_the_rest_stays() {
    let site = Site::with_peer();
    let (index, sockets) = (site.index("neb0"), site.sockets(4242));
    run("ip", &["-n", &site.namespace, "route", "add", "10.99.0.0/24", "dev", "neb0"]);

    // Routes and MTUs.
    let changes = Changes::watch(&site.namespace);
    let wanted =
        Wanted { tun: "dev: neb0, mtu: 1400, unsafe_routes: [{route: 10.97.0.0/24, via: 10.77.0.2}]", ..FIRST };
    site.restart_as(&wanted);
    assert_eq!((site.index("neb0"), site.sockets(4242)), (index, sockets.clone()));
    let routes = site.ip("route show dev neb0");
    for (route, is_there) in [
        ("10.97.0.0/24", true),
        ("10.98.0.0/24", false),
        ("10.99.0.0/24", true),
        ("10.77.0.128/25", false),
        ("mtu 1300", false),
        ("mtu 1200", false),
    ] {
        assert_eq!(routes.contains(route), is_there, "{route} among\n{routes}");
    }
    assert!(site.ip("link show neb0").contains("mtu 1400"));
    let losses = changes.losses();
    assert!(losses.iter().all(|loss| loss.contains("10.98.0.0/24") || loss.contains("10.77.0.128/25")), "{losses:?}");
    assert_eq!(losses.len(), 2, "{losses:?}");
    site.world.ping("p", U, SOON);

    // Another address: the certificate has it.
    let wanted = Wanted { certificate: "moved", ..FIRST };
    site.restart_as(&wanted);
    assert_eq!((site.index("neb0"), site.sockets(4242)), (index, sockets.clone()));
    let addresses = site.ip("-o address show dev neb0");
    assert!(addresses.contains("10.77.0.9/24") && !addresses.contains(U), "{addresses}");
    let routes = site.ip("route show dev neb0");
    assert!(
        routes.contains("10.77.0.0/24") && !routes.contains("src 10.77.0.1 ") && routes.contains("10.98.0.0/24"),
        "{routes}"
    );
    let log = site.systemd.log();
    assert!(log.contains("Removed what the last run left") && !log.contains("does not fit"), "{log}");

    // Another port.
    site.restart_as(&Wanted { listen: "port: 4243", ..FIRST });
    assert_eq!((site.index("neb0"), site.sockets(4242)), (index, Vec::new()));
    assert_eq!((site.sockets(4243).len(), site.stored().as_str()), (1, "2"));
    assert!(site.systemd.log().contains("0.0.0.0:4242, and 0.0.0.0:4243 is wanted"), "{}", site.systemd.log());
    // A port that the kernel chooses stays the same, too.
    site.restart_as(&Wanted { listen: "port: 0", ..FIRST });
    assert!(site.sockets(4243).is_empty());
    let chosen = || site.world.run("u", &["ss", "-uanHe"]);
    let before = chosen();
    site.control("restart");
    assert_eq!((chosen(), site.stored().as_str()), (before, "2"));

    // Several routines.
    let several = Wanted { more: "routines: 2", ..FIRST };
    site.restart_as(&several);
    let made = site.index("neb0");
    assert!(made.is_some() && made != index, "a device with several queues is another one");
    assert_eq!((site.sockets(4242).len(), site.stored().as_str()), (2, "4"));
    let mut sockets = site.sockets(4242);
    site.control("restart");
    let mut kept = site.sockets(4242);
    sockets.sort();
    kept.sort();
    assert_eq!((site.index("neb0"), kept, site.stored().as_str()), (made, sockets, "4"), "{}", site.systemd.log());
    site.world.ping("p", U, SOON);

    // Another device; then none.
    site.restart_as(&Wanted { tun: "dev: neb1", ..FIRST });
    assert!(site.index("neb0").is_none() && site.index("neb1").is_some());
    assert!(!site.systemd.log().contains("Another interface has an address"), "{}", site.systemd.log());
    assert_eq!(site.stored(), "2");
    site.world.ping("p", U, SOON);
    site.restart_as(&Wanted { tun: "disabled: true", ..FIRST });
    site.wait("the device ends", SOON, |site| site.index("neb1").is_none());
    site.wait("only the socket is stored", SOON, |site| site.stored() == "1");

    // A device that somebody removes is made anew, and its dead descriptor is not kept.
    site.restart_as(&FIRST);
    let before = site.index("neb0");
    run("ip", &["-n", &site.namespace, "link", "del", "neb0"]);
    site.wait("another device", SOON, |site| site.index("neb0").is_some_and(|index| Some(index) != before));
    site.wait("two descriptors", SOON, |site| site.stored() == "2");
    site.world.ping("p", U, SOON);
}

#[test]
#[ignore = "needs root, systemd, network namespaces and the Go peers in target/peers"]
fn a_stop_ends_device_and_port_and_a_refused_configuration_keeps_them_until_it_is_corrected() {
    let site = Site::with_peer();
    let (index, sockets) = (site.index("neb0"), site.sockets(4242));
    site.configure(&Wanted { listen: "port: 424200", ..FIRST });
    assert!(!site.systemd.call(&["systemctl", "restart", "nebula.service"]).status.success());
    site.wait("systemd tries again", SOON, |site| site.show("NRestarts") != "0");
    assert_eq!((site.index("neb0"), site.sockets(4242)), (index, sockets.clone()));
    // Nothing for the overlay takes another way.
    assert!(site.ip("route get 10.77.0.2").contains("dev neb0"));
    site.configure(&FIRST);
    site.wait("it is corrected", SOON, |site| site.show("ActiveState") == "active");
    assert_eq!((site.index("neb0"), site.sockets(4242)), (index, sockets));
    site.world.ping("u", P, SOON);

    site.control("stop");
    assert_eq!(site.show("Result"), "success");
    // systemd closes the descriptors some time after the last process has ended.
    site.wait("the device ends", Duration::from_secs(2), |site| site.index("neb0").is_none());
    site.wait("the port ends", Duration::from_secs(2), |site| site.sockets(4242).is_empty());
    assert_eq!(site.ip("route show dev neb0"), "");
    site.control("start");
    assert!(site.index("neb0").is_some_and(|new| Some(new) != index));
    site.world.ping("u", P, SOON);
}
