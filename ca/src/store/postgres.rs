//! Rows in PostgreSQL, for several services on one ledger. There is one table, and every writing step takes one lock
//! that all services share, so that they act as a single writer.

use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use ::postgres::{Client, Config, Row as Found, Transaction};

use crate::store::{
    Beginning, StoreError,
    ledger::Ledger,
    postgres_tls::Protection,
    rows::{Database, Row, Rows, Table},
};

/// The store that replicas share.
pub(crate) type PostgresStore = Ledger<Postgres>;

/// A database of rows, with idle connections to it.
pub(crate) struct Postgres {
    config: Config,
    protection: Protection,
    idle: Mutex<Vec<Client>>,
}

impl PostgresStore {
    /// Connects and creates the table if it is missing. `database` is a URL or `key=value` pairs, as for libpq.
    pub(crate) fn connect(database: &str, beginning: Beginning) -> Result<Self, StoreError> {
        let (mut config, protection) = Protection::read(database)?;
        config.application_name("nebula-ca").connect_timeout(CONNECT_WITHIN).tcp_user_timeout(ANSWER_WITHIN);
        if config.get_options().is_none() {
            config.options(OPTIONS);
        }
        let database = Postgres { config, protection, idle: Mutex::default() };
        database.with(|client| {
            let mut transaction = client.transaction()?;
            lock(&mut transaction)?;
            transaction.batch_execute(
                "create table if not exists nebula_ca \
                 (kind text not null, key bytea not null, record text not null, primary key (kind, key))",
            )?;
            transaction.commit()
        })?;
        Self::open(database, beginning)
    }
}

impl Postgres {
    fn connection(&self) -> Result<Client, StoreError> {
        let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        if let Some(mut client) = idle
            && client.is_valid(CONNECT_WITHIN).is_ok()
        {
            return Ok(client);
        }
        self.protection.connect(&self.config).map_err(|error| failed(&error))
    }

    fn give_back(&self, client: Client) {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        if idle.len() < MAX_IDLE {
            idle.push(client);
        }
    }

    fn with<T>(&self, step: impl FnOnce(&mut Client) -> Result<T, ::postgres::Error>) -> Result<T, StoreError> {
        let mut client = self.connection()?;
        let value = step(&mut client).map_err(|error| failed(&error))?;
        self.give_back(client);
        Ok(value)
    }
}

impl Database for Postgres {
    const IS_SHARED: bool = true;

    fn write<T, E: From<StoreError>>(&self, step: impl FnOnce(&mut dyn Rows) -> Result<T, E>) -> Result<T, E> {
        let mut client = self.connection()?;
        let mut transaction = client.transaction().map_err(|error| failed(&error))?;
        lock(&mut transaction).map_err(|error| failed(&error))?;
        // Dropping the transaction rolls it back.
        let value = step(&mut transaction)?;
        transaction.commit().map_err(|error| failed(&error))?;
        self.give_back(client);
        Ok(value)
    }

    fn get(&self, table: Table, key: &[u8]) -> Result<Option<Vec<u8>>, StoreError> {
        let row = self.with(|client| {
            client.query_opt("select record from nebula_ca where kind = $1 and key = $2", &[&table.0, &key])
        })?;
        Ok(row.map(|row| row.get::<_, String>(0).into_bytes()))
    }

    fn get_many(&self, table: Table, keys: &[Vec<u8>]) -> Result<Vec<Option<Vec<u8>>>, StoreError> {
        let found = self.with(|client| {
            client.query("select key, record from nebula_ca where kind = $1 and key = any($2)", &[&table.0, &keys])
        })?;
        Ok(in_order(&found, keys))
    }

    fn after(&self, table: Table, key: &[u8], limit: usize) -> Result<Vec<Row>, StoreError> {
        let limit = i64::try_from(limit).unwrap_or(i64::MAX);
        let rows = self.with(|client| {
            let query = "select key, record from nebula_ca where kind = $1 and key > $2 order by key limit $3";
            client.query(query, &[&table.0, &key, &limit])
        })?;
        Ok(rows.iter().map(|row| (row.get(0), row.get::<_, String>(1).into_bytes())).collect())
    }

    fn each(&self, _visit: &mut dyn FnMut(Table, Row) -> Result<(), StoreError>) -> Result<(), StoreError> {
        Err(StoreError::Postgres("pg_dump copies the ledger of a database".to_owned()))
    }
}

impl Drop for Postgres {
    fn drop(&mut self) {
        let idle = std::mem::take(&mut *self.idle.lock().unwrap_or_else(PoisonError::into_inner));
        // Closing a connection blocks, which a thread of an event loop must not do.
        let _ = std::thread::spawn(move || drop(idle)).join();
    }
}

impl Rows for Transaction<'_> {
    fn get(&mut self, table: Table, keys: &[Vec<u8>]) -> Result<Vec<Option<Vec<u8>>>, StoreError> {
        let found = self
            .query("select key, record from nebula_ca where kind = $1 and key = any($2)", &[&table.0, &keys])
            .map_err(|error| failed(&error))?;
        Ok(in_order(&found, keys))
    }

    fn put(&mut self, table: Table, key: &[u8], row: &[u8]) -> Result<(), StoreError> {
        let record = String::from_utf8_lossy(row);
        let statement = "insert into nebula_ca (kind, key, record) values ($1, $2, $3) \
                         on conflict (kind, key) do update set record = excluded.record";
        self.execute(statement, &[&table.0, &key, &record.as_ref()]).map_err(|error| failed(&error))?;
        Ok(())
    }

    fn remove(&mut self, table: Table, key: &[u8]) -> Result<(), StoreError> {
        self.execute("delete from nebula_ca where kind = $1 and key = $2", &[&table.0, &key])
            .map_err(|error| failed(&error))?;
        Ok(())
    }

    fn remove_if(&mut self, table: Table, is_over: &dyn Fn(&[u8]) -> bool) -> Result<(), StoreError> {
        let rows = self
            .query("select key, record from nebula_ca where kind = $1", &[&table.0])
            .map_err(|error| failed(&error))?;
        let over = rows.iter().filter(|row| is_over(row.get::<_, &str>(1).as_bytes()));
        let keys: Vec<Vec<u8>> = over.map(|row| row.get(0)).collect();
        self.execute("delete from nebula_ca where kind = $1 and key = any($2)", &[&table.0, &keys])
            .map_err(|error| failed(&error))?;
        Ok(())
    }
}

/// Rows of key and record, in the order of `keys`.
fn in_order(found: &[Found], keys: &[Vec<u8>]) -> Vec<Option<Vec<u8>>> {
    let mut found: HashMap<Vec<u8>, Vec<u8>> =
        found.iter().map(|row| (row.get(0), row.get::<_, String>(1).into_bytes())).collect();
    keys.iter().map(|key| found.remove(key)).collect()
}

/// Takes the lock of all writers, which is held until the transaction ends in any way.
fn lock(transaction: &mut Transaction<'_>) -> Result<(), ::postgres::Error> {
    transaction.execute("select pg_advisory_xact_lock($1)", &[&LOCK]).map(|_| ())
}

fn failed(error: &::postgres::Error) -> StoreError {
    // The source holds the server's message; neither contains the password.
    let cause = std::error::Error::source(error).map(|cause| format!(": {cause}")).unwrap_or_default();
    StoreError::Postgres(format!("{error}{cause}"))
}

/// Key of this ledger's advisory lock in the database.
const LOCK: i64 = 0x6e65_6275_6c61;
const CONNECT_WITHIN: Duration = Duration::from_secs(3);
const ANSWER_WITHIN: Duration = Duration::from_secs(8);
/// The caller of a step that takes longer has given up.
const OPTIONS: &str = "-c statement_timeout=6000 -c lock_timeout=6000 -c idle_in_transaction_session_timeout=6000";
const MAX_IDLE: usize = 8;
