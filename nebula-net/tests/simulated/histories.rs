//! Streams through random histories: links, moves, cuts, new tunnels, sleep.
//!
//! `RANDOM_HISTORIES=10000` runs that many seeds, `RANDOM_HISTORY_SEED=42` one of them. A failure prints the seed.

use std::time::Duration;

use nebula_cert::Version;
use nebula_core::simulator::{HostSpec, Link, SimNet};
use nebula_net::stack::StackOptions;

use crate::world::World;

const SEEDS: u64 = 100;
const STEPS: usize = 12;

/// Numbers that differ by seed (SplitMix64).
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ mixed >> 31) % sides
    }

    fn millis(&mut self, most: u64) -> Duration {
        Duration::from_millis(self.roll(most))
    }
}

fn run(seed: u64) -> (Duration, usize) {
    let mut dice = Dice(seed);
    let mut net = SimNet::new(seed);
    let relay = net.add(HostSpec::new("relay").am_lighthouse().config(|config| config.relay.am_relay = true));
    let at = net.overlay(relay);
    let hosts = ["a", "b"].map(|name| {
        let spec = HostSpec::new(name).lighthouse(relay).config(move |config| config.relay.relays = vec![at]);
        net.add(spec.config(|config| config.path_mtu = Some(1300)))
    });
    net.run_for(Duration::from_secs(1));
    let mut world = World::new(net);
    let addresses = ["10.42.0.2", "10.42.0.3"];
    for (host, address) in hosts.into_iter().zip(addresses) {
        world.node(host, &[address], StackOptions::default());
    }
    for number in 0..STEPS {
        let (x, byte) = (dice.roll(2) as usize, number as u8 + 1);
        match dice.roll(9) {
            0..=1 => _ = world.dial(x, 1 - x, addresses[1 - x], [dice.roll(1 << 19), dice.roll(1 << 19)]),
            2 => {
                let (loss, duplicate) = (dice.roll(15) as u32, dice.roll(20) as u32);
                world.net.set_link(Link { loss, duplicate, jitter: dice.millis(30), ..Link::default() });
            }
            3 => world.net.set_link(Link::carrying(1300 + dice.roll(200) as usize)),
            4 => world.net.roam_to(hosts[x], &format!("192.0.2.{}:{}", 100 * (x as u8) + byte, 1000 + dice.roll(9))),
            5 => world.net.cut(hosts[0], hosts[1]),
            6 => world.net.heal(hosts[0], hosts[1]),
            7 => world.net.control(hosts[x], |node, now| node.close_all(now)),
            _ => {
                let identity = world.net.renewed_identity(hosts[x], &[Version::V2]);
                world.net.control(hosts[x], |node, now| node.reconfigure(now, |config| config.identity = identity));
            }
        }
        let most = if dice.roll(3) == 0 { 5000 } else { 100 };
        world.run_for(dice.millis(most));
    }
    world.net.heal(hosts[0], hosts[1]);
    world.net.set_link(Link::default());
    // Until hosts that moved without a word have told the lighthouse where they are.
    world.run_for(Duration::from_secs(70));
    world.dial(0, 1, addresses[1], [1 << 18; 2]);
    world.expect_all_that_began(Duration::from_secs(180))
}

#[test]
fn every_byte_arrives_after_any_history() {
    let number = |name: &str| std::env::var(name).ok().map(|text| text.parse::<u64>().expect("a number"));
    let seeds = match number("RANDOM_HISTORY_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number("RANDOM_HISTORIES").unwrap_or(SEEDS),
    };
    let (mut slowest, mut streams) = ((Duration::ZERO, 0), 0);
    for seed in seeds {
        println!("RANDOM_HISTORY_SEED={seed}");
        let (took, began) = run(seed);
        assert!(began > 0, "the last dial is made after all is well again");
        slowest = slowest.max((took, seed));
        streams += began;
    }
    println!("all {streams} streams were over at most {:?} after the last change (seed {})", slowest.0, slowest.1);
}
