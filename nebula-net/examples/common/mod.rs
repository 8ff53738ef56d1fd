//! A CA and the configurations of hosts that know each other's endpoints.

use std::error::Error;
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};

use nebula_cert::{CaPool, Curve, Identity, PrivateKey, SigningKey, Template};
use nebula_core::Config;
use nebula_core::firewall::Rule;

/// Seconds since the Unix epoch in which everything here is valid.
const VALIDITY: std::ops::RangeInclusive<nebula_cert::UnixTime> = 1_700_000_000..=2_000_000_000;

/// As [`named`], for hosts named `host-1`, `host-2` and so on.
pub(crate) fn hosts<const COUNT: usize>() -> Result<[(UdpSocket, Config); COUNT], Box<dyn Error>> {
    let names: [_; COUNT] = std::array::from_fn(|at| format!("host-{}", at + 1));
    named(names.each_ref().map(String::as_str))
}

/// Sockets on loopback and configurations for hosts with these names and the addresses 10.42.0.NUMBER and
/// fd42::NUMBER, in the group `example`. They know each other and allow everything. Each may be a gateway to
/// 172.20.NUMBER.0/24.
pub(crate) fn named<const COUNT: usize>(names: [&str; COUNT]) -> Result<[(UdpSocket, Config); COUNT], Box<dyn Error>> {
    let key = SigningKey::generate(Curve::Curve25519)?;
    let authority =
        Template { public_key: key.public_key(), ..Template::new("example CA", VALIDITY) }.self_sign(&key)?;
    let sockets = (0..COUNT).map(|_| UdpSocket::bind("127.0.0.1:0")).collect::<Result<Vec<_>, _>>()?;
    let endpoints = sockets.iter().map(UdpSocket::local_addr).collect::<Result<Vec<SocketAddr>, _>>()?;
    let mut hosts = Vec::new();
    for ((number, socket), name) in (1..).zip(sockets).zip(names) {
        let host_key = PrivateKey::generate(Curve::Curve25519)?;
        let template = Template {
            networks: vec![format!("{}/16", overlay(number)).parse()?, format!("fd42::{number}/64").parse()?],
            unsafe_networks: vec![format!("172.20.{number}.0/24").parse()?],
            groups: vec!["example".to_owned()],
            public_key: host_key.public_key(),
            ..Template::new(name, VALIDITY)
        };
        let identity = Identity::new(vec![template.sign(&authority, &key)?], host_key)?;
        let mut trust = CaPool::new();
        trust.add(authority.clone())?;
        let mut config = Config::new(identity, trust);
        for (other, endpoint) in (1..).zip(&endpoints).filter(|(other, _)| *other != number) {
            config.static_hosts.insert(overlay(other).into(), vec![*endpoint]);
            config.static_hosts.insert(format!("fd42::{other}").parse()?, vec![*endpoint]);
        }
        config.firewall.outbound.push(Rule::any());
        config.firewall.inbound.push(Rule::any());
        hosts.push((socket, config));
    }
    hosts.try_into().map_err(|_| "one host for each socket".into())
}

/// Overlay address of a host.
pub(crate) fn overlay(number: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 42, 0, number)
}
