//! Connection limits: how many connections one source may have, and which one is evicted when there is no room.

use crate::rate_limit;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use std::{
    collections::{BTreeMap, HashMap},
    net::IpAddr,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};
use tokio::{sync::Notify, time::Instant};

/// All connections of callers. A new connection is always admitted: if its source or the service has no room left, the
/// oldest connection of that source is evicted, or of the source with the most. Connections of callers that have proved
/// who they are are kept, and part of the room is reserved for them: a caller that shares its address with an attacker,
/// as all pods of a node may, needs only one new connection to be served.
pub(crate) struct Connections {
    table: Mutex<Table>,
    most: usize,
}

#[derive(Default)]
struct Table {
    next: u64,
    /// Oldest first.
    open: BTreeMap<u64, Open>,
    sources: HashMap<IpAddr, Count>,
    /// Number of connections per proven identity.
    identities: HashMap<String, usize>,
    unproven: usize,
}

struct Open {
    source: IpAddr,
    since: Instant,
    stage: Stage,
    identity: Option<String>,
    end: Arc<Notify>,
}

/// Progress of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Handshake,
    Open,
    /// Waits for a change of the trust bundle.
    Waiting,
    /// Its request is being processed.
    Working,
}

/// Unproven connections of one source.
#[derive(Default)]
struct Count {
    all: usize,
    handshakes: usize,
    waiting: usize,
}

/// One connection; dropping it ends its entry.
pub(crate) struct Connection {
    id: u64,
    connections: Arc<Connections>,
    end: Arc<Notify>,
    introduced: AtomicBool,
}

impl Connections {
    /// Limits the number of connections by the available descriptors.
    pub(crate) fn new(descriptors: usize) -> Self {
        let most = MAX_CONNECTIONS.min(descriptors.saturating_sub(OTHER_DESCRIPTORS)).max(FEWEST_CONNECTIONS);
        Self { table: Mutex::default(), most }
    }

    /// Admits a new connection, evicting others if needed.
    pub(crate) fn admit(self: &Arc<Self>, address: IpAddr, now: Instant) -> Connection {
        let source = rate_limit::source(address);
        let end = Arc::new(Notify::new());
        let mut table = self.table();
        table.make_room(source, self.most, now);
        let id = table.next;
        table.next += 1;
        let stage = Stage::Handshake;
        table.open.insert(id, Open { source, since: now, stage, identity: None, end: Arc::clone(&end) });
        table.count(source, stage, true);
        Connection { id, connections: Arc::clone(self), end, introduced: AtomicBool::new(false) }
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        // Counters stay usable after a panic elsewhere.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Table {
    fn make_room(&mut self, source: IpAddr, most: usize, now: Instant) {
        let count = self.sources.get(&source);
        let (all, handshakes) = count.map_or((0, 0), |count| (count.all, count.handshakes));
        if handshakes >= MAX_HANDSHAKES_OF_A_SOURCE {
            // A whole node may start at once, but only a silent caller is slow.
            self.end_oldest(|open| {
                open.source == source && open.stage == Stage::Handshake && now >= open.since + HANDSHAKE_EVICTABLE_AFTER
            });
        }
        if all >= most / 4 {
            self.end_oldest(|open| open.source == source && open.identity.is_none());
        }
        if self.unproven >= most / 4 * 3 || self.open.len() >= most {
            let largest = self.sources.iter().max_by_key(|(_, count)| count.all).map(|(source, _)| *source);
            if !self.end_oldest(|open| Some(open.source) == largest && open.identity.is_none()) {
                self.end_oldest(|_| true);
            }
        }
    }

    /// Evicts the oldest connection of this kind; one that is being answered only if there is no other.
    fn end_oldest(&mut self, is_meant: impl Fn(&Open) -> bool) -> bool {
        let meant = || self.open.iter().filter(|(_, open)| is_meant(open));
        let oldest = meant().find(|(_, open)| open.stage != Stage::Working).or_else(|| meant().next());
        let Some(id) = oldest.map(|(id, _)| *id) else { return false };
        if let Some(open) = self.remove(id) {
            open.end.notify_one();
        }
        true
    }

    fn remove(&mut self, id: u64) -> Option<Open> {
        let open = self.open.remove(&id)?;
        match &open.identity {
            None => self.count(open.source, open.stage, false),
            Some(identity) => {
                if let Some(count) = self.identities.get_mut(identity) {
                    *count -= 1;
                    if *count == 0 {
                        self.identities.remove(identity);
                    }
                }
            }
        }
        Some(open)
    }

    /// Adds an unproven connection to the counts, or removes it.
    fn count(&mut self, source: IpAddr, stage: Stage, is_one_more: bool) {
        let change = |number: &mut usize| *number = if is_one_more { *number + 1 } else { number.saturating_sub(1) };
        change(&mut self.unproven);
        let count = self.sources.entry(source).or_default();
        change(&mut count.all);
        match stage {
            Stage::Handshake => change(&mut count.handshakes),
            Stage::Waiting => change(&mut count.waiting),
            Stage::Open | Stage::Working => {}
        }
        if count.all == 0 {
            self.sources.remove(&source);
        }
    }

    fn enter(&mut self, id: u64, stage: Stage) {
        let Some(open) = self.open.get_mut(&id) else { return };
        let (source, before) = (open.source, std::mem::replace(&mut open.stage, stage));
        if open.identity.is_none() {
            self.count(source, before, false);
            self.count(source, stage, true);
        }
    }
}

impl Connection {
    /// Completes when the connection is evicted.
    pub(crate) async fn ended(&self) {
        self.end.notified().await;
    }

    /// Notes that the handshake is done.
    pub(crate) fn is_open(&self) {
        self.connections.table().enter(self.id, Stage::Open);
    }

    /// Marks the request as being processed until the guard is dropped.
    pub(crate) fn work(self: &Arc<Self>) -> Busy {
        self.connections.table().enter(self.id, Stage::Working);
        Busy(Arc::clone(self))
    }

    /// Marks the connection as waiting for news until the guard is dropped. `None` if too many of its source wait
    /// already.
    pub(crate) fn wait(self: &Arc<Self>) -> Option<Busy> {
        let mut table = self.connections.table();
        let open = table.open.get(&self.id)?;
        let waiting = table.sources.get(&open.source).map_or(0, |count| count.waiting);
        if open.identity.is_none() && waiting >= MAX_WAITING_OF_A_SOURCE {
            return None;
        }
        table.enter(self.id, Stage::Waiting);
        drop(table);
        Some(Busy(Arc::clone(self)))
    }

    /// Notes that the client of this connection has proved to be `identity`.
    pub(crate) fn has_proved(&self, identity: &str) {
        let mut table = self.connections.table();
        let Some(open) = table.open.get(&self.id) else { return };
        let count = table.identities.get(identity).copied().unwrap_or_default();
        if open.identity.is_some() || count >= MAX_OF_AN_IDENTITY {
            return;
        }
        let (source, stage) = (open.source, open.stage);
        table.count(source, stage, false);
        *table.identities.entry(identity.to_owned()).or_default() += 1;
        if let Some(open) = table.open.get_mut(&self.id) {
            open.identity = Some(identity.to_owned());
        }
    }

    /// Who the client has proved to be.
    pub(crate) fn identity(&self) -> Option<String> {
        self.connections.table().open.get(&self.id)?.identity.clone()
    }

    /// Whether what the client says about itself is worth a look: once, so that nonsense costs no more than a
    /// handshake.
    pub(crate) fn may_introduce_itself(&self) -> bool {
        !self.is_proven() && !self.introduced.swap(true, Ordering::Relaxed)
    }

    /// Whether the client has proved who it is.
    pub(crate) fn is_proven(&self) -> bool {
        self.connections.table().open.get(&self.id).is_some_and(|open| open.identity.is_some())
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.connections.table().remove(self.id);
    }
}

/// Guard of a request in progress.
pub(crate) struct Busy(Arc<Connection>);

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.is_open();
    }
}

/// Raises the soft limit of open files to the hard limit, and returns the limit in force.
pub(crate) fn raise_descriptor_limit() -> usize {
    let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE) else { return FEWEST_CONNECTIONS };
    let limit = match setrlimit(Resource::RLIMIT_NOFILE, hard, hard) {
        Ok(()) => hard,
        Err(error) => {
            tracing::warn!(%error, soft, hard, "cannot raise the limit of open files");
            soft
        }
    };
    usize::try_from(limit).unwrap_or(usize::MAX)
}

/// Most of them wait for changes of the trust bundle. Each takes about 30 kB.
const MAX_CONNECTIONS: usize = 4_096;
const FEWEST_CONNECTIONS: usize = 64;
/// Reserved for the store, the API server, listeners, files, and connections about to end.
const OTHER_DESCRIPTORS: usize = 256;
const MAX_HANDSHAKES_OF_A_SOURCE: usize = 64;
const HANDSHAKE_EVICTABLE_AFTER: Duration = Duration::from_secs(1);
/// Enough for several nodes full of pods.
const MAX_WAITING_OF_A_SOURCE: usize = 512;
/// A pod has one, and a second one while it changes over.
const MAX_OF_AN_IDENTITY: usize = 8;

/// Remote address of a connection.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Caller(pub(crate) IpAddr);

#[cfg(test)]
mod tests {
    use super::*;

    fn address(last: u8) -> IpAddr {
        IpAddr::from([192, 0, 2, last])
    }

    /// Room for a hundred connections.
    fn few() -> Arc<Connections> {
        Arc::new(Connections::new(OTHER_DESCRIPTORS + 100))
    }

    fn is_in(connection: &Connection) -> bool {
        connection.connections.table().open.contains_key(&connection.id)
    }

    #[test]
    fn the_oldest_of_a_source_makes_room_and_proven_ones_stay() {
        let (connections, now) = (few(), Instant::now());
        let proven = Arc::new(connections.admit(address(1), now));
        proven.has_proved("pod a");
        let other = connections.admit(address(2), now);
        let many: Vec<_> = (0..1_000).map(|_| connections.admit(address(1), now)).collect();
        assert!(is_in(&proven) && is_in(&other));
        assert_eq!(many.iter().filter(|connection| is_in(connection)).count(), 25);
        assert!(is_in(&many[999]), "the newest is in");
        drop((many, other));
        assert_eq!(connections.table().unproven, 0);
        drop(proven);
        assert!(connections.table().sources.is_empty() && connections.table().identities.is_empty());
    }

    #[test]
    fn many_sources_leave_room_for_whoever_proves_something() {
        let (connections, now) = (few(), Instant::now());
        let strangers: Vec<_> = (0..200).map(|last| connections.admit(address(last), now)).collect();
        assert_eq!(strangers.iter().filter(|connection| is_in(connection)).count(), 75);
        let mut proven = Vec::new();
        for number in 0..40 {
            let connection = connections.admit(address(250), now);
            connection.has_proved(&format!("pod {}", number % 20));
            proven.push(connection);
        }
        assert!(proven.iter().all(is_in));
        assert!(connections.table().open.len() <= 101);
    }

    #[test]
    fn one_identity_makes_only_so_many_connections_proven() {
        let (connections, now) = (few(), Instant::now());
        let all: Vec<_> = (0..20).map(|_| connections.admit(address(1), now)).collect();
        all.iter().for_each(|connection| connection.has_proved("pod a"));
        assert_eq!(all.iter().filter(|connection| connection.is_proven()).count(), MAX_OF_AN_IDENTITY);
    }

    #[test]
    fn silent_handshakes_make_room_before_those_that_are_under_way() {
        let connections = Arc::new(Connections::new(usize::MAX));
        let (then, now) = (Instant::now(), Instant::now() + HANDSHAKE_EVICTABLE_AFTER);
        let silent: Vec<_> = (0..64).map(|_| connections.admit(address(1), then)).collect();
        let node: Vec<_> = (0..300).map(|_| connections.admit(address(1), now)).collect();
        assert!(silent.iter().all(|connection| !is_in(connection)));
        assert!(node.iter().all(is_in), "a whole node that starts at once");
    }

    #[test]
    fn of_one_source_only_so_many_wait_unless_they_proved_who_they_are() {
        let connections = Arc::new(Connections::new(usize::MAX));
        let now = Instant::now();
        let all: Vec<_> = (0..600).map(|_| Arc::new(connections.admit(address(1), now))).collect();
        let waiting: Vec<_> = all.iter().filter_map(Connection::wait).collect();
        assert_eq!(waiting.len(), MAX_WAITING_OF_A_SOURCE);
        all[599].has_proved("pod a");
        assert!(all[599].wait().is_some());
        assert!(connections.admit(address(2), now).connections.table().open.len() == 601);
        drop(waiting);
        assert!(all[598].wait().is_some());
    }
}
