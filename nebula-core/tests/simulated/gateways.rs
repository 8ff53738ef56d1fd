//! Several gateways of one network: which of them take flows, when one is given up and when it takes flows again.

use crate::packets;

use std::net::{IpAddr, SocketAddr};
use std::num::NonZeroU32;
use std::time::Duration;

use nebula_core::config::{Gateway, SubnetRoute};
use nebula_core::firewall::{Cidr, Rule};
use nebula_core::simulator::{HostId, HostSpec, Link, SimNet};
use nebula_core::{Event, GatewayState};

const SECOND: Duration = Duration::from_secs(1);
const STEP: Duration = Duration::from_millis(50);
const NETWORKS: [&str; 2] = ["192.168.7.0/24", "fd07::/64"];
const MACHINES: [&str; 2] = ["192.168.7.9", "fd07::9"];

fn at(text: &str) -> IpAddr {
    text.parse().expect("an address")
}

fn endpoint(text: &str) -> SocketAddr {
    text.parse().expect("an endpoint")
}

/// A client and its gateways. What the gateways receive is answered.
struct Site {
    net: SimNet,
    client: HostId,
    gateways: Vec<HostId>,
    /// The machine behind them that the client talks to.
    machine: IpAddr,
}

impl Site {
    /// A gateway for each pair of weight and priority, all with a tunnel.
    fn new(seed: u64, gateways: &[(u32, u32)]) -> Self {
        let mut site = Self::unconnected(seed, gateways, false);
        for gateway in site.gateways.clone() {
            site.net.ping(site.client, gateway).until_delivered();
        }
        site
    }

    fn unconnected(seed: u64, gateways: &[(u32, u32)], is_v6: bool) -> Self {
        Self::with(seed, gateways, is_v6, |_, spec| spec)
    }

    /// `change` gets the number of each gateway, and 0 for the client.
    fn with(seed: u64, gateways: &[(u32, u32)], is_v6: bool, change: impl Fn(usize, HostSpec) -> HostSpec) -> Self {
        let mut net = SimNet::new(seed);
        let (network, machine) = (NETWORKS[usize::from(is_v6)], MACHINES[usize::from(is_v6)]);
        let added = (1..=gateways.len()).map(|number| {
            let open = Rule { local_cidr: Some(Cidr::Any), ..Rule::any() };
            let spec = HostSpec::new(&format!("g{number}")).unsafe_networks(&[network]);
            let v6 = [format!("fd42::{number}/64")];
            let spec = if is_v6 { spec.networks(&[&v6[0]]) } else { spec };
            let spec = spec.config(move |config| {
                config.firewall.inbound = vec![open.clone()];
                config.firewall.outbound = vec![open];
            });
            net.add(change(number, spec))
        });
        let added: Vec<_> = added.collect();
        let via = added.iter().zip(gateways).map(|(host, (weight, priority))| {
            Gateway::new(net.overlay(*host))
                .weighing(NonZeroU32::new(*weight).expect("a weight"))
                .with_priority(*priority)
        });
        let route = SubnetRoute::new(network.parse().expect("a network"), via.collect());
        let spec = HostSpec::new("client").config(move |config| config.subnets = vec![route]);
        let spec = if is_v6 { spec.networks(&["fd42::99/64"]) } else { spec };
        let client = net.add(change(0, added.iter().fold(spec, |spec, host| spec.knows(*host))));
        Self { net, client, gateways: added, machine: at(machine) }
    }

    /// Sends a packet of the flow from this port, and lets what received it answer. Returns the number of the gateway
    /// that it came by.
    fn exchange(&mut self, port: u16) -> Option<usize> {
        let before = self.received();
        let own = self.net.overlay(self.client);
        let _verdict = self.net.send_packet(self.client, &packets::udp(own, self.machine, (port, 53), b"query"));
        self.net.run_for(STEP);
        let number = self.received().iter().zip(before).position(|(now, before)| *now > before)?;
        let answer = packets::udp(self.machine, own, (53, port), b"answer");
        let _verdict = self.net.send_packet(self.gateways[number], &answer);
        self.net.run_for(STEP);
        Some(number)
    }

    fn received(&self) -> Vec<usize> {
        self.gateways.iter().map(|gateway| self.net.payloads(*gateway, 53).len()).collect()
    }

    /// Exchanges packets of a flow for a time. Returns when the first one came through again, and which gateways took
    /// packets in the end.
    fn exchange_for(&mut self, time: Duration, port: u16) -> (Option<Duration>, Vec<usize>) {
        let (start, mut first, mut by) = (self.net.elapsed(), None, Vec::new());
        while self.net.elapsed() < start + time {
            if let Some(number) = self.exchange(port) {
                first = first.or_else(|| Some(self.net.elapsed() - start));
                if by.last() != Some(&number) {
                    by.push(number);
                }
            }
        }
        (first, by)
    }

    /// A flow that takes this gateway.
    fn flow_of(&mut self, number: usize, from: u16) -> u16 {
        (from..from + 200).find(|port| self.exchange(*port) == Some(number)).expect("a flow by each gateway")
    }

    fn flow_of_first(&mut self) -> u16 {
        self.flow_of(0, 2000)
    }

    fn state(&mut self, number: usize) -> GatewayState {
        let address = self.net.overlay(self.gateways[number]);
        let all = self.net.control(self.client, |node, _| node.gateways(100));
        all.iter().find(|status| status.gateway.address == address).expect("it is a gateway").state
    }

    /// How often this gateway was found dead.
    fn deaths(&self, number: usize) -> usize {
        let of = self.net.overlay(self.gateways[number]);
        let is_death = |event: &&Event| {
            matches!(event, Event::Gateway { address, state: GatewayState::Dead, before, .. }
                if *address == of && before.takes_flows())
        };
        self.net.events(self.client).iter().filter(is_death).count()
    }
}

#[test]
fn flows_of_a_killed_gateway_go_on_by_another_in_less_than_two_seconds() {
    for is_v6 in [false, true] {
        for seed in 0..8 {
            let mut site = Site::unconnected(100 + seed, &[(1, 0), (1, 0)], is_v6);
            let port = site.flow_of_first();
            assert_eq!(site.exchange_for(SECOND, port).1, [0]);
            site.net.kill(site.gateways[0]);
            let (first, by) = site.exchange_for(3 * SECOND, port);
            assert!(first.is_some_and(|first| first < 3 * SECOND / 2), "{first:?}\n{}", site.net.diagram());
            assert_eq!((by, site.state(0)), (vec![1], GatewayState::Dead));
        }
    }
}

#[test]
fn a_flow_that_begins_while_all_was_quiet_moves_within_two_seconds_too() {
    let mut site = Site::new(1, &[(1, 0), (1, 0)]);
    let port = site.flow_of_first();
    site.net.run_for(3 * SECOND);
    site.net.kill(site.gateways[0]);
    site.net.run_for(3 * SECOND);
    let (first, _) = site.exchange_for(3 * SECOND, port);
    assert!(first.is_some_and(|first| first < 2 * SECOND), "{first:?}\n{}", site.net.diagram());
}

#[test]
fn a_gateway_that_dies_is_found_even_if_what_it_left_unanswered_is_not_repeated_soon() {
    for phase in 0..5 {
        let mut site = Site::new(20, &[(1, 0), (1, 0)]);
        let port = site.flow_of_first();
        site.net.run_for(phase * STEP);
        assert_eq!(site.exchange(port), Some(0));
        site.net.kill(site.gateways[0]);
        assert_eq!(site.exchange(port), None, "it is not known yet");
        // A TCP sender would be silent from 0.6 to 1.4 s after the last answer.
        site.net.run_for(SECOND * 13 / 10);
        assert_eq!(site.state(0), GatewayState::Dead, "{phase}: {}", site.net.diagram());
        assert_eq!(site.exchange(port), Some(1));
    }
}

#[test]
fn flows_do_not_wait_for_the_other_path_of_a_gateway_whose_path_in_use_dies() {
    let second = |number: usize| format!("203.0.113.{}:4242", number + 100);
    let mut site = Site::with(4, &[(1, 0), (1, 0)], false, |number, spec| {
        spec.also_at(&[&second(number)]).config(|config| config.measure_paths = true)
    });
    let gateway = site.gateways[0];
    let path = |site: &Site| {
        let used = site.net.endpoint_of(site.client, gateway).expect("a direct tunnel");
        let own =
            if used == site.net.underlay(gateway) { site.net.underlay(site.client) } else { endpoint(&second(0)) };
        (own, used)
    };
    let slow = Link { latency: Duration::from_millis(30), ..Link::default() };
    site.net.set_path(endpoint(&second(0)), endpoint(&second(1)), slow);
    let port = site.flow_of_first();
    site.net.introduce(site.client, gateway);
    // As if there were some hundred packets a second, so that the paths are probed often.
    let busy = |site: &mut Site, time: Duration| {
        let (start, mut first, mut by) = (site.net.elapsed(), None, Vec::new());
        while site.net.elapsed() < start + time {
            for (from, to) in [(site.client, gateway), (gateway, site.client)] {
                site.net.spend_counters(from, to, 100);
            }
            if let Some(number) = site.exchange(port) {
                first = first.or_else(|| Some(site.net.elapsed() - start));
                by.push(number);
            }
        }
        by.dedup();
        (first, by)
    };
    assert_eq!(busy(&mut site, 20 * SECOND).1, [0]);
    let (own, used) = path(&site);
    assert_eq!(used, site.net.underlay(gateway), "{}", site.net.diagram());
    site.net.set_path(own, used, Link { loss: 100, ..Link::default() });
    let (first, by) = busy(&mut site, 2 * SECOND);
    assert!(first.is_some_and(|first| first < 3 * SECOND / 2), "{first:?}\n{}", site.net.diagram());
    assert_eq!(by, [1], "{}", site.net.diagram());
    // The tunnel moves to the other path, so the gateway takes flows again.
    site.exchange_for(30 * SECOND, port);
    assert_eq!((path(&site).1, site.state(0)), (endpoint(&second(1)), GatewayState::Healthy), "{}", site.net.diagram());
}

#[test]
fn a_gateway_that_closes_its_tunnels_is_left_at_once() {
    let mut site = Site::new(2, &[(1, 0), (1, 0)]);
    let port = site.flow_of_first();
    site.net.stop(site.gateways[0]);
    site.net.run_for(STEP);
    assert_eq!(site.exchange(port), Some(1), "{}", site.net.diagram());
    assert_eq!(site.state(0), GatewayState::Dead);
}

#[test]
fn a_moved_flow_stays_and_new_flows_take_the_gateway_that_is_back() {
    let mut site = Site::new(3, &[(1, 0), (1, 0)]);
    let moved = site.flow_of_first();
    let own = site.flow_of(1, 2000);
    site.net.cut(site.client, site.gateways[0]);
    assert_eq!(site.exchange_for(3 * SECOND, moved).1, [1]);
    site.net.heal(site.client, site.gateways[0]);
    for _ in 0..30 {
        assert_eq!((site.exchange_for(SECOND, moved).1, site.exchange(own)), (vec![1], Some(1)));
    }
    assert_eq!(site.state(0), GatewayState::Healthy);
    site.flow_of(0, 4000);
    // With its own gateway alive, a moved flow returns only when the other one dies.
    site.net.cut(site.client, site.gateways[1]);
    assert_eq!(site.exchange_for(3 * SECOND, moved).1, [0]);
    site.net.heal(site.client, site.gateways[1]);
    assert_eq!(site.exchange_for(30 * SECOND, moved).1, [0]);
}

#[test]
fn a_gateway_is_used_again_only_after_it_was_healthy_for_a_while() {
    let mut site = Site::new(4, &[(1, 0), (1, 0)]);
    let port = site.flow_of_first();
    site.net.cut(site.client, site.gateways[0]);
    site.exchange_for(3 * SECOND, port);
    site.net.heal(site.client, site.gateways[0]);
    let healed = site.net.elapsed();
    while site.state(0) != GatewayState::Returning {
        site.exchange(port);
    }
    while site.state(0) == GatewayState::Returning {
        let new_flow = 5000 + (site.net.elapsed().as_millis() / 100) as u16;
        assert_eq!(site.exchange(new_flow), Some(1), "not yet");
    }
    let took = site.net.elapsed() - healed;
    assert!((5 * SECOND..15 * SECOND).contains(&took), "{took:?}");
}

#[test]
fn a_gateway_that_comes_and_goes_takes_flows_ever_more_seldom() {
    let mut site = Site::new(5, &[(1, 0), (1, 0)]);
    let port = site.flow_of_first();
    // 15 seconds there, 5 seconds away, for ten minutes.
    for _ in 0..30 {
        site.net.cut(site.client, site.gateways[0]);
        site.exchange_for(5 * SECOND, port);
        site.net.heal(site.client, site.gateways[0]);
        for new_flow in 0..15 {
            site.exchange_for(SECOND / 2, 3000 + new_flow);
            assert_eq!(site.exchange_for(SECOND / 2, port).1, [1], "a moved flow stays");
        }
    }
    let deaths = site.deaths(0);
    assert!((1..=4).contains(&deaths), "{deaths} times in ten minutes");
    // In the end it is reliable again.
    for _ in 0..400 {
        site.net.run_for(SECOND);
    }
    assert_eq!(site.state(0), GatewayState::Healthy);
}

#[test]
fn many_flows_are_shared_by_weight_also_without_one_of_the_gateways() {
    let mut site = Site::new(6, &[(1, 0), (2, 0), (3, 0)]);
    let own = site.net.overlay(site.client);
    let spread = |site: &mut Site, from: u16| {
        let before = site.received();
        for port in from..from + 12_000 {
            let _verdict = site.net.send_packet(site.client, &packets::udp(own, site.machine, (port, 53), b"query"));
            if port % 100 == 0 {
                site.net.run_for(Duration::from_millis(1));
            }
        }
        site.net.run_for(SECOND);
        site.received().iter().zip(before).map(|(now, before)| now - before).collect::<Vec<_>>()
    };
    let near = |found: usize, expected: usize| found.abs_diff(expected) <= expected / 20;
    let all = spread(&mut site, 10_000);
    assert!(near(all[0], 2000) && near(all[1], 4000) && near(all[2], 6000), "{all:?}");
    site.net.kill(site.gateways[2]);
    let port = (2000..3000).find(|port| site.exchange(*port).is_none()).expect("a flow of the killed one");
    site.exchange_for(2 * SECOND, port);
    let rest = spread(&mut site, 30_000);
    assert!(near(rest[0], 4000) && near(rest[1], 8000) && rest[2] == 0, "{rest:?}");
}

#[test]
fn the_gateways_of_the_best_priority_take_all_flows_as_long_as_one_of_them_answers() {
    let mut site = Site::new(7, &[(1, 20), (1, 10), (1, 10)]);
    let by = |site: &mut Site| {
        let taken = (2000..2040).filter_map(|port| site.exchange(port)).collect::<std::collections::BTreeSet<_>>();
        taken.into_iter().collect::<Vec<_>>()
    };
    assert_eq!(by(&mut site), [1, 2]);
    site.net.cut(site.client, site.gateways[1]);
    site.exchange_for(3 * SECOND, 2000);
    assert!(by(&mut site).contains(&2));
    by(&mut site);
    assert_eq!(by(&mut site), [2]);
    site.net.cut(site.client, site.gateways[2]);
    site.exchange_for(3 * SECOND, 2000);
    assert_eq!(by(&mut site), [0]);
    // A better priority takes its flows back, once it was healthy for a while.
    site.net.heal(site.client, site.gateways[2]);
    assert_eq!(site.exchange_for(SECOND, 2000).1, [0]);
    site.exchange_for(40 * SECOND, 2000);
    assert_eq!(by(&mut site), [2]);
}

#[test]
fn with_all_gateways_dead_the_first_that_is_back_takes_all_flows_at_once() {
    let mut site = Site::new(8, &[(1, 0), (1, 0)]);
    let ports = [site.flow_of(0, 2000), site.flow_of(1, 2000)];
    for gateway in site.gateways.clone() {
        site.net.cut(site.client, gateway);
    }
    for _ in 0..60 {
        for port in ports {
            site.exchange(port);
        }
        site.net.run_for(SECOND);
    }
    assert_eq!((site.state(0), site.state(1)), (GatewayState::Dead, GatewayState::Dead));
    site.net.heal(site.client, site.gateways[1]);
    for port in ports {
        let (first, by) = site.exchange_for(3 * SECOND, port);
        assert_eq!(by, [1], "{}", site.net.diagram());
        assert!(first.is_some_and(|first| first < 5 * SECOND / 2), "{first:?}");
    }
}

#[test]
fn a_gateway_without_a_tunnel_is_called_before_another_priority_is_used() {
    let mut site = Site::unconnected(9, &[(1, 0), (1, 1)], false);
    site.net.ping(site.client, site.gateways[1]).until_delivered();
    assert_eq!(site.exchange(2000), Some(0), "it waits for the handshake");
    let mut site = Site::unconnected(10, &[(1, 0), (1, 1)], false);
    site.net.cut(site.client, site.gateways[0]);
    let (first, by) = site.exchange_for(3 * SECOND, 2000);
    assert!(first.is_some_and(|first| first < 2 * SECOND), "{first:?}");
    assert_eq!(by, [1]);
    // The packets that waited meanwhile are not lost.
    let sent = site.net.payloads(site.gateways[1], 53).len();
    assert!(sent >= 28, "{sent}");
}

#[test]
fn a_one_sided_stream_moves_no_flow_and_costs_few_probes() {
    let mut site = Site::new(11, &[(1, 0), (1, 0)]);
    let own = site.net.overlay(site.client);
    let before = site.net.counter(site.client, "test_requests_out");
    for _ in 0..2000 {
        let _verdict = site.net.send_packet(site.client, &packets::udp(own, site.machine, (2000, 53), b"stream"));
        site.net.run_for(Duration::from_millis(10));
    }
    assert_eq!((site.deaths(0), site.deaths(1)), (0, 0));
    let probes = site.net.counter(site.client, "test_requests_out") - before;
    assert!((1..=50).contains(&probes), "{probes} in 20 seconds");
    assert_eq!(site.received().iter().filter(|received| **received == 2000).count(), 1);
}

#[test]
fn idle_gateways_and_those_without_an_alternative_are_not_probed() {
    for gateways in [&[(1, 0), (1, 0)][..], &[(1, 0)]] {
        let mut site = Site::new(12, gateways);
        site.net.run_for(10 * SECOND);
        let before = site.net.counter(site.client, "test_requests_out");
        site.net.run_for(60 * SECOND);
        assert_eq!(site.net.counter(site.client, "test_requests_out"), before);
    }
    let mut site = Site::new(13, &[(1, 0)]);
    assert_eq!(site.state(0), GatewayState::Healthy);
    site.net.kill(site.gateways[0]);
    site.exchange_for(3 * SECOND, 2000);
    assert_eq!(site.net.counter(site.client, "test_requests_out"), 0);
}

#[test]
fn what_is_known_of_a_gateway_survives_a_change_of_routes() {
    let mut site = Site::new(14, &[(1, 0), (1, 0)]);
    let port = site.flow_of_first();
    site.net.cut(site.client, site.gateways[0]);
    site.exchange_for(3 * SECOND, port);
    site.net.control(site.client, |node, now| {
        node.reconfigure(now, |config| {
            let more =
                SubnetRoute::new("172.16.0.0/12".parse().expect("a network"), config.subnets[0].gateways.clone());
            config.subnets.push(more);
        })
    });
    assert_eq!((site.state(0), site.exchange(port)), (GatewayState::Dead, Some(1)));
}
