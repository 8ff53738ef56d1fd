//! The flows that a pod had: a short list of whom it spoke to at which port, from which policies can be suggested. It
//! is no record of each flow: a busy pod meets more peers than there is room for, and then says how much it has
//! forgotten.

use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use nebula_cni_contract::instance_status::{SeenFlow, SeenFlows};
use nebula_cni_policy::program::Direction;

/// One kind of flows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Kind {
    pub(super) direction: Direction,
    pub(super) peer: IpAddr,
    /// That of the peer's certificate by the cluster table; 0 if it is no pod.
    pub(super) incarnation: u64,
    pub(super) protocol: u8,
    /// Destination port; 0 for protocols without ports.
    pub(super) port: u16,
}

/// The kinds of flows of one pod that were seen last. Nothing is allocated before the first one. Packets of known flows
/// do not come here, so a lock is cheap enough.
#[derive(Debug, Default)]
pub(super) struct FlowList(Mutex<Rows>);

#[derive(Debug, Default)]
struct Rows {
    rows: Vec<Row>,
    /// Flows whose rows had to give way to others.
    lost: u64,
}

/// 40 bytes: each pod of a node has some.
#[derive(Debug, Clone, Copy)]
struct Row {
    peer: [u8; 16],
    incarnation: u64,
    flows: u32,
    /// In seconds since 1970.
    last: u32,
    port: u16,
    protocol: u8,
    is_egress: bool,
}

impl Row {
    fn is_of(&self, kind: &Self) -> bool {
        (self.peer, self.incarnation, self.port, self.protocol, self.is_egress)
            == (kind.peer, kind.incarnation, kind.port, kind.protocol, kind.is_egress)
    }
}

impl FlowList {
    /// Notes a new flow at `now` (since the Unix epoch).
    pub(super) fn note(&self, kind: &Kind, now: Duration) {
        let last = u32::try_from(now.as_secs()).unwrap_or(u32::MAX);
        let peer = match kind.peer {
            IpAddr::V4(address) => address.to_ipv6_mapped(),
            IpAddr::V6(address) => address,
        };
        let row = Row {
            peer: peer.octets(),
            incarnation: kind.incarnation,
            flows: 1,
            last,
            port: kind.port,
            protocol: kind.protocol,
            is_egress: kind.direction == Direction::Egress,
        };
        let mut list = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Rows { rows, lost } = &mut *list;
        if let Some(known) = rows.iter_mut().find(|known| known.is_of(&row)) {
            (known.flows, known.last) = (known.flows.saturating_add(1), last);
            return;
        }
        if rows.len() < MAX_ROWS {
            if rows.len() == rows.capacity() {
                rows.reserve_exact(STEP);
            }
            return rows.push(row);
        }
        if let Some(oldest) = rows.iter_mut().min_by_key(|row| row.last) {
            *lost += u64::from(oldest.flows);
            *oldest = row;
        }
    }

    /// All of them, for whoever asks.
    pub(super) fn report(&self) -> SeenFlows {
        let list = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let flow = |row: &Row| SeenFlow {
            direction: if row.is_egress { Direction::Egress } else { Direction::Ingress }.name().to_owned(),
            peer: Ipv6Addr::from(row.peer).to_canonical(),
            incarnation: row.incarnation,
            protocol: row.protocol,
            port: row.port,
            flows: row.flows.into(),
            last: row.last.into(),
        };
        SeenFlows { flows: list.rows.iter().map(flow).collect(), lost: list.lost }
    }
}

/// About four kilobytes.
const MAX_ROWS: usize = 96;
const STEP: usize = 16;

#[cfg(test)]
mod tests {
    use super::*;

    fn kind(port: u16) -> Kind {
        let peer = IpAddr::from([10, 244, 1, 9]);
        Kind { direction: Direction::Egress, peer, incarnation: 7, protocol: 6, port }
    }

    #[test]
    fn flows_of_one_kind_are_one_row_and_all_of_it_makes_a_kind() {
        let list = FlowList::default();
        assert_eq!((list.report(), list.0.lock().unwrap().rows.capacity()), (SeenFlows::default(), 0));
        let six = "fd00::9".parse().unwrap();
        let others = [
            kind(443),
            Kind { direction: Direction::Ingress, ..kind(80) },
            Kind { peer: six, ..kind(80) },
            Kind { incarnation: 8, ..kind(80) },
            Kind { protocol: 17, ..kind(80) },
        ];
        for kind in [kind(80), kind(80)].iter().chain(&others) {
            list.note(kind, Duration::from_secs(100));
        }
        list.note(&kind(80), Duration::from_secs(200));
        let report = list.report();
        let first = SeenFlow {
            direction: "egress".to_owned(),
            peer: kind(80).peer,
            incarnation: 7,
            protocol: 6,
            port: 80,
            flows: 3,
            last: 200,
        };
        assert_eq!((&report.flows[0], report.flows.len(), report.lost), (&first, 6, 0));
        assert_eq!((report.flows[3].peer, &*report.flows[2].direction), (six, "ingress"));
    }

    #[test]
    fn a_scan_pushes_out_what_was_not_seen_for_longest_and_that_is_counted() {
        let list = FlowList::default();
        for port in 1..=1000 {
            list.note(&kind(port), Duration::from_secs(port.into()));
            list.note(&kind(1), Duration::from_secs(port.into()));
        }
        let report = list.report();
        assert_eq!((report.flows.len(), list.0.lock().unwrap().rows.capacity()), (MAX_ROWS, MAX_ROWS));
        let has = |port| report.flows.iter().find(|flow| flow.port == port).map(|flow| flow.flows);
        assert_eq!((has(1), has(2), has(1000)), (Some(1001), None, Some(1)));
        assert_eq!(report.lost + report.flows.iter().map(|flow| flow.flows).sum::<u64>(), 2000);
        assert!(size_of::<Row>() * MAX_ROWS <= 4096);
    }
}
