//! Relays that answer every probe, and drop what they are given to carry.

use std::net::IpAddr;
use std::time::Duration;

use nebula_core::simulator::{HostId, Link};
use nebula_core::{PathVerdict, RelayTrouble};

use crate::group_relays::{Grouped, relay_of};

const SECOND: Duration = Duration::from_secs(1);
const PORT: u16 = 9;

/// Hosts that measure, as they do unless they are told otherwise.
fn grouped(seed: u64, relays: usize, hosts: usize) -> Grouped {
    let mut it = Grouped::new(seed, relays, hosts);
    for host in it.hosts.clone() {
        it.net.control(host, |node, now| node.reconfigure(now, |config| config.measure_paths = true));
    }
    it
}

/// Sends from one host to another, this many packets a second. Returns the relays that were used, in order.
fn talk(it: &mut Grouped, pair: (HostId, HostId), seconds: u32, rate: u32) -> Vec<IpAddr> {
    talk_and(it, pair, seconds, (rate, false))
}

/// The same; with `is_answered`, as many packets go back.
fn talk_and(
    it: &mut Grouped,
    (from, to): (HostId, HostId),
    seconds: u32,
    (rate, is_answered): (u32, bool),
) -> Vec<IpAddr> {
    let mut used = Vec::new();
    for _ in 0..seconds * rate {
        let _verdict = it.net.send_udp(from, to, (PORT, PORT), b"one way");
        if is_answered {
            let _verdict = it.net.send_udp(to, from, (PORT, PORT), b"answer");
        }
        it.net.run_for(SECOND / rate);
        used.extend(relay_of(&it.net, from, to).filter(|relay| used.last() != Some(relay)));
    }
    used
}

fn arrived(it: &Grouped, host: HostId) -> usize {
    it.net.payloads(host, PORT).len()
}

fn relay_at(it: &Grouped, address: IpAddr) -> HostId {
    it.relays.iter().copied().find(|relay| it.net.overlay(*relay) == address).expect("a relay")
}

#[test]
fn a_relay_that_answers_probes_and_drops_what_it_carries_loses_its_place_within_half_a_minute_and_for_good() {
    for (seed, rate, is_answered) in [(1, 2, true), (2, 20, false), (3, 100, false), (4, 100, true)] {
        let traffic = (rate, is_answered);
        let mut it = grouped(seed, 5, 2);
        let [a, b] = [it.hosts[0], it.hosts[1]];
        it.net.run_for(60 * SECOND);
        it.net.ping(a, b).until_delivered();
        // Until the hash of the hosts has selected one of the equally good relays.
        talk_and(&mut it, (a, b), 150, traffic);
        let bad = relay_of(&it.net, a, b).expect("a relay");
        let relay = relay_at(&it, bad);
        it.net.drop_carried(relay, true);
        // Probes are answered as before.
        it.net.run_for(SECOND);
        let mut waited = 0;
        let before = arrived(&it, b);
        while arrived(&it, b) == before {
            talk_and(&mut it, (a, b), 1, traffic);
            waited += 1;
            assert!(
                waited <= 30,
                "seed {seed}, {rate} a second: nothing arrives after {waited} s\n{}",
                it.net.diagram()
            );
        }
        println!("{rate} packets a second: another relay carries them after {waited} s");
        let (before, used) = (arrived(&it, b), talk_and(&mut it, (a, b), 110, traffic));
        assert!(!used.contains(&bad), "{used:?}");
        assert!(arrived(&it, b) - before >= (110 * rate as usize) * 99 / 100);
        for host in [a, b] {
            let seen = it.of(host, relay);
            assert!(!seen.is_chosen && seen.trouble == Some(RelayTrouble::Drops), "seed {seed}: {seen:?}");
        }
        assert!(!it.reported(a).contains(&bad) && !it.reported(b).contains(&bad), "peers are not sent there");
    }
}

#[test]
fn an_honest_relay_is_not_suspected_for_one_way_traffic_loss_or_jitter() {
    for seed in 4..8 {
        let mut it = grouped(seed, 4, 2);
        let [a, b] = [it.hosts[0], it.hosts[1]];
        it.net.run_for(60 * SECOND);
        it.net.ping(a, b).until_delivered();
        for (loss, jitter) in [(0, 0), (10, 0), (0, 50), (15, 50)] {
            let jitter = Duration::from_millis(jitter);
            it.net.set_link(Link { loss, jitter, ..Link::default() });
            talk(&mut it, (a, b), 100, 10);
        }
        for host in [a, b] {
            assert!(it.offered(host).iter().all(|relay| relay.trouble != Some(RelayTrouble::Drops)));
        }
        let tunnels = it.net.tunnels_to(a, b);
        assert!(tunnels.iter().flat_map(|tunnel| &tunnel.paths).all(|path| path.verdict != PathVerdict::Drops));
    }
}

#[test]
fn where_all_relays_drop_a_tunnel_does_not_go_to_and_fro_between_them() {
    let mut it = grouped(9, 2, 2);
    let [a, b] = [it.hosts[0], it.hosts[1]];
    it.net.run_for(60 * SECOND);
    it.net.ping(a, b).until_delivered();
    talk(&mut it, (a, b), 10, 20);
    for relay in it.relays.clone() {
        it.net.drop_carried(relay, true);
    }
    let used = talk(&mut it, (a, b), 600, 20);
    assert!(used.len() <= 8, "{used:?}");
    // One that carries again is found.
    let relay = it.relays[0];
    it.net.drop_carried(relay, false);
    let before = arrived(&it, b);
    talk(&mut it, (a, b), 1800, 20);
    assert!(arrived(&it, b) > before);
}
