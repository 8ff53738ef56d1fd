//! The store: one file of SQLite, with one who writes and any number who read.
//!
//! | file | what |
//! | --- | --- |
//! | `schema.rs` | the tables, and how a file is opened |
//! | `rows.rs` | a record as a row and as words |
//! | `table.rs` | statements for each row |
//! | `pods.rs` | the pods that have records, and which of them gives way |
//! | `words.rs` | texts, once for each pod |
//! | `query.rs` | questions, on a connection of their own |
//! | `batch.rs` | records in the order of the file, for exporters |
//! | `decoder.rs` | a row as a record |
//! | `exports.rs` | how far exporters are |

mod batch;
#[cfg(test)]
mod cost;
mod decoder;
mod exports;
mod pods;
mod query;
mod rows;
mod schema;
mod table;
#[cfg(test)]
mod tests;
mod words;

use std::collections::HashSet;
use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nebula_cni_contract::flow_records::FlowRecords;
use rusqlite::{Connection, ErrorCode, params};

pub(super) use self::batch::{Batch, BatchReader};
use self::exports::Exports;
use self::pods::Pods;
pub use self::query::{Answer, Limits, Reader};
use self::rows::Row;
use self::table::{Table, WordIds};
use self::words::Words;
use super::Attached;
use super::export::Target;
use super::pairs::Pairs;

/// Why the store cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// Nothing was ever kept here.
    #[error("no flow records are kept on this node")]
    None,
    /// The file system refuses.
    #[error("cannot use its folder: {0}")]
    Folder(#[source] io::Error),
    /// Another agent writes it.
    #[error("another agent of this node writes them")]
    Taken,
    /// It cannot be read as what it should be.
    #[error("it is damaged: {0}")]
    Damaged(String),
    /// SQLite refuses.
    #[error(transparent)]
    Sqlite(rusqlite::Error),
}

impl From<rusqlite::Error> for StoreError {
    fn from(error: rusqlite::Error) -> Self {
        match error.sqlite_error_code() {
            Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase) => Self::Damaged(error.to_string()),
            _ => Self::Sqlite(error),
        }
    }
}

/// How much is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bound {
    /// Of all files together, in bytes.
    pub bytes: u64,
    /// Age of the oldest record.
    pub age: Duration,
}

impl Bound {
    /// Pages that may be in use: the rest is for what was written and is not in its place yet.
    fn pages(self) -> u64 {
        self.bytes.saturating_sub(OF_THE_LOG).max(schema::PAGE * 64) / schema::PAGE
    }
}

/// What has become of records since the store was opened.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Changes that were written.
    pub written: u64,
    /// Records that gave way to others.
    pub evicted: u64,
    /// Records that became too old.
    pub expired: u64,
    /// Records that instances had to drop before they were asked.
    pub lost: u64,
    /// Records that were gone before they were exported, by [`Target`].
    pub unexported: [u64; Target::ALL.len()],
}

/// How full the store is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Fill {
    /// Records.
    pub records: u64,
    /// Bytes of its files.
    pub bytes: u64,
    /// When the oldest record was last seen, in milliseconds since 1970.
    pub oldest_ms: Option<u64>,
}

/// Where an instance is asked from.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Cursor {
    /// The records after this number are missing.
    pub next: u64,
}

/// The file, opened by the one who writes. After an error it must be dropped and opened again: what is in memory may
/// differ from the file.
#[derive(Debug)]
pub struct Store {
    connection: Connection,
    /// Its folder, locked: numbers of records are given by one who writes.
    _lock: File,
    path: PathBuf,
    bound: Bound,
    pods: Pods,
    words: Words,
    next_seq: i64,
    counts: Counts,
    exports: Exports,
    pairs: Pairs,
}

impl Store {
    /// Opens the store in a folder, or begins one.
    ///
    /// # Errors
    /// See [`StoreError`]; a damaged one is left as it is.
    pub fn open(folder: &Path, bound: Bound) -> Result<Self, StoreError> {
        let path = folder.join(FILE);
        let lock = schema::folder(folder).map_err(StoreError::Folder)?;
        match lock.try_lock() {
            Err(TryLockError::WouldBlock) => return Err(StoreError::Taken),
            Err(TryLockError::Error(error)) => return Err(StoreError::Folder(error)),
            Ok(()) => {}
        }
        let connection = schema::open(&path)?;
        let most: i64 = bound.pages().saturating_add(SLACK_PAGES).try_into().unwrap_or(i64::MAX);
        connection.query_row(&format!("PRAGMA max_page_count = {most}"), [], |_| Ok(()))?;
        connection.set_prepared_statement_cache_capacity(32);
        let exports = Exports::read(&connection)?;
        // Numbers go on where all records of before are gone.
        let sql = "SELECT max(coalesce((SELECT max(seq) FROM flows), 0), coalesce((SELECT max(seq) - 1 FROM ticks), 0), ?) + 1";
        let next_seq = connection.query_row(sql, params![exports.last()], |row| row.get(0))?;
        let pods = Pods::read(&connection)?;
        let (words, counts, pairs) = (Words::default(), Counts::default(), Pairs::default());
        Ok(Self { connection, _lock: lock, path, bound, pods, words, next_seq, counts, exports, pairs })
    }

    /// Goes on with counters of a store that was open before.
    pub(super) fn with_pairs(self, pairs: Pairs) -> Self {
        Self { pairs, ..self }
    }

    /// The counters of traffic, for the next store; what was not committed does not count.
    pub(super) fn into_pairs(mut self) -> Pairs {
        self.pairs.take_back();
        self.pairs
    }

    /// The counters of traffic.
    pub(super) fn pairs(&self) -> &Pairs {
        &self.pairs
    }

    /// The newest number.
    pub(super) fn newest(&self) -> u64 {
        (self.next_seq - 1).cast_unsigned()
    }

    /// Sets the exporters, and returns how far each of them is: a new one begins with the next record.
    pub(super) fn follow(&mut self, targets: &[Target]) -> Result<Vec<(Target, u64)>, StoreError> {
        let newest = self.newest();
        self.exports.follow(&self.connection, targets, newest)
    }

    /// Notes that an exporter is further. It is in the file with the next [`Store::tidy`].
    pub(super) fn exported(&mut self, target: Target, number: u64) {
        self.exports.exported(target, number);
    }

    /// Puts a damaged store aside, so that a new one can begin. It replaces the one that was put aside before. Returns
    /// where it is.
    ///
    /// # Errors
    /// Returns the file system's error.
    pub fn set_aside(folder: &Path) -> io::Result<PathBuf> {
        let (path, aside) = (folder.join(FILE), folder.join(ASIDE));
        fs::rename(&path, &aside)?;
        for suffix in ["-wal", "-shm"] {
            match fs::remove_file(folder.join(format!("{FILE}{suffix}"))) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        Ok(aside)
    }

    /// From where an instance is to be asked.
    #[must_use]
    pub fn cursor(&self, attachment: &str) -> Cursor {
        Cursor { next: self.pods.by_attachment(attachment).map_or(0, |(_, pod)| pod.next) }
    }

    /// Keeps what instances answered, all or nothing. Answers of one instance are in order. Returns whether there
    /// was something to write. It is committed with [`Store::commit`]: a page that changes often is written once.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub fn keep(&mut self, mut answers: Vec<(&Attached, FlowRecords)>, now_ms: u64) -> Result<bool, StoreError> {
        answers
            .retain(|(attached, answer)| !answer.records.is_empty() || self.pods.is_news(&attached.attachment, answer));
        if answers.is_empty() {
            return Ok(false);
        }
        if self.connection.is_autocommit() {
            self.connection.execute_batch("BEGIN IMMEDIATE")?;
        }
        let kept = self.keep_all(answers, now_ms);
        self.ended(kept).map(|()| true)
    }

    /// Commits what was kept.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub fn commit(&mut self) -> Result<(), StoreError> {
        if self.connection.is_autocommit() {
            return Ok(());
        }
        let committed = self.connection.execute_batch("COMMIT").map_err(StoreError::from);
        self.ended(committed)?;
        self.pairs.settle();
        Ok(())
    }

    fn keep_all(&mut self, answers: Vec<(&Attached, FlowRecords)>, now_ms: u64) -> Result<(), StoreError> {
        let tick = tick(now_ms);
        self.connection
            .prepare_cached("INSERT OR IGNORE INTO ticks VALUES(?, ?)")?
            .execute(params![tick, self.next_seq])?;
        let mut written: u64 = 0;
        let Self { connection, pods, words, pairs, next_seq, counts, .. } = self;
        let mut table = Table::of(connection)?;
        for (attached, answer) in answers {
            let first = answer.records.first().map_or(0, |record| record.id.cast_signed());
            let pod = pods.of(connection, attached, first)?;
            let name = format!("{}/{}", attached.pod.namespace, attached.pod.name);
            for record in answer.records {
                let record = rows::corrected(record, &name, now_ms);
                let flow = pods.short(pod, record.id.cast_signed());
                let earlier = table.take(pods, pod, flow)?;
                pairs.add(&attached.pod.namespace, &record, earlier, now_ms);
                let (kind, [source, destination], before, row) = rows::apart(record);
                let ids = WordIds {
                    kind: words.id(connection, pods, pod, &kind)?,
                    ends: [words.id(connection, pods, pod, &source)?, words.id(connection, pods, pod, &destination)?],
                    original: before.map(|before| words.id(connection, pods, pod, &before)).transpose()?,
                };
                table.insert(pod, flow, &ids, &Row { seq: *next_seq, ..row })?;
                *next_seq += 1;
                pods.changed_by(pod, 1);
                pods.has(pod, flow);
                written += 1;
            }
            counts.lost += pods.answered(connection, pod, answer.next, answer.lost)?;
        }
        counts.written += written;
        drop(table);
        self.make_room(written.saturating_mul(2).clamp(LEAST_ROOM, MOST_ROOM))
    }

    /// Evicts about `most` records, of the pods that have the most, while more pages are in use than the bound allows.
    fn make_room(&mut self, most: u64) -> Result<(), StoreError> {
        let mut left = most;
        while left > 0 && self.pages()? > self.bound.pages() {
            let Some(pod) = self.pods.largest() else { return Ok(()) };
            let step = left.min(STEP);
            let sql = "DELETE FROM flows WHERE seq IN (SELECT seq FROM flows WHERE pod = ? ORDER BY flow LIMIT ?) RETURNING seq, flow";
            let mut gone: u64 = 0;
            {
                let mut statement = self.connection.prepare_cached(sql)?;
                let mut rows = statement.query(params![pod, step.cast_signed()])?;
                while let Some(row) = rows.next()? {
                    self.exports.gone(row.get(0)?, &mut self.counts.unexported);
                    self.pods.gave_way(pod, row.get(1)?);
                    gone += 1;
                }
            }
            self.pods.changed_by(pod, -gone.cast_signed());
            self.counts.evicted += gone;
            self.words.sweep(&self.connection, &mut self.pods, pod, gone == 0)?;
            left -= step;
        }
        Ok(())
    }

    /// Housekeeping: forgets what is too old and pods that are gone, and gives free pages back. `attached` are all
    /// attachments of this node. Returns whether there is more to do at once.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub fn tidy(&mut self, attached: &HashSet<String>, now_ms: u64) -> Result<bool, StoreError> {
        self.commit()?;
        self.connection.execute_batch("BEGIN IMMEDIATE")?;
        let kept = self.exports.keep(&self.connection);
        let tidied = kept.and_then(|()| self.tidy_all(attached, now_ms)).and_then(|more| {
            self.connection.execute_batch("COMMIT")?;
            Ok(more)
        });
        let more = self.ended(tidied)?;
        let free: u64 = self.number("PRAGMA freelist_count")?;
        if free > SLACK_PAGES {
            // Steps of it return rows.
            let sql = format!("PRAGMA incremental_vacuum({STEP})");
            let mut vacuum = self.connection.prepare(&sql)?;
            let mut rows = vacuum.query([])?;
            while rows.next()?.is_some() {}
        }
        Ok(more || free > SLACK_PAGES + STEP)
    }

    fn tidy_all(&mut self, attached: &HashSet<String>, now_ms: u64) -> Result<bool, StoreError> {
        let oldest = tick(now_ms.saturating_sub(u64::try_from(self.bound.age.as_millis()).unwrap_or(u64::MAX)));
        let sql = "SELECT coalesce(min(seq), ?) FROM ticks WHERE told >= ?";
        let first: i64 =
            self.connection.prepare_cached(sql)?.query_row(params![self.next_seq, oldest], |row| row.get(0))?;
        let sql = "DELETE FROM flows WHERE seq IN (SELECT seq FROM flows WHERE seq < ? ORDER BY seq LIMIT ?) RETURNING pod, seq";
        let mut expired = 0;
        {
            let mut statement = self.connection.prepare_cached(sql)?;
            let mut rows = statement.query(params![first, LEAST_ROOM.cast_signed()])?;
            while let Some(row) = rows.next()? {
                self.pods.changed_by(row.get(0)?, -1);
                self.exports.gone(row.get(1)?, &mut self.counts.unexported);
                expired += 1;
            }
        }
        self.counts.expired += expired;
        if expired < LEAST_ROOM {
            self.connection.prepare_cached("DELETE FROM ticks WHERE told < ?")?.execute(params![oldest])?;
        }
        for gone in self.pods.gone(attached) {
            self.words.forget(&self.connection, gone)?;
            self.connection.prepare_cached("DELETE FROM pods WHERE id = ?")?.execute(params![gone])?;
            self.pods.forget(gone);
        }
        if let Some(pod) = self.pods.with_old_words() {
            self.words.sweep(&self.connection, &mut self.pods, pod, false)?;
        }
        self.make_room(MOST_ROOM)?;
        Ok(expired == LEAST_ROOM || self.pages()? > self.bound.pages() && self.pods.largest().is_some())
    }

    /// Takes back what was not committed.
    fn ended<T>(&self, done: Result<T, StoreError>) -> Result<T, StoreError> {
        if done.is_err() && !self.connection.is_autocommit() {
            let _ = self.connection.execute_batch("ROLLBACK");
        }
        done
    }

    /// What has become of records since it was opened.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// How full it is.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub fn fill(&self) -> Result<Fill, StoreError> {
        let oldest = self
            .connection
            .prepare_cached("SELECT last_ms FROM flows ORDER BY seq LIMIT 1")?
            .query_row([], |row| row.get(0));
        let oldest = match oldest {
            Err(rusqlite::Error::QueryReturnedNoRows) => None,
            other => Some(i64::cast_unsigned(other?)),
        };
        let size = |path: PathBuf| fs::metadata(path).map_or(0, |file| file.len());
        let log = self.path.with_file_name(format!("{FILE}-wal"));
        Ok(Fill { records: self.pods.records(), bytes: size(self.path.clone()) + size(log), oldest_ms: oldest })
    }

    /// Pages in use.
    fn pages(&self) -> Result<u64, StoreError> {
        Ok(self.number("PRAGMA page_count")?.saturating_sub(self.number("PRAGMA freelist_count")?))
    }

    fn number(&self, pragma: &str) -> Result<u64, StoreError> {
        let number: i64 = self.connection.prepare_cached(pragma)?.query_row([], |row| row.get(0))?;
        Ok(number.cast_unsigned())
    }
}

/// Time in the resolution in which it is kept when rows were told.
fn tick(now_ms: u64) -> i64 {
    (now_ms / TICK_MS).cast_signed()
}

/// Name of the file in its folder.
const FILE: &str = "flows.db";
/// A damaged one.
const ASIDE: &str = "flows.db.damaged";
const TICK_MS: u64 = 10_000;
/// Of the bound: what was written and is not in its place yet.
const OF_THE_LOG: u64 = 6 << 20;
/// Pages that may be used beyond the bound until others give way, and that may be free.
const SLACK_PAGES: u64 = 512;
/// Records that give way at once.
const STEP: u64 = 256;
const LEAST_ROOM: u64 = 1024;
const MOST_ROOM: u64 = 8192;
