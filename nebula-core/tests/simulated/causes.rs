//! What each fault leaves behind on each side, as evidence for its cause.
//!
//! What was refused, what answers, what repeats its calls.

use std::collections::BTreeSet;
use std::time::Duration;

use nebula_core::config::Cipher;
use nebula_core::simulator::{HostId, HostSpec, NatBehaviour, SimNet};

use Calls::{Both, Left};

/// Who calls the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Calls {
    Left,
    Both,
}

/// What `at` knows about `of` when its operator asks why there is no tunnel.
fn evidence(net: &mut SimNet, at: HostId, of: HostId) -> BTreeSet<String> {
    let peer = net.overlay(of);
    for _ in 0..2 {
        net.control(at, |node, now| node.probe(now, peer));
        net.run_for(Duration::from_millis(300));
    }
    let told = net.control(at, |node, now| node.diagnosis(now));
    let mut found = BTreeSet::new();
    for attempt in told.attempts.iter().filter(|attempt| attempt.peer == peer) {
        found.extend(attempt.refusal.iter().map(|refusal| format!("refused {}", refusal.reason.name())));
        for tried in &attempt.tried {
            found.extend((tried.unopened > 0).then(|| "unopened".to_owned()));
            found.extend(tried.heard.map(|_| "heard".to_owned()));
        }
    }
    let callers = told.callers.iter().filter(|it| it.claimed.as_ref().is_some_and(|it| it.addresses.contains(&peer)));
    found.extend(callers.map(|caller| format!("caller {}", caller.reason.name())));
    let unheard = told.unheard.iter().filter(|caller| caller.peer == peer && caller.repeats >= 3);
    found.extend(unheard.map(|_| "unheard".to_owned()));
    found
}

/// Puts a host `left` and a host `right` with a fault between them, lets them call, and compares what they know
/// afterwards.
#[track_caller]
fn assert_evidence(
    calls: Calls,
    fault: impl Fn(&mut SimNet, &dyn Fn(&str) -> HostSpec) -> [HostId; 2],
    [at_left, at_right]: [&[&str]; 2],
) {
    for is_old_go in [false, true] {
        let spec = move |name: &str| {
            let spec = HostSpec::new(name);
            if is_old_go && name == "right" { spec.old_go() } else { spec }
        };
        let mut net = SimNet::new(50);
        let [left, right] = fault(&mut net, &spec);
        // Twice: what the first attempt showed is still known after the second one.
        for _ in 0..2 {
            if calls == Both {
                let peer = net.overlay(left);
                net.control(right, |node, now| node.connect(now, peer));
            }
            assert!(!net.ping(left, right).is_answered_within(Duration::from_secs(40)));
        }
        let found = [evidence(&mut net, left, right), evidence(&mut net, right, left)];
        let expected = [at_left, at_right].map(|told| told.iter().map(|it| (*it).to_owned()).collect::<BTreeSet<_>>());
        assert_eq!(found, expected, "peer before Go 1.11: {is_old_go}\n{}", net.diagram());
    }
}

fn two(net: &mut SimNet, spec: &dyn Fn(&str) -> HostSpec) -> [HostId; 2] {
    let right = net.add(spec("right"));
    let left = net.add(spec("left").knows(right));
    net.introduce(right, left);
    [left, right]
}

/// The left one has these certificates of others, and not the one of the network.
fn distrusting(spec: HostSpec) -> HostSpec {
    let stranger = SimNet::new(77).authority().trust();
    spec.config(|config| config.trust = stranger)
}

#[test]
fn silence_in_both_directions_is_no_evidence_of_anything() {
    assert_evidence(
        Both,
        |net, spec| {
            let [left, right] = two(net, spec);
            net.cut(left, right);
            [left, right]
        },
        [&[], &[]],
    );
    assert_evidence(
        Left,
        |net, spec| {
            let [left, right] = two(net, spec);
            net.kill(right);
            [left, right]
        },
        [&[], &[]],
    );
}

#[test]
fn udp_that_passes_in_one_direction_is_known_where_it_arrives() {
    assert_evidence(
        Both,
        |net, spec| {
            let [left, right] = two(net, spec);
            net.cut_one_way(left, right);
            [left, right]
        },
        [&["unheard"], &[]],
    );
    assert_evidence(
        Left,
        |net, spec| {
            let [left, right] = two(net, spec);
            net.cut_one_way(right, left);
            [left, right]
        },
        [&[], &["unheard"]],
    );
}

#[test]
fn another_ca_is_known_where_it_is_refused_and_udp_passes_for_the_other() {
    let fault = |net: &mut SimNet, spec: &dyn Fn(&str) -> HostSpec| {
        let right = net.add(spec("right"));
        let left = net.add(distrusting(spec("left")).knows(right));
        net.introduce(right, left);
        [left, right]
    };
    assert_evidence(Left, fault, [&["refused unknown_ca", "heard"], &["heard"]]);
    assert_evidence(Both, fault, [&["caller unknown_ca", "refused unknown_ca", "heard"], &["heard"]]);
}

#[test]
fn a_blocked_certificate_is_known_where_it_is_blocked() {
    assert_evidence(
        Both,
        |net, spec| {
            let right = net.add(spec("right"));
            let mut trust = net.authority().trust();
            trust.block(net.fingerprint(right));
            let left = net.add(spec("left").knows(right).config(|config| config.trust = trust));
            net.introduce(right, left);
            [left, right]
        },
        [&["caller blocked", "refused blocked", "heard"], &["heard"]],
    );
}

#[test]
fn another_cipher_is_known_to_the_caller_and_the_other_knows_that_its_answers_are_not_taken() {
    let fault = |net: &mut SimNet, spec: &dyn Fn(&str) -> HostSpec| {
        let right = net.add(spec("right").config(|config| config.cipher = Cipher::ChaCha20Poly1305));
        let left = net.add(spec("left").knows(right));
        net.introduce(right, left);
        [left, right]
    };
    assert_evidence(Left, fault, [&["unopened", "heard"], &["unheard", "heard"]]);
    assert_evidence(Both, fault, [&["unopened", "unheard", "heard"], &["unopened", "unheard", "heard"]]);
}

#[test]
fn a_host_behind_a_nat_that_lets_nobody_in_knows_the_same_as_everybody() {
    assert_evidence(
        Left,
        |net, spec| {
            let nat = net.add_nat(NatBehaviour::home());
            let right = net.add(spec("right").behind(nat));
            let left = net.add(spec("left").knows(right));
            [left, right]
        },
        [&[], &[]],
    );
}

#[test]
fn another_host_at_the_endpoint_is_known_to_the_caller_alone() {
    assert_evidence(
        Left,
        |net, spec| {
            let right = net.add(spec("right"));
            let wrong = net.add(HostSpec::new("wrong"));
            let (peer, endpoint) = (net.overlay(right), net.underlay(wrong));
            let left = net.add(spec("left").config(move |config| {
                config.static_hosts.insert(peer, vec![endpoint]);
            }));
            [left, right]
        },
        // The other host answers the probe, too: what was refused says more.
        [&["refused other_host", "heard"], &[]],
    );
}

#[test]
fn a_tunnel_ends_what_was_known_of_calls_that_were_not_heard() {
    let mut net = SimNet::new(51);
    let [left, right] = net.nodes(["left", "right"]);
    net.cut_one_way(right, left);
    assert!(!net.ping(left, right).is_answered_within(Duration::from_secs(10)));
    assert!(evidence(&mut net, right, left).contains("unheard"));
    net.heal(left, right);
    net.ping(left, right).until_delivered();
    assert!(net.control(right, |node, now| node.diagnosis(now)).unheard.is_empty());
}

#[test]
fn a_host_is_found_by_name_after_its_tunnel_ended_and_where_it_was_refused() {
    let mut net = SimNet::new(52);
    let [left, right] = net.nodes(["left", "right"]);
    let named = |net: &mut SimNet, at: HostId, name: &str| net.control(at, |node, _| node.named(name));
    assert_eq!(named(&mut net, left, "right"), None);
    net.ping(left, right).until_delivered();
    let at = net.overlay(right);
    assert_eq!(named(&mut net, left, "RIGHT"), Some(at));
    net.control(left, |node, now| node.close(now, at, true));
    assert_eq!(named(&mut net, left, "right"), Some(at));

    let mut net = SimNet::new(53);
    let right = net.add(HostSpec::new("right"));
    let left = net.add(distrusting(HostSpec::new("left")).knows(right));
    assert!(!net.ping(left, right).is_answered_within(Duration::from_secs(10)));
    let at = net.overlay(right);
    assert_eq!(named(&mut net, left, "right"), Some(at));
}
