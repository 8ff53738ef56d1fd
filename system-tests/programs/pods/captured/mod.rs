//! Pods whose traffic is captured: whatever address a program uses, packets between two enrolled pods are in the
//! tunnel. Real plugin, instances, CA and lighthouse; the test writes the cluster table as the node agent does, and
//! translates Services on the nodes as kube-proxy does.

#![allow(clippy::disallowed_methods, reason = "these tests watch real processes on a real clock")]

mod clear_policies;
mod faults;
mod killed;
mod policies;
mod reused;
mod town;
mod traffic;
mod wiretap;

use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use faults::{Fault, Faults};
use town::{
    API, CAPTURED, DB, ENDPOINTS, FAMILIES, Family, LOADED_PORT, NODE_PORT, OTHER_PLAIN, PLAIN, PUBLIC_NODE_PORT, Pod,
    Primary, SOON, Town, WEB,
};
use traffic::{Conversation, Speaker};
use wiretap::{PUBLIC, SECRET};

use crate::world::chaos::{Random, number};
use crate::world::load::{Gaps, Load};
use crate::world::nonces::Nonces;

#[test]
#[ignore = "needs root, network namespaces and a release build"]
fn on_a_bridge_enrolled_pods_speak_through_the_tunnel_and_others_as_before() {
    everybody_is_reached(&Town::new(Primary::Bridge, |entry| entry["capture"]["clear"] = "allow".into()));
}

#[test]
#[ignore = "needs root, network namespaces and a release build"]
fn on_links_to_the_node_alone_enrolled_pods_speak_through_the_tunnel_and_others_as_before() {
    // Two threads share the flows of a pod.
    everybody_is_reached(&Town::new(Primary::Links, |entry| {
        entry["nebula"]["routines"] = 2.into();
        entry["capture"]["clear"] = "allow".into();
    }));
}

#[test]
#[ignore = "needs root, network namespaces and a release build"]
fn on_links_of_our_own_enrolled_pods_speak_through_the_tunnel_and_others_as_before() {
    everybody_is_reached(&Town::new(Primary::Own, |entry| entry["capture"]["clear"] = "allow".into()));
}

#[test]
#[ignore = "needs root, network namespaces and a release build"]
fn who_has_no_certificate_answers_enrolled_pods_and_opens_nothing_to_them() {
    for primary in [Primary::Bridge, Primary::Links] {
        let town = Town::new(primary, |_| ());
        let wires = town.wiretaps();
        for family in FAMILIES {
            let web = WEB.address(family);
            for (target, whose) in [
                (PLAIN.at(family), PLAIN),
                (OTHER_PLAIN.at(family), OTHER_PLAIN),
                (family.public_service(), OTHER_PLAIN),
            ] {
                for answer in [town.converse(PUBLIC, "web", target), town.exchange(PUBLIC, "web", target)] {
                    assert_eq!(answer, (whose.name.to_owned(), web), "{primary:?} {target}");
                }
            }
            // By its address, and by the Service of enrolled pods on both nodes.
            for client in [PLAIN.name, OTHER_PLAIN.name, "n2"] {
                for target in [WEB.at(family), family.service()] {
                    nobody_answers(&town, client, target);
                }
            }
            assert_eq!(town.converse(PUBLIC, "n1", WEB.at(family)).0, "web", "a probe of the kubelet");
            assert_eq!(town.exchange(PUBLIC, "n1", WEB.at(family)).0, "web", "the same by UDP");
            town.world().ping("n1", &web.to_string(), SOON);
            assert_eq!(town.converse(SECRET, "web", DB.at(family)).0, "db");
        }
        wires.heard_nothing_in_clear();
    }
}

#[test]
#[ignore = "needs root, network namespaces and a release build"]
fn where_clear_is_denied_accepted_clients_are_answered_all_the_same() {
    let town = Town::new(Primary::Bridge, |entry| {
        entry["capture"]["clear"] = "deny".into();
        entry["capture"]["accept"] =
            serde_json::json!([{"port": traffic::PORT}, {"port": traffic::PORT, "proto": "udp"}]);
    });
    for family in FAMILIES {
        let web = WEB.address(family);
        for client in [PLAIN, OTHER_PLAIN] {
            let expected = ("web".to_owned(), client.address(family));
            assert_eq!(town.converse(PUBLIC, client.name, WEB.at(family)), expected);
            // The answer goes through the instance.
            assert_eq!(town.exchange(PUBLIC, client.name, WEB.at(family)), expected);
            nobody_answers(&town, "web", client.at(family));
        }
        nobody_answers(&town, "web", family.public_service());
        assert_eq!(town.converse(PUBLIC, "n1", WEB.at(family)).0, "web", "a probe of the kubelet");
        town.world().ping("n1", &web.to_string(), SOON);
    }
}

/// Neither by TCP nor by UDP.
fn nobody_answers(town: &Town, from: &str, target: SocketAddr) {
    let asked = town.try_converse(from, target).err();
    assert!(asked.is_some(), "{from} -> {target} by TCP");
    let asked = traffic::exchange_once(town.world().namespace_of(from), PUBLIC, target).err();
    assert!(asked.is_some(), "{from} -> {target} by UDP");
}

#[test]
#[ignore = "needs root, network namespaces and a release build"]
fn ports_of_nodes_and_load_balancers_lead_to_enrolled_pods_through_the_tunnel_and_to_others_as_before() {
    for primary in [Primary::Bridge, Primary::Links] {
        let town = Town::new(primary, |entry| {
            entry["capture"]["loadBalancers"] = serde_json::json!(FAMILIES.map(Family::load_balancers));
        });
        let wires = town.wiretaps();
        for family in FAMILIES {
            let at = |node: u8, port: u16| SocketAddr::new(town.node_address(node, family), port);
            let web = WEB.address(family);
            for target in [at(1, NODE_PORT), at(2, NODE_PORT), family.balanced()] {
                for _ in 0..4 {
                    for answer in [town.converse(SECRET, "web", target), town.exchange(SECRET, "web", target)] {
                        let by_endpoint = ENDPOINTS.iter().any(|pod| pod.name == answer.0);
                        assert!(by_endpoint && answer.1 == web, "{primary:?} {target} is answered by {answer:?}");
                    }
                }
            }
            for target in [at(1, PUBLIC_NODE_PORT), at(2, PUBLIC_NODE_PORT)] {
                assert_eq!(town.converse(PUBLIC, "web", target).0, "plain2", "{primary:?} {target}");
                assert_eq!(town.exchange(PUBLIC, "web", target).0, "plain2", "{primary:?} {target}");
            }
            // No Service has this port: the node itself answers.
            let refused = town.try_converse("web", at(1, NODE_PORT + 1)).expect_err("nobody listens");
            assert_eq!(refused.kind(), ErrorKind::ConnectionRefused, "{primary:?}");
        }
        wires.heard_nothing_in_clear();
    }
}

fn everybody_is_reached(town: &Town) {
    let wires = town.wiretaps();
    let name = |pods: &[Pod], said: &str| pods.iter().any(|pod| pod.name == said);
    for family in FAMILIES {
        let web = WEB.address(family);
        // A pod of another node and of the same node, and a Service with endpoints on both nodes.
        for (target, whose) in [(DB.at(family), &[DB][..]), (API.at(family), &[API]), (family.service(), &ENDPOINTS)] {
            for answer in [town.converse(SECRET, "web", target), town.exchange(SECRET, "web", target)] {
                assert!(name(whose, &answer.0) && answer.1 == web, "{target} is answered by {answer:?}");
            }
        }
        let answered: Vec<String> = (0..24).map(|_| town.converse(SECRET, "web", family.service()).0).collect();
        assert!(ENDPOINTS.iter().all(|pod| answered.iter().any(|by| by == pod.name)), "both: {answered:?}");
        wires.heard_nothing_in_clear();

        // What is not enrolled is reached as before, in both directions.
        let before = wires.public();
        for (target, whose) in
            [(PLAIN.at(family), PLAIN), (OTHER_PLAIN.at(family), OTHER_PLAIN), (family.public_service(), OTHER_PLAIN)]
        {
            for answer in [town.converse(PUBLIC, "web", target), town.exchange(PUBLIC, "web", target)] {
                assert_eq!(answer, (whose.name.to_owned(), web), "{target}");
            }
        }
        for client in [PLAIN, OTHER_PLAIN] {
            let (target, expected) = (WEB.at(family), ("web".to_owned(), client.address(family)));
            assert_eq!(town.converse(PUBLIC, client.name, target), expected);
            assert_eq!(town.exchange(PUBLIC, client.name, target), expected);
        }
        // A probe of the kubelet.
        assert_eq!(town.converse(PUBLIC, "n1", WEB.at(family)).0, "web");
        town.world().ping("n1", &web.to_string(), SOON);
        wires.heard_nothing_in_clear();
        let heard = wires.public();
        assert!(heard.iter().zip(before).all(|(now, before)| *now > before), "a deaf wiretap: {before:?} {heard:?}");
    }
}

#[test]
#[ignore = "needs root, network namespaces and a release build"]
fn a_service_that_is_enrolled_pod_by_pod_answers_each_connection_whatever_the_primary_network_would_choose() {
    let mut town = Town::new(Primary::Links, |_| ());
    // On the nodes it leads to two enrolled pods still.
    town.write_table(&[DB, OTHER_PLAIN]);
    town.wait_for_table(WEB);
    town.choose(WEB, OTHER_PLAIN);
    for family in FAMILIES {
        let web = WEB.address(family);
        let mut answered = Vec::new();
        for _ in 0..40 {
            let namespace = || town.world().namespace_of("web");
            for answer in [
                traffic::converse(namespace(), PUBLIC, family.service()),
                traffic::exchange(namespace(), PUBLIC, family.service()),
            ] {
                let (service, before) = (family.service(), answered.len());
                let (name, client) = answer.unwrap_or_else(|error| panic!("{service} after {before}: {error}"));
                assert_eq!(client, web);
                answered.push(name);
            }
        }
        let by_db = answered.iter().filter(|name| *name == "db").count();
        assert!((20..60).contains(&by_db), "{by_db} of 80");
        assert!(answered.iter().all(|name| name == "db" || name == "plain2"), "{answered:?}");
    }
    // The other pods of the node are led as before.
    assert_eq!(town.converse(PUBLIC, "plain", FAMILIES[0].public_service()).0, "plain2");
}

#[test]
#[ignore = "needs root, network namespaces and a release build"]
fn an_endpoint_that_is_gone_gets_no_new_flow_and_an_unknown_pod_gets_nothing() {
    let mut town = Town::new(Primary::Links, |_| ());
    let wires = town.wiretaps();
    for family in FAMILIES {
        town.write_table(&[DB]);
        let took = town.wait_for_table(WEB);
        assert!(took < Duration::from_secs(1), "a table is in use after {took:?}");
        for _ in 0..8 {
            assert_eq!(town.converse(SECRET, "web", family.service()).0, "db", "an endpoint that is gone is chosen");
        }
        // No endpoint: refused at once, as kube-proxy does.
        town.write_table(&[]);
        town.wait_for_table(WEB);
        let began = Instant::now();
        let refused = town.try_converse("web", family.service()).expect_err("nobody can answer");
        assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
        assert!(began.elapsed() < Duration::from_millis(500), "{:?}", began.elapsed());
    }
    town.write_only(&[WEB, API, DB]);
    town.wait_for_table(WEB);
    for family in FAMILIES {
        let error = town.try_converse("web", OTHER_PLAIN.at(family)).expect_err("nothing is known of it");
        assert_eq!(error.kind(), ErrorKind::TimedOut);
    }
    wires.heard_nothing_in_clear();
}

#[test]
#[ignore = "needs root, network namespaces and a release build"]
fn a_super_packet_that_waited_for_the_table_is_cut_and_arrives_whole() {
    let mut town = Town::new(Primary::Bridge, |_| ());
    let wires = town.wiretaps();
    for family in FAMILIES {
        for (words, target) in [(SECRET, DB.at(family)), (PUBLIC, OTHER_PLAIN.at(family))] {
            town.write_only(&[WEB]);
            town.wait_for_table(WEB);
            let namespace = town.world().namespace_of("web");
            let answered = std::thread::spawn(move || traffic::burst(namespace, words, target, BURST));
            std::thread::sleep(Duration::from_millis(300));
            town.write_table(&ENDPOINTS);
            assert_eq!(answered.join().expect("the visit ends").expect("it is sent"), BURST, "{target}");
        }
    }
    wires.heard_nothing_in_clear();
    assert!(wires.public().iter().all(|heard| *heard > 0), "a deaf wiretap: {:?}", wires.public());
}

#[test]
#[ignore = "needs root, network namespaces and a release build"]
fn a_path_that_silently_drops_large_datagrams_carries_a_megabyte_without_any_setting() {
    let town = Town::new(Primary::Links, |_| ());
    let wires = town.wiretaps();
    town.narrow_path();
    for target in FAMILIES.map(|family| DB.at(family)) {
        let took = traffic::upload(town.world().namespace_of("web"), SECRET, target, (1 << 20) / SECRET.len());
        println!("{target}: {took:?}");
        // Without discovery it never ends. `path_mtu::` holds it to a second, with nothing else on the machine's
        // processors.
        assert!(took.as_ref().is_ok_and(|took| *took < Duration::from_secs(2)), "{target}: {took:?}");
    }
    wires.heard_nothing_in_clear();
}

/// Sixteen connections to the Service, each with the endpoint that answers.
fn connections_to_the_service(town: &Town) -> Vec<(Conversation, String)> {
    let open = |family: Family| {
        let mut conversation = town.open("web", family.service());
        conversation.ask(SECRET).expect("it is sent");
        let by = conversation.answer().expect("an answer");
        (conversation, by)
    };
    (0..8).flat_map(|_| FAMILIES).map(open).collect()
}

#[test]
#[ignore = "needs root, network namespaces and a release build"]
fn connections_to_a_service_keep_their_endpoint_when_the_instance_is_killed() {
    let mut town = Town::new(Primary::Links, |_| ());
    let wires = town.wiretaps();
    let mut opened = connections_to_the_service(&town);
    assert!(ENDPOINTS.iter().all(|pod| opened.iter().any(|(_, by)| by == pod.name)), "both");
    // Of half of them, the server speaks first afterwards.
    town.let_servers_wait(true);
    for (conversation, _) in opened.iter_mut().step_by(2) {
        conversation.ask(SECRET).expect("it is sent");
    }
    // In another version of the table the endpoints are listed in another order.
    for _ in 0..3 {
        town.write_table(&ENDPOINTS);
    }
    // The questions are with the servers.
    std::thread::sleep(Duration::from_secs(1));
    assert!(town.kill_instance(WEB), "it ran");
    town.let_servers_wait(false);
    town.restart_instances();
    for (n, (conversation, by)) in opened.iter_mut().enumerate() {
        if n % 2 > 0 {
            conversation.ask(SECRET).expect("it is sent");
        }
        let again = conversation.answer();
        assert!(again.as_ref().is_ok_and(|again| again == by), "connection {n} to {by}: {again:?}");
    }
    wires.heard_nothing_in_clear();
}

#[test]
#[ignore = "needs root, network namespaces and a release build"]
fn connections_to_a_service_go_on_while_other_programs_take_over_from_the_instances() {
    let mut town = Town::new(Primary::Links, |_| ());
    let wires = town.wiretaps();
    let mut opened = connections_to_the_service(&town);
    let mut longest = Duration::ZERO;
    for round in 0..6 {
        // In another version of the table the endpoints are listed in another order.
        town.write_table(&ENDPOINTS);
        for pod in CAPTURED {
            let began = Instant::now();
            assert!(
                town.upgrade(pod).status().expect("the plugin").success(),
                "{pod:?}: {}",
                town.node(pod).instance_logs()
            );
            for (n, (conversation, by)) in opened.iter_mut().enumerate() {
                conversation.ask(SECRET).expect("it is sent");
                let again = conversation.answer();
                assert!(
                    again.as_ref().is_ok_and(|again| again == by),
                    "round {round}, {pod:?}, connection {n} to {by}: {again:?}"
                );
            }
            longest = longest.max(began.elapsed());
        }
    }
    println!("18 instances replaced; one upgrade and 16 answers took {longest:?} at most");
    wires.heard_nothing_in_clear();
}

/// `UPGRADES` says how many; a full run has 50. They alternate between the Service's endpoint and its client.
#[test]
#[ignore = "needs root, network namespaces and a release build"]
fn upgrades_under_load_end_no_connection_to_a_service() {
    let upgrades = number("UPGRADES", 4);
    let town = Town::new(Primary::Links, |_| ());
    let [host, other] = [DB, WEB].map(|pod| town.node(pod).name.clone());
    let port = town.node(DB).status("db")["port"].as_u64().and_then(|port| u16::try_from(port).ok());
    let nonces = Nonces::record(town.world(), &host, &[&host, &other], port.expect("a port"));
    let at = SocketAddr::new(DB.address(Family::V4), LOADED_PORT);
    let load = Load::start(town.world(), ("web", "db", at), Some(Family::V4.loaded()), 8, 200);
    let mut gaps = Gaps::default();
    for n in 0..upgrades {
        let pod = if n % 2 == 0 { DB } else { WEB };
        let broken = gaps.measure(&load, || {
            let is_upgraded = town.upgrade(pod).status().expect("the plugin").success();
            assert!(is_upgraded, "{pod:?}: {}", town.node(pod).instance_logs());
        });
        assert_eq!(broken, None, "upgrade {n} of {pod:?}\n{}", town.node(pod).instance_logs());
    }
    println!("{gaps}");
    assert!(gaps.longest() <= Duration::from_millis(200) && gaps.lost == 0, "{gaps:?}");
    drop(load);
    let seen = nonces.finish();
    let (tunnels, datagrams) = seen.counts();
    println!("{tunnels} keys and {datagrams} nonces seen");
    assert_eq!((&seen.reused, seen.merged), (&Vec::new(), 0));
    assert!(tunnels as u64 > upgrades && datagrams as u64 > gaps.sent, "{tunnels} {datagrams}");
}

#[test]
#[ignore = "needs root, network namespaces and a release build"]
fn connections_to_a_service_from_before_the_capture_keep_the_endpoint_that_the_node_chose() {
    // On a bridge, answers of pods of the same node would not come back through the node.
    let town = Town::uncaptured(Primary::Links);
    let mut opened: Vec<_> = (0..8)
        .flat_map(|_| FAMILIES)
        .map(|family| {
            let mut conversation = town.open("web", family.service());
            conversation.ask(PUBLIC).expect("it is sent");
            let by = conversation.answer().expect("an answer");
            (conversation, by)
        })
        .collect();
    assert!(ENDPOINTS.iter().all(|pod| opened.iter().any(|(_, by)| by == pod.name)), "both");
    town.attach_all();
    let wires = town.wiretaps();
    for (n, (conversation, by)) in opened.iter_mut().enumerate() {
        conversation.ask(SECRET).expect("it is sent");
        let again = conversation.answer();
        assert!(again.as_ref().is_ok_and(|again| again == by), "connection {n} to {by}: {again:?}");
    }
    wires.heard_nothing_in_clear();
}

#[test]
#[ignore = "needs root, network namespaces and a release build"]
fn every_protocol_is_in_the_tunnel_and_sctp_reaches_services() {
    const ESP: u8 = 50;
    const SCTP: u8 = 132;
    let mut town = Town::new(Primary::Bridge, |_| ());
    town.write_table(&[DB]);
    town.wait_for_table(WEB);
    let wires = town.wiretaps();
    for family in FAMILIES {
        let [web, db] = [WEB, DB].map(|pod| pod.address(family));
        town.world().ping("web", &db.to_string(), SOON);
        // ESP's security parameters index is not 0; the words are the payload of both.
        for protocol in [GRE, ESP] {
            let body = [&[0, 0, 0x08, 0, 0, 0, 0, 1][..], SECRET].concat();
            let arrived = town.pass_on(WEB, (DB, family), packet(protocol, web, db, &body));
            assert!(arrived.ends_with(&body), "protocol {protocol}: {arrived:02x?}");
        }
        let sctp = |to: u16| {
            let ports = [40_000_u16.to_be_bytes(), to.to_be_bytes()].concat();
            let mut body = [&ports[..], &[0, 0, 0, 1, 0, 0, 0, 0], SECRET].concat();
            let sum = crc32c(&body).to_le_bytes();
            body[8..12].copy_from_slice(&sum);
            body
        };
        let target = family.service();
        let arrived = town.pass_on(WEB, (DB, family), packet(SCTP, web, target.ip(), &sctp(target.port())));
        assert!(arrived.ends_with(&sctp(DB.at(family).port())), "{arrived:02x?}");
    }
    wires.heard_nothing_in_clear();
}

const GRE: u8 = 47;

/// An IP packet; the kernel fills in the sum of an IPv4 header.
fn packet(protocol: u8, from: IpAddr, to: IpAddr, body: &[u8]) -> Vec<u8> {
    let mut packet = match (from, to) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            let length = (20 + body.len() as u16).to_be_bytes();
            let header = [0x45, 0, length[0], length[1], 0, 0, 0, 0, 64, protocol, 0, 0];
            [&header[..], &from.octets(), &to.octets()].concat()
        }
        (IpAddr::V6(from), IpAddr::V6(to)) => {
            let length = (body.len() as u16).to_be_bytes();
            [&[0x60, 0, 0, 0, length[0], length[1], protocol, 64][..], &from.octets(), &to.octets()].concat()
        }
        _ => panic!("one family"),
    };
    packet.extend(body);
    packet
}

/// The checksum of SCTP.
fn crc32c(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(u32::MAX, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| if crc & 1 == 1 { crc >> 1 ^ 0x82f6_3b78 } else { crc >> 1 })
    })
}

/// Datagrams in a super-packet.
const BURST: usize = 20;

/// `CAPTURE_KILLS` says how many, `CAPTURE_SEED` repeats a run.
#[test]
#[ignore = "needs root, network namespaces and a release build; prints figures"]
fn nothing_between_enrolled_pods_is_in_clear_whatever_is_killed() {
    let (seed, wanted) = (number("CAPTURE_SEED", std::process::id().into()), number("CAPTURE_KILLS", 12) as usize);
    println!("CAPTURE_SEED={seed} CAPTURE_KILLS={wanted}");
    let (mut random, mut faults) = (Random::new(seed), Faults::default());
    let (mut sent, mut replies, mut public) = (0, 0, 0);
    while faults.count() < wanted {
        let primary = [Primary::Bridge, Primary::Links][random.below(2)];
        let mut town = Town::new(primary, |_| ());
        let wires = town.wiretaps();
        let speak = |pod: Pod, words, target| Speaker::start(town.world(), pod.name, words, target);
        let speakers: Vec<Speaker> = FAMILIES
            .iter()
            .flat_map(|family| [DB.at(*family), API.at(*family), family.service()])
            .map(|target| speak(WEB, SECRET, target))
            .chain(FAMILIES.map(|family| speak(DB, SECRET, WEB.at(family))))
            .collect();
        let control = FAMILIES.map(|family| speak(PLAIN, PUBLIC, OTHER_PLAIN.at(family)));
        let until = wanted.min(faults.count() + FAULTS_OF_A_TOWN);
        while faults.count() < until {
            let fault = Fault::random(&mut random);
            faults.happen(fault, &mut town, &mut random);
            std::thread::sleep(Duration::from_millis(random.below(250) as u64));
            // Often one thing fails before another is repaired.
            if !random.one_in(3) {
                faults.repair(&mut town);
            }
        }
        faults.repair(&mut town);
        for family in FAMILIES {
            assert_eq!(town.converse(SECRET, "web", DB.at(family)).0, "db", "everything works again");
            assert_eq!(town.converse(SECRET, "db", API.at(family)).0, "api", "everything works again");
            assert!(["db", "api"].contains(&town.converse(SECRET, "web", family.service()).0.as_str()));
        }
        let control_sent: usize = control.iter().map(Speaker::sent).sum();
        wires.heard_nothing_in_clear();
        let heard = wires.public();
        assert!(heard.iter().all(|heard| *heard >= control_sent * 9 / 10), "of {control_sent} heard {heard:?}");
        assert!(speakers.iter().all(|speaker| speaker.replies() > 0), "somebody was never answered");
        public += control_sent;
        sent += speakers.iter().map(Speaker::sent).sum::<usize>();
        replies += speakers.iter().map(Speaker::replies).sum::<usize>();
    }
    println!("{faults:?}: {sent} packets sent, {replies} answered, 0 in clear; {public} of the control");
}

/// A CA gives a pod 30 certificates in ten minutes.
const FAULTS_OF_A_TOWN: usize = 45;
