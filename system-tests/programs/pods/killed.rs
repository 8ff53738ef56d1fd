//! An instance that is killed under systemd: the next one of its unit goes on with the device, the routes, the port and
//! the packets that wait, from the unit's descriptor store. And what must not stay there.

#![allow(clippy::disallowed_methods, reason = "these tests watch real processes on a real clock")]

use crate::service_manager;
use crate::world;

use std::net::UdpSocket;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use service_manager::{PLACE, Systemd};
use world::chaos::number;
use world::cluster::{Cluster, LIGHTHOUSE, Node, answer_at, binary, links, place};
use world::run;

use super::upgrade::Site;

const SOON: Duration = Duration::from_secs(20);
/// Fewer than wait for a handshake.
const WAITING: u8 = 20;

/// What outlives an instance.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Outlives {
    device: String,
    routes: Vec<String>,
    port: Value,
}

impl Outlives {
    fn of(site: &Site) -> Self {
        let namespace = site.cluster.world.namespace_of("db");
        let device = run("ip", &["-n", &namespace, "-o", "link", "show", "nebula0"]);
        let routes = |family| run("ip", &["-n", &namespace, family, "route", "show", "table", "all", "dev", "nebula0"]);
        let mut routes: Vec<String> = format!("{}{}", routes("-4"), routes("-6")).lines().map(str::to_owned).collect();
        routes.sort();
        Self { device, routes, port: site.node.status("db")["port"].clone() }
    }
}

/// Kills the one instance of `db`; returns when it is gone.
fn kill_instance(site: &Site) {
    let [pid] = site.instances()[..] else { panic!("not one instance\n{}", site.logs()) };
    kill(Pid::from_raw(pid), Signal::SIGKILL).expect("it runs");
    while site.instances().contains(&pid) {
        thread::sleep(Duration::from_millis(1));
    }
}

fn wait_for_another(site: &Site, before: i32) {
    let serves = |status: &Value| status["state"] == "running" && status["pid"] != before;
    site.until("another process", || answer_at(&site.node.status_socket("db")).is_ok_and(|status| serves(&status)));
}

fn unit_of(site: &Site) -> String {
    site.systemd().units().split(' ').next().unwrap_or_default().to_owned()
}

/// How many descriptors of tun devices systemd holds.
fn held_devices(systemd: &Systemd) -> String {
    systemd.sh("ls -l /proc/1/fd | grep -c /dev/net/tun")
}

/// Binds a UDP socket in the namespace of a pod, at its overlay address.
fn socket_in(site: &Site, pod: &str) -> UdpSocket {
    let shown = site.cluster.world.run(pod, &["ip", "-4", "-o", "addr", "show", "dev", "nebula0"]);
    let address = shown.split_whitespace().nth(3).and_then(|network| network.split('/').next());
    let address: std::net::IpAddr = address.and_then(|address| address.parse().ok()).expect("an overlay address");
    let namespace = site.cluster.world.namespace_of(pod);
    let bound = thread::spawn(move || {
        world::enter(&namespace);
        UdpSocket::bind((address, 0)).expect("a socket")
    });
    bound.join().expect("it is bound")
}

#[test]
#[ignore = "needs root, network namespaces, systemd, D-Bus and a release build"]
fn after_a_kill_device_routes_port_and_waiting_packets_are_as_before() {
    let site = Site::of_systemd();
    let namespace = site.cluster.world.namespace_of("db");
    // As a person adds it.
    run("ip", &["-n", &namespace, "route", "add", "10.42.77.0/24", "dev", "nebula0"]);
    let (before, certificate) = (Outlives::of(&site), site.node.status("db")["certificate"].clone());
    // As an instance with another certificate and other settings left them.
    run("ip", &["-n", &namespace, "address", "add", "10.42.9.9/32", "dev", "nebula0"]);
    run("ip", &["-n", &namespace, "route", "add", "10.43.0.0/24", "dev", "nebula0", "proto", "static"]);
    assert_ne!(Outlives::of(&site), before);
    let (sender, inbox) = (socket_in(&site, "db"), socket_in(&site, "web"));
    inbox.set_read_timeout(Some(Duration::from_secs(1))).expect("a timeout");
    let mut silences = Vec::new();
    for _ in 0..number("KILLS", 3) {
        thread::sleep(Duration::from_millis(300));
        let pid = site.pid();
        site.flow().watch();
        kill_instance(&site);
        for number in 0..WAITING {
            // Without a device there is no route.
            let _ = sender.send_to(&[number], inbox.local_addr().expect("its address"));
        }
        assert_eq!(site.instances(), [] as [i32; 0], "they were sent before another one started");
        wait_for_another(&site, pid);
        site.until("traffic goes on", || site.flow().answers().0 > 5 && site.flow().answers().1 > 20);
        silences.push(site.flow().silence().1);
        let arrived = std::iter::from_fn(|| inbox.recv(&mut [0; 8]).ok()).take(WAITING.into()).count();
        println!("silence {:?} (UDP and TCP), {arrived} of {WAITING} waiting packets arrive", site.flow().silence());
        if number("ONLY_MEASURE", 0) == 0 {
            assert_eq!((Outlives::of(&site), arrived), (before.clone(), usize::from(WAITING)), "{}", site.logs());
        }
        assert_eq!(site.flow().broken(), None);
    }
    silences.sort();
    println!("silence of UDP: median {:?}, longest {:?}", silences[silences.len() / 2], silences[silences.len() - 1]);
    assert_eq!(site.node.status("db")["certificate"], certificate);
    // The certificate, and a queue and a socket.
    let first = unit_of(&site);
    assert_eq!(site.systemd().show(&first, "NFileDescriptorStore"), "3");
    // The unit of a program that took over has them, too.
    site.node.install_another(&binary("nebula-cni-instance"));
    let pid = site.upgrade(&[]);
    assert_ne!(unit_of(&site), first);
    kill_instance(&site);
    wait_for_another(&site, pid);
    // TCP waits for its own timer.
    site.flow().watch();
    site.until("traffic goes on", || site.flow().answers().0 > 5 && site.flow().answers().1 > 20);
    assert_eq!((Outlives::of(&site), held_devices(site.systemd())), (before, "1".to_owned()));
    site.flow().watch();
    site.assert_well();
    let systemd = site.end().expect("it was started");
    assert_eq!((systemd.units(), held_devices(&systemd)), (String::new(), "0".to_owned()));
}

#[test]
#[ignore = "needs root, network namespaces, systemd, D-Bus and a release build"]
fn what_does_not_fit_in_the_store_is_given_up_and_made_again() {
    let site = Site::of_systemd();
    let before = Outlives::of(&site);
    // What the next process stores before it becomes the instance that is to go on.
    site.install_script(&format!("exec /usr/bin/python3 {} \"$0.instance\" \"$@\"", junk(&site).display()));
    let program = site.node.kept_program("db");
    place(&site.node.installed(), &program);
    let instance = PathBuf::from(format!("{}.instance", program.display()));
    std::fs::copy(binary("nebula-cni-instance"), instance).expect("a copy");
    let mut pid = site.pid();
    kill_instance(&site);
    wait_for_another(&site, pid);
    // The junk is found by the one after it.
    assert_eq!(Outlives::of(&site), before);
    pid = site.pid();
    kill_instance(&site);
    wait_for_another(&site, pid);
    let after = Outlives::of(&site);
    assert_ne!(after.device, before.device);
    assert_eq!((&after.routes, &after.port), (&before.routes, &before.port));
    // And a program without junk goes on with what this one left.
    place(&binary("nebula-cni-instance"), &program);
    pid = site.pid();
    kill_instance(&site);
    wait_for_another(&site, pid);
    assert_eq!(Outlives::of(&site), after);
    assert_eq!(site.systemd().show(&unit_of(&site), "NFileDescriptorStore"), "3", "and nothing foreign");
    // TCP waits for its own timer.
    site.flow().watch();
    site.until("traffic goes on", || site.flow().answers().0 > 5 && site.flow().answers().1 > 20);
    site.flow().watch();
    site.assert_well();
    site.end();
}

/// A program that stores descriptors of the wrong kind, and too many of them, under the names that the instance uses.
fn junk(site: &Site) -> PathBuf {
    let text = r#"
import array, os, socket, sys
manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
manager.connect(os.environ["NOTIFY_SOCKET"])
def store(name, file):
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [file]))]
    manager.sendmsg([b"FDSTORE=1\nFDPOLL=0\nFDNAME=" + name], rights)
for _ in range(30):
    for name in (b"tun", b"udp", b"identity", b"foreign"):
        store(name, os.open("/dev/null", os.O_RDONLY))
os.execv(sys.argv[1], sys.argv[1:])
"#;
    let path = site.node.dir.join("junk.py");
    std::fs::write(&path, text).expect("a program");
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).expect("rights");
    path
}

#[test]
#[ignore = "needs root, network namespaces, systemd, D-Bus and a release build"]
fn in_the_unit_of_an_earlier_plugin_an_instance_starts_again_with_its_certificate_alone() {
    let site = Site::of_systemd();
    let (unit, before) = (unit_of(&site), Outlives::of(&site));
    let certificate = site.node.status("db")["certificate"].clone();
    let systemd = site.systemd();
    systemd.sh(&format!("systemctl stop {unit}"));
    assert_eq!(links(&site.cluster.world.namespace_of("db")), ["lo", "eth0"], "one that is stopped leaves no device");
    let launch = site.node.records().join("db-eth0.launch").display().to_string();
    let program = site.node.installed().display().to_string();
    let properties = ["NotifyAccess=main", "Restart=on-failure", "RestartSec=0.5", "FileDescriptorStoreMax=1"];
    let properties = properties.map(|property| format!("-p {property}")).join(" ");
    systemd.sh(&format!("systemd-run --unit={unit} --service-type=notify {properties} {program} --launch {launch}"));
    site.until("it runs", || systemd.show(&unit, "ActiveState") == "active");
    // TCP waits for its own timer.
    site.flow().watch();
    site.until("traffic goes on", || site.flow().answers().0 > 5 && site.flow().answers().1 > 20);
    let first = site.node.status("db")["certificate"].clone();
    assert_ne!(first, certificate, "a unit of its own");
    let (pid, device) = (site.pid(), Outlives::of(&site).device);
    site.flow().watch();
    kill_instance(&site);
    wait_for_another(&site, pid);
    site.until("traffic goes on", || site.flow().answers().0 > 5 && site.flow().answers().1 > 20);
    println!("silence with the certificate alone: {:?}", site.flow().silence());
    assert_eq!(site.node.status("db")["certificate"], first);
    assert_eq!(systemd.show(&unit, "NFileDescriptorStore"), "1");
    let after = Outlives::of(&site);
    assert!(after.device != device && after.port == before.port, "{after:?}");
    site.flow().watch();
    site.assert_well();
    site.end();
}

#[test]
#[ignore = "needs root, network namespaces, systemd, D-Bus and a release build"]
fn nothing_is_left_of_a_killed_instance_whose_pod_ends() {
    let mut cluster = Cluster::below(Path::new(PLACE));
    let mut node = cluster.node("n1", "1.0.0");
    let systemd = Systemd::start_in(&Path::new("/run/netns").join(cluster.world.namespace_of("n1")));
    node.conf["plugins"][1]["supervisor"] = "systemd".into();
    node.bus = Some(systemd.bus());
    node.conf["plugins"][1]["nebula"]["routines"] = 2.into();
    let of_node = links(&cluster.world.namespace_of("n1")).len();
    node.add_pods(&mut cluster.world, &["a", "b", "c", "d"]);
    // One link of each pod, and the bridge.
    assert_eq!(links(&cluster.world.namespace_of("n1")).len(), of_node + 5);
    cluster.world.ping("a", LIGHTHOUSE, SOON);
    assert_eq!(held_devices(&systemd), "8");
    let namespace = |pod: &str| cluster.world.namespace_of(pod);
    let unit_of = |pod: &str| unit_with(&systemd, &node, pod);
    let before = run("ip", &["-n", &namespace("d"), "-o", "link", "show", "nebula0"]);
    let kill = |pod: &str| systemd.sh(&format!("systemctl kill --signal=KILL {}", unit_of(pod)));

    // All queues go on.
    let first = systemd.show(&unit_of("d"), "MainPID");
    kill("d");
    eventually("another one starts", || !["0", &first].contains(&systemd.show(&unit_of("d"), "MainPID").as_str()));
    cluster.world.ping("d", LIGHTHOUSE, SOON);
    assert_eq!(run("ip", &["-n", &namespace("d"), "-o", "link", "show", "nebula0"]), before);
    assert_eq!(systemd.show(&unit_of("d"), "NFileDescriptorStore"), "5");

    // DEL before another instance starts: the device is gone before systemd closes it.
    kill("a");
    eventually("it has ended", || systemd.show(&unit_of("a"), "MainPID") == "0");
    assert!(links(&namespace("a")).contains(&"nebula0".to_owned()), "systemd keeps it");
    node.chain_ok(&cluster.world, "del", "a");
    assert_eq!((links(&namespace("a")), held_devices(&systemd)), (vec!["lo".to_owned()], "6".to_owned()));

    // The pod is gone without DEL.
    kill("b");
    run("ip", &["netns", "del", &namespace("b")]);
    eventually("its unit ends", || systemd.units().lines().count() == 2);
    eventually("and its namespace", || links(&cluster.world.namespace_of("n1")).len() == of_node + 3);
    assert_eq!(held_devices(&systemd), "4");
    node.chain_ok(&cluster.world, "del", "b");

    // An instance that stops.
    let unit = unit_of("c");
    systemd.sh(&format!("systemctl kill --signal=TERM {unit}"));
    eventually("its unit ends", || systemd.units().lines().count() == 1);
    assert_eq!(
        (links(&namespace("c")), held_devices(&systemd)),
        (vec!["lo".to_owned(), "eth0".to_owned()], "2".to_owned())
    );
    node.chain_ok(&cluster.world, "del", "c");

    // A unit that somebody stops while it waits for the next start.
    kill("d");
    systemd.sh(&format!("systemctl stop {}", unit_of("d")));
    assert_eq!(
        (links(&namespace("d")), held_devices(&systemd)),
        (vec!["lo".to_owned(), "eth0".to_owned()], "0".to_owned())
    );
    node.chain_ok(&cluster.world, "del", "d");
    assert_eq!((systemd.units(), node.leftovers()), (String::new(), Vec::<PathBuf>::new()));
}

/// The unit of a pod.
fn unit_with(systemd: &Systemd, node: &Node, pod: &str) -> String {
    let launch = node.records().join(format!("{pod}-eth0.launch")).display().to_string();
    let is_of = |unit: &&str| systemd.show(unit, "ExecStart").contains(&launch);
    let units = systemd.units();
    let mut names = units.lines().filter_map(|line| line.split(' ').next());
    names.find(is_of).expect("a unit").to_owned()
}

fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let until = Instant::now() + SOON;
    while !holds() {
        assert!(Instant::now() < until, "not in time: {what}");
        thread::sleep(Duration::from_millis(20));
    }
}
