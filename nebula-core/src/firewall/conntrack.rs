//! Flows already allowed: sharded, with expiry and a hard cap (connection tracking).

use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::Filter;
use super::filter::Timeouts;
use super::flow_table::{Entry, FlowTable};
use crate::DropReason;
use crate::counters::Direction;
use crate::wire::ip::FlowKey;

const SHARDS: usize = 16;
/// A flow that got answers is not forgotten early for another one unless it is idle for this long.
const KEEP_ANSWERED_MS: u64 = 30_000;
/// Time between two searches of the whole table for expired flows.
const SEARCH_EVERY_MS: u64 = 10_000;
/// Expired flows cleared away with each new one: more than one, so that the table shrinks, but bounded work.
const SWEEP: usize = 4;

/// Flows already allowed.
#[derive(Debug)]
pub(crate) struct Conntrack {
    start: Instant,
    keys: [u64; 4],
    max_per_shard: AtomicUsize,
    next_search: AtomicU64,
    shards: [Mutex<FlowTable>; SHARDS],
}

impl Conntrack {
    /// An empty table; `key` makes collisions unpredictable.
    pub(crate) fn new(start: Instant, key: u64, max_flows: usize) -> Self {
        let keys = std::array::from_fn(|n| split_mix(key.wrapping_add(n as u64)));
        let conntrack = Self {
            start,
            keys,
            max_per_shard: AtomicUsize::new(0),
            next_search: AtomicU64::new(0),
            shards: Default::default(),
        };
        conntrack.set_max_flows(max_flows);
        conntrack
    }
    pub(crate) fn set_max_flows(&self, max_flows: usize) {
        self.max_per_shard.store(max_flows.div_ceil(SHARDS).max(1), Ordering::Relaxed);
    }
    /// Flows remembered, those about to expire included.
    pub(crate) fn len(&self) -> usize {
        self.shards.iter().map(|shard| lock(shard).len()).sum()
    }
    /// Forgets what has expired, if the last time is not just past.
    pub(crate) fn expire(&self, now: Instant, filter: &Filter) {
        let timeouts = filter.timeouts();
        let now = self.millis(now);
        if now < self.next_search.load(Ordering::Relaxed) {
            return;
        }
        self.next_search.store(now + SEARCH_EVERY_MS, Ordering::Relaxed);
        for shard in &self.shards {
            let mut table = lock(shard);
            while expire_one(&mut table, now, timeouts) {}
            table.shrink();
        }
    }
    /// Time as flows see it.
    pub(super) fn millis(&self, now: Instant) -> u64 {
        now.saturating_duration_since(self.start).as_millis() as u64
    }
    /// Keyed hash of a flow, for this table and the caches before it.
    pub(super) fn hash(&self, flow: &FlowKey) -> u64 {
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
    /// Lets a known flow pass, or a new one if `allows` says so for the direction it begins in. A flow admitted under
    /// another generation of rules is asked about again, in the direction in which it began.
    pub(super) fn admit(
        &self,
        hash: u64,
        flow: &FlowKey,
        seen: Seen,
        allows: impl Fn(Direction) -> bool,
    ) -> Result<(), DropReason> {
        let mut table = lock(&self.shards[(hash >> 60) as usize % SHARDS]);
        let Seen { direction, now, generation, timeouts } = seen;
        if let Some(at) = table.find(hash, flow) {
            let entry = table.entry(at);
            let is_live = now < entry.last_used.saturating_add(timeouts.of(flow));
            if is_live && (entry.generation == generation || allows(entry.direction)) {
                let answered = entry.direction != direction;
                table.touch(at, now, generation, answered);
                return Ok(());
            }
            table.remove(at);
        }
        if !allows(direction) {
            return Err(DropReason::NoRule);
        }
        for _ in 0..SWEEP {
            if !expire_one(&mut table, now, timeouts) {
                break;
            }
        }
        if table.len() >= self.max_per_shard.load(Ordering::Relaxed) && !evict(&mut table, now) {
            return Err(DropReason::ConntrackFull);
        }
        table.insert(hash, Entry::new(*flow, direction, generation, now));
        Ok(())
    }
}

/// A packet's circumstances.
#[derive(Debug, Clone, Copy)]
pub(super) struct Seen {
    pub(super) direction: Direction,
    pub(super) now: u64,
    pub(super) generation: u32,
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

fn expire_one(table: &mut FlowTable, now: u64, timeouts: Timeouts) -> bool {
    let expired = table.oldest().find(|at| {
        let entry = table.entry(*at);
        now >= entry.last_used.saturating_add(timeouts.of(&entry.flow))
    });
    expired.inspect(|at| table.remove(*at)).is_some()
}

/// Makes room: first a flow that never got an answer (a scan, a one-way stream), then one idle for long.
fn evict(table: &mut FlowTable, now: u64) -> bool {
    let candidate = table.oldest().min_by_key(|at| (table.entry(*at).answered, table.entry(*at).last_used));
    let victim = candidate.filter(|at| {
        let entry = table.entry(*at);
        !entry.answered || now >= entry.last_used.saturating_add(KEEP_ANSWERED_MS)
    });
    victim.inspect(|at| table.remove(*at)).is_some()
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
