//! The tables of the store, and how a file is opened.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::time::Duration;

use rusqlite::{Connection, OpenFlags};

use super::StoreError;

/// `flows.seq` rises with each record of an instance: an updated flow moves to the end. So rows are
/// in the order of time, which needs no index. What flows have in common is in `words`, once for each pod: a pod that
/// makes up names spends its own share.
const TABLES: &str = "
    CREATE TABLE pods(
        id INTEGER PRIMARY KEY, attachment TEXT NOT NULL UNIQUE, namespace TEXT NOT NULL, name TEXT NOT NULL, uid TEXT NOT NULL,
        first_flow INTEGER NOT NULL, next INTEGER NOT NULL, lost INTEGER NOT NULL, lost_now INTEGER NOT NULL);
    CREATE TABLE words(id INTEGER PRIMARY KEY, pod INTEGER NOT NULL, hash INTEGER NOT NULL, body TEXT NOT NULL);
    CREATE UNIQUE INDEX words_by_hash ON words(pod, hash);
    CREATE TABLE flows(
        seq INTEGER PRIMARY KEY, pod INTEGER NOT NULL, flow INTEGER NOT NULL, kind INTEGER NOT NULL,
        source INTEGER NOT NULL, destination INTEGER NOT NULL, original INTEGER, destination_port INTEGER, source_port INTEGER,
        original_port INTEGER, last_ms INTEGER NOT NULL, lasted_ms INTEGER NOT NULL, forward_packets INTEGER NOT NULL,
        forward_bytes INTEGER NOT NULL, reply_packets INTEGER NOT NULL, reply_bytes INTEGER NOT NULL);
    CREATE UNIQUE INDEX flows_of_pod ON flows(pod, flow);
    CREATE TABLE ticks(told INTEGER PRIMARY KEY, seq INTEGER NOT NULL);";

/// How far exporters are. A file of an earlier release has no such table and the same version: an agent that does not
/// know the table leaves it alone.
const EXPORTS: &str =
    "CREATE TABLE IF NOT EXISTS exports(target TEXT PRIMARY KEY, seq INTEGER NOT NULL) WITHOUT ROWID;";

/// Opens the file for writing; makes it if it is not there.
pub(super) fn open(path: &Path) -> Result<Connection, StoreError> {
    // SQLite gives its other files the same mode.
    OpenOptions::new().create(true).append(true).mode(0o600).open(path).map_err(StoreError::Folder)?;
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let connection = Connection::open_with_flags(path, flags)?;
    connection.busy_timeout(BUSY)?;
    // Before the first table.
    connection.execute_batch(&format!("PRAGMA page_size = {PAGE}; PRAGMA auto_vacuum = INCREMENTAL;"))?;
    let mode: String = connection.query_row("PRAGMA journal_mode = WAL", [], |row| row.get(0))?;
    if mode != "wal" {
        return Err(StoreError::Folder(io::Error::other("its file system lets no files be shared")));
    }
    // What was committed survives the program's death; of the machine's, the last half minute may be lost.
    connection.execute_batch(
        "PRAGMA synchronous = NORMAL; PRAGMA cache_size = -2048; PRAGMA temp_store = MEMORY; PRAGMA wal_autocheckpoint = 512;
         PRAGMA journal_size_limit = 2097152; PRAGMA trusted_schema = OFF; PRAGMA cell_size_check = ON;",
    )?;
    let (application, version) = versions(&connection)?;
    let tables: i64 = connection.query_row("SELECT count(*) FROM sqlite_schema", [], |row| row.get(0))?;
    if (application, version, tables) == (0, 0, 0) {
        let made = format!(
            "BEGIN IMMEDIATE; {TABLES} PRAGMA application_id = {APPLICATION}; PRAGMA user_version = {VERSION}; COMMIT;"
        );
        connection.execute_batch(&made)?;
    } else {
        check(application, version)?;
        let found: String = connection.query_row("PRAGMA quick_check(1)", [], |row| row.get(0))?;
        if found != "ok" {
            return Err(StoreError::Damaged(found));
        }
    }
    connection.execute_batch(EXPORTS)?;
    Ok(connection)
}

/// Opens the file for reading, beside who writes.
pub(super) fn open_to_read(path: &Path) -> Result<Connection, StoreError> {
    if let Err(error) = fs::metadata(path) {
        return Err(if error.kind() == io::ErrorKind::NotFound { StoreError::None } else { StoreError::Folder(error) });
    }
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let connection = Connection::open_with_flags(path, flags)?;
    connection.busy_timeout(BUSY)?;
    connection
        .execute_batch("PRAGMA temp_store = MEMORY; PRAGMA mmap_size = 268435456; PRAGMA trusted_schema = OFF;")?;
    let (application, version) = versions(&connection)?;
    check(application, version)?;
    Ok(connection)
}

fn versions(connection: &Connection) -> rusqlite::Result<(i64, i64)> {
    let number = |pragma: &str| connection.query_row(pragma, [], |row| row.get(0));
    Ok((number("PRAGMA application_id")?, number("PRAGMA user_version")?))
}

fn check(application: i64, version: i64) -> Result<(), StoreError> {
    match (application, version) {
        (APPLICATION, VERSION) => Ok(()),
        (APPLICATION, other) => Err(StoreError::Damaged(format!("its version is {other}, not {VERSION}"))),
        _ => Err(StoreError::Damaged("it is no store of flow records".to_owned())),
    }
}

/// Makes a folder for root only, and opens it.
pub(super) fn folder(path: &Path) -> io::Result<File> {
    DirBuilder::new().recursive(true).mode(0o700).create(path)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o700))?;
    File::open(path)
}

/// "nebf"
const APPLICATION: i64 = 0x6e65_6266;
const VERSION: i64 = 1;
pub(super) const PAGE: u64 = 4096;
const BUSY: Duration = Duration::from_secs(2);
