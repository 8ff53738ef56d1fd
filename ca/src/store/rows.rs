//! Tables of JSON records, whatever database holds them.

use std::net::IpAddr;

use serde::{Serialize, de::DeserializeOwned};

use super::StoreError;

/// A database of rows.
pub(crate) trait Database: Send + Sync {
    /// Whether other processes also write to it.
    const IS_SHARED: bool;

    /// Runs `step` with exclusive access among all processes. Durable once this returns; rolled back on failure.
    fn write<T, E: From<StoreError>>(&self, step: impl FnOnce(&mut dyn Rows) -> Result<T, E>) -> Result<T, E>;

    /// The row with this key.
    fn get(&self, table: Table, key: &[u8]) -> Result<Option<Vec<u8>>, StoreError>;

    /// The rows with these keys, in the order of `keys`.
    fn get_many(&self, table: Table, keys: &[Vec<u8>]) -> Result<Vec<Option<Vec<u8>>>, StoreError>;

    /// At most `limit` rows with keys after `key`, sorted by key.
    fn after(&self, table: Table, key: &[u8], limit: usize) -> Result<Vec<Row>, StoreError>;

    /// Visits all rows as they are at one moment.
    fn each(&self, visit: &mut dyn FnMut(Table, Row) -> Result<(), StoreError>) -> Result<(), StoreError>;
}

/// A row as it is copied from one ledger into another.
pub(crate) struct StoredRow {
    pub(crate) table: &'static str,
    pub(crate) key: Vec<u8>,
    pub(crate) record: Vec<u8>,
}

impl StoredRow {
    /// `None` if no ledger has such a table.
    pub(crate) fn new(table: &str, key: Vec<u8>, record: Vec<u8>) -> Option<Self> {
        let table = TABLES.into_iter().find(|known| known.0 == table)?.0;
        Some(Self { table, key, record })
    }
}

/// A key and its record.
pub(crate) type Row = (Vec<u8>, Vec<u8>);

/// Visits the rows of a table, sorted by key, a page at a time: a ledger of many certificates does not fit into memory
/// twice. Rows that are written meanwhile may be missing.
pub(super) fn each_row(
    database: &impl Database,
    table: Table,
    mut visit: impl FnMut(Row) -> Result<(), StoreError>,
) -> Result<(), StoreError> {
    let mut last = Vec::new();
    loop {
        let page = database.after(table, &last, PAGE)?;
        let is_last = page.len() < PAGE;
        if let Some((key, _)) = page.last() {
            last.clone_from(key);
        }
        page.into_iter().try_for_each(&mut visit)?;
        if is_last {
            return Ok(());
        }
    }
}

/// The rows within one transaction.
pub(crate) trait Rows {
    /// The rows with these keys, in the order of `keys`.
    fn get(&mut self, table: Table, keys: &[Vec<u8>]) -> Result<Vec<Option<Vec<u8>>>, StoreError>;
    /// Inserts or replaces a row.
    fn put(&mut self, table: Table, key: &[u8], row: &[u8]) -> Result<(), StoreError>;
    /// Removes a row if it exists.
    fn remove(&mut self, table: Table, key: &[u8]) -> Result<(), StoreError>;
    /// Removes all rows for which `is_over` returns `true`.
    fn remove_if(&mut self, table: Table, is_over: &dyn Fn(&[u8]) -> bool) -> Result<(), StoreError>;
}

pub(super) fn address_key(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    }
}

pub(super) fn get_in<T: DeserializeOwned>(
    rows: &mut dyn Rows,
    table: Table,
    key: &[u8],
) -> Result<Option<T>, StoreError> {
    let row = rows.get(table, &[key.to_vec()])?.pop().flatten();
    row.map(|row| parse(table, key, &row)).transpose()
}

pub(super) fn put<T: Serialize>(rows: &mut dyn Rows, table: Table, key: &[u8], record: &T) -> Result<(), StoreError> {
    rows.put(table, key, &serde_json::to_vec(record).map_err(|error| damaged(table, key, error))?)
}

pub(super) fn prune<T: DeserializeOwned>(
    rows: &mut dyn Rows,
    table: Table,
    is_over: impl Fn(&T) -> bool,
) -> Result<(), StoreError> {
    // An unreadable record is kept for diagnosis.
    rows.remove_if(table, &|row| serde_json::from_slice(row).is_ok_and(|record| is_over(&record)))
}

pub(super) fn parse<T: DeserializeOwned>(table: Table, key: &[u8], row: &[u8]) -> Result<T, StoreError> {
    serde_json::from_slice(row).map_err(|error| damaged(table, key, error))
}

fn damaged(table: Table, key: &[u8], error: serde_json::Error) -> StoreError {
    StoreError::Record { table: table.0, key: nebula_cert::hex::encode(key), error }
}

/// Name of a table that maps bytes to the JSON of one kind of record.
#[derive(Clone, Copy)]
pub(crate) struct Table(pub(crate) &'static str);

/// All tables.
pub(crate) const TABLES: [Table; 10] =
    [META, TOKENS, ISSUED, PODS, ADDRESSES, REVOKED, KEPT_OUT, KEPT, LIGHTHOUSES, CHANGES];

pub(super) const META: Table = Table("meta");
/// Keyed by token hash.
pub(super) const TOKENS: Table = Table("tokens");
/// Keyed by fingerprint.
pub(super) const ISSUED: Table = Table("issued");
/// Keyed by pod UID, or `host NAME`.
pub(super) const PODS: Table = Table("pods");
/// Keyed by the bytes of the overlay address.
pub(super) const ADDRESSES: Table = Table("addresses");
/// Keyed by fingerprint: the last second for which the certificate must stay blocked.
pub(super) const REVOKED: Table = Table("revoked");
/// By pod UID.
pub(super) const KEPT_OUT: Table = Table("kept_out");

/// Addresses that are kept, by `namespace/name` of a pod.
pub(super) const KEPT: Table = Table("kept");
/// Keyed by the bytes of the overlay address.
pub(super) const LIGHTHOUSES: Table = Table("lighthouses");
/// Keyed by the number of the change, eight bytes, highest first.
pub(super) const CHANGES: Table = Table("changes");

/// So few in tests that they need several.
const PAGE: usize = if cfg!(test) { 3 } else { 512 };
