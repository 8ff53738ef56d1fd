//! Settings that change while a node runs.

use std::time::Duration;

use nebula_cert::Version;
use nebula_core::Part;
use nebula_core::config::{self, AllowList, RemoteAllowList};
use nebula_core::internals::header::{Header, MessageType};
use nebula_core::simulator::{HostId, HostSpec, SimNet};

fn uses(net: &mut SimNet, host: HostId, lighthouses: &[HostId]) {
    let hosts = lighthouses.iter().map(|lighthouse| net.overlay(*lighthouse)).collect();
    for &lighthouse in lighthouses {
        net.introduce(host, lighthouse);
    }
    net.control(host, |node, now| node.reconfigure(now, |config| config.lighthouse.hosts = hosts));
}

#[test]
fn a_host_moves_from_one_lighthouse_to_another() {
    let mut net = SimNet::new(1);
    let [old, new] = ["old", "new"].map(|name| net.add(HostSpec::new(name).am_lighthouse()));
    let a = net.add(HostSpec::new("a").lighthouse(old));
    let b = net.add(HostSpec::new("b").lighthouse(new));
    net.run_for(Duration::from_secs(1));
    assert!(!net.ping(b, a).is_answered_within(Duration::from_secs(6)), "they have no lighthouse in common");
    uses(&mut net, a, &[new]);
    net.run_for(Duration::from_secs(1));
    net.ping(b, a).until_delivered();
}

#[test]
fn a_host_without_lighthouses_tells_nobody_where_it_is() {
    let mut net = SimNet::new(2);
    let lighthouse = net.add(HostSpec::new("lighthouse").am_lighthouse());
    let a = net.add(HostSpec::new("a").lighthouse(lighthouse));
    net.run_for(Duration::from_secs(1));
    uses(&mut net, a, &[]);
    let before = net.elapsed();
    net.run_for(Duration::from_secs(60));
    let told = net.flow().filter(|step| {
        let kind = Header::parse(&step.datagram).map(|header| header.kind);
        step.sender == "a" && step.at > before && matches!(kind, Ok(MessageType::Lighthouse))
    });
    assert_eq!(told.count(), 0, "{}", net.diagram());
}

#[test]
fn a_node_never_becomes_a_lighthouse_while_it_runs() {
    let mut net = SimNet::new(3);
    let host = net.add(HostSpec::new("host"));
    net.control(host, |node, now| node.reconfigure(now, |config| config.lighthouse.am_lighthouse = true));
    let [a, b] = ["a", "b"].map(|name| net.add(HostSpec::new(name).lighthouse(host)));
    net.run_for(Duration::from_secs(1));
    assert!(!net.ping(a, b).is_answered_within(Duration::from_secs(6)));
}

#[test]
fn a_node_learns_while_it_runs_to_close_tunnels_that_are_not_used() {
    let mut net = SimNet::new(5);
    let [a, b] = net.nodes(["a", "b"]);
    net.introduce(a, b);
    net.ping(a, b).until_delivered();
    net.run_for(Duration::from_secs(300));
    assert_eq!(net.tunnels_to(a, b).len(), 1, "by default a tunnel stays");
    let timeout = Some(Duration::from_secs(60));
    net.control(a, |node, now| node.reconfigure(now, |config| config.timers.inactivity_timeout = timeout));
    net.run_for(Duration::from_secs(90));
    assert_eq!(net.tunnels_to(a, b).len(), 0, "{}", net.diagram());
}

#[test]
fn a_new_allow_list_applies_to_the_next_handshake() {
    let mut net = SimNet::new(4);
    let [a, b] = net.nodes(["a", "b"]);
    let refuse = AllowList::new([("198.51.100.0/24".parse().unwrap(), false)]).unwrap();
    let list = RemoteAllowList::new(refuse, []);
    net.control(b, |node, now| node.reconfigure(now, |config| config.lighthouse.remote_allow = list));
    assert!(!net.ping(a, b).is_answered_within(Duration::from_secs(6)));
    net.control(b, |node, now| node.reconfigure(now, |config| config.lighthouse = config::Lighthouse::default()));
    net.ping(a, b).until_delivered();
}

#[test]
fn tunnels_with_expired_certificates_are_closed_once_that_is_asked_for() {
    let mut net = SimNet::new(5);
    let lax = |config: &mut nebula_core::Config| config.disconnect_invalid = false;
    let a = net.add(HostSpec::new("a").config(lax));
    let b = net.add(HostSpec::new("b").knows(a).expires_after(Duration::from_secs(60)));
    net.ping(b, a).until_delivered();
    net.run_for(Duration::from_secs(120));
    assert_eq!(net.tunnels_to(a, b).len(), 1);
    net.control(a, |node, now| node.reconfigure(now, |config| config.disconnect_invalid = true));
    assert_eq!(net.tunnels_to(a, b).len(), 0);
}

#[test]
fn keepalive_punches_start_when_they_are_switched_on() {
    let mut net = SimNet::new(6);
    let [a, b] = net.nodes(["a", "b"]);
    net.ping(a, b).until_delivered();
    net.run_for(Duration::from_secs(60));
    let punches = |net: &SimNet| net.flow().filter(|step| step.datagram == [1]).count();
    assert_eq!(punches(&net), 0);
    net.control(a, |node, now| node.reconfigure(now, |config| config.punchy.punch = true));
    net.run_for(Duration::from_secs(60));
    assert!(punches(&net) >= 10, "{}", net.diagram());
}

#[test]
fn advertised_endpoints_of_a_reload_are_reported_at_once() {
    let mut net = SimNet::new(7);
    let lighthouse = net.add(HostSpec::new("lighthouse").am_lighthouse());
    let [a, b] = ["a", "b"].map(|name| net.add(HostSpec::new(name).lighthouse(lighthouse)));
    net.run_for(Duration::from_secs(1));
    let hosts = vec![net.overlay(lighthouse)];
    let advertise = vec!["203.0.113.77:777".parse().unwrap()];
    net.control(b, |node, now| {
        node.reconfigure(now, |config| (config.lighthouse.hosts, config.lighthouse.advertise) = (hosts, advertise))
    });
    net.run_for(Duration::from_millis(100));
    net.ping(a, b).until_delivered();
    let tried = net.flow().any(|step| step.sender == "a" && step.to == "203.0.113.77:777".parse().unwrap());
    assert!(tried, "{}", net.diagram());
}

#[test]
fn two_peers_that_reload_everything_at_the_same_instant_never_lose_the_tunnel() {
    let mut net = SimNet::new(8);
    let [old, new] = ["old", "new"].map(|name| net.add(HostSpec::new(name).am_lighthouse()));
    let [a, b] = ["a", "b"].map(|name| net.add(HostSpec::new(name).lighthouse(old)));
    net.run_for(Duration::from_secs(1));
    net.ping(a, b).until_delivered();
    for round in 0..4 {
        for host in [a, b] {
            let identity = net.renewed_identity(host, &[Version::V2]);
            let trust = net.authority().trust();
            let calculated = config::Calculation { mask: "198.51.100.0/24".parse().unwrap(), port: 4242 };
            let calculated = config::CalculatedRemotes::new([("10.42.0.0/16".parse().unwrap(), vec![calculated])]);
            let mut settings = config::Lighthouse::default();
            settings.advertise = vec![std::net::SocketAddr::from(([203, 0, 113, round], 4242))];
            settings.calculated_remotes = calculated.unwrap();
            let lighthouse = if round % 2 == 0 { new } else { old };
            settings.hosts = vec![net.overlay(lighthouse)];
            let endpoints = [(net.overlay(lighthouse), vec![net.underlay(lighthouse)])].into();
            net.control(host, |node, now| {
                node.reconfigure(now, |config| {
                    config.trust = trust;
                    config.identity = identity;
                    config.firewall = nebula_core::firewall::Policy {
                        inbound: vec![nebula_core::firewall::Rule::any()],
                        outbound: vec![nebula_core::firewall::Rule::any()],
                        ..nebula_core::firewall::Policy::default()
                    };
                    config.static_hosts = endpoints;
                    config.lighthouse = settings;
                })
            });
        }
        assert_eq!(net.ping(a, b).train(120, Duration::from_millis(250)), 120, "round {round}\n{}", net.diagram());
    }
    for host in [a, b] {
        let peers = net.tunnels_to(host, if host == a { b } else { a });
        assert_eq!(peers.len(), 1, "one tunnel is left of all those rounds");
    }
}

#[test]
fn a_new_initiating_version_applies_to_the_next_handshake() {
    let mut net = SimNet::new(77);
    let both = [Version::V1, Version::V2];
    let b = net.add(HostSpec::new("b").versions(&both));
    let c = net.add(HostSpec::new("c").versions(&both));
    let a = net.add(HostSpec::new("a").versions(&both).knows(b).knows(c));
    net.ping(a, b).until_delivered();
    assert_eq!(net.tunnels_to(a, b)[0].version, Version::V1);
    net.control(a, |node, now| node.reconfigure(now, |config| config.initiating_version = Some(Version::V2)));
    net.ping(a, c).until_delivered();
    assert_eq!(net.tunnels_to(a, c)[0].version, Version::V2);
}

#[test]
fn a_reload_names_what_it_changed_and_keeps_what_only_a_start_can_change() {
    let mut net = SimNet::new(9);
    let a = net.add(HostSpec::new("a"));
    let parts = net.control(a, |node, now| {
        node.reconfigure(now, |config| {
            config.punchy.punch = true;
            config.preferred_ranges = vec!["192.0.2.0/24".parse().unwrap()];
            config.handshakes.retries += 1;
            config.timers.connection_alive_interval *= 2;
            config.lighthouse.am_lighthouse = true;
            config.listen_port += 1;
        })
    });
    assert_eq!(parts, [Part::Punchy, Part::PreferredRanges]);
    let again = net.control(a, |node, now| node.reconfigure(now, |config| config.punchy.punch = true));
    assert_eq!(again, [], "it is in force already");
}
