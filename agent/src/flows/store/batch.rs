//! Records in the order of the file, some at a time: what exporters read.

use std::collections::HashMap;
use std::path::Path;

use nebula_cni_contract::flow_records::{FlowEnd, FlowRecord};
use rusqlite::{Connection, OptionalExtension, params};

use super::decoder::Decoder;
use super::{FILE, StoreError, schema};

/// A connection that only reads, and stays open.
#[derive(Debug)]
pub(in crate::flows) struct BatchReader {
    connection: Connection,
}

/// Some records.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(in crate::flows) struct Batch {
    /// The oldest first.
    pub(in crate::flows) records: Vec<FlowRecord>,
    /// The newest number of the store.
    pub(in crate::flows) newest: u64,
}

impl BatchReader {
    /// Opens the store in a folder.
    pub(in crate::flows) fn open(folder: &Path) -> Result<Self, StoreError> {
        let connection = schema::open_to_read(&folder.join(FILE))?;
        connection.execute_batch("PRAGMA cache_size = -256")?;
        Ok(Self { connection })
    }

    /// The records with the next higher numbers: at most `most`, and fewer if they are large.
    pub(in crate::flows) fn after(&mut self, after: u64, most: usize) -> Result<Batch, StoreError> {
        let transaction = self.connection.transaction()?;
        read(&transaction, after, most)
    }
}

fn read(connection: &Connection, after: u64, most: usize) -> Result<Batch, StoreError> {
    let sql = "SELECT coalesce(max(seq), 0) FROM flows";
    let newest: i64 = connection.prepare_cached(sql)?.query_row([], |row| row.get(0))?;
    let mut batch = Batch { records: Vec::new(), newest: newest.cast_unsigned() };
    let (mut decoder, mut first_flows, mut weight) = (Decoder::new(connection), HashMap::new(), 0);
    let mut statement = connection.prepare_cached("SELECT * FROM flows WHERE seq > ? ORDER BY seq LIMIT ?")?;
    let after = after.min(i64::MAX as u64).cast_signed();
    let mut rows = statement.query(params![after, i64::try_from(most).unwrap_or(i64::MAX)])?;
    while let Some(row) = rows.next()? {
        let pod: i64 = row.get(1)?;
        let first_flow = match first_flows.get(&pod) {
            Some(known) => *known,
            None => {
                let mut statement = connection.prepare_cached("SELECT first_flow FROM pods WHERE id = ?")?;
                let first: i64 = statement.query_row(params![pod], |row| row.get(0)).optional()?.unwrap_or_default();
                first_flows.insert(pod, first);
                first
            }
        };
        let record = decoder.record(row, first_flow)?;
        weight += of_end(&record.source) + of_end(&record.destination);
        batch.records.push(record);
        if weight > MOST_TEXT {
            break;
        }
    }
    Ok(batch)
}

/// About how much memory the texts of an end take, which others choose.
fn of_end(end: &FlowEnd) -> usize {
    let groups: usize = end.groups.iter().map(|group| group.len() + OF_A_GROUP).sum();
    groups + end.name.as_ref().map_or(0, String::len) + end.fingerprint.as_ref().map_or(0, String::len)
}

const OF_A_GROUP: usize = 64;
/// Of a batch: one record may exceed it.
const MOST_TEXT: usize = 256 << 10;
