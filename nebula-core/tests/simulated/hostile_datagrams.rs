//! Bytes from anybody on the underlay.

use std::time::Duration;

use nebula_core::simulator::{HostId, SimNet};
use rand_chacha::ChaCha20Rng;
use rand_chacha::rand_core::{RngCore as _, SeedableRng as _};

fn connected(seed: u64) -> (SimNet, HostId, HostId) {
    let mut net = SimNet::new(seed);
    let [a, b] = net.nodes(["a", "b"]);
    net.ping(a, b).until_delivered();
    (net, a, b)
}

#[test]
fn random_datagrams_only_count_drops() {
    let (mut net, a, b) = connected(1);
    let mut rng = ChaCha20Rng::seed_from_u64(1);
    for _ in 0..5_000 {
        let mut datagram = vec![0; usize::try_from(rng.next_u32() % 200).unwrap()];
        rng.fill_bytes(&mut datagram);
        if let Some(first) = datagram.first_mut() {
            // Mostly plausible types, so that the random bytes get past the header.
            *first = 0x10 | (*first & 7);
        }
        net.inject("192.0.2.66:666".parse().unwrap(), net.underlay(b), &datagram);
        net.run_for(Duration::from_millis(6));
    }
    assert!(net.ping(a, b).is_answered_within(Duration::from_millis(100)));
    assert_eq!(net.tunnels(b).len(), 1);
}

#[test]
fn damaged_copies_of_real_datagrams_change_nothing() {
    let (mut net, a, b) = connected(2);
    let seen: Vec<_> = net.flow().cloned().collect();
    let mut rng = ChaCha20Rng::seed_from_u64(2);
    for _ in 0..2_000 {
        let step = &seen[usize::try_from(rng.next_u32()).unwrap() % seen.len()];
        let mut datagram = step.datagram.clone();
        let at = usize::try_from(rng.next_u32()).unwrap() % datagram.len();
        datagram[at] ^= 1 << (rng.next_u32() % 8);
        if rng.next_u32() % 4 == 0 {
            datagram.truncate(at);
        }
        net.inject(step.from, step.to, &datagram);
        net.run_for(Duration::from_millis(6));
    }
    net.ping(a, b).until_delivered();
    assert!(net.tunnels(a).len() <= 5 && net.tunnels(b).len() <= 5);
}

#[test]
fn a_replayed_conversation_delivers_nothing_again() {
    let (mut net, a, b) = connected(3);
    for number in 0..20_u8 {
        let _verdict = net.send_udp(a, b, (1, 2), &[number]);
    }
    net.run_for(Duration::from_secs(1));
    let data: Vec<_> = net.flow().filter(|step| step.sender == "a" && step.datagram[0] == 0x11).cloned().collect();
    for step in &data {
        net.inject(step.from, step.to, &step.datagram);
    }
    net.run_for(Duration::from_secs(1));
    assert_eq!(net.payloads(b, 2).len(), 20);
    assert_eq!(net.counter(b, "dropped_in_replayed"), u64::try_from(data.len()).unwrap());
}

#[test]
fn a_replayed_first_message_makes_no_second_tunnel() {
    let (mut net, a, b) = connected(4);
    let first = net.flow().next().unwrap().clone();
    for _ in 0..10 {
        net.inject("192.0.2.66:666".parse().unwrap(), first.to, &first.datagram);
        net.run_for(Duration::from_secs(1));
    }
    assert_eq!(net.tunnels(b).len(), 1);
    assert_eq!(net.endpoint_of(b, a), Some(net.underlay(a)));
}

#[test]
fn an_old_first_message_replayed_after_a_new_handshake_makes_no_tunnel() {
    let (mut net, a, b) = connected(5);
    let old = net.flow().next().unwrap().clone();
    net.restart(a);
    net.ping(a, b).until_delivered();
    net.run_for(Duration::from_secs(40));
    net.ping(a, b).until_delivered();
    let before = net.tunnels(b);
    net.inject(old.from, old.to, &old.datagram);
    net.run_for(Duration::from_secs(1));
    let indexes = |tunnels: &[nebula_core::TunnelStatus]| tunnels.iter().map(|it| it.local_index).collect::<Vec<_>>();
    assert_eq!(indexes(&net.tunnels(b)), indexes(&before));
}
