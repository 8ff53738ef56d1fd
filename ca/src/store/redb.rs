//! Rows in one file that one process has open: redb, one durable transaction per step.

use std::{
    fs::{File, OpenOptions},
    os::unix::fs::OpenOptionsExt,
    path::Path,
};

use ::redb::{
    Database as RedbDatabase, DatabaseError, ReadableDatabase, ReadableTable, TableDefinition, WriteTransaction,
};

use crate::{
    directory::hand_over,
    store::{
        StoreError,
        ledger::{Database, Ledger, Row, Rows, TABLES, Table},
    },
};

/// The embedded store.
pub(crate) type RedbStore = Ledger<RedbFile>;

/// A file of rows.
pub(crate) struct RedbFile(RedbDatabase);

impl RedbStore {
    /// Opens the file, or makes it, readable by its owner only.
    pub(crate) fn open_file(path: &Path) -> Result<Self, StoreError> {
        let file: File =
            OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)?;
        hand_over(&file, path)?;
        let database = RedbDatabase::builder().create_file(file).map_err(|error| match error {
            DatabaseError::DatabaseAlreadyOpen => StoreError::InUse,
            other => failed(other),
        })?;
        let transaction = database.begin_write().map_err(failed)?;
        // Every table exists from here on, so that reading needs no special case.
        for table in TABLES {
            transaction.open_table(definition(table)).map_err(failed)?;
        }
        transaction.commit().map_err(failed)?;
        Self::open(RedbFile(database))
    }
}

impl Database for RedbFile {
    const IS_SHARED: bool = false;

    fn write<T, E: From<StoreError>>(&self, step: impl FnOnce(&mut dyn Rows) -> Result<T, E>) -> Result<T, E> {
        let mut transaction = self.0.begin_write().map_err(failed)?;
        // Dropping the transaction on an error undoes it.
        let value = step(&mut transaction)?;
        transaction.commit().map_err(failed)?;
        Ok(value)
    }

    fn get(&self, table: Table, key: &[u8]) -> Result<Option<Vec<u8>>, StoreError> {
        let rows = self.0.begin_read().map_err(failed)?.open_table(definition(table)).map_err(failed)?;
        Ok(rows.get(key).map_err(failed)?.map(|row| row.value().to_vec()))
    }

    fn all(&self, table: Table) -> Result<Vec<Row>, StoreError> {
        let rows = self.0.begin_read().map_err(failed)?.open_table(definition(table)).map_err(failed)?;
        let mut all = Vec::new();
        for row in rows.iter().map_err(failed)? {
            let (key, value) = row.map_err(failed)?;
            all.push((key.value().to_vec(), value.value().to_vec()));
        }
        Ok(all)
    }
}

impl Rows for WriteTransaction {
    fn get(&mut self, table: Table, keys: &[Vec<u8>]) -> Result<Vec<Option<Vec<u8>>>, StoreError> {
        let rows = self.open_table(definition(table)).map_err(failed)?;
        keys.iter().map(|key| Ok(rows.get(key.as_slice()).map_err(failed)?.map(|row| row.value().to_vec()))).collect()
    }

    fn put(&mut self, table: Table, key: &[u8], row: &[u8]) -> Result<(), StoreError> {
        let mut rows = self.open_table(definition(table)).map_err(failed)?;
        rows.insert(key, row).map_err(failed)?;
        Ok(())
    }

    fn remove(&mut self, table: Table, key: &[u8]) -> Result<(), StoreError> {
        let mut rows = self.open_table(definition(table)).map_err(failed)?;
        rows.remove(key).map_err(failed)?;
        Ok(())
    }

    fn remove_if(&mut self, table: Table, is_over: &dyn Fn(&[u8]) -> bool) -> Result<(), StoreError> {
        let mut rows = self.open_table(definition(table)).map_err(failed)?;
        rows.retain(|_, row| !is_over(row)).map_err(failed)
    }
}

fn definition(table: Table) -> TableDefinition<'static, &'static [u8], &'static [u8]> {
    TableDefinition::new(table.0)
}

fn failed(error: impl Into<::redb::Error>) -> StoreError {
    StoreError::Database(Box::new(error.into()))
}
