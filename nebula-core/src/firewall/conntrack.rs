//! Flows already allowed: sharded, with expiry and a hard cap (connection tracking).

mod handed_over;

use std::net::IpAddr;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use ipnet::IpNet;

pub(crate) use self::handed_over::HandedOverFlow;
use super::check::Passage;
use super::filter::Timeouts;
use super::flow_cache::Tally;
use super::flow_entry::{At, Entry, Owner};
use super::flow_table::FlowTable;
use super::records::{End, FlowId, Judged, Records};
use super::{Admitted, Filter, Occasion, Peer};
use crate::counters::Direction;
use crate::counters::DropReason;
use crate::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use crate::sync::{CachePadded, Mutex, MutexGuard};
use crate::tunnel::{PeerIdentity, route_digest};
use crate::wire::ip::FlowKey;

const SHARDS: usize = if cfg!(all(test, loom)) { 1 } else { 16 };
/// An answered flow is evicted for another flow of its own peer only if it was idle for this long.
const KEEP_ANSWERED_MS: u64 = 30_000;
/// An unanswered flow that was idle for less than this may still be answered. If others can give way, it is kept: the
/// answer would count as a flow of its own, and most firewalls refuse that.
const AWAIT_ANSWER_MS: u64 = 5_000;
/// Time between two sweeps of the whole table for expired flows.
const SEARCH_EVERY_MS: u64 = 10_000;
/// Maximum number of expired flows removed with each new one: more than one, so that the table shrinks, but bounded.
const MAX_SWEPT_PER_FLOW: usize = 4;

/// Times before this count as this one. Longer than any timeout that makes sense.
const MAX_PAST: Duration = Duration::from_secs(86_400);

/// A flow known to connection tracking.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KnownFlow {
    /// Direction of its first packet.
    pub direction: Direction,
    /// Whether packets went both ways.
    pub answered: bool,
    /// Time since its last packet.
    pub idle: Duration,
}

/// Flows already allowed. Lanes look here for flows that are not in their own [`super::FlowCache`]: new ones, and every
/// known one once in a while. Every packet reads `start` and `keys`, so they share no cache line with anything that is
/// written.
#[derive(Debug)]
pub(crate) struct Conntrack {
    start: Instant,
    keys: [u64; 4],
    max_per_shard: CachePadded<AtomicUsize>,
    next_search: CachePadded<AtomicU64>,
    shards: [CachePadded<Mutex<FlowTable>>; SHARDS],
    records: Records,
}

impl Conntrack {
    /// An empty table; `key` makes collisions unpredictable.
    pub(crate) fn new(start: Instant, key: u64, max_flows: usize) -> Self {
        // Flows of an earlier process were used before the start.
        let start = start.checked_sub(MAX_PAST).unwrap_or(start);
        let keys = std::array::from_fn(|n| split_mix(key.wrapping_add(n as u64)));
        let conntrack = Self {
            start,
            keys,
            max_per_shard: CachePadded::new(AtomicUsize::new(0)),
            next_search: CachePadded::new(AtomicU64::new(0)),
            shards: std::array::from_fn(|_| CachePadded::new(Mutex::new(FlowTable::default()))),
            records: Records::default(),
        };
        conntrack.set_max_flows(max_flows);
        conntrack
    }

    pub(crate) fn set_max_flows(&self, max_flows: usize) {
        self.max_per_shard.store(max_flows.div_ceil(SHARDS).max(1), Ordering::Relaxed);
    }

    /// Number of tracked flows, including expired ones that were not removed yet.
    pub(crate) fn len(&self) -> usize {
        self.shards.iter().map(|shard| lock(shard).len()).sum()
    }

    /// Removes expired flows, unless the last sweep was less than `SEARCH_EVERY_MS` ago.
    pub(crate) fn expire(&self, now: Instant, filter: &Filter) {
        let timeouts = filter.timeouts();
        let now = self.millis(now);
        if now < self.next_search.load(Ordering::Relaxed) {
            return;
        }
        self.next_search.store(now + SEARCH_EVERY_MS, Ordering::Relaxed);
        for shard in &self.shards {
            let mut table = lock(shard);
            while self.expire_one(&mut table, now, timeouts) {}
            table.shrink();
        }
    }

    /// Calls `look` for every flow. Locks one part of the table after the other, so this is not for the packet path.
    pub(crate) fn each_flow(&self, mut look: impl FnMut(&FlowKey)) {
        self.shards.iter().for_each(|shard| lock(shard).flows().for_each(&mut look));
    }

    /// Whether a flow is tracked that all gateways of this subnet route share.
    pub(crate) fn is_shared_flow(&self, flow: &FlowKey, network: IpNet) -> bool {
        let owner = self.shared_owner(network);
        let hash = self.hash(flow) ^ owner;
        self.shard(hash).find(hash, flow, owner).is_some()
    }

    /// Forgets all flows with a peer.
    pub(crate) fn forget(&self, peer: IpAddr, now: Instant) {
        let now = self.millis(now);
        for shard in &self.shards {
            let mut table = lock(shard);
            while let Some(at) = table.oldest_of(peer).into_iter().flatten().next() {
                self.records.end(table.remove(at), End::PeerGone, now);
            }
        }
    }

    /// The records of flows.
    pub(crate) fn records(&self) -> &Records {
        &self.records
    }

    /// Adds what a lane has counted of a flow.
    pub(super) fn add(&self, tally: &Tally, now: u64) {
        let Tally { flow: FlowId { id, at, shard }, direction, amount } = *tally;
        let Some(shard) = self.shards.get(usize::from(shard)) else { return };
        match lock(shard).recorded(At(at), id) {
            Some(recorded) => {
                recorded.add(direction, amount);
                self.records.refresh(recorded, now);
            }
            None => self.records.add_late(id, direction, amount),
        }
    }

    /// Removes a flow whose time is over.
    fn expire_one(&self, table: &mut FlowTable, now: u64, timeouts: Timeouts) -> bool {
        let expired = table.oldest().find(|at| {
            let entry = table.entry(*at);
            now >= entry.last_used.saturating_add(timeouts.of(&entry.flow))
        });
        expired.inspect(|at| self.records.end(table.remove(*at), End::Idle, now)).is_some()
    }

    /// Makes room for a flow of `peer` as [`victim`] has it. Returns whether there is some.
    fn make_room(&self, table: &mut FlowTable, now: u64, peer: IpAddr) -> bool {
        victim(table, now, peer).inspect(|at| self.records.end(table.remove(*at), End::Evicted, now)).is_some()
    }

    fn shard(&self, hash: u64) -> MutexGuard<'_, FlowTable> {
        lock(&self.shards[shard_of(hash)])
    }

    /// Milliseconds since the start of the table, the time base of flows.
    pub(crate) fn millis(&self, now: Instant) -> u64 {
        now.saturating_duration_since(self.start).as_millis() as u64
    }

    /// The moment this number of milliseconds after the start.
    pub(crate) fn instant(&self, millis: u64) -> Instant {
        self.start + Duration::from_millis(millis)
    }

    /// Keyed hash of a flow, for this table and the caches in front of it.
    pub(crate) fn hash(&self, flow: &FlowKey) -> u64 {
        let [a, b, c, d] = self.keys;
        let (local, remote) = (words(flow.local), words(flow.remote));
        let rest = u64::from(flow.local_port) << 32
            | u64::from(flow.remote_port) << 16
            | u64::from(flow.protocol) << 8
            | u64::from(flow.fragment);
        let hash = fold(local[0] ^ a, local[1] ^ b);
        let hash = fold(hash ^ remote[0], remote[1] ^ c);
        fold(hash ^ rest, d)
    }

    /// The owner of a flow with this peer: all gateways of its subnet route together if there are several, otherwise
    /// the peer alone.
    fn owner(&self, peer: &Peer<'_>) -> Owner {
        let [a, b, c, d] = self.keys;
        let keyed = |[high, low]: [u64; 2], with: [u64; 2]| fold(high ^ with[0], low ^ with[1]);
        let PeerIdentity { name, rights } = peer.identity;
        let (name, rights) = (keyed(name, [a, b]), keyed(rights, [c, d]));
        match peer.route {
            None => Owner { owner: name, rights },
            // The gateways share the flow, but each is evaluated by its own certificate.
            Some(network) => Owner { owner: self.shared_owner(network), rights: fold(name ^ a, rights ^ b) },
        }
    }

    fn shared_owner(&self, network: IpNet) -> u64 {
        let [a, b, ..] = self.keys;
        let [high, low] = route_digest(network);
        fold(high ^ a, low ^ b)
    }

    /// An unexpired flow with `peer`, and what becomes of a packet of it in this direction. This does not count as a
    /// packet of the flow.
    pub(super) fn find(
        &self,
        flow: &FlowKey,
        peer: &Peer<'_>,
        direction: Direction,
        now: u64,
        filter: &Filter,
    ) -> Option<(KnownFlow, Result<(), DropReason>)> {
        let (entry, rights) = self.live(flow, peer, now, filter.timeouts())?;
        let idle = Duration::from_millis(now.saturating_sub(entry.last_used));
        let known = KnownFlow { direction: entry.direction, answered: entry.answered, idle };
        let verdict = match entry.stands(rights, filter.generation()) {
            true => Ok(()),
            false => {
                let judge = |direction| filter.judge(direction, flow, *peer, Occasion::Question);
                entry.judge_again(direction, judge).map(|_| ())
            }
        };
        Some((known, verdict))
    }

    /// Whether an unexpired flow with `peer` is tracked, allowed or not.
    pub(super) fn is_tracked(&self, flow: &FlowKey, peer: &Peer<'_>, now: u64, timeouts: Timeouts) -> bool {
        self.live(flow, peer, now, timeouts).is_some()
    }

    /// An unexpired flow, and the keyed digest of the rights that `peer` has.
    fn live(&self, flow: &FlowKey, peer: &Peer<'_>, now: u64, timeouts: Timeouts) -> Option<(Entry, u64)> {
        let Owner { owner, rights } = self.owner(peer);
        let hash = self.hash(flow) ^ owner;
        let table = self.shard(hash);
        let entry = table.entry(table.find(hash, flow, owner)?);
        (now < entry.last_used.saturating_add(timeouts.of(flow))).then(|| (entry.without_record(), rights))
    }

    /// Lets a known flow of `peer` pass, or a new one if `judge` agrees for the direction it begins in. A flow
    /// admitted under another generation of rules, or while the peer's certificate granted other rights, is evaluated
    /// again in its original direction. If it is refused then, it has ended but stays known until it expires:
    /// otherwise the next packet of the other end would begin it the other way round. Flows of other peers with the
    /// same addresses do not count as known.
    pub(super) fn admit(
        &self,
        hash: u64,
        seen: Seen<'_>,
        judge: impl Fn(Direction, Occasion) -> Result<Admitted, DropReason>,
    ) -> Result<Passage, DropReason> {
        let Seen { judged, peer, timeouts } = seen;
        let Judged { now, direction, flow, generation, .. } = judged;
        let owner = self.owner(peer);
        let hash = hash ^ owner.owner;
        // A certificate has at least one network.
        let peer = peer.networks.first().map_or(flow.remote, IpNet::addr);
        let mut table = self.shard(hash);
        if let Some(at) = table.find(hash, flow, owner.owner) {
            let entry = table.entry(at);
            if now < entry.last_used.saturating_add(timeouts.of(flow)) {
                let began = entry.direction;
                let stands = entry.stands(owner.rights, generation);
                let verdict = match stands {
                    true => Ok(Admitted { is_in_audit: false }),
                    false => entry.judge_again(direction, |direction| judge(direction, Occasion::KnownFlow)),
                };
                return match verdict {
                    Ok(Admitted { is_in_audit }) => {
                        table.touch(at, now, owner.rights, generation, began != direction);
                        let rejudged = (!stands).then_some(is_in_audit);
                        let judged = Judged { direction: began, ..judged };
                        Ok(Passage { is_in_audit, flow: self.go_on(&mut table, (at, hash), &judged, rejudged) })
                    }
                    Err(reason) => {
                        table.end(at, now);
                        if let Some(recorded) = table.recorded_of(at) {
                            self.records.end_refused(recorded, reason, &judged);
                        }
                        Err(reason)
                    }
                };
            }
            self.records.end(table.remove(at), End::Idle, now);
        }
        let admitted = judge(direction, Occasion::NewFlow)?;
        for _ in 0..MAX_SWEPT_PER_FLOW {
            if !self.expire_one(&mut table, now, timeouts) {
                break;
            }
        }
        if table.len() >= self.max_per_shard.load(Ordering::Relaxed) && !self.make_room(&mut table, now, peer) {
            return Err(DropReason::ConntrackFull);
        }
        let Admitted { is_in_audit } = admitted;
        let at = table.insert(hash, peer, Entry::new(*flow, owner, direction, generation, now));
        let flow = match self.records.begin(&judged, is_in_audit) {
            Some(recorded) => {
                let id = recorded.id;
                table.record(at, Some(recorded));
                FlowId { id, at: at.0, shard: shard_of(hash) as u8 }
            }
            None => FlowId::NONE,
        };
        Ok(Passage { is_in_audit, flow })
    }

    /// Where a packet of a known flow is counted. If flows are recorded since the last one only, its record begins.
    /// `rejudged` says whether policies in audit would refuse it, if it was judged again.
    #[inline]
    fn go_on(
        &self,
        table: &mut FlowTable,
        (at, hash): (At, u64),
        judged: &Judged<'_>,
        rejudged: Option<bool>,
    ) -> FlowId {
        if !self.records.are_on() {
            return FlowId::NONE;
        }
        let id = match table.recorded_of(at) {
            Some(recorded) => {
                Records::touch(recorded, judged, rejudged);
                recorded.id
            }
            None => {
                let recorded = self.records.begin(judged, rejudged.unwrap_or(false));
                let id = recorded.as_ref().map_or(0, |recorded| recorded.id);
                table.record(at, recorded);
                id
            }
        };
        FlowId { id, at: at.0, shard: shard_of(hash) as u8 }
    }
}

/// The context of a packet.
#[derive(Debug, Clone, Copy)]
pub(super) struct Seen<'a> {
    pub(super) judged: Judged<'a>,
    /// The peer whose tunnel it uses; flows are counted against the peer's first address.
    pub(super) peer: &'a Peer<'a>,
    pub(super) timeouts: Timeouts,
}

impl Timeouts {
    pub(super) fn of(self, flow: &FlowKey) -> u64 {
        match flow.protocol {
            6 => self.tcp,
            17 => self.udp,
            _ => self.other,
        }
    }
}

fn lock(shard: &Mutex<FlowTable>) -> MutexGuard<'_, FlowTable> {
    shard.lock().unwrap_or_else(PoisonError::into_inner)
}

fn shard_of(hash: u64) -> usize {
    (hash >> 60) as usize % SHARDS
}

/// The flow to evict to make room for one of `peer`. A peer that has its fair share loses one of its own flows, unless
/// all of them are in use. A peer below its share takes the place of a flow of a peer that holds more, so nobody is
/// locked out by others and nobody below its share loses a flow to them. First to go is a flow that nobody answered in
/// time (a scan, a one-way stream), then one that was answered and is idle for long, then one that may still be
/// answered.
fn victim(table: &mut FlowTable, now: u64, peer: IpAddr) -> Option<At> {
    let has_its_share = table.has_its_share(peer);
    let [unanswered, answered] = if has_its_share { table.oldest_of(peer) } else { table.oldest_of_heaviest() };
    let idle_for = |at: Option<At>, ms: u64| at.filter(|at| now >= table.entry(*at).last_used.saturating_add(ms));
    idle_for(unanswered, AWAIT_ANSWER_MS)
        .or_else(|| idle_for(answered, KEEP_ANSWERED_MS))
        .or(unanswered)
        .or_else(|| answered.filter(|_| !has_its_share))
}

fn words(address: IpAddr) -> [u64; 2] {
    match address {
        IpAddr::V4(v4) => [v4.to_bits().into(), 0],
        IpAddr::V6(v6) => [(v6.to_bits() >> 64) as u64, v6.to_bits() as u64],
    }
}

fn fold(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    (product >> 64) as u64 ^ product as u64
}

fn split_mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ x >> 31
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    const CAP: usize = 24;
    const OWNER: Owner = Owner { owner: 1, rights: 2 };

    fn address(peer: u8) -> IpAddr {
        [10, 0, 0, 2 + peer].into()
    }

    fn flow(peer: u8, port: u16) -> FlowKey {
        let (local, remote) = (address(0), address(peer));
        FlowKey { local, remote, local_port: port, remote_port: 0, protocol: 17, fragment: false }
    }

    /// The expected content of a table: flow to (answered, last used).
    type Model = BTreeMap<(u8, u16), (bool, u64)>;

    fn held(model: &Model, peer: u8) -> usize {
        model.keys().filter(|(holder, _)| *holder == peer).count()
    }

    /// Adds a new flow if there is room or room can be made. Returns the evicted flow.
    fn add(table: &mut FlowTable, model: &mut Model, now: u64, peer: u8, port: u16) -> Result<Option<(u8, u16)>, ()> {
        if table.len() >= CAP {
            let at = victim(table, now, address(peer)).ok_or(())?;
            table.remove(at);
        }
        let hash = u64::from(port) << 8 | u64::from(peer);
        table.insert(hash, address(peer), Entry::new(flow(peer, port), OWNER, Direction::Inbound, 1, now));
        let is_gone = |(peer, port): &&(u8, u16)| {
            let hash = u64::from(*port) << 8 | u64::from(*peer);
            table.find(hash, &flow(*peer, *port), OWNER.owner).is_none()
        };
        let gone: Vec<_> = model.keys().filter(is_gone).copied().collect();
        assert!(gone.len() <= 1, "one flow makes room for one");
        model.retain(|key, _| !gone.contains(key));
        model.insert((peer, port), (false, now));
        Ok(gone.first().copied())
    }

    proptest! {
        #[test]
        fn a_full_table_takes_from_who_has_most_and_shuts_out_nobody(
            steps in prop::collection::vec((0_u8..5, 0_u16..400, 0_u8..4, 0_u64..20_000), 1..300),
        ) {
            let (mut table, mut model, mut now) = (FlowTable::default(), Model::new(), 0);
            for (peer, port, step, wait) in steps {
                now += wait;
                let hash = u64::from(port) << 8 | u64::from(peer);
                if let Some(at) = table.find(hash, &flow(peer, port), OWNER.owner) {
                    let answered = model[&(peer, port)].0 || step == 0;
                    table.touch(at, now, OWNER.rights, 1, answered);
                    model.insert((peer, port), (answered, now));
                    continue;
                }
                let before = model.clone();
                let peers = (0..5).filter(|other| *other == peer || held(&before, *other) > 0).count();
                let has_its_share = held(&before, peer) * peers >= before.len();
                match add(&mut table, &mut model, now, peer, port) {
                    Ok(None) => prop_assert!(before.len() < CAP),
                    Ok(Some((victim, gone))) => {
                        let (answered, last_used) = before[&(victim, gone)];
                        if has_its_share {
                            prop_assert_eq!(victim, peer, "it pays for itself");
                            prop_assert!(!answered || now >= last_used + KEEP_ANSWERED_MS);
                        } else {
                            let average = before.len().div_ceil(peers);
                            prop_assert!(held(&before, victim) >= average && victim != peer);
                        }
                        // The lower the sooner: not answered in time, idle for long, to be answered, in use.
                        let rank = |answered: bool, used: u64| match (answered, now.saturating_sub(used)) {
                            (false, AWAIT_ANSWER_MS..) => 0,
                            (true, KEEP_ANSWERED_MS..) => 1,
                            (false, _) => 2,
                            (true, _) => 3,
                        };
                        let before_it = before.iter().any(|((other, _), (with, used))| {
                            *other == victim && (rank(*with, *used), *used) < (rank(answered, last_used), last_used)
                        });
                        prop_assert!(!before_it, "another one of the same peer goes first");
                    }
                    Err(()) => {
                        prop_assert!(has_its_share && before.len() == CAP);
                        let all_live = before.iter().filter(|((other, _), _)| *other == peer)
                            .all(|(_, (answered, used))| *answered && now < used + KEEP_ANSWERED_MS);
                        prop_assert!(all_live);
                    }
                }
                prop_assert!(table.len() <= CAP && table.len() == model.len());
            }
        }
    }

    #[test]
    fn in_a_table_full_of_finished_connections_a_question_stays_until_it_may_be_answered() {
        let (mut table, mut model) = (FlowTable::default(), Model::new());
        for port in 0..CAP as u16 {
            add(&mut table, &mut model, 0, 1, port).unwrap();
            let hash = u64::from(port) << 8 | 1;
            let at = table.find(hash, &flow(1, port), OWNER.owner).unwrap();
            table.touch(at, 0, OWNER.rights, 1, true);
        }
        let now = KEEP_ANSWERED_MS;
        let gone: Vec<_> =
            (100..110).map(|port| add(&mut table, &mut model, now, 1, port).unwrap().unwrap().1).collect();
        assert!(gone.iter().all(|port| *port < CAP as u16), "{gone:?}");
        // Nobody answered: they are the first to go.
        assert_eq!(add(&mut table, &mut model, now + AWAIT_ANSWER_MS, 1, 200), Ok(Some((1, 100))));
    }

    #[test]
    fn a_flood_of_one_peer_costs_others_nothing() {
        let (mut table, mut model) = (FlowTable::default(), Model::new());
        for port in 0..3 {
            add(&mut table, &mut model, 0, 1, port).unwrap();
        }
        for port in 0..10_000 {
            add(&mut table, &mut model, 1, 2, port).unwrap();
        }
        assert_eq!((held(&model, 1), held(&model, 2)), (3, CAP - 3));
        // Even answered flows are evicted for a peer that holds less.
        for port in 9_900..10_000 {
            let hash = u64::from(port) << 8 | 2;
            if let Some(at) = table.find(hash, &flow(2, port), OWNER.owner) {
                table.touch(at, 2, OWNER.rights, 1, true);
            }
        }
        assert!(add(&mut table, &mut model, 3, 2, 20_000).is_err());
        assert_eq!(add(&mut table, &mut model, 3, 3, 1).unwrap().unwrap().0, 2);
    }
}
