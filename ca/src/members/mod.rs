//! Who is in the network now, for the directory: followed from the ledger's log, and told to agents in versions.

mod roster;

use std::sync::{
    Mutex, PoisonError, RwLock,
    atomic::{AtomicBool, Ordering},
};

use nebula_cert::UnixTime;
use tokio::sync::watch;

pub(crate) use self::roster::Question;
use self::roster::Roster;
use crate::store::{KEPT_CHANGES, Store, StoreError};

/// Follows the members in the ledger. Answers come from memory, also while the ledger cannot be read: the directory
/// only says where to send, and a peer's certificate proves who answers.
pub(crate) struct Members {
    /// `None` until the ledger was read once.
    roster: RwLock<Option<Roster>>,
    /// Signalled when somebody joined or left.
    news: watch::Sender<()>,
    /// Held by whoever follows the log; when the roster was last compared with the whole ledger.
    following: Mutex<Option<UnixTime>>,
    /// Set when there may be more in the log.
    is_behind: AtomicBool,
}

impl Members {
    pub(crate) fn new() -> Self {
        let news = watch::Sender::new(());
        Self { roster: RwLock::default(), news, following: Mutex::default(), is_behind: AtomicBool::new(false) }
    }

    /// The answer to a question; `None` if there is nothing to tell yet, which never happens once the caller
    /// `has_waited`. `Err` until the ledger was read once. Does not block on I/O.
    pub(crate) fn answer(&self, question: &Question, has_waited: bool) -> Result<Option<String>, NotRead> {
        let roster = self.roster.read().unwrap_or_else(PoisonError::into_inner);
        roster.as_ref().map(|roster| roster.answer(question, has_waited)).ok_or(NotRead)
    }

    /// Signals when somebody joined or left.
    pub(crate) fn news(&self) -> watch::Receiver<()> {
        self.news.subscribe()
    }

    /// Wakes all who wait.
    pub(crate) fn wake(&self) {
        self.news.send_replace(());
    }

    /// Number of members.
    pub(crate) fn count(&self) -> usize {
        self.roster.read().unwrap_or_else(PoisonError::into_inner).as_ref().map_or(0, Roster::len)
    }

    /// Takes over what the log has that is new. If another thread is doing that, it goes on with what is new now.
    pub(crate) fn follow(&self, store: &dyn Store, now: UnixTime) {
        self.is_behind.store(true, Ordering::SeqCst);
        while self.is_behind.load(Ordering::SeqCst) {
            let Ok(mut compared) = self.following.try_lock() else { return };
            self.is_behind.store(false, Ordering::SeqCst);
            if let Err(error) = self.catch_up(store, &mut compared, now) {
                tracing::warn!(%error, "cannot read who is in the network; the directory stays as it is");
            }
        }
    }

    fn catch_up(&self, store: &dyn Store, compared: &mut Option<UnixTime>, now: UnixTime) -> Result<(), StoreError> {
        if self.roster.read().unwrap_or_else(PoisonError::into_inner).is_none() {
            self.replace(Roster::load(store, now)?);
            *compared = Some(now);
        }
        self.read_log(store, now)?;
        let mut doubtful = self.with(|roster| roster.expired(now, REVIEWED_AT_ONCE));
        // Whatever else writes to a shared ledger, for example a database that was restored, may leave the log alone.
        if store.is_shared() && compared.is_none_or(|at| !(at..at + COMPARE_EVERY).contains(&now)) {
            *compared = Some(now);
            let members = store.members(now)?;
            doubtful.extend(self.with(|roster| roster.differing(&members, REVIEWED_AT_ONCE)));
        }
        if !doubtful.is_empty() {
            store.review_members(&doubtful, now)?;
            self.read_log(store, now)?;
        }
        Ok(())
    }

    fn read_log(&self, store: &dyn Store, now: UnixTime) -> Result<(), StoreError> {
        loop {
            let at = self.with(|roster| roster.at());
            let changes = store.member_changes(at, READ_AT_ONCE)?;
            let count = changes.len();
            let (mut has_news, mut has_gap) = (false, false);
            {
                let mut roster = self.roster.write().unwrap_or_else(PoisonError::into_inner);
                let Some(roster) = roster.as_mut() else { return Ok(()) };
                for change in changes {
                    match roster.apply(change) {
                        Ok(is_news) => has_news |= is_news,
                        Err(_gap) => has_gap = true,
                    }
                }
            }
            if has_gap {
                // It was away for longer than changes are kept.
                self.replace(Roster::load(store, now)?);
                continue;
            }
            if has_news {
                self.wake();
            }
            if count < READ_AT_ONCE {
                return Ok(());
            }
        }
    }

    fn replace(&self, roster: Roster) {
        *self.roster.write().unwrap_or_else(PoisonError::into_inner) = Some(roster);
        self.wake();
    }

    fn with<T: Default>(&self, read: impl FnOnce(&Roster) -> T) -> T {
        self.roster.read().unwrap_or_else(PoisonError::into_inner).as_ref().map(read).unwrap_or_default()
    }
}

impl Roster {
    /// Reads all members, and the changes that callers may ask for.
    fn load(store: &dyn Store, now: UnixTime) -> Result<Self, StoreError> {
        let position = store.position()?;
        // What happens meanwhile is read from the log later, once more.
        let mut roster = Self::new(&position, store.members(now)?);
        let mut at = position.at.saturating_sub(KEPT_CHANGES);
        loop {
            let changes = store.member_changes(at, READ_AT_ONCE)?;
            let Some(last) = changes.last() else { break };
            at = last.at;
            roster.remember(changes.into_iter().filter(|change| change.at <= position.at));
            if at >= position.at {
                break;
            }
        }
        Ok(roster)
    }
}

/// The ledger could not be read yet.
#[derive(Debug)]
pub(crate) struct NotRead;

const READ_AT_ONCE: usize = 1_000;
const REVIEWED_AT_ONCE: usize = 1_000;
/// Seconds.
const COMPARE_EVERY: i64 = 600;
