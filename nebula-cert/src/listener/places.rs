//! The connections that a listener serves at a time, shared out between those who connect.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::Source;

/// The places of a listener. Where all are taken, a new connection gets the place of another one: of the source that
/// has the most, one that has not asked anything yet before one that has, and the oldest before newer ones. So whoever
/// opens many connections, or slow ones, ends its own. Those of root and of the program's own user make room for each
/// other only, which keeps the door open to the kubelet and to whoever administers the machine.
pub struct Places {
    most: usize,
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    next: u64,
    /// Oldest first.
    open: BTreeMap<u64, Open>,
    /// Connections that were told to end and have not done so yet.
    ending: usize,
}

struct Open {
    source: Source,
    has_asked: bool,
    end: Box<dyn FnOnce() + Send>,
}

/// The place of one connection, which dropping it frees.
pub struct Place {
    id: u64,
    places: Arc<Places>,
}

impl Places {
    /// Serves at most `most` connections at a time. As many again may be about to end.
    #[must_use]
    pub fn new(most: usize) -> Arc<Self> {
        Arc::new(Self { most, table: Mutex::default() })
    }

    /// Returns a place for a new connection. `end` is called, by whoever takes the place, when the connection has to
    /// end; it must not block. `None`: this connection is the one that must end.
    #[must_use]
    pub fn admit(self: &Arc<Self>, source: Source, end: impl FnOnce() + Send + 'static) -> Option<Place> {
        let mut table = self.table();
        // Reserve for who comes first: where many end slowly, it is not kept waiting for them.
        let most_ending = if source.is_trusted() { 2 * self.most } else { self.most };
        if table.ending >= most_ending {
            return None;
        }
        let evicted = if table.open.len() >= self.most {
            let oldest = table.next_to_end(source)?;
            let evicted = table.open.remove(&oldest)?;
            table.ending += 1;
            Some(evicted.end)
        } else {
            None
        };
        let id = table.next;
        table.next += 1;
        table.open.insert(id, Open { source, has_asked: false, end: Box::new(end) });
        drop(table);
        if let Some(end) = evicted {
            end();
        }
        Some(Place { id, places: Arc::clone(self) })
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        // No step leaves the table in between.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Table {
    fn next_to_end(&self, newcomer: Source) -> Option<u64> {
        let only_trusted = self.open.values().all(|open| open.source.is_trusted());
        let may_end = |source: Source| !source.is_trusted() || (only_trusted && newcomer.is_trusted());
        let held = |source| {
            let open = self.open.values().filter(|open| open.source == source).count();
            open + usize::from(source == newcomer)
        };
        let open = self.open.iter().filter(|(_, open)| may_end(open.source));
        open.min_by_key(|(id, open)| (Reverse(held(open.source)), open.has_asked, **id)).map(|(id, _)| *id)
    }
}

impl Place {
    /// Notes that the client has sent its request: silent clients of the same source end before it.
    pub fn has_asked(&self) {
        if let Some(open) = self.places.table().open.get_mut(&self.id) {
            open.has_asked = true;
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut table = self.places.table();
        if table.open.remove(&self.id).is_none() {
            table.ending -= 1;
        }
    }
}

impl fmt::Debug for Places {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Places").field("most", &self.most).finish_non_exhaustive()
    }
}

impl fmt::Debug for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Place").field("id", &self.id).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    const ROOT: Source = Source::User(0);
    const ALICE: Source = Source::User(70_001);
    const BOB: Source = Source::User(70_002);

    /// A connection that ends as soon as it is told to.
    struct Client {
        place: Option<Place>,
        told: Arc<AtomicBool>,
    }

    impl Client {
        fn new(places: &Arc<Places>, source: Source) -> Self {
            let told = Arc::new(AtomicBool::new(false));
            let end = Arc::clone(&told);
            Self { place: places.admit(source, move || end.store(true, Ordering::Relaxed)), told }
        }

        fn is_served(&mut self) -> bool {
            if self.told.load(Ordering::Relaxed) {
                self.place = None;
            }
            self.place.is_some()
        }
    }

    fn served(clients: &mut [Client]) -> Vec<usize> {
        let all = clients.iter_mut().enumerate();
        all.filter_map(|(at, client)| client.is_served().then_some(at)).collect()
    }

    #[test]
    fn who_has_most_makes_room_and_ends_its_oldest() {
        let places = Places::new(8);
        let mut few = Client::new(&places, BOB);
        let mut many = Vec::new();
        for _ in 0..300 {
            many.push(Client::new(&places, ALICE));
            served(&mut many);
        }
        assert!(few.is_served());
        assert_eq!(served(&mut many), [293, 294, 295, 296, 297, 298, 299]);
        let mut another = Client::new(&places, Source::Network([192, 0, 2, 1].into()));
        assert!(another.is_served() && few.is_served());
        assert_eq!(served(&mut many).first(), Some(&294));
    }

    #[test]
    fn of_equals_the_newcomer_has_one_more() {
        let places = Places::new(4);
        let mut clients: Vec<_> = [ALICE, ALICE, BOB, BOB].map(|source| Client::new(&places, source)).into();
        clients.push(Client::new(&places, BOB));
        assert_eq!(served(&mut clients), [0, 1, 3, 4]);
    }

    #[test]
    fn root_is_served_beside_any_number_of_others_and_ended_by_root_only() {
        let places = Places::new(4);
        let mut root = Client::new(&places, ROOT);
        for user in 0..100 {
            assert!(Client::new(&places, Source::User(80_000 + user)).is_served());
        }
        let mut strangers: Vec<_> = (0..100).map(|user| Client::new(&places, Source::User(90_000 + user))).collect();
        served(&mut strangers);
        assert!(root.is_served());
        let mut more: Vec<_> = (0..3).map(|_| Client::new(&places, ROOT)).collect();
        assert_eq!((served(&mut more).len(), served(&mut strangers).len()), (3, 0));
        assert!(!Client::new(&places, ALICE).is_served(), "all places are root's");
        assert!(root.is_served());
        assert!(Client::new(&places, ROOT).is_served());
        assert!(!root.is_served(), "it was the oldest");
    }

    #[test]
    fn a_silent_client_ends_before_one_of_the_same_source_that_asked() {
        let places = Places::new(2);
        let mut clients: Vec<_> = (0..2).map(|_| Client::new(&places, ALICE)).collect();
        clients[0].place.as_ref().unwrap().has_asked();
        clients.push(Client::new(&places, ALICE));
        assert_eq!(served(&mut clients), [0, 2]);
    }

    #[test]
    fn connections_that_do_not_end_when_told_are_bounded_and_leave_a_reserve_to_root() {
        let places = Places::new(4);
        let stuck: Vec<_> = (0..100).filter_map(|_| places.admit(ALICE, || ())).collect();
        assert_eq!(stuck.len(), 8);
        let root: Vec<_> = (0..4).filter_map(|_| places.admit(ROOT, || ())).collect();
        assert_eq!(root.len(), 4);
        drop((stuck, root));
        let table = places.table();
        assert_eq!((table.open.len(), table.ending), (0, 0));
    }
}
