//! Builds the bytes of a table from facts about the cluster, in any order.

use std::net::{IpAddr, Ipv4Addr};
use std::ops::Range;
use std::time::Duration;

use ipnet::IpNet;

use super::format::{HEADER_LEN, MAGIC, MAJOR, MINOR, SECTION_LEN, SECTIONS, SectionKind};
use super::hash_table::{HashTable, bucket, mix};
use super::key_of;
use super::table::{KIND_ADDRESS, KIND_CLEAR, KIND_EMPTY, KIND_ENROLLED, service_key};

/// Facts about the cluster, of which [`Builder::finish`] makes a table. Of contradicting facts the one that keeps packets
/// in the tunnel wins; of two about the same pod or the same port of a Service the later one.
#[derive(Debug, Clone, Default)]
pub struct Builder {
    pods: Vec<(u128, u64)>,
    clear: Vec<u128>,
    clear_ranges: Vec<(u128, u128)>,
    sealed_ranges: Vec<(u128, u128)>,
    services: Vec<(ServicePort, Range<usize>)>,
    endpoints: Vec<ServiceEndpoint>,
}

/// A port of a Service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ServicePort {
    /// A ClusterIP, or another address that is translated in the same way.
    pub address: IpAddr,
    /// The Service's port.
    pub port: u16,
    /// IP protocol: 6 for TCP, 17 for UDP, 132 for SCTP.
    pub protocol: u8,
    /// Time of session affinity by client address; `None` without it. Whole seconds.
    pub affinity: Option<Duration>,
    /// Whether only endpoints of this node may be chosen (`internalTrafficPolicy: Local`).
    pub this_node_only: bool,
}

/// An endpoint of a port of a Service, enrolled or not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ServiceEndpoint {
    /// Its address.
    pub address: IpAddr,
    /// Its port.
    pub port: u16,
    /// Whether it takes new flows.
    pub state: EndpointState,
    /// Whether it is on the node for which the table is.
    pub is_on_this_node: bool,
}

/// Whether an endpoint takes new flows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EndpointState {
    /// It does (`ready`).
    Ready,
    /// It serves the flows it has (`serving` and `terminating`). It takes new ones where no endpoint is ready, as with
    /// kube-proxy.
    Terminating,
    /// It does not.
    NotReady,
}

impl Builder {
    /// Of a cluster of which nothing is known.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// `address` is that of an enrolled pod. `incarnation` is not 0, and another one for each pod that has had the address.
    pub fn pod(&mut self, address: IpAddr, incarnation: u64) {
        self.pods.push((key_of(address), incarnation));
    }

    /// `address` is known not to be enrolled.
    pub fn clear(&mut self, address: IpAddr) {
        self.clear.push(key_of(address));
    }

    /// Nothing in `prefix` is enrolled, but for the pods and sealed prefixes in it.
    pub fn clear_prefix(&mut self, prefix: IpNet) {
        self.clear_ranges.extend(ranges_of(prefix));
    }

    /// Everything in `prefix` is in the mesh without being an enrolled pod: machines outside the cluster with certificates of
    /// their own. Pods known not to be enrolled are excepted.
    pub fn sealed_prefix(&mut self, prefix: IpNet) {
        self.sealed_ranges.extend(ranges_of(prefix));
    }

    /// A port of a Service with all its endpoints, whatever their state and node.
    pub fn service(&mut self, port: ServicePort, endpoints: impl IntoIterator<Item = ServiceEndpoint>) {
        let first = self.endpoints.len();
        self.endpoints.extend(endpoints);
        self.services.push((port, first..self.endpoints.len()));
    }

    /// The bytes of the table. `version` rises with every table that the node's instances are to use.
    #[must_use]
    pub fn finish(self, version: u64) -> Vec<u8> {
        let seed = mix(version);
        let with_key = |(address, value)| ((address, 0), value);
        let pods = HashTable::new(seed, self.pods.iter().copied().map(with_key).collect());
        let clear = HashTable::new(seed, self.clear.iter().map(|address| ((*address, 0), ())).collect());
        let mut addresses: Vec<_> = self.services.iter().map(|(port, _)| key_of(port.address)).collect();
        addresses.dedup();
        let addresses = addresses.into_iter().map(|address| (service_key(address, 0, 0), None));
        let ports = self.services.iter().map(|(port, endpoints)| {
            (service_key(key_of(port.address), port.port, port.protocol), Some((port, endpoints.clone())))
        });
        let services = HashTable::new(seed, addresses.chain(ports).collect());

        let mut listed = Vec::new();
        let mut choice = Choice::default();
        let service_records: Vec<_> = services
            .entries
            .iter()
            .map(|((address, _), service)| {
                let Some((port, endpoints)) = service else {
                    return record(&[&address.to_be_bytes(), &[0, 0, 0, KIND_ADDRESS], &[0; 20]]);
                };
                let facts = self.endpoints.get(endpoints.clone()).unwrap_or_default();
                let kind = choice.make(port, facts, &pods);
                let (first, chosen) = (number(listed.len()), number(choice.chosen.len()));
                let all = chosen + number(choice.serving.len());
                let affinity = port.affinity.map_or(0, |time| u32::try_from(time.as_secs()).unwrap_or(u32::MAX));
                let counts = [first, chosen, all, affinity, 0].map(u32::to_le_bytes);
                listed.append(&mut choice.chosen);
                listed.append(&mut choice.serving);
                let name = [port.port.to_le_bytes(), [port.protocol, kind]];
                record(&[&address.to_be_bytes(), name.as_flattened(), counts.as_flattened()])
            })
            .collect();

        let mut file = File::new(version, seed);
        file.section(SectionKind::PodBuckets, pods.starts.iter().map(|start| start.to_le_bytes()));
        let pod = |((address, _), incarnation): &(_, u64)| {
            record(&[&u128::to_be_bytes(*address), &incarnation.to_le_bytes()])
        };
        file.section::<24>(SectionKind::Pods, pods.entries.iter().map(pod));
        file.section(SectionKind::ClearBuckets, clear.starts.iter().map(|start| start.to_le_bytes()));
        file.section(SectionKind::Clear, clear.entries.iter().map(|((address, _), ())| address.to_be_bytes()));
        for (kind, ranges) in
            [(SectionKind::ClearRanges, self.clear_ranges), (SectionKind::SealedRanges, self.sealed_ranges)]
        {
            let ranges = disjoint(ranges);
            file.section::<32>(kind, ranges.iter().map(|(a, b)| record(&[&a.to_be_bytes(), &b.to_be_bytes()])));
        }
        file.section(SectionKind::ServiceBuckets, services.starts.iter().map(|start| start.to_le_bytes()));
        file.section::<40>(SectionKind::Services, service_records.into_iter());
        let endpoint =
            |Listed { pod, port, tag }: Listed| record(&[&pod.to_le_bytes(), &port.to_le_bytes(), &tag.to_le_bytes()]);
        file.section::<8>(SectionKind::Endpoints, listed.into_iter().map(endpoint));
        file.finish()
    }
}

/// The enrolled endpoints of a service.
#[derive(Debug, Default)]
struct Choice {
    /// To choose from.
    chosen: Vec<Listed>,
    /// These only serve the flows they have.
    serving: Vec<Listed>,
}

/// An endpoint as the table lists it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Listed {
    /// Index of the pod.
    pod: u32,
    port: u16,
    tag: u16,
}

impl Choice {
    /// Sorts the endpoints of a service; returns its kind.
    fn make(&mut self, port: &ServicePort, endpoints: &[ServiceEndpoint], pods: &HashTable<u64>) -> u8 {
        let mut has_enrolled = false;
        for endpoint in endpoints {
            let Some(pod) = pods.position((key_of(endpoint.address), 0)) else { continue };
            has_enrolled = true;
            if port.this_node_only && !endpoint.is_on_this_node {
                continue;
            }
            match endpoint.state {
                EndpointState::Ready => self.chosen.push(Listed { pod, port: endpoint.port, tag: 0 }),
                EndpointState::Terminating => self.serving.push(Listed { pod, port: endpoint.port, tag: 0 }),
                EndpointState::NotReady => {}
            }
        }
        if self.chosen.is_empty() {
            std::mem::swap(&mut self.chosen, &mut self.serving);
        }
        for group in [&mut self.chosen, &mut self.serving] {
            group.sort_unstable();
            group.dedup();
            give_tags(group, pods);
        }
        match endpoints {
            [] => KIND_EMPTY,
            _ if has_enrolled => KIND_ENROLLED,
            _ => KIND_CLEAR,
        }
    }
}

/// Gives each endpoint of a group another tag than the others, in an order that does not depend on this table.
fn give_tags(group: &mut [Listed], pods: &HashTable<u64>) {
    // The rest of the numbers is for endpoints whose hash another one has.
    const HASHES: u32 = 1 << 15;
    let address = |listed: &Listed| pods.entries.get(listed.pod as usize).map_or(0, |((address, _), _)| *address);
    let hash = |listed: &Listed| bucket(0, (address(listed), listed.port.into()), HASHES);
    let mut order: Vec<_> =
        (0..).zip(&*group).map(|(at, listed)| (hash(listed), address(listed), listed.port, at)).collect();
    order.sort_unstable();
    let mut least = 1;
    for (hash, _, _, at) in order {
        let tag = least.max(hash + 1);
        least = tag.saturating_add(1);
        if let Some(listed) = group.get_mut::<usize>(at) {
            listed.tag = u16::try_from(tag).unwrap_or(u16::MAX);
        }
    }
}

/// The table's bytes so far.
struct File {
    header: Vec<u8>,
    /// What comes after the header.
    records: Vec<u8>,
    version: u64,
    seed: u64,
}

impl File {
    fn new(version: u64, seed: u64) -> Self {
        Self { header: Vec::new(), records: Vec::new(), version, seed }
    }

    /// Appends a section; they come in the order of [`SectionKind::ALL`].
    fn section<const N: usize>(&mut self, kind: SectionKind, records: impl ExactSizeIterator<Item = [u8; N]>) {
        debug_assert_eq!((self.header.len(), N), (kind as usize * SECTION_LEN, kind.record_len()));
        let offset = (HEADER_LEN + SECTIONS * SECTION_LEN + self.records.len()) as u64;
        self.header.extend(offset.to_le_bytes());
        self.header.extend(number(records.len()).to_le_bytes());
        self.header.extend(number(N).to_le_bytes());
        self.records.reserve(records.len() * N);
        for record in records {
            self.records.extend_from_slice(&record);
        }
    }

    fn finish(self) -> Vec<u8> {
        let len = HEADER_LEN + self.header.len() + self.records.len();
        let mut bytes = Vec::with_capacity(len);
        bytes.extend(MAGIC);
        bytes.extend(MINOR.to_le_bytes());
        bytes.extend(MAJOR.to_le_bytes());
        bytes.extend(number(SECTIONS).to_le_bytes());
        bytes.extend((len as u64).to_le_bytes());
        bytes.extend(self.version.to_le_bytes());
        bytes.extend(self.seed.to_le_bytes());
        bytes.extend(self.header);
        bytes.extend(self.records);
        bytes
    }
}

fn record<const N: usize>(fields: &[&[u8]]) -> [u8; N] {
    let mut record = [0; N];
    let mut rest = &mut record[..];
    for field in fields {
        let len = field.len().min(rest.len());
        let (place, after) = std::mem::take(&mut rest).split_at_mut(len);
        place.copy_from_slice(field.get(..len).unwrap_or_default());
        rest = after;
    }
    record
}

/// First and last addresses. An IPv6 prefix that contains the mapped IPv4 addresses does not mean those.
fn ranges_of(prefix: IpNet) -> Vec<(u128, u128)> {
    let (first, last) = (key_of(prefix.network()), key_of(prefix.broadcast()));
    let (mapped, after) = (key_of(Ipv4Addr::UNSPECIFIED.into()), key_of(Ipv4Addr::BROADCAST.into()) + 1);
    match prefix {
        IpNet::V6(_) if first < mapped && last >= after => vec![(first, mapped - 1), (after, last)],
        IpNet::V6(_) | IpNet::V4(_) => vec![(first, last)],
    }
}

/// The same addresses in order and without overlaps.
fn disjoint(mut ranges: Vec<(u128, u128)>) -> Vec<(u128, u128)> {
    ranges.sort_unstable();
    let mut merged: Vec<(u128, u128)> = Vec::with_capacity(ranges.len());
    for (first, last) in ranges {
        match merged.last_mut() {
            Some((_, end)) if first <= end.saturating_add(1) => *end = last.max(*end),
            _ => merged.push((first, last)),
        }
    }
    merged
}

/// A table has fewer records than a u32 counts: more would not fit into the memory of a node.
fn number(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}
