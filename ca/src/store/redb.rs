//! Rows in a single file that one process has open: redb, with one durable transaction per step.

use std::{
    collections::Bound,
    fs::{File, OpenOptions},
    io,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    sync::{
        PoisonError, RwLock, RwLockReadGuard,
        atomic::{AtomicBool, Ordering},
    },
};

use ::redb::{
    Database as RedbDatabase, DatabaseError, ReadableDatabase, ReadableTable, TableDefinition, WriteTransaction,
};

use crate::{
    directory::hand_over,
    store::{
        Beginning, StoreError, StoredRow,
        ledger::Ledger,
        rows::{Database, Row, Rows, TABLES, Table},
    },
};

/// The embedded store.
pub(crate) type RedbStore = Ledger<RedbFile>;

/// A file of rows. After a disk error redb refuses every later call, so the file is reopened, which rolls back
/// incomplete writes.
pub(crate) struct RedbFile {
    path: PathBuf,
    /// `None` if it could not be reopened.
    database: RwLock<Option<RedbDatabase>>,
    has_failed: AtomicBool,
}

impl RedbStore {
    /// Opens the file, or creates it readable by its owner only.
    pub(crate) fn open_file(path: &Path, beginning: Beginning) -> Result<Self, StoreError> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).mode(0o600);
        Self::open(RedbFile::open(path, &options)?, beginning)
    }

    /// Makes a file with these rows, all in one step.
    pub(crate) fn make_file(path: &Path, rows: impl Iterator<Item = StoredRow>) -> Result<(), StoreError> {
        let file = RedbFile::open(path, OpenOptions::new().read(true).write(true).create_new(true).mode(0o600))?;
        file.write(|to| {
            rows.into_iter().try_for_each(|row| to.put(Table(row.table), &row.key, &row.record))?;
            Ok::<_, StoreError>(())
        })?;
        // One without a format is no ledger.
        Self::open(file, Beginning::Refused).map(|_| ())
    }
}

impl RedbFile {
    fn open(path: &Path, options: &OpenOptions) -> Result<Self, StoreError> {
        let file: File = options.open(path)?;
        hand_over(&file, path)?;
        let database = open_database(file)?;
        let transaction = database.begin_write().map_err(failed)?;
        // All tables exist from here on, so that reading needs no special case.
        for table in TABLES {
            transaction.open_table(definition(table)).map_err(failed)?;
        }
        transaction.commit().map_err(failed)?;
        let (path, database) = (path.to_owned(), RwLock::new(Some(database)));
        Ok(Self { path, database, has_failed: AtomicBool::new(false) })
    }

    /// The database, reopened if it has failed before.
    fn database(&self) -> Result<RwLockReadGuard<'_, Option<RedbDatabase>>, StoreError> {
        if self.has_failed.load(Ordering::Acquire) {
            let mut database = self.database.write().unwrap_or_else(PoisonError::into_inner);
            // Another thread may have reopened it meanwhile.
            if self.has_failed.load(Ordering::Acquire) {
                // Closed first, because a process can open the file only once at a time.
                *database = None;
                let file = OpenOptions::new().read(true).write(true).open(&self.path)?;
                // redb would turn an empty file into an empty ledger, in which nothing is blocked.
                if file.metadata()?.len() == 0 {
                    return Err(io::Error::new(io::ErrorKind::InvalidData, "it is empty").into());
                }
                *database = Some(open_database(file)?);
                self.has_failed.store(false, Ordering::Release);
                tracing::warn!(path = %self.path.display(), "the store was reopened after an error");
            }
        }
        Ok(self.database.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn has<T>(&self, outcome: Result<T, StoreError>) -> Result<T, StoreError> {
        outcome.inspect_err(|_| self.has_failed.store(true, Ordering::Release))
    }

    fn begin(&self, database: &Option<RedbDatabase>) -> Result<WriteTransaction, StoreError> {
        self.has(database.as_ref().ok_or_else(closed)?.begin_write().map_err(failed))
    }

    /// Runs `step`; retries once, because the file may have to be reopened.
    fn read<T>(&self, step: impl Fn(&RedbDatabase) -> Result<T, StoreError>) -> Result<T, StoreError> {
        let attempt = || {
            let database = self.database()?;
            self.has(step(database.as_ref().ok_or_else(closed)?))
        };
        attempt().or_else(|_| attempt())
    }
}

impl Database for RedbFile {
    const IS_SHARED: bool = false;

    fn write<T, E: From<StoreError>>(&self, step: impl FnOnce(&mut dyn Rows) -> Result<T, E>) -> Result<T, E> {
        let mut database = self.database()?;
        let mut transaction = match self.begin(&database) {
            Ok(transaction) => transaction,
            // An earlier step failed inside redb, which shows only now.
            Err(_) => {
                drop(database);
                database = self.database()?;
                self.begin(&database)?
            }
        };
        // Dropping the transaction rolls it back.
        let value = step(&mut transaction)?;
        self.has(transaction.commit().map_err(failed))?;
        Ok(value)
    }

    fn get(&self, table: Table, key: &[u8]) -> Result<Option<Vec<u8>>, StoreError> {
        self.read(|database| {
            let rows = database.begin_read().map_err(failed)?.open_table(definition(table)).map_err(failed)?;
            Ok(rows.get(key).map_err(failed)?.map(|row| row.value().to_vec()))
        })
    }

    fn get_many(&self, table: Table, keys: &[Vec<u8>]) -> Result<Vec<Option<Vec<u8>>>, StoreError> {
        self.read(|database| {
            let rows = database.begin_read().map_err(failed)?.open_table(definition(table)).map_err(failed)?;
            keys.iter()
                .map(|key| Ok(rows.get(key.as_slice()).map_err(failed)?.map(|row| row.value().to_vec())))
                .collect()
        })
    }

    fn after(&self, table: Table, key: &[u8], limit: usize) -> Result<Vec<Row>, StoreError> {
        self.read(|database| {
            let rows = database.begin_read().map_err(failed)?.open_table(definition(table)).map_err(failed)?;
            let mut found = Vec::new();
            for row in rows.range::<&[u8]>((Bound::Excluded(key), Bound::Unbounded)).map_err(failed)?.take(limit) {
                let (key, value) = row.map_err(failed)?;
                found.push((key.value().to_vec(), value.value().to_vec()));
            }
            Ok(found)
        })
    }

    fn each(&self, visit: &mut dyn FnMut(Table, Row) -> Result<(), StoreError>) -> Result<(), StoreError> {
        let database = self.database()?;
        let snapshot = self.has(database.as_ref().ok_or_else(closed)?.begin_read().map_err(failed))?;
        // Writers go on.
        drop(database);
        for table in TABLES {
            let rows = self.has(snapshot.open_table(definition(table)).map_err(failed))?;
            for row in self.has(rows.iter().map_err(failed))? {
                let (key, value) = self.has(row.map_err(failed))?;
                visit(table, (key.value().to_vec(), value.value().to_vec()))?;
            }
        }
        Ok(())
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

fn open_database(file: File) -> Result<RedbDatabase, StoreError> {
    RedbDatabase::builder().create_file(file).map_err(|error| match error {
        DatabaseError::DatabaseAlreadyOpen => StoreError::InUse,
        other => failed(other),
    })
}

/// Another thread could not reopen the file, and left none open.
fn closed() -> StoreError {
    StoreError::File(io::Error::other("it is closed after an error"))
}

fn definition(table: Table) -> TableDefinition<'static, &'static [u8], &'static [u8]> {
    TableDefinition::new(table.0)
}

fn failed(error: impl Into<::redb::Error>) -> StoreError {
    StoreError::Database(Box::new(error.into()))
}
