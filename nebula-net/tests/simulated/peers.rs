//! Peers that start again, sleep, or are gone.

use std::time::Duration;

use nebula_core::simulator::{HostId, SimNet};
use nebula_net::stack::StackOptions;
use nebula_net::tcp::{Error, Keepalive};

use crate::world::World;

const SECOND: Duration = Duration::from_secs(1);
const MEGABYTE: u64 = 1 << 20;

fn pair(seed: u64, options: StackOptions) -> (World, [HostId; 2]) {
    let mut net = SimNet::new(seed);
    let hosts = net.nodes(["a", "b"]);
    let mut world = World::new(net);
    for (host, address) in hosts.into_iter().zip(["10.42.0.1", "10.42.0.2"]) {
        world.node(host, &[address], options.clone());
    }
    (world, hosts)
}

#[test]
fn a_peer_that_starts_again_resets_the_stream_of_who_sends() {
    for (seed, wait) in [(1, SECOND / 20), (2, SECOND), (3, 10 * SECOND)] {
        let (mut world, [_, b]) = pair(seed, StackOptions::default());
        let stream = world.dial(0, 1, "10.42.0.2", [8 * MEGABYTE, 8 * MEGABYTE]);
        world.run_for(SECOND / 20);
        world.net.kill(b);
        world.run_for(wait);
        world.restart(1);
        let took = world.expect("an end", 30 * SECOND, |world| world.is_over(stream));
        assert_eq!(world.outcomes(stream)[0], Some(Err(Error::Reset)));
        println!("reset {took:?} after the restart, {wait:?} after the end");
        // And the next one goes through.
        let next = world.dial(0, 1, "10.42.0.2", [MEGABYTE; 2]);
        world.expect("the next stream", 30 * SECOND, |world| world.is_over(next));
        assert_eq!(world.outcomes(next), [Some(Ok(())); 2]);
    }
}

#[test]
fn who_only_reads_learns_by_keepalive_that_the_peer_started_again() {
    let mut options = StackOptions::default();
    options.tcp.keepalive = Some(Keepalive::after(10 * SECOND));
    let (mut world, _) = pair(4, options);
    let stream = world.dial(0, 1, "10.42.0.2", [0, 8 * MEGABYTE]);
    world.run_for(SECOND / 20);
    world.restart(1);
    let took = world.expect("an end", 60 * SECOND, |world| world.is_over(stream));
    assert_eq!(world.outcomes(stream)[0], Some(Err(Error::Reset)));
    println!("reset {took:?} after the restart");
}

#[test]
fn a_peer_that_sleeps_goes_on_with_the_stream() {
    for (seed, time) in [(5, SECOND), (6, 20 * SECOND), (7, 120 * SECOND)] {
        let (mut world, [_, b]) = pair(seed, StackOptions::default());
        world.dial(0, 1, "10.42.0.2", [8 * MEGABYTE, 8 * MEGABYTE]);
        world.run_for(SECOND / 20);
        world.net.suspend(b);
        world.run_for(time);
        world.net.resume(b);
        let took = world.expect_all(90 * SECOND);
        println!("over {took:?} after a sleep of {time:?}");
    }
}

#[test]
fn a_peer_that_is_gone_is_given_up() {
    let (mut world, [_, b]) = pair(8, StackOptions::default());
    let stream = world.dial(0, 1, "10.42.0.2", [8 * MEGABYTE, 0]);
    world.run_for(SECOND / 20);
    world.net.kill(b);
    let took = world.expect("an end", 1200 * SECOND, |world| world.outcomes(stream)[0].is_some());
    assert_eq!(world.outcomes(stream)[0], Some(Err(Error::TimedOut)));
    assert!(took > 300 * SECOND, "not before there was a chance: {took:?}");
}

#[test]
fn a_peer_that_is_gone_is_given_up_after_the_time_that_the_program_chose() {
    let probes = Keepalive { idle: 10 * SECOND, interval: 2 * SECOND, probes: 3 };
    for (seed, bytes, keepalive, user_timeout, expected) in [
        (11, [8 * MEGABYTE, 0], None, Some(20 * SECOND), 20 * SECOND),
        // Nothing waits for an acknowledgement.
        (12, [0, 8 * MEGABYTE], Some(probes), None, 16 * SECOND),
        (13, [0, 8 * MEGABYTE], Some(probes), Some(SECOND), 16 * SECOND),
    ] {
        let mut options = StackOptions::default();
        (options.tcp.keepalive, options.tcp.user_timeout) = (keepalive, user_timeout);
        let (mut world, [_, b]) = pair(seed, options);
        let stream = world.dial(0, 1, "10.42.0.2", bytes);
        world.run_for(SECOND / 20);
        world.net.kill(b);
        let took = world.expect("an end", 60 * SECOND, |world| world.outcomes(stream)[0].is_some());
        assert_eq!(world.outcomes(stream)[0], Some(Err(Error::TimedOut)));
        let difference = took.abs_diff(expected);
        assert!(difference < SECOND / 2, "{took:?} instead of {expected:?}");
    }
}

#[test]
fn a_closed_window_is_no_reason_to_give_a_peer_up() {
    let mut options = StackOptions::default();
    options.tcp.user_timeout = Some(5 * SECOND);
    let (mut world, _) = pair(14, options);
    let stream = world.dial(0, 1, "10.42.0.2", [8 * MEGABYTE, 0]);
    world.run_for(SECOND / 20);
    world.stop_reading(stream, 1);
    world.run_for(60 * SECOND);
    assert_eq!(world.outcomes(stream), [None, None]);
}

#[test]
fn a_connection_may_end_with_the_tunnel_of_its_peer() {
    let (mut world, [_, b]) = pair(15, StackOptions::default());
    world.ends_with_tunnel = true;
    let stream = world.dial(0, 1, "10.42.0.2", [8 * MEGABYTE, 0]);
    world.run_for(SECOND / 20);
    world.net.kill(b);
    let took = world.expect("an end", 60 * SECOND, |world| world.outcomes(stream)[0].is_some());
    assert_eq!(world.outcomes(stream)[0], Some(Err(Error::TimedOut)));
    println!("over {took:?} after the peer's end");
    assert!(took < 30 * SECOND, "{took:?}");
}

#[test]
fn a_host_that_does_not_answer_fails_the_dial() {
    let (mut world, [_, b]) = pair(9, StackOptions::default());
    world.net.kill(b);
    let stream = world.dial(0, 1, "10.42.0.2", [1, 1]);
    let took = world.expect("an end", 60 * SECOND, |world| world.outcomes(stream)[0].is_some());
    assert_eq!(world.outcomes(stream)[0], Some(Err(Error::Unreachable)));
    assert!(took < 30 * SECOND, "{took:?}");
}

#[test]
fn nothing_is_left_of_connections_a_minute_after_they_ended() {
    let (mut world, _) = pair(10, StackOptions::default());
    for round in 0..20 {
        world.dial(round % 2, (round + 1) % 2, ["10.42.0.2", "10.42.0.1"][round % 2], [10_000; 2]);
        world.run_for(SECOND / 10);
    }
    world.expect_all(10 * SECOND);
    assert!(world.connections() > 0, "some rest");
    world.run_for(61 * SECOND);
    assert_eq!(world.connections(), 0);
}
