//! Reports of hosts to this lighthouse, stored compactly: a lighthouse may know a million hosts.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use super::{KnownEndpoints, Notices, Wanted};

/// Reported endpoints and relays per host. Learnt endpoints are not stored here, since the tunnel to the host has them.
#[derive(Debug, Default)]
pub struct Server {
    /// By overlay address. Under the further addresses of a host, only its first address is stored. Iterated only to
    /// list all addresses, in no particular order.
    records: HashMap<Address, Record, BuildHasherDefault<AddressHasher>>,
    wanted: Wanted,
    notices: Notices,
}

impl Server {
    /// Replaces the report of the host with these addresses (primary first).
    pub fn store(&mut self, host: &[IpAddr], report: &KnownEndpoints) {
        let Some((&primary, others)) = host.split_first() else { return };
        self.records.insert(primary.into(), pack(report).into());
        for &alias in others {
            let mut record = Vec::with_capacity(17);
            push_address(&mut record, primary, ALIAS_V4, ALIAS_V6);
            self.records.insert(alias.into(), record.into());
        }
    }

    /// Queries that could not be answered yet.
    pub(crate) fn wanted(&mut self) -> &mut Wanted {
        &mut self.wanted
    }

    /// Whom this lighthouse told lately about a caller.
    pub(crate) fn notices(&mut self) -> &mut Notices {
        &mut self.notices
    }

    /// Overlay addresses whose hosts reported, in no particular order.
    pub(crate) fn subjects(&self) -> impl Iterator<Item = IpAddr> {
        self.records.keys().map(|address| address.to_ip())
    }

    /// Number of overlay addresses whose hosts reported.
    #[must_use]
    pub fn len(&self) -> usize {
        self.records.len()
    }

    /// Whether no host has reported.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.records.is_empty()
    }

    /// What the host with this address reported.
    #[must_use]
    pub fn report(&self, subject: IpAddr) -> Option<KnownEndpoints> {
        let record = self.records.get(&subject.into())?.bytes();
        match alias(record) {
            Some(primary) => self.records.get(&primary.into()).map(|record| unpack(record.bytes())),
            None => Some(unpack(record)),
        }
    }

    /// Drops a host whose last tunnel is gone.
    pub fn forget(&mut self, host: &[IpAddr]) {
        let Some((&primary, others)) = host.split_first() else { return };
        self.records.remove(&primary.into());
        for &other in others {
            let record = self.records.get(&other.into());
            if record.and_then(|record| alias(record.bytes())) == Some(primary) {
                self.records.remove(&other.into());
            }
        }
        // Shrinks the table after a whole fleet has left, but not for every host that leaves.
        if self.records.len() < self.records.capacity() / 8 {
            self.records.shrink_to(self.records.len() * 2);
        }
    }
}

/// What is stored under an overlay address. Up to three IPv4 endpoints, or one IPv6 endpoint, need no allocation.
#[derive(Debug)]
enum Record {
    Short(u8, [u8; INLINE_LEN]),
    Long(Box<[u8]>),
}

impl Record {
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Short(len, bytes) => &bytes[..usize::from(*len).min(INLINE_LEN)],
            Self::Long(bytes) => bytes,
        }
    }
}

impl From<Vec<u8>> for Record {
    fn from(bytes: Vec<u8>) -> Self {
        match u8::try_from(bytes.len()) {
            Ok(len) if bytes.len() <= INLINE_LEN => {
                let mut short = [0; INLINE_LEN];
                short[..bytes.len()].copy_from_slice(&bytes);
                Self::Short(len, short)
            }
            _ => Self::Long(bytes.into_boxed_slice()),
        }
    }
}

/// An overlay address as two words; certificates hold no IPv4-mapped addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Address([u64; 2]);

impl From<IpAddr> for Address {
    fn from(address: IpAddr) -> Self {
        let bits = match address {
            IpAddr::V4(v4) => v4.to_ipv6_mapped().to_bits(),
            IpAddr::V6(v6) => v6.to_bits(),
        };
        Self([(bits >> 64) as u64, bits as u64])
    }
}

impl Address {
    fn to_ip(self) -> IpAddr {
        let bits = u128::from(self.0[0]) << 64 | u128::from(self.0[1]);
        IpAddr::V6(Ipv6Addr::from_bits(bits)).to_canonical()
    }
}

impl std::hash::Hash for Address {
    fn hash<H: Hasher>(&self, state: &mut H) {
        let [high, low] = self.0;
        state.write_u64(high);
        state.write_u64(low);
    }
}

/// Mixes a few words. It needs no secret, since the addresses stored here were assigned by a CA.
#[derive(Debug, Default)]
struct AddressHasher(u64);

impl Hasher for AddressHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64(u64::from(*byte)));
    }

    fn write_u64(&mut self, word: u64) {
        let product = u128::from(self.0 ^ word ^ 0x9e37_79b9_7f4a_7c15) * 0xd6e8_feb8_6659_fd93;
        self.0 = (product >> 64) as u64 ^ product as u64;
    }
}

/// Makes a record as small as a box and its tag with room to spare.
const INLINE_LEN: usize = 22;
// A tag byte, then the address and, for an endpoint, its port.
const ENDPOINT_V4: u8 = 0;
const ENDPOINT_V6: u8 = 1;
const RELAY_V4: u8 = 2;
const RELAY_V6: u8 = 3;
/// The whole record is the first address of the host.
const ALIAS_V4: u8 = 4;
const ALIAS_V6: u8 = 5;

fn pack(report: &KnownEndpoints) -> Vec<u8> {
    let mut packed = Vec::with_capacity(7 * report.reported.len() + 5 * report.relays.len());
    for endpoint in &report.reported {
        push_address(&mut packed, endpoint.ip(), ENDPOINT_V4, ENDPOINT_V6);
        packed.extend(endpoint.port().to_be_bytes());
    }
    for &relay in &report.relays {
        push_address(&mut packed, relay, RELAY_V4, RELAY_V6);
    }
    packed
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

/// The host's first address, if this record is stored under a further one.
fn alias(record: &[u8]) -> Option<IpAddr> {
    match take_address(record)? {
        (ALIAS_V4 | ALIAS_V6, primary, _) => Some(primary),
        _ => None,
    }
}

/// Splits off a tag and its address.
fn take_address(packed: &[u8]) -> Option<(u8, IpAddr, &[u8])> {
    let (&tag, rest) = packed.split_first()?;
    match tag {
        ENDPOINT_V4 | RELAY_V4 | ALIAS_V4 => {
            let (octets, rest) = rest.split_first_chunk::<4>()?;
            Some((tag, IpAddr::V4(Ipv4Addr::from(*octets)), rest))
        }
        _ => {
            let (octets, rest) = rest.split_first_chunk::<16>()?;
            Some((tag, IpAddr::V6(Ipv6Addr::from(*octets)), rest))
        }
    }
}

fn unpack(mut packed: &[u8]) -> KnownEndpoints {
    let mut report = KnownEndpoints { reported: Vec::with_capacity(packed.len() / 7 + 1), ..KnownEndpoints::default() };
    while let Some((tag, address, rest)) = take_address(packed) {
        packed = rest;
        if matches!(tag, RELAY_V4 | RELAY_V6) {
            report.relays.push(address);
            continue;
        }
        let Some((port, rest)) = packed.split_first_chunk::<2>() else { break };
        report.reported.push(SocketAddr::new(address, u16::from_be_bytes(*port)));
        packed = rest;
    }
    report
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::messages::{MAX_ENDPOINTS, MAX_RELAYS};

    fn report() -> KnownEndpoints {
        KnownEndpoints {
            reported: vec!["203.0.113.1:4242".parse().unwrap(), "[2001:db8::1]:65535".parse().unwrap()],
            relays: vec!["10.42.0.9".parse().unwrap(), "fd00::9".parse().unwrap()],
            learnt: Vec::new(),
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
    fn reports_of_any_length_are_kept() {
        let mut server = Server::default();
        for count in 0..30_u8 {
            let reported = (0..count).map(|n| SocketAddr::from(([203, 0, 113, n], u16::from(n)))).collect();
            let relays = vec!["fd00::1".parse().unwrap(); usize::from(count % 3)];
            let report = KnownEndpoints { reported, relays, ..KnownEndpoints::default() };
            let host: [IpAddr; 2] = [[10, 42, 0, count].into(), Ipv6Addr::from(u128::from(count) << 64).into()];
            server.store(&host, &report);
            assert_eq!(server.report(host[1]), Some(report));
        }
        assert_eq!(server.len(), 60);
    }

    #[test]
    fn a_fleet_that_left_gives_its_memory_back() {
        let mut server = Server::default();
        let host = |n: u32| IpAddr::from(n.to_be_bytes());
        (0..10_000).for_each(|n| server.store(&[host(n)], &report()));
        (0..9_990).for_each(|n| server.forget(&[host(n)]));
        assert!(server.records.capacity() < 200);
        assert_eq!(server.report(host(9_999)), Some(report()));
    }

    #[test]
    fn a_new_report_replaces_the_old_one() {
        let host: [IpAddr; 1] = ["10.42.0.2".parse().unwrap()];
        let mut server = Server::default();
        server.store(&host, &report());
        server.store(&host, &KnownEndpoints::default());
        assert_eq!(server.report(host[0]), Some(KnownEndpoints::default()));
    }

    #[test]
    fn an_ordinary_host_takes_few_bytes() {
        let reported = vec!["203.0.113.1:4242".parse().unwrap(), "192.168.1.2:4242".parse().unwrap()];
        let record = Record::from(pack(&KnownEndpoints { reported, ..KnownEndpoints::default() }));
        assert!(matches!(record, Record::Short(14, _)));
        assert_eq!(size_of::<(Address, Record)>(), 40);
    }

    #[test]
    fn a_host_with_as_many_addresses_as_a_message_holds_takes_a_bounded_number_of_bytes() {
        let reported = vec!["[2001:db8::1]:65535".parse().unwrap(); MAX_ENDPOINTS];
        let relays = vec!["fd00::9".parse().unwrap(); MAX_RELAYS];
        let report = KnownEndpoints { reported, relays, ..KnownEndpoints::default() };
        assert_eq!(pack(&report).len(), 626);
        assert_eq!(unpack(&pack(&report)), report);
    }
}
