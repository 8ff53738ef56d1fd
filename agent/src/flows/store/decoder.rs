//! Rows as the records that they are, with each word read and parsed once.

use std::collections::HashMap;

use nebula_cni_contract::flow_records::{FlowEnd, FlowRecord};
use rusqlite::{Connection, params};
use serde::de::DeserializeOwned;

use super::StoreError;
use super::rows::{self, Before, Kind, Row};

/// What was read of one moment of the store. It must not outlive its transaction: numbers of words are given again.
pub(super) struct Decoder<'a> {
    connection: &'a Connection,
    kinds: HashMap<i64, Kind>,
    ends: HashMap<i64, FlowEnd>,
    befores: HashMap<i64, Before>,
}

impl<'a> Decoder<'a> {
    pub(super) fn new(connection: &'a Connection) -> Self {
        Self { connection, kinds: HashMap::new(), ends: HashMap::new(), befores: HashMap::new() }
    }

    /// The record of a whole row. The flows of its pod are numbered from `first_flow`.
    pub(super) fn record(&mut self, row: &rusqlite::Row<'_>, first_flow: i64) -> Result<FlowRecord, StoreError> {
        let numbers = Row {
            seq: row.get(0)?,
            flow: row.get::<_, i64>(2)?.wrapping_add(first_flow),
            destination_port: row.get(7)?,
            source_port: row.get(8)?,
            original_port: row.get(9)?,
            last_ms: row.get(10)?,
            lasted_ms: row.get(11)?,
            amounts: [row.get(12)?, row.get(13)?, row.get(14)?, row.get(15)?],
        };
        let kind = word(self.connection, &mut self.kinds, row.get(3)?)?;
        let ends =
            [word(self.connection, &mut self.ends, row.get(4)?)?, word(self.connection, &mut self.ends, row.get(5)?)?];
        let before: Option<i64> = row.get(6)?;
        let before = before.map(|id| word(self.connection, &mut self.befores, id)).transpose()?;
        Ok(rows::together(kind, ends, before, &numbers))
    }
}

fn word<T: Clone + DeserializeOwned>(
    connection: &Connection,
    known: &mut HashMap<i64, T>,
    id: i64,
) -> Result<T, StoreError> {
    if let Some(known) = known.get(&id) {
        return Ok(known.clone());
    }
    let mut statement = connection.prepare_cached("SELECT body FROM words WHERE id = ?")?;
    let parsed: T = statement.query_row(params![id], |row| {
        let body = row.get_ref(0)?.as_str()?;
        Ok(serde_json::from_str(body).map_err(|error| StoreError::Damaged(error.to_string())))
    })??;
    if known.len() >= MOST_KNOWN {
        known.clear();
    }
    known.insert(id, parsed.clone());
    Ok(parsed)
}

/// Of each form.
const MOST_KNOWN: usize = 10_000;
