//! Hosts with more than one lighthouse.

use std::time::Duration;

use nebula_core::internals::header::{Header, MessageType};
use nebula_core::simulator::{HostId, HostSpec, SimNet};

fn lighthouses<const N: usize>(net: &mut SimNet) -> [HostId; N] {
    std::array::from_fn(|n| net.add(HostSpec::new(&format!("lighthouse{n}")).am_lighthouse()))
}

fn client(name: &str, lighthouses: &[HostId]) -> HostSpec {
    lighthouses.iter().fold(HostSpec::new(name), |spec, lighthouse| spec.lighthouse(*lighthouse))
}

#[test]
fn every_lighthouse_is_told_and_acknowledges() {
    let mut net = SimNet::new(1);
    let all = lighthouses::<3>(&mut net);
    let host = net.add(client("host", &all));
    net.run_for(Duration::from_secs(65));
    for (n, lighthouse) in all.into_iter().enumerate() {
        assert_eq!(net.tunnels_to(lighthouse, host).len(), 1);
        let name = format!("lighthouse{n}");
        let messages = |from: &str, to: &str| {
            let steps = net.flow().filter(|step| step.sender == from && step.receiver.as_deref() == Some(to));
            let is_message =
                |datagram: &[u8]| Header::parse(datagram).is_ok_and(|header| header.kind == MessageType::Lighthouse);
            steps.filter(|step| is_message(&step.datagram)).count()
        };
        let (told, acknowledged) = (messages("host", &name), messages(&name, "host"));
        assert!((6..=8).contains(&told), "one every ten seconds and one at the start: {told}");
        assert_eq!(acknowledged, told);
    }
}

#[test]
fn a_peer_that_only_one_of_them_knows_is_found() {
    let mut net = SimNet::new(2);
    let [one, two] = lighthouses(&mut net);
    let a = net.add(client("a", &[one, two]));
    let b = net.add(client("b", &[two]));
    net.run_for(Duration::from_secs(1));
    let took = net.ping(a, b).until_delivered();
    assert!(took < Duration::from_millis(100), "{took:?}");
}

#[test]
fn the_answers_of_all_are_tried_together() {
    let mut net = SimNet::new(3);
    let [stale, fresh] = lighthouses(&mut net);
    let [a, b] = ["a", "b"].map(|name| net.add(client(name, &[stale, fresh])));
    net.run_for(Duration::from_secs(1));
    // One of them does not learn that the host moved, and keeps reporting the old endpoint.
    net.cut(b, stale);
    net.move_to(b, "198.51.100.99:4242");
    net.run_for(Duration::from_secs(11));
    net.ping(a, b).until_delivered();
    assert_eq!(net.endpoint_of(a, b), Some("198.51.100.99:4242".parse().unwrap()), "{}", net.diagram());
    assert!(net.flow().any(|step| step.sender == "a" && step.to == "198.51.100.4:4242".parse().unwrap()));
}

#[test]
fn a_dead_lighthouse_delays_nothing() {
    let mut net = SimNet::new(4);
    let [dead, alive] = lighthouses(&mut net);
    let [a, b] = ["a", "b"].map(|name| net.add(client(name, &[dead, alive])));
    for host in [a, b] {
        net.cut(host, dead);
    }
    net.run_for(Duration::from_secs(30));
    let took = net.ping(a, b).until_delivered();
    assert!(took < Duration::from_millis(100), "{took:?}");
}

#[test]
fn a_lighthouse_that_dies_is_not_missed_and_is_updated_when_it_returns() {
    let mut net = SimNet::new(5);
    let [mortal, other] = lighthouses(&mut net);
    let [a, b] = ["a", "b"].map(|name| net.add(client(name, &[mortal, other])));
    net.run_for(Duration::from_secs(1));
    for host in [a, b] {
        net.cut(host, mortal);
    }
    net.run_for(Duration::from_secs(60));
    net.ping(a, b).until_delivered();
    net.restart(mortal);
    for host in [a, b] {
        net.heal(host, mortal);
    }
    net.run_for(Duration::from_secs(20));
    assert_eq!(net.tunnels(mortal).len(), 2, "{}", net.diagram());
    // Now the other one is cut off, and all tunnels are closed.
    for host in [a, b] {
        net.cut(host, other);
        net.control(host, |node, now| node.close_all(now));
    }
    net.run_for(Duration::from_secs(20));
    net.ping(b, a).until_delivered();
}
