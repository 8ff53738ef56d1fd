//! Texts of a pod's records, each once: who is at an end, and of what kind a record is.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hash, RandomState};

use nebula_cni_contract::flow_records::FlowEnd;
use rusqlite::{Connection, OptionalExtension, params};
use serde::Serialize;
use sha2::{Digest, Sha256};

use super::StoreError;
use super::pods::Pods;
use super::rows::{Before, Kind};

/// A text of one of three forms.
pub(super) trait Word: Serialize + Hash {
    /// Which form: what is hashed of two forms may be the same.
    const FORM: u8;
}

impl Word for Kind {
    const FORM: u8 = 0;
}

impl Word for FlowEnd {
    const FORM: u8 = 1;
}

impl Word for Before {
    const FORM: u8 = 2;
}

/// The numbers of those that were looked up lately, by a hash of pod, form and text. Nobody outside knows its key, so
/// nobody can make two texts share a number but by chance: once in 2⁵¹ texts, while 8,192 are known.
#[derive(Debug, Default)]
pub(super) struct Words {
    known: HashMap<u64, i64>,
    key: RandomState,
}

impl Words {
    /// The number of a text, which is put into the file if it is new.
    pub(super) fn id<W: Word>(
        &mut self,
        connection: &Connection,
        pods: &mut Pods,
        pod: i64,
        what: &W,
    ) -> Result<i64, StoreError> {
        let key = self.key.hash_one((pod, W::FORM, what));
        if let Some(id) = self.known.get(&key) {
            return Ok(*id);
        }
        let failed = |error: serde_json::Error| StoreError::Damaged(error.to_string());
        let body = serde_json::to_string(what).map_err(failed)?;
        let mut short = [0; 8];
        short.copy_from_slice(&Sha256::digest(&body)[..8]);
        let mut hash = i64::from_le_bytes(short);
        let id = loop {
            let sql = "SELECT id, body = ? FROM words WHERE pod = ? AND hash = ?";
            let found = connection
                .prepare_cached(sql)?
                .query_row(params![body, pod, hash], |row| Ok((row.get::<_, i64>(0)?, row.get::<_, bool>(1)?)))
                .optional()?;
            match found {
                Some((id, true)) => break id,
                // Another text has the same one.
                Some((_, false)) => hash = hash.wrapping_add(1),
                None => {
                    let sql = "INSERT INTO words(pod, hash, body) VALUES(?, ?, ?)";
                    connection.prepare_cached(sql)?.execute(params![pod, hash, body])?;
                    pods.spoke(pod, body.len() as u64);
                    break connection.last_insert_rowid();
                }
            }
        };
        if self.known.len() >= MOST_KNOWN {
            self.known.clear();
        }
        self.known.insert(key, id);
        Ok(id)
    }

    /// Removes the texts of a pod that no record needs, if there may be many or `at_once`.
    pub(super) fn sweep(
        &mut self,
        connection: &Connection,
        pods: &mut Pods,
        pod: i64,
        at_once: bool,
    ) -> Result<(), StoreError> {
        if !at_once && !pods.has_old_words(pod) {
            return Ok(());
        }
        let sql = "DELETE FROM words WHERE pod = ?1 AND id NOT IN (
            SELECT kind FROM flows WHERE pod = ?1 UNION SELECT source FROM flows WHERE pod = ?1
            UNION SELECT destination FROM flows WHERE pod = ?1
            UNION SELECT original FROM flows WHERE pod = ?1 AND original IS NOT NULL)";
        connection.prepare_cached(sql)?.execute(params![pod])?;
        let sql = "SELECT coalesce(sum(length(CAST(body AS BLOB))), 0) FROM words WHERE pod = ?";
        let left: i64 = connection.prepare_cached(sql)?.query_row(params![pod], |row| row.get(0))?;
        pods.swept(pod, left.cast_unsigned());
        self.known.clear();
        Ok(())
    }

    /// Removes all texts of a pod.
    pub(super) fn forget(&mut self, connection: &Connection, pod: i64) -> Result<(), StoreError> {
        connection.prepare_cached("DELETE FROM words WHERE pod = ?")?.execute(params![pod])?;
        self.known.clear();
        Ok(())
    }
}

/// About 0.3 MB.
const MOST_KNOWN: usize = 8192;
