//! The table of flows: statements for each record, which are looked up once for many.

use nebula_cni_contract::flow_records::Amount;
use rusqlite::{CachedStatement, Connection, OptionalExtension, params};

use super::StoreError;
use super::pods::Pods;
use super::rows::Row;
use crate::flows::pairs::Earlier;

/// The two statements that most records need.
pub(super) struct Table<'a> {
    insert: CachedStatement<'a>,
    take: CachedStatement<'a>,
}

/// Numbers of the words of a row.
pub(super) struct WordIds {
    pub(super) kind: i64,
    pub(super) ends: [i64; 2],
    pub(super) original: Option<i64>,
}

impl<'a> Table<'a> {
    pub(super) fn of(connection: &'a Connection) -> Result<Self, StoreError> {
        let insert = "INSERT INTO flows VALUES(?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)";
        let take = "DELETE FROM flows WHERE pod = ? AND flow = ? RETURNING forward_packets, forward_bytes, reply_packets, reply_bytes";
        Ok(Self { insert: connection.prepare_cached(insert)?, take: connection.prepare_cached(take)? })
    }

    pub(super) fn insert(&mut self, pod: i64, flow: i64, words: &WordIds, row: &Row) -> Result<(), StoreError> {
        let [packets, bytes, reply_packets, reply_bytes] = row.amounts;
        self.insert.execute(params![
            row.seq,
            pod,
            flow,
            words.kind,
            words.ends[0],
            words.ends[1],
            words.original,
            row.destination_port,
            row.source_port,
            row.original_port,
            row.last_ms,
            row.lasted_ms,
            packets,
            bytes,
            reply_packets,
            reply_bytes
        ])?;
        Ok(())
    }

    /// Takes the row of a flow out of the file, and returns what was known of it.
    pub(super) fn take(&mut self, pods: &mut Pods, pod: i64, flow: i64) -> Result<Earlier, StoreError> {
        if !pods.may_have(pod, flow) {
            return Ok(Earlier::Nothing);
        }
        let amount = |row: &rusqlite::Row<'_>, at: usize| -> rusqlite::Result<Amount> {
            let (packets, bytes) = (row.get::<_, i64>(at)?, row.get::<_, i64>(at + 1)?);
            Ok(Amount { packets: packets.cast_unsigned(), bytes: bytes.cast_unsigned() })
        };
        let carried = self.take.query_row(params![pod, flow], |row| Ok([amount(row, 0)?, amount(row, 2)?]));
        Ok(match carried.optional()? {
            Some(carried) => {
                pods.changed_by(pod, -1);
                Earlier::Carried(carried)
            }
            None if pods.has_given_way(pod, flow) => Earlier::Forgotten,
            None => Earlier::Nothing,
        })
    }
}
