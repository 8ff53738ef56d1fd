//! Captured pods whose instances are units of systemd and are killed: their connections go on with the same endpoints,
//! and nothing leaves in clear while nobody reads the device.

use std::thread;
use std::time::{Duration, Instant};

use super::town::{DB, FAMILIES, Family, Primary, SOON, Town, WEB};
use super::traffic::Speaker;
use super::wiretap::SECRET;
use crate::world::cluster::answer_at;
use crate::world::run;

#[test]
#[ignore = "needs root, network namespaces, systemd, D-Bus and a release build"]
fn connections_of_a_pod_whose_instance_is_killed_go_on_with_the_same_endpoints_and_nothing_is_in_clear() {
    let town = Town::of_systemd(Primary::Links);
    let systemd = town.systemd.as_ref().expect("it was started");
    let wires = town.wiretaps();
    let web = town.world().namespace_of("web");
    let device = || {
        let link = run("ip", &["-n", &web, "-o", "link", "show", "nebula0"]);
        let routes = FAMILIES.map(|family| {
            let family = if family == Family::V4 { "-4" } else { "-6" };
            run("ip", &["-n", &web, family, "route", "show", "table", "20034"])
        });
        (link, routes)
    };
    let before = device();
    let mut connections = Vec::new();
    for family in FAMILIES {
        for target in [DB.at(family), family.service(), family.service()] {
            let mut connection = town.open("web", target);
            connection.ask(SECRET).expect("it is open");
            let endpoint = connection.answer().expect("an answer");
            connections.push((connection, target, endpoint));
        }
    }
    let speakers = FAMILIES.map(|family| Speaker::start(town.world(), "web", SECRET, family.service()));
    for _ in 0..3 {
        let pid = town.node(WEB).status("web")["pid"].clone();
        let killed = Instant::now();
        systemd.sh("systemctl kill --signal=KILL 'nebula-pod-*'");
        thread::sleep(Duration::from_millis(100));
        // These wait in the device, and are judged by the next instance.
        for (connection, target, _) in &mut connections {
            connection.ask(SECRET).unwrap_or_else(|error| panic!("{target}: {error}"));
        }
        for (connection, target, endpoint) in &mut connections {
            let answer = connection.answer().unwrap_or_else(|error| panic!("{target}: {error}"));
            assert_eq!(answer, *endpoint, "{target}");
        }
        println!("silence of {} connections: {:?}", connections.len(), killed.elapsed());
        let another = || answer_at(&town.node(WEB).status_socket("web")).is_ok_and(|status| status["pid"] != pid);
        while !another() {
            assert!(killed.elapsed() < SOON, "another instance");
            thread::sleep(Duration::from_millis(20));
        }
        assert_eq!(device(), before);
        for family in FAMILIES {
            assert_eq!(town.converse(SECRET, "web", DB.at(family)), ("db".to_owned(), WEB.address(family)));
        }
    }
    assert!(speakers.iter().all(|speaker| speaker.sent() > 10 && speaker.replies() > 10));
    wires.heard_nothing_in_clear();
}
