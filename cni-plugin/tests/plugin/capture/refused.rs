//! The attack: programs of a captured pod that pass its own namespace by. Nothing of what they send reaches another
//! captured pod in clear, of the same node or of another, whatever frame it is in.

use std::net::UdpSocket;

use nebula_cni_contract::launch::MARK;
use nebula_cni_plugin::link::capture_rules::{refused, tables_with_clear_sets};
use nix::sys::socket::{setsockopt, sockopt};
use serde_json::json;

use super::BOTH;
use super::site::{FRAMES, Listener, NODE, Pod, Primary, REMOTE, REMOTE_SERVICE, SERVICE, Site};

/// Sends every frame from `one` and returns what arrived: at `two`, on the node's other links, at the other node.
fn attack(site: &Site, one: &Pod, two: &Pod) -> Vec<String> {
    let bridge = site.primary == Primary::Bridge;
    let gateway = if bridge { site.mac("node", "cni0") } else { site.mac("node", &one.host_end()) };
    let peer = if bridge { site.mac("two", "eth0") } else { String::new() };
    let parameters = json!({"mac": site.mac("one", "eth0"), "gateway_mac": gateway, "peer_mac": peer, "own4": one.v4(),
        "peer4": two.v4(), "own6": one.v6(), "peer6": two.v6(), "node4": NODE, "service4": SERVICE, "remote4": REMOTE,
        "remote_service4": REMOTE_SERVICE, "local6": site.link_local("one", "eth0"),
        "peer_local6": site.link_local("two", "eth0")});
    let own = one.host_end();
    // On a bridge it and its ports see what the pod floods before the rules of the other ports do.
    let excluded = [own.as_str(), "cni0"];
    let listeners = [
        Listener::start(site, "two", &[]),
        Listener::start(site, "node", &excluded),
        Listener::start(site, "other", &[]),
    ];
    site.inside("one", &["python3", FRAMES, "send", "eth0", "captured", &parameters.to_string()]);
    let mut heard = Vec::new();
    for (place, listener) in ["two", "node", "other"].iter().zip(listeners) {
        heard.extend(listener.heard().into_iter().map(|name| format!("{name} at {place}")));
    }
    heard
}

#[test]
#[ignore = "needs root and network namespaces"]
fn no_frame_of_a_raw_socket_carries_a_payload_to_another_captured_pod() {
    for primary in BOTH {
        let mut site = Site::new(primary);
        let [one, two] = [site.pod("one", 7), site.pod("two", 8)];
        site.serve(SERVICE, &two.v4());
        site.serve(REMOTE_SERVICE, REMOTE);
        // The control: without capture the listeners hear what is sent.
        let control = attack(&site, &one, &two);
        for name in ["udp", "tcp", "esp", "fragment6", "to-service", "udp6"] {
            assert!(control.contains(&format!("{name} on eth0 at two")), "{primary:?} {name}: {control:?}");
        }
        assert!(control.contains(&"to-remote on under at other".to_owned()), "{control:?}");
        site.add(&one);
        site.add(&two);
        let heard = attack(&site, &one, &two);
        // Outside the ranges clear traffic goes on: the packets to nowhere leave by the gateway.
        let leaks: Vec<&String> = heard.iter().filter(|name| !name.starts_with("outside")).collect();
        assert!(leaks.is_empty(), "{primary:?}: {leaks:?}");
        let counts = site.at("node", refused).unwrap();
        for reason in
            ["to a pod that is not known to be unenrolled", "not from the pod's own address", "neither IP nor ARP"]
        {
            let count = |(link, found, packets): &(Option<String>, String, u64)| {
                (link.as_deref() == Some(&one.host_end()) && found == reason).then_some(*packets)
            };
            assert!(counts.iter().filter_map(count).sum::<u64>() > 0, "{reason}: {counts:?}");
        }
        let text = site.inside("node", &["nft", "list", "table", "netdev", "nebula-cni-capture"]);
        assert!(
            text.contains("counter packets") && text.contains("comment \"not from the pod's own address\""),
            "{text}"
        );
    }
}

/// Sends a datagram with the mark of what stays on the primary network, and returns whether it arrived.
pub(crate) fn arrives(site: &Site, from: &str, to: &str, at: &str, listen: &str) -> bool {
    let server = site.at(at, || UdpSocket::bind((listen, 7000))).unwrap();
    server.set_read_timeout(Some(std::time::Duration::from_millis(400))).unwrap();
    let client = site.at(from, || UdpSocket::bind("0.0.0.0:0")).unwrap();
    setsockopt(&client, sockopt::Mark, &MARK).unwrap();
    for _ in 0..3 {
        // A refusal may be reported.
        let _ = client.send_to(b"hello", (to, 7000));
    }
    let mut text = [0; 8];
    matches!(server.recv_from(&mut text), Ok((5, _)))
}

#[test]
#[ignore = "needs root and network namespaces"]
fn neither_a_mark_nor_a_service_leads_around_the_tunnel_and_what_is_known_to_be_clear_passes_both_ways() {
    for primary in BOTH {
        let mut site = Site::new(primary);
        site.node.entry["capture"]["clear"] = "allow".into();
        let [one, two] = [site.captured("one", 7), site.captured("two", 8)];
        let three = site.pod("three", 9);
        site.serve(SERVICE, &two.v4());
        site.serve(REMOTE_SERVICE, REMOTE);
        let (one, two, three) = (one.v4(), two.v4(), three.v4());
        let enrolled = |site: &Site| {
            [
                ("one", two.as_str(), "two", two.as_str()),
                ("one", SERVICE, "two", &two),
                ("one", REMOTE, "other", REMOTE),
                ("one", REMOTE_SERVICE, "other", REMOTE),
                ("other", &two, "two", &two),
            ]
            .map(|(from, to, at, listen)| arrives(site, from, to, at, listen))
        };
        // From another node comes what has the source of an enrolled pod there, too.
        site.inside("other", &["ip", "route", "change", "10.244.1.0/24", "via", "192.0.2.1", "src", REMOTE]);
        assert_eq!(enrolled(&site), [false; 5], "{primary:?}");
        // Of the third pod nothing is known.
        assert!(!arrives(&site, "one", &three, "three", &three) && !arrives(&site, "three", &one, "one", &one));
        assert!(site.set_clear(&[&format!("{three}/32"), "10.244.2.9/32", "10.244.3.0/24", "10.244.3.0/25"]));
        assert!(arrives(&site, "one", &three, "three", &three), "{primary:?}");
        assert!(arrives(&site, "three", &one, "one", &one), "{primary:?}");
        assert!(arrives(&site, "one", "10.244.2.9", "other", "10.244.2.9"));
        assert_eq!(enrolled(&site), [false; 5], "{primary:?}");
        let forwarded = site.at("node", refused).unwrap().into_iter().filter(|(link, ..)| link.is_none());
        // The frames are refused before, except those of Services.
        assert!(forwarded.map(|(.., packets)| packets).sum::<u64>() > 0);
        // The pod becomes an enrolled one: it is taken out.
        assert!(site.set_clear(&["10.244.2.9/32"]));
        assert!(!arrives(&site, "one", &three, "three", &three));
        site.set_clear(&[REMOTE, &two].map(|address| format!("{address}/32")).each_ref().map(String::as_str));
        assert!(arrives(&site, "one", REMOTE_SERVICE, "other", REMOTE), "the rule of the Service works");
    }
}

#[test]
#[ignore = "needs root and network namespaces"]
fn without_captured_pods_there_is_nothing_to_keep() {
    let site = Site::new(Primary::Bridge);
    assert!(!site.set_clear(&["10.244.2.9/32"]));
    assert_eq!(site.rules(), "");
    assert_eq!(site.at("node", tables_with_clear_sets).unwrap(), None);
}

#[test]
#[ignore = "needs root and network namespaces"]
fn sets_that_were_made_anew_are_told_from_those_that_were_filled() {
    let mut site = Site::new(Primary::Bridge);
    let pod = site.captured("one", 7);
    let handles = |site: &Site| site.at("node", tables_with_clear_sets).unwrap().expect("tables");
    let first = handles(&site);
    assert!(site.set_clear(&["10.244.2.9/32"]));
    let _second = site.captured("two", 8);
    assert_eq!(handles(&site), first, "another pod uses the same tables");
    site.inside("node", &["nft", "flush", "ruleset"]);
    assert_eq!(site.at("node", tables_with_clear_sets).unwrap(), None);
    site.attach(&pod);
    assert!(!site.rules().contains("10.244.2.9"), "the rules are back, the sets are empty");
    let again = handles(&site);
    assert!(first.iter().zip(again).all(|(first, again)| *first != again), "{first:?} {again:?}");
}

#[test]
#[ignore = "needs root and network namespaces"]
fn a_running_pod_that_is_attached_sends_nothing_in_clear_any_more_even_if_its_instance_fails() {
    for primary in BOTH {
        let mut site = Site::new(primary);
        let [one, two] = [site.pod("one", 7), site.pod("two", 8)];
        let server = site.at("two", || UdpSocket::bind((two.v4().as_str(), 7000))).unwrap();
        server.set_read_timeout(Some(std::time::Duration::from_millis(300))).unwrap();
        let client = site.at("one", || UdpSocket::bind("0.0.0.0:0")).unwrap();
        let speaks = || {
            // What is in the queue was sent before.
            server.set_nonblocking(true).unwrap();
            while server.recv(&mut [0; 8]).is_ok() {}
            server.set_nonblocking(false).unwrap();
            let _ = client.send_to(b"hello", (two.v4().as_str(), 7000));
            server.recv(&mut [0; 8]).is_ok()
        };
        // On a busy machine a new link takes its time for the first packet.
        let speaks_soon = || (0..10).any(|_| speaks());
        assert!(speaks_soon(), "{primary:?}: it is not captured yet");
        site.node.entry["nebula"] = json!({"fake": "exit"});
        site.attach(&one).error();
        assert!(!speaks(), "{primary:?}: it stays closed");
        site.node.entry["nebula"] = json!({});
        site.attach(&one).expect_ok();
        assert!(!speaks(), "{primary:?}");
        site.call("DEL", &one).expect_ok();
        assert_eq!(site.rules(), "");
        assert!(speaks_soon(), "{primary:?}: it is as before");
    }
}
