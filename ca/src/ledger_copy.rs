//! The rows of the ledger as lines of a backup, which the process that has the ledger open writes for it.

use std::fs;
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::OpenOptionsExt;

use nebula_cert::hex;
use serde::{Deserialize, Serialize};
use zeroize::{Zeroize, Zeroizing};

use crate::{
    directory::{Directory, FileError, hand_over},
    store::{Store, StoreError},
};

/// Why there is no copy.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CopyError {
    /// The directory refuses it.
    #[error(transparent)]
    File(#[from] FileError),
    /// It cannot be written.
    #[error("cannot write the copy of the ledger: {0}")]
    Io(#[from] io::Error),
    /// The ledger cannot be read.
    #[error("cannot read the ledger")]
    Store(#[from] StoreError),
}

/// One line.
#[derive(Serialize, Deserialize)]
#[serde(untagged, deny_unknown_fields)]
pub(crate) enum Line {
    Head { nebula_ca_backup: u64, made: String, ledger: Place },
    File { file: String, text: String },
    Row { table: String, key: String, row: String },
    End { records: u64 },
}

/// Where the ledger is.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Place {
    Here,
    Database,
}

pub(crate) fn write_line(to: &mut impl Write, line: &Line) -> io::Result<()> {
    let json = Zeroizing::new(serde_json::to_vec(line)?);
    to.write_all(&json)?;
    to.write_all(b"\n")
}

impl Line {
    pub(crate) fn wipe(&mut self) {
        if let Self::File { text, .. } = self {
            text.zeroize();
        }
    }
}

/// Copies the rows of a ledger into the directory, for a backup. Returns how many there are; `None` if other
/// services share the ledger, whose database has means of its own.
pub(crate) fn copy_ledger(directory: &Directory, store: &dyn Store) -> Result<Option<u64>, CopyError> {
    if store.is_shared() {
        return Ok(None);
    }
    let copy = || {
        directory.remove(LEDGER_COPY)?;
        let path = directory.file(LEDGER_COPY);
        let file = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path)?;
        hand_over(&file, &path)?;
        let (mut to, mut records) = (BufWriter::new(&file), 0);
        store.each_row(&mut |row| {
            let (table, key) = (row.table.to_owned(), hex::encode(&row.key));
            let row = String::from_utf8_lossy(&row.record).into_owned();
            records += 1;
            write_line(&mut to, &Line::Row { table, key, row }).map_err(StoreError::File)
        })?;
        to.flush()?;
        Ok(records)
    };
    let outcome: Result<u64, CopyError> = copy();
    if outcome.is_err() {
        let _ = directory.remove(LEDGER_COPY);
    }
    outcome.map(Some)
}

/// The rows of the ledger, from the process that has it open to the one that makes the backup.
pub(crate) const LEDGER_COPY: &str = ".ledger.copy";
