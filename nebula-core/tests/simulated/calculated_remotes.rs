//! Endpoints that follow from overlay addresses.

use std::net::SocketAddr;
use std::time::Duration;

use nebula_core::Config;
use nebula_core::config::{self, CalculatedRemotes, Calculation};
use nebula_core::simulator::{HostSpec, SimNet};

/// 10.42.0.n is at 198.51.100.n, which is how the simulator numbers its hosts.
fn by_number(mask: &str) -> CalculatedRemotes {
    let guess = Calculation { mask: mask.parse().expect("a prefix"), port: 4242 };
    let everybody = "10.42.0.0/16".parse().expect("a prefix");
    CalculatedRemotes::new([(everybody, vec![guess])]).expect("both are IPv4")
}

fn guesses(config: &mut Config) {
    config.lighthouse.calculated_remotes = by_number("198.51.100.0/24");
}

#[test]
fn a_calculated_endpoint_is_tried_at_once_and_without_a_lighthouse() {
    let mut net = SimNet::new(1);
    let a = net.add(HostSpec::new("a").config(guesses));
    let b = net.add(HostSpec::new("b"));
    let took = net.ping(a, b).until_delivered();
    assert!(took < Duration::from_millis(90), "without waiting for the first interval: {took:?}");
    assert_eq!(net.endpoint_of(a, b), Some(net.underlay(b)));
}

#[test]
fn a_wrong_guess_does_no_harm_once_a_lighthouse_answers() {
    let mut net = SimNet::new(2);
    let lighthouse = net.add(HostSpec::new("lighthouse").am_lighthouse());
    let b = net.add(HostSpec::new("b").lighthouse(lighthouse));
    let wrong = |config: &mut Config| config.lighthouse.calculated_remotes = by_number("203.0.113.0/24");
    let a = net.add(HostSpec::new("a").lighthouse(lighthouse).config(wrong));
    net.run_for(Duration::from_secs(1));
    net.ping(a, b).until_delivered();
    assert!(net.flow().any(|step| step.to == "203.0.113.2:4242".parse::<SocketAddr>().unwrap()), "{}", net.diagram());
    assert_eq!(net.endpoint_of(a, b), Some(net.underlay(b)));
}

#[test]
fn no_endpoint_is_guessed_for_a_host_with_a_configured_one() {
    let mut net = SimNet::new(3);
    let b = net.add(HostSpec::new("b").underlay("192.0.2.9:999"));
    let a = net.add(HostSpec::new("a").knows(b).config(guesses));
    net.ping(a, b).until_delivered();
    assert!(net.flow().all(|step| step.to != "198.51.100.1:4242".parse::<SocketAddr>().unwrap()));
}

#[test]
fn a_guess_inside_the_overlay_or_an_excluded_network_is_not_tried() {
    let mut net = SimNet::new(4);
    let b = net.add(HostSpec::new("b"));
    let inside = net.add(HostSpec::new("inside").config(|config| {
        config.lighthouse.calculated_remotes = by_number("10.42.7.0/24");
    }));
    let excluded = net.add(HostSpec::new("excluded").config(|config| {
        guesses(config);
        let refuse = config::AllowList::new([("198.51.100.0/24".parse().unwrap(), false)]).unwrap();
        config.lighthouse.remote_allow = config::RemoteAllowList::new(refuse, []);
    }));
    for host in [inside, excluded] {
        assert!(!net.ping(host, b).is_answered_within(Duration::from_secs(6)));
    }
    assert_eq!(net.flow().count(), 0, "{}", net.diagram());
}

#[test]
fn ipv6_overlay_addresses_give_ipv6_endpoints() {
    let mut net = SimNet::new(5);
    let b = net.add(HostSpec::new("b").networks(&["fd42::b:1/64"]).underlay("[2001:db8::b:1]:4242"));
    let a = HostSpec::new("a").networks(&["fd42::a:1/64"]).underlay("[2001:db8::a:1]:4242").config(|config| {
        let guess = Calculation { mask: "2001:db8::/64".parse().unwrap(), port: 4242 };
        let calculated = CalculatedRemotes::new([("fd42::/64".parse().unwrap(), vec![guess])]);
        config.lighthouse.calculated_remotes = calculated.unwrap();
    });
    let a = net.add(a);
    net.ping(a, b).between("fd42::a:1", "fd42::b:1").until_delivered();
}

#[test]
fn handshakes_in_progress_try_endpoints_calculated_after_a_reload() {
    let mut net = SimNet::new(6);
    let [a, b] = ["a", "b"].map(|name| net.add(HostSpec::new(name)));
    let _verdict = net.send_udp(a, b, (1, 2), b"waits");
    net.run_for(Duration::from_millis(750));
    let settings = by_number("198.51.100.0/24");
    net.control(a, |node, now| node.reconfigure(now, |config| config.lighthouse.calculated_remotes = settings));
    net.run_for(Duration::from_millis(100));
    assert_eq!(net.payloads(b, 2), [b"waits"], "{}", net.diagram());
}
