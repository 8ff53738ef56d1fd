//! What hosts reported to this lighthouse, kept small: a lighthouse may know a million of them.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// Reported endpoints and relays per host. Learnt endpoints are not here: the tunnel to the host knows them.
#[derive(Debug, Default)]
pub(crate) struct Server {
    hosts: BTreeMap<IpAddr, Box<[u8]>>,
    /// Further overlay addresses of hosts that have several.
    aliases: BTreeMap<IpAddr, IpAddr>,
}

/// What a host said about itself.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Report {
    pub(crate) endpoints: Vec<SocketAddr>,
    pub(crate) relays: Vec<IpAddr>,
}

impl Server {
    /// Replaces the report of the host with these addresses (primary first).
    pub(crate) fn store(&mut self, host: &[IpAddr], report: &Report) {
        let Some((&primary, others)) = host.split_first() else { return };
        self.hosts.insert(primary, pack(report));
        for &alias in others {
            self.aliases.insert(alias, primary);
        }
    }

    /// What the host with this address reported.
    pub(crate) fn report(&self, subject: IpAddr) -> Option<Report> {
        let primary = self.aliases.get(&subject).unwrap_or(&subject);
        self.hosts.get(primary).map(|packed| unpack(packed))
    }

    /// Addresses under which a report is found.
    pub(crate) fn len(&self) -> usize {
        self.hosts.len() + self.aliases.len()
    }

    /// Drops a host whose last tunnel is gone.
    pub(crate) fn forget(&mut self, host: &[IpAddr]) {
        let Some((primary, others)) = host.split_first() else { return };
        self.hosts.remove(primary);
        for alias in others {
            if self.aliases.get(alias) == Some(primary) {
                self.aliases.remove(alias);
            }
        }
    }
}

// A tag byte, then the address and, for an endpoint, its port.
const ENDPOINT_V4: u8 = 0;
const ENDPOINT_V6: u8 = 1;
const RELAY_V4: u8 = 2;
const RELAY_V6: u8 = 3;

fn pack(report: &Report) -> Box<[u8]> {
    let mut packed = Vec::with_capacity(7 * report.endpoints.len() + 5 * report.relays.len());
    for endpoint in &report.endpoints {
        push_address(&mut packed, endpoint.ip(), ENDPOINT_V4, ENDPOINT_V6);
        packed.extend(endpoint.port().to_be_bytes());
    }
    for &relay in &report.relays {
        push_address(&mut packed, relay, RELAY_V4, RELAY_V6);
    }
    packed.into_boxed_slice()
}

fn push_address(packed: &mut Vec<u8>, address: IpAddr, tag_v4: u8, tag_v6: u8) {
    match address {
        IpAddr::V4(v4) => {
            packed.push(tag_v4);
            packed.extend(v4.octets());
        }
        IpAddr::V6(v6) => {
            packed.push(tag_v6);
            packed.extend(v6.octets());
        }
    }
}

fn unpack(mut packed: &[u8]) -> Report {
    let mut report = Report::default();
    while let Some((&tag, rest)) = packed.split_first() {
        let (address, rest) = match tag {
            ENDPOINT_V4 | RELAY_V4 => {
                let Some((octets, rest)) = rest.split_first_chunk::<4>() else { break };
                (IpAddr::V4(Ipv4Addr::from(*octets)), rest)
            }
            _ => {
                let Some((octets, rest)) = rest.split_first_chunk::<16>() else { break };
                (IpAddr::V6(Ipv6Addr::from(*octets)), rest)
            }
        };
        packed = rest;
        if matches!(tag, RELAY_V4 | RELAY_V6) {
            report.relays.push(address);
            continue;
        }
        let Some((port, rest)) = packed.split_first_chunk::<2>() else { break };
        report.endpoints.push(SocketAddr::new(address, u16::from_be_bytes(*port)));
        packed = rest;
    }
    report
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> Report {
        Report {
            endpoints: vec!["203.0.113.1:4242".parse().unwrap(), "[2001:db8::1]:65535".parse().unwrap()],
            relays: vec!["10.42.0.9".parse().unwrap(), "fd00::9".parse().unwrap()],
        }
    }

    #[test]
    fn a_report_is_found_under_every_address_of_its_host() {
        let host: [IpAddr; 2] = ["10.42.0.2".parse().unwrap(), "fd00::2".parse().unwrap()];
        let mut server = Server::default();
        server.store(&host, &report());
        assert_eq!(server.report(host[0]), Some(report()));
        assert_eq!(server.report(host[1]), Some(report()));
        assert_eq!(server.report("10.42.0.3".parse().unwrap()), None);
        server.forget(&host);
        assert_eq!(server.report(host[0]), None);
        assert_eq!(server.report(host[1]), None);
    }

    #[test]
    fn a_new_report_replaces_the_old_one() {
        let host: [IpAddr; 1] = ["10.42.0.2".parse().unwrap()];
        let mut server = Server::default();
        server.store(&host, &report());
        server.store(&host, &Report::default());
        assert_eq!(server.report(host[0]), Some(Report::default()));
    }

    #[test]
    fn an_ordinary_host_takes_few_bytes() {
        let endpoints = vec!["203.0.113.1:4242".parse().unwrap(), "192.168.1.2:4242".parse().unwrap()];
        assert_eq!(pack(&Report { endpoints, relays: Vec::new() }).len(), 14);
    }
}
