//! Streams on paths that lose, reorder, change, end and are replaced.

use std::time::Duration;

use nebula_cert::Version;
use nebula_core::simulator::{HostId, HostSpec, Link, SimNet};
use nebula_net::stack::StackOptions;

use crate::world::{StreamId, World};

const SECOND: Duration = Duration::from_secs(1);
const MEGABYTE: u64 = 1 << 20;
const ADDRESSES: [&[&str]; 2] = [&["10.42.0.1", "fd42::1"], &["10.42.0.2", "fd42::2"]];

/// Hosts with addresses of both families that know each other, whose devices have an MTU of 1300, and who examine
/// their paths.
fn pair(seed: u64) -> (World, [HostId; 2]) {
    pair_that_examines(seed, Some(1300))
}

fn pair_that_examines(seed: u64, path_mtu: Option<u16>) -> (World, [HostId; 2]) {
    let mut net = SimNet::new(seed);
    let hosts =
        [("a", &["10.42.0.1/16", "fd42::1/64"]), ("b", &["10.42.0.2/16", "fd42::2/64"])].map(|(name, networks)| {
            net.add(HostSpec::new(name).networks(networks).config(move |config| config.path_mtu = path_mtu))
        });
    net.introduce(hosts[0], hosts[1]);
    net.introduce(hosts[1], hosts[0]);
    let mut world = World::new(net);
    for (host, addresses) in hosts.into_iter().zip(ADDRESSES) {
        world.node(host, addresses, StackOptions::default());
    }
    (world, hosts)
}

/// A stream with this many bytes in each direction, from the moment at which a tenth of it arrived.
fn begun(world: &mut World, address: &str, bytes: u64) -> StreamId {
    let stream = world.dial(0, 1, address, [bytes; 2]);
    let begun = move |world: &World| world.received(stream).iter().all(|received| *received > bytes / 10);
    world.expect("a tenth", 30 * SECOND, begun);
    stream
}

#[test]
fn megabytes_arrive_both_ways_over_either_family() {
    for address in ["10.42.0.2", "fd42::2"] {
        let (mut world, _) = pair(1);
        for _ in 0..3 {
            world.dial(0, 1, address, [2 * MEGABYTE; 2]);
        }
        let took = world.expect_all(60 * SECOND);
        assert!(took < 2 * SECOND, "{took:?}");
    }
}

#[test]
fn a_path_that_loses_reorders_and_duplicates_changes_no_byte() {
    let links = [
        Link { loss: 5, ..Link::default() },
        Link { jitter: Duration::from_millis(20), ..Link::default() },
        Link { duplicate: 30, ..Link::default() },
        Link { loss: 10, jitter: Duration::from_millis(30), duplicate: 20, ..Link::default() },
    ];
    for (seed, link) in (1..).zip(links) {
        for address in ["10.42.0.2", "fd42::2"] {
            let (mut world, _) = pair(seed);
            world.net.set_link(link);
            world.dial(0, 1, address, [MEGABYTE; 2]);
            world.expect_all(120 * SECOND);
        }
    }
}

/// Longest time without an arrival at the end that accepted, while so many megabytes arrive.
fn longest_pause(world: &mut World, stream: StreamId, megabytes: u64) -> Duration {
    let (mut longest, end) = (Duration::ZERO, world.received(stream)[1] + megabytes * MEGABYTE);
    while world.received(stream)[1] < end {
        let before = world.received(stream)[1];
        longest = longest.max(world.expect("an arrival", 60 * SECOND, |world| world.received(stream)[1] > before));
    }
    longest
}

#[test]
fn a_path_that_shrinks_under_a_stream_interrupts_it_until_it_is_noticed() {
    for (seed, address) in [(1, "10.42.0.2"), (2, "fd42::2")] {
        let (mut world, _) = pair(seed);
        world.net.set_link(Link::carrying(1500));
        let stream = begun(&mut world, address, 4 * MEGABYTE);
        world.net.set_link(Link::carrying(1345));
        let pause = longest_pause(&mut world, stream, 1);
        // The tunnel notices within three seconds; nothing waits for the next timeout then.
        assert!(pause < 3500 * SECOND / 1000, "{pause:?}");
        world.expect_all(60 * SECOND);
    }
}

#[test]
fn a_path_that_shrinks_interrupts_a_stream_for_a_second_even_if_nobody_examines_it() {
    for (seed, address) in [(1, "10.42.0.2"), (2, "fd42::2")] {
        let (mut world, _) = pair_that_examines(seed, None);
        world.net.set_link(Link::carrying(1500));
        let stream = begun(&mut world, address, 4 * MEGABYTE);
        world.net.set_link(Link::carrying(1200));
        let pause = longest_pause(&mut world, stream, 1);
        assert!(pause < 1500 * SECOND / 1000, "{pause:?}");
        world.net.set_link(Link::carrying(1500));
        world.expect_all(60 * SECOND);
    }
}

#[test]
fn a_stream_survives_a_path_that_shrinks_and_grows() {
    for (seed, address) in [(1, "10.42.0.2"), (2, "fd42::2")] {
        let (mut world, _) = pair(seed);
        world.net.set_link(Link::carrying(1500));
        world.dial(0, 1, address, [8 * MEGABYTE; 2]);
        for path in [1360, 1350, 1340, 1500, 1345] {
            world.run_for(SECOND / 20);
            world.net.set_link(Link::carrying(path));
        }
        let took = world.expect_all(60 * SECOND);
        assert!(took < 20 * SECOND, "{took:?}");
    }
}

#[test]
fn a_host_that_roams_loses_no_stream() {
    let (mut world, [a, b]) = pair(3);
    let stream = begun(&mut world, "10.42.0.2", 4 * MEGABYTE);
    world.net.move_to(b, "198.51.100.99:999");
    let arrived = world.received(stream)[1] + MEGABYTE;
    world.expect("data after the peer moved", 5 * SECOND, |world| world.received(stream)[1] > arrived);
    world.net.roam_to(a, "198.51.100.98:998");
    world.expect_all(5 * SECOND);
}

#[test]
fn both_hosts_may_roam_at_once_if_a_lighthouse_knows_them() {
    let mut net = SimNet::new(4);
    let lighthouse = net.add(HostSpec::new("lighthouse").am_lighthouse());
    let hosts = ["a", "b"].map(|name| net.add(HostSpec::new(name).lighthouse(lighthouse)));
    net.run_for(SECOND);
    let mut world = World::new(net);
    for (host, address) in hosts.into_iter().zip(["10.42.0.2", "10.42.0.3"]) {
        world.node(host, &[address], StackOptions::default());
    }
    begun(&mut world, "10.42.0.3", 4 * MEGABYTE);
    world.net.roam_to(hosts[0], "198.51.100.98:998");
    world.net.roam_to(hosts[1], "198.51.100.99:999");
    world.expect_all(60 * SECOND);
}

#[test]
fn a_stream_goes_through_a_relay_and_through_the_next_one_when_that_ends() {
    for (seed, clean) in [(5, true), (6, false)] {
        let mut net = SimNet::new(seed);
        let lighthouse = net.add(HostSpec::new("lighthouse").am_lighthouse());
        let relays = ["first", "second"].map(|name| {
            net.add(HostSpec::new(name).lighthouse(lighthouse).config(|config| config.relay.am_relay = true))
        });
        let at = relays.map(|relay| net.overlay(relay)).to_vec();
        let hosts = ["a", "b"].map(|name| {
            let relays = at.clone();
            net.add(HostSpec::new(name).lighthouse(lighthouse).config(|config| config.relay.relays = relays))
        });
        net.cut(hosts[0], hosts[1]);
        net.run_for(SECOND);
        let mut world = World::new(net);
        for (host, address) in hosts.into_iter().zip(["10.42.0.4", "10.42.0.5"]) {
            world.node(host, &[address], StackOptions::default());
        }
        begun(&mut world, "10.42.0.5", 4 * MEGABYTE);
        let tunnels = world.net.tunnels_to(hosts[0], hosts[1]);
        let used = tunnels.iter().find(|tunnel| tunnel.primary).and_then(|tunnel| tunnel.relay).expect("a relay");
        let used = relays[at.iter().position(|address| *address == used).expect("one of the two")];
        if clean {
            world.net.stop(used);
        } else {
            world.net.kill(used);
        }
        let took = world.expect_all(60 * SECOND);
        println!("through the second relay after {took:?}");
    }
}

#[test]
fn a_stream_moves_from_a_relay_to_a_direct_path_and_back() {
    let mut net = SimNet::new(7);
    let both = net.add(HostSpec::new("both").am_lighthouse().config(|config| config.relay.am_relay = true));
    let at = net.overlay(both);
    let hosts = ["a", "b"]
        .map(|name| net.add(HostSpec::new(name).lighthouse(both).config(move |config| config.relay.relays = vec![at])));
    net.cut(hosts[0], hosts[1]);
    net.run_for(SECOND);
    let mut world = World::new(net);
    for (host, address) in hosts.into_iter().zip(["10.42.0.2", "10.42.0.3"]) {
        world.node(host, &[address], StackOptions::default());
    }
    begun(&mut world, "10.42.0.3", 4 * MEGABYTE);
    world.net.heal(hosts[0], hosts[1]);
    world.expect_all(60 * SECOND);
    begun(&mut world, "10.42.0.3", 4 * MEGABYTE);
    world.net.cut(hosts[0], hosts[1]);
    world.expect_all(60 * SECOND);
}

#[test]
fn a_stream_outlives_its_tunnel() {
    let (mut world, [a, b]) = pair(8);
    let stream = begun(&mut world, "10.42.0.2", 8 * MEGABYTE);
    // Either side closes the tunnel and tells its peer.
    for host in [a, b] {
        world.net.control(host, |node, now| node.close_all(now));
        let arrived = world.received(stream)[1] + MEGABYTE / 2;
        world.expect("data in the next tunnel", 5 * SECOND, |world| world.received(stream)[1] > arrived);
    }
    // New certificates make new tunnels beside the old ones.
    for host in [a, b] {
        let identity = world.net.renewed_identity(host, &[Version::V2]);
        world.net.control(host, |node, now| node.reconfigure(now, |config| config.identity = identity));
        world.run_for(SECOND / 20);
    }
    world.expect_all(30 * SECOND);
}
