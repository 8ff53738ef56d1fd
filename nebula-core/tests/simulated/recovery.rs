//! How soon traffic flows again after a restart, a move or a sleep.

use std::time::Duration;

use nebula_core::config::RecvErrorPolicy;
use nebula_core::simulator::{HostId, HostSpec, SimNet};

/// Time between the packets of a train.
const STEP: Duration = Duration::from_millis(20);
/// How much longer than its cause an outage may last.
const GRACE: Duration = Duration::from_millis(300);
const DOWNTIMES: [Duration; 3] = [Duration::from_millis(200), Duration::from_secs(3), Duration::from_millis(7_350)];

/// A lighthouse and two hosts that know each other only through it and have exchanged packets.
fn site(seed: u64) -> (SimNet, HostId, [HostId; 2]) {
    let mut net = SimNet::new(seed);
    let lighthouse = net.add(HostSpec::new("lighthouse").am_lighthouse());
    let hosts = ["a", "b"].map(|name| net.add(HostSpec::new(name).lighthouse(lighthouse)));
    net.run_for(Duration::from_secs(7));
    net.ping(hosts[0], hosts[1]).until_delivered();
    (net, lighthouse, hosts)
}

/// Sends packets from one host to the other for this long.
fn train(net: &mut SimNet, (from, to): (HostId, HostId), time: Duration) {
    let end = net.elapsed() + time;
    while net.elapsed() < end {
        let _verdict = net.send_udp(from, to, (1, 2), b"train");
        net.run_for(STEP.min(end - net.elapsed()));
    }
}

/// Sends packets until one arrives; returns how long that took.
fn gap(net: &mut SimNet, (from, to): (HostId, HostId)) -> Duration {
    let start = net.elapsed();
    net.take_udp(to);
    while net.take_udp(to).is_empty() {
        assert!(net.elapsed() < start + Duration::from_secs(60), "nothing arrives\n{}", net.diagram());
        train(net, (from, to), STEP);
    }
    net.elapsed() - start
}

#[test]
fn a_peer_that_is_restarted_is_found_again_at_once() {
    for down in DOWNTIMES {
        let (mut net, _, [a, b]) = site(1);
        net.stop(b);
        train(&mut net, (a, b), down);
        net.restart(b);
        let gap = gap(&mut net, (a, b));
        assert!(gap <= GRACE.max(down / 15), "{gap:?} after {down:?}\n{}", net.diagram());
    }
}

#[test]
fn a_peer_that_crashed_is_found_again_at_once() {
    for down in DOWNTIMES {
        let (mut net, _, [a, b]) = site(2);
        net.kill(b);
        train(&mut net, (a, b), down);
        net.restart(b);
        let gap = gap(&mut net, (a, b));
        assert!(gap <= GRACE, "{gap:?} after {down:?}\n{}", net.diagram());
    }
}

#[test]
fn a_peer_that_is_restarted_elsewhere_is_found_again_at_once() {
    for down in DOWNTIMES {
        let (mut net, _, [a, b]) = site(3);
        net.stop(b);
        train(&mut net, (a, b), down);
        net.move_to(b, "198.51.100.99:999");
        net.restart(b);
        let gap = gap(&mut net, (a, b));
        assert!(gap <= GRACE.max(down / 15), "{gap:?} after {down:?}\n{}", net.diagram());
        assert_eq!(net.endpoint_of(a, b), Some("198.51.100.99:999".parse().unwrap()));
    }
}

#[test]
fn a_lighthouse_answers_a_query_for_an_unknown_host_as_soon_as_it_registers() {
    let mut net = SimNet::new(4);
    let lighthouse = net.add(HostSpec::new("lighthouse").am_lighthouse());
    let [a, b] = ["a", "b"].map(|name| net.add(HostSpec::new(name).lighthouse(lighthouse)));
    net.run_for(Duration::from_secs(1));
    net.stop(b);
    net.run_for(Duration::from_secs(1));
    train(&mut net, (a, b), Duration::from_millis(2_300));
    let asked = net.counter(a, "lighthouse_query_out");
    net.restart(b);
    let gap = gap(&mut net, (a, b));
    assert!(gap <= GRACE, "{gap:?}\n{}", net.diagram());
    assert_eq!(net.counter(a, "lighthouse_query_out"), asked, "nobody had to ask again");
    assert!(asked <= 2, "a host that was never there is not asked for again and again");
}

#[test]
fn a_peer_that_does_not_return_costs_few_datagrams() {
    let (mut net, lighthouse, [a, b]) = site(5);
    net.stop(b);
    let before = net.flow().count();
    let sent = |net: &SimNet, to: HostId| {
        let to = net.underlay(to);
        net.flow().skip(before).filter(|step| step.sender == "a" && step.to == to).count()
    };
    train(&mut net, (a, b), Duration::from_secs(30));
    assert!(sent(&net, b) <= 70, "{} first messages", sent(&net, b));
    assert!(sent(&net, lighthouse) <= 80, "{} questions", sent(&net, lighthouse));
    net.run_for(Duration::from_secs(60));
    let (calls, candidates) = (sent(&net, b), net.table_sizes(a).candidates);
    train(&mut net, (a, b), Duration::from_secs(30));
    assert_eq!(sent(&net, b), calls, "its place is forgotten ({candidates} candidates)");
}

#[test]
fn nothing_is_sent_to_a_peer_that_left_if_nobody_needs_it() {
    let (mut net, _, [_, b]) = site(6);
    net.stop(b);
    let (before, to) = (net.flow().count(), net.underlay(b));
    net.run_for(Duration::from_secs(60));
    assert!(net.flow().skip(before).all(|step| step.sender != "a" || step.to != to));
}

#[test]
fn a_peer_learns_at_once_that_a_quiet_host_moved() {
    let (mut net, _, [a, b]) = site(7);
    train(&mut net, (a, b), Duration::from_secs(10));
    net.roam_to(b, "198.51.100.99:999");
    let gap = gap(&mut net, (a, b));
    assert!(gap <= GRACE, "{gap:?}\n{}", net.diagram());
    assert_eq!(net.tunnels(a).len(), 2, "the tunnels are those from before");
}

#[test]
fn a_host_that_slept_is_back_at_once() {
    for asleep in [Duration::from_secs(3), Duration::from_secs(30), Duration::from_secs(600)] {
        for moved in [false, true] {
            let (mut net, _, [a, b]) = site(8);
            train(&mut net, (a, b), Duration::from_secs(5));
            net.suspend(b);
            train(&mut net, (a, b), asleep);
            if moved {
                net.move_to(b, "198.51.100.99:999");
            }
            net.resume(b);
            let gap = gap(&mut net, (a, b));
            assert!(gap <= GRACE, "{gap:?} after {asleep:?}, moved: {moved}\n{}", net.diagram());
        }
    }
}

#[test]
fn a_host_that_slept_tells_the_lighthouse_at_once_where_it_is() {
    let (mut net, lighthouse, [_, b]) = site(9);
    net.suspend(b);
    net.run_for(Duration::from_secs(600));
    assert_eq!(net.table_sizes(lighthouse).reports, 1, "it gave the host up, which did not answer");
    net.resume(b);
    net.run_for(2 * STEP);
    assert_eq!(net.table_sizes(lighthouse).reports, 2, "{}", net.diagram());
}

#[test]
fn a_host_whose_clock_says_that_it_slept_asks_its_peers_once() {
    let (mut net, _, [a, b]) = site(10);
    let before = net.counter(b, "test_requests_out");
    net.control(b, |node, now| node.wake(now));
    net.run_for(Duration::from_secs(1));
    assert_eq!(net.counter(b, "test_requests_out") - before, 2, "the peer and the lighthouse");
    assert_eq!(net.tunnels_to(b, a).len(), 1);
}

#[test]
fn a_peer_is_found_after_its_lighthouse_and_then_itself_were_restarted() {
    for down in [Duration::from_millis(200), Duration::from_secs(3)] {
        let (mut net, lighthouse, [a, b]) = site(11);
        net.stop(lighthouse);
        train(&mut net, (a, b), down);
        net.restart(lighthouse);
        train(&mut net, (a, b), Duration::from_secs(1));
        net.stop(b);
        net.move_to(b, "198.51.100.99:999");
        train(&mut net, (a, b), down);
        net.restart(b);
        let gap = gap(&mut net, (a, b));
        assert!(gap <= GRACE, "{gap:?} after {down:?}\n{}", net.diagram());
    }
}

#[test]
fn hosts_reconnect_to_a_closed_lighthouse_before_their_next_update() {
    let (mut net, lighthouse, [a, b]) = site(12);
    net.stop(lighthouse);
    net.run_for(Duration::from_millis(200));
    net.restart(lighthouse);
    net.run_for(Duration::from_millis(1_500));
    assert_eq!(net.tunnels(lighthouse).len(), 2, "{}", net.diagram());
    assert_eq!((net.tunnels(a).len(), net.tunnels(b).len()), (2, 2));
}

#[test]
fn a_crash_is_noticed_at_once_in_both_directions() {
    for policy in [RecvErrorPolicy::Always, RecvErrorPolicy::Private] {
        let (mut net, _, [a, b]) = site(13);
        net.kill(b);
        net.restart(b);
        net.control(b, |node, now| node.reconfigure(now, |config| config.send_recv_error = policy));
        if policy == RecvErrorPolicy::Always {
            assert!(gap(&mut net, (a, b)) <= GRACE, "{}", net.diagram());
        } else {
            assert!(gap(&mut net, (b, a)) <= GRACE, "{}", net.diagram());
            assert!(gap(&mut net, (a, b)) <= GRACE, "by the new tunnel: {}", net.diagram());
        }
    }
}
