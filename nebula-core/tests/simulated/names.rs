//! Hosts whose certificates have the same name.

use std::net::IpAddr;
use std::time::Duration;

use nebula_core::simulator::{HostId, HostSpec, SimNet};

const SECOND: Duration = Duration::from_secs(1);

/// The addresses of the peers that `name` stands for at `host`.
fn holders(net: &SimNet, host: HostId, name: &str) -> Vec<IpAddr> {
    let named = net.tunnels(host).into_iter().filter(|tunnel| tunnel.name.eq_ignore_ascii_case(name));
    let mut addresses: Vec<_> = named.filter(|tunnel| tunnel.holds_name).flat_map(|tunnel| tunnel.peer).collect();
    addresses.dedup();
    addresses
}

#[test]
fn a_name_stands_for_the_host_that_showed_it_first_also_while_that_restarts() {
    let mut net = SimNet::new(1);
    let lighthouse = net.add(HostSpec::new("lighthouse").am_lighthouse());
    let first = net.add(HostSpec::new("db").lighthouse(lighthouse));
    net.run_for(2 * SECOND);
    let second = net.add(HostSpec::new("DB").lighthouse(lighthouse));
    net.run_for(2 * SECOND);
    assert_eq!(net.tunnels(lighthouse).len(), 2);
    assert_eq!(holders(&net, lighthouse, "db"), [net.overlay(first)]);
    net.stop(first);
    net.run_for(5 * SECOND);
    assert!(holders(&net, lighthouse, "db").is_empty(), "it may come back");
    // Its new tunnel is newer than that of the other one.
    net.restart(first);
    net.run_for(5 * SECOND);
    assert_eq!(holders(&net, lighthouse, "db"), [net.overlay(first)]);
    net.stop(first);
    net.run_for(60 * SECOND);
    net.ping(lighthouse, second).until_delivered();
    assert_eq!(holders(&net, lighthouse, "db"), [net.overlay(second)]);
}

#[test]
fn no_peer_gets_the_name_of_this_host() {
    let mut net = SimNet::new(2);
    let lighthouse = net.add(HostSpec::new("lighthouse").am_lighthouse());
    net.add(HostSpec::new("Lighthouse").lighthouse(lighthouse));
    net.run_for(2 * SECOND);
    assert_eq!(net.tunnels(lighthouse).len(), 1);
    assert!(holders(&net, lighthouse, "lighthouse").is_empty());
}
