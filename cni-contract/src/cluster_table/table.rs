//! Lookups in the bytes of a table. Whatever the bytes are, nothing outside them is read and nothing panics; a record
//! that points nowhere is as if it were not there.

use std::cmp::Ordering;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::ops::Range;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::format::{Layout, Record, Section, SectionKind};
use super::hash_table::{Key, candidates};
use super::{address_of, key_of};

/// Where the tunnel of a pod probably ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct End {
    /// Address of its node.
    pub node: IpAddr,
    /// UDP port of its instance.
    pub port: u16,
    /// The port that it has if the first one was taken.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub other: Option<u16>,
}

/// A table: its bytes and their checked header.
#[derive(Debug, Clone, Copy)]
pub struct Table<'a> {
    pub(super) bytes: &'a [u8],
    pub(super) layout: &'a Layout,
}

/// What a table says of the destination of a new flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Found {
    /// An enrolled pod, or an address of a sealed prefix (incarnation 0).
    Enrolled {
        /// Another number when another pod has the address.
        incarnation: u64,
    },
    /// A port of a Service with endpoints to choose from.
    Service(Service),
    /// A Service without an endpoint to choose: none is ready, or it does not have that port.
    NoEndpoint,
    /// Known not to be enrolled.
    Clear,
    /// The table does not have the address; or it does not know of any endpoint of a Service whether it is enrolled.
    Unknown,
}

/// What policies know of an enrolled address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Labels {
    /// A pod whose namespace, labels and ports have this number.
    Set(u32),
    /// It is no pod.
    NoPod,
    /// A pod of which they are not known yet.
    Unknown,
}

/// A port of a Service with endpoints to choose from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Service {
    /// Its index, which is valid in this version of the table only.
    pub id: u32,
    /// Number of enrolled endpoints to choose from.
    pub ready: u32,
    /// Number of endpoints to choose from that are not enrolled; not 0 if the other number is.
    pub clear: u32,
    /// How long a client keeps its endpoint, counted from its last new flow.
    pub affinity: Option<Duration>,
}

/// An enrolled endpoint of a Service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Endpoint {
    /// Address of the pod.
    pub address: IpAddr,
    /// The pod's port.
    pub port: u16,
    /// The pod's incarnation.
    pub incarnation: u64,
}

/// A port of a Service, as it is listed.
#[derive(Debug, Clone)]
pub(super) struct ListedService {
    pub(super) address: IpAddr,
    pub(super) port: u16,
    pub(super) protocol: u8,
    pub(super) affinity_seconds: u32,
    /// Number of endpoints to choose from that are not enrolled.
    pub(super) clear: u32,
    /// Whether it has endpoints to choose from, but of none of them is known whether it is enrolled.
    pub(super) is_unknown: bool,
    /// Port of the endpoints; 0 if they have their own.
    pub(super) target: u16,
    /// Indexes of the enrolled endpoints to choose from, and of those that only serve the flows they have.
    pub(super) groups: [Range<u32>; 2],
}

/// More endpoints than one Service can have: readers look at each.
const MAX_CLEAR: u32 = 1 << 16;
/// In the place of the number of a set of labels.
pub(super) const NO_POD: u32 = u32::MAX;
pub(super) const KIND_PORT: u8 = 0;
pub(super) const KIND_UNKNOWN: u8 = 1;
pub(super) const KIND_ADDRESS: u8 = 2;

impl Layout {
    /// The table with this header. `bytes` are those from which it was read.
    #[must_use]
    pub fn table<'a>(&'a self, bytes: &'a [u8]) -> Table<'a> {
        Table { bytes, layout: self }
    }
}

impl<'a> Table<'a> {
    /// The programs of a pod of this node, for ingress and egress; `None` if it has none.
    #[must_use]
    pub fn programs(&self, address: IpAddr) -> Option<[&'a [u8]; 2]> {
        let (address, programs) = (key_of(address), self.layout.section(SectionKind::Programs));
        let compare = |index| Some(programs.record::<32>(self.bytes, index)?.address(0).cmp(&address));
        let record: Record<'_, 32> = programs.record(self.bytes, search(0..programs.count, compare)?)?;
        let all = self.layout.section(SectionKind::ProgramBytes);
        let part = |at| all.bytes(self.bytes, record.u32(at), record.u32(at + 4));
        Some([part(16)?, part(24)?])
    }
}

impl Table<'_> {
    /// Version of the contents.
    #[must_use]
    pub fn version(&self) -> u64 {
        self.layout.version
    }

    /// Numbers of pods, addresses known not to be enrolled, ports of Services and endpoints.
    #[must_use]
    pub fn counts(&self) -> [u32; 4] {
        [SectionKind::Pods, SectionKind::Clear, SectionKind::Services, SectionKind::Endpoints]
            .map(|kind| self.layout.section(kind).count)
    }

    /// What becomes of a flow to `port` of `address`; both port and protocol's number are those of the packet.
    #[must_use]
    pub fn find(&self, address: IpAddr, port: u16, protocol: u8) -> Found {
        let address = key_of(address);
        if let Some((_, incarnation)) = self.pod(address) {
            return Found::Enrolled { incarnation };
        }
        if let Some(found) = self.service(service_key(address, port, protocol)) {
            return found;
        }
        // The address may be a Service's that has no such port.
        if let Some(found) = self.service(service_key(address, 0, 0)) {
            return found;
        }
        if self.is_node(address)
            && let Some(found) = self.service(service_key(unspecified(address), port, protocol))
        {
            return found;
        }
        if self.is_clear_address(address) {
            return Found::Clear;
        }
        if self.is_in_ranges(SectionKind::SealedRanges, address) {
            return Found::Enrolled { incarnation: 0 };
        }
        if self.is_in_ranges(SectionKind::ClearRanges, address) { Found::Clear } else { Found::Unknown }
    }

    /// The incarnation of an enrolled pod; 0 for an address of a sealed prefix.
    #[must_use]
    pub fn incarnation(&self, address: IpAddr) -> Option<u64> {
        let key = key_of(address);
        let pod = self.pod(key).map(|(_, incarnation)| incarnation);
        let is_sealed = || !self.is_clear_address(key) && self.is_in_ranges(SectionKind::SealedRanges, key);
        pod.or_else(|| is_sealed().then_some(0))
    }

    /// Where the tunnel of an enrolled pod probably ends.
    #[must_use]
    pub fn end(&self, address: IpAddr) -> Option<End> {
        let (pod, _) = self.pod(key_of(address))?;
        let ends = self.layout.section(SectionKind::Ends);
        let compare = |index| Some(ends.record::<24>(self.bytes, index)?.u32(0).cmp(&pod));
        let record = ends.record(self.bytes, search(0..ends.count, compare)?)?;
        Some(end_of(record))
    }

    /// What policies know of an enrolled address.
    #[must_use]
    pub fn labels(&self, address: IpAddr) -> Labels {
        let identities = self.layout.section(SectionKind::Identities);
        let find = || {
            let (pod, _) = self.pod(key_of(address))?;
            let compare = |index| Some(identities.record::<8>(self.bytes, index)?.u32(0).cmp(&pod));
            let record: Record<'_, 8> = identities.record(self.bytes, search(0..identities.count, compare)?)?;
            Some(record.u32(4))
        };
        match find() {
            Some(NO_POD) => Labels::NoPod,
            Some(number @ 1..) => Labels::Set(number),
            _ => Labels::Unknown,
        }
    }

    /// Enrolled endpoint `n` of those to choose from, for `n` below [`Service::ready`].
    #[must_use]
    pub fn endpoint(&self, service: u32, n: u32) -> Option<Endpoint> {
        let ([chosen, _], target) = self.groups(service)?;
        if n >= chosen.end.saturating_sub(chosen.start) {
            return None;
        }
        let (pod, port) = self.endpoint_at(chosen.start + n, target)?;
        let record: Record<'_, 24> = self.layout.section(SectionKind::Pods).record(self.bytes, pod)?;
        Some(Endpoint { address: address_of(record.address(0)), port, incarnation: record.u64(16) })
    }

    /// The tags of the enrolled endpoints to choose from, in their order.
    pub fn tags(&self, service: u32) -> impl Iterator<Item = u16> {
        let ([chosen, _], _) = self.groups(service).unwrap_or_default();
        let endpoints = self.layout.section(SectionKind::Endpoints);
        chosen.map_while(move |index| endpoints.record::<8>(self.bytes, index).map(|record| record.u16(6)))
    }

    /// Whether an endpoint still serves the flows that it has: it is ready, or terminating and serving.
    #[must_use]
    pub fn serves(&self, service: u32, address: IpAddr, port: u16) -> bool {
        let Some((pod, _)) = self.pod(key_of(address)) else { return false };
        let Some((groups, target)) = self.groups(service) else { return false };
        let holds = |group: Range<u32>| {
            search(group, |index| self.endpoint_at(index, target).map(|endpoint| endpoint.cmp(&(pod, port)))).is_some()
        };
        groups.into_iter().any(holds)
    }

    /// The enrolled pods with their incarnations, in no order.
    pub(super) fn pods(&self) -> impl Iterator<Item = (IpAddr, u64)> {
        self.records::<24>(SectionKind::Pods).map(|record| (address_of(record.address(0)), record.u64(16)))
    }

    /// The addresses known not to be enrolled, in no order.
    pub(super) fn clear_addresses(&self) -> impl Iterator<Item = IpAddr> {
        self.records::<16>(SectionKind::Clear).map(|record| address_of(record.address(0)))
    }

    /// The addresses of nodes, in order.
    pub(super) fn nodes(&self) -> impl Iterator<Item = IpAddr> {
        self.records::<16>(SectionKind::Nodes).map(|record| address_of(record.address(0)))
    }

    /// Where the tunnels of pods probably end, in no order.
    pub(super) fn ends(&self) -> impl Iterator<Item = (IpAddr, End)> {
        let pods = self.layout.section(SectionKind::Pods);
        self.records::<24>(SectionKind::Ends).filter_map(move |record| {
            let pod: Record<'_, 24> = pods.record(self.bytes, record.u32(0))?;
            Some((address_of(pod.address(0)), end_of(record)))
        })
    }

    /// What policies know of enrolled addresses, in no order.
    pub(super) fn identities(&self) -> impl Iterator<Item = (IpAddr, Labels)> {
        let pods = self.layout.section(SectionKind::Pods);
        self.records::<8>(SectionKind::Identities).filter_map(move |record| {
            let pod: Record<'_, 24> = pods.record(self.bytes, record.u32(0))?;
            let address = address_of(pod.address(0));
            Some((address, self.labels(address)))
        })
    }

    /// First and last addresses of what is known not to be enrolled.
    pub(super) fn clear_ranges(&self) -> impl Iterator<Item = (IpAddr, IpAddr)> {
        self.ranges(SectionKind::ClearRanges)
    }

    /// First and last addresses of sealed prefixes.
    pub(super) fn sealed_ranges(&self) -> impl Iterator<Item = (IpAddr, IpAddr)> {
        self.ranges(SectionKind::SealedRanges)
    }

    /// The ports of Services, in no order.
    pub(super) fn services(&self) -> impl Iterator<Item = ListedService> {
        let records =
            self.records::<44>(SectionKind::Services).zip(0..).filter(|(record, _)| record.u8(19) != KIND_ADDRESS);
        records.map(|(record, id)| ListedService {
            address: address_of(record.address(0)),
            port: record.u16(16),
            protocol: record.u8(18),
            affinity_seconds: record.u32(32),
            clear: record.u32(36),
            is_unknown: record.u8(19) == KIND_UNKNOWN,
            target: record.u16(40),
            groups: self.groups(id).unwrap_or_default().0,
        })
    }

    /// An enrolled endpoint by its index in the table, of a service with this `target`; `None` where there is none.
    pub(super) fn endpoint_address(&self, index: u32, target: u16) -> Option<(IpAddr, u16)> {
        let (pod, port) = self.endpoint_at(index, target)?;
        let record: Record<'_, 24> = self.layout.section(SectionKind::Pods).record(self.bytes, pod)?;
        Some((address_of(record.address(0)), port))
    }

    fn ranges(&self, kind: SectionKind) -> impl Iterator<Item = (IpAddr, IpAddr)> {
        self.records::<32>(kind).map(|record| (address_of(record.address(0)), address_of(record.address(16))))
    }

    fn records<const N: usize>(&self, kind: SectionKind) -> impl Iterator<Item = Record<'_, N>> {
        let section = self.layout.section(kind);
        (0..section.count).filter_map(move |index| section.record(self.bytes, index))
    }

    /// Index and incarnation.
    pub(super) fn pod(&self, address: u128) -> Option<(u32, u64)> {
        let pods = self.layout.section(SectionKind::Pods);
        self.candidates(SectionKind::PodBuckets, pods, (address, 0)).find_map(|index| {
            let record: Record<'_, 24> = pods.record(self.bytes, index)?;
            (record.address(0) == address).then(|| (index, record.u64(16)))
        })
    }

    fn is_clear_address(&self, address: u128) -> bool {
        let clear = self.layout.section(SectionKind::Clear);
        self.candidates(SectionKind::ClearBuckets, clear, (address, 0))
            .any(|index| clear.record::<16>(self.bytes, index).is_some_and(|record| record.address(0) == address))
    }

    fn is_node(&self, address: u128) -> bool {
        let nodes = self.layout.section(SectionKind::Nodes);
        let compare = |index| Some(nodes.record::<16>(self.bytes, index)?.address(0).cmp(&address));
        search(0..nodes.count, compare).is_some()
    }

    fn service(&self, key: Key) -> Option<Found> {
        let services = self.layout.section(SectionKind::Services);
        let (id, record) = self.candidates(SectionKind::ServiceBuckets, services, key).find_map(|index| {
            let record: Record<'_, 44> = services.record(self.bytes, index)?;
            let own = service_key(record.address(0), record.u16(16), record.u8(18));
            (own == key).then_some((index, record))
        })?;
        let (ready, seconds, clear) = (record.u32(24), record.u32(32), record.u32(36).min(MAX_CLEAR));
        Some(match record.u8(19) {
            KIND_PORT if ready > 0 || clear > 0 => {
                let affinity = (seconds > 0).then(|| Duration::from_secs(seconds.into()));
                Found::Service(Service { id, ready, clear, affinity })
            }
            KIND_UNKNOWN => Found::Unknown,
            _ => Found::NoEndpoint,
        })
    }

    /// Enrolled endpoints to choose from, and those that only serve the flows they have; and the port of all of them,
    /// or 0.
    fn groups(&self, service: u32) -> Option<([Range<u32>; 2], u16)> {
        let record: Record<'_, 44> = self.layout.section(SectionKind::Services).record(self.bytes, service)?;
        let first = record.u32(20);
        let (chosen, all) = (first.checked_add(record.u32(24))?, first.checked_add(record.u32(28))?);
        Some(([first..chosen, chosen..all.max(chosen)], record.u16(40)))
    }

    /// Index of the pod, and port, which is `target` if the list is shared.
    fn endpoint_at(&self, index: u32, target: u16) -> Option<(u32, u16)> {
        let record: Record<'_, 8> = self.layout.section(SectionKind::Endpoints).record(self.bytes, index)?;
        let own = record.u16(4);
        Some((record.u32(0), if own == 0 { target } else { own }))
    }

    fn is_in_ranges(&self, kind: SectionKind, address: u128) -> bool {
        let ranges = self.layout.section(kind);
        let compare = |index| {
            let record: Record<'_, 32> = ranges.record(self.bytes, index)?;
            Some(if record.address(16) < address {
                Ordering::Less
            } else if record.address(0) > address {
                Ordering::Greater
            } else {
                Ordering::Equal
            })
        };
        search(0..ranges.count, compare).is_some()
    }

    /// The records that may have `key`; of a malformed table no more than there are.
    fn candidates(&self, buckets: SectionKind, records: Section, key: Key) -> Range<u32> {
        let found = candidates(self.bytes, self.layout.seed, self.layout.section(buckets), key);
        found.start..found.end.min(records.count)
    }
}

fn end_of(record: Record<'_, 24>) -> End {
    let other = record.u16(6);
    End { node: address_of(record.address(8)), port: record.u16(4), other: (other > 0).then_some(other) }
}

pub(super) fn service_key(address: u128, port: u16, protocol: u8) -> Key {
    (address, u32::from(port) << 8 | u32::from(protocol))
}

/// The address that stands for those of all nodes.
fn unspecified(address: u128) -> u128 {
    match address_of(address) {
        IpAddr::V4(_) => key_of(Ipv4Addr::UNSPECIFIED.into()),
        IpAddr::V6(_) => key_of(Ipv6Addr::UNSPECIFIED.into()),
    }
}

/// Binary search; `None` from `compare` ends it.
pub(super) fn search(range: Range<u32>, compare: impl Fn(u32) -> Option<Ordering>) -> Option<u32> {
    let (mut low, mut high) = (range.start, range.end);
    while low < high {
        let middle = low + (high - low) / 2;
        match compare(middle)? {
            Ordering::Less => low = middle + 1,
            Ordering::Greater => high = middle,
            Ordering::Equal => return Some(middle),
        }
    }
    None
}
