//! A backup of a service in one file, and a new directory from it.
//!
//! The file has one JSON object a line: a head, the files of the directory, the rows of the ledger, and their count.
//! The process that has the ledger open copies its rows in one read transaction, so the service goes on meanwhile.

use std::{
    fs,
    io::{self, BufRead, BufReader, BufWriter, Read, Write},
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::Path,
};

use nebula_cert::{UnixTime, hex, rfc3339};
use zeroize::Zeroizing;

use crate::{
    control::{Command, CommandOutcome},
    control_socket::{ControlError, call},
    directory::{
        CA_CERTIFICATE, CA_KEY, DATABASE, Directory, FileError, NEXT_KEY, NODE_TOKEN, POLICY, PREVIOUS_KEY,
        RENEWAL_KEY, STORE, TLS_CERTIFICATE, TLS_KEY,
    },
    ledger_copy::{LEDGER_COPY, Line, Place, write_line},
    store::{RedbStore, StoreError, StoredRow},
};

/// What is in a backup.
#[derive(Debug)]
pub struct Backup {
    /// When it was made, RFC 3339.
    pub made: String,
    /// Names of the files in it.
    pub files: Vec<String>,
    /// How many records of the ledger are in it; `None`: the ledger is in a database.
    pub records: Option<u64>,
    /// Whether the key of the CA is in a hardware token, and so not in the backup.
    pub key_is_elsewhere: bool,
}

/// Why there is no backup, or no new directory.
#[derive(Debug, thiserror::Error)]
pub enum BackupError {
    /// A file of the directory cannot be read or written.
    #[error(transparent)]
    File(#[from] FileError),
    /// The backup cannot be read or written.
    #[error("cannot use the backup: {0}")]
    Io(#[from] io::Error),
    /// The service, or the ledger, did not answer.
    #[error(transparent)]
    Control(#[from] ControlError),
    /// The service refused.
    #[error("{0}")]
    Refused(String),
    /// The ledger cannot be made.
    #[error("cannot make the ledger")]
    Store(#[from] StoreError),
    /// The files of the directory were replaced meanwhile.
    #[error("files of the CA were replaced meanwhile; make the backup again")]
    Changed,
    /// Something is in the new directory.
    #[error("{0} exists; nothing was changed. Restore into a directory without a CA")]
    Exists(String),
    /// The file is no backup, or not a whole one.
    #[error(
        "line {line} is not one of a backup of this release, or the file was cut off ({problem}); nothing was changed"
    )]
    Malformed {
        /// Its number, from 1.
        line: u64,
        /// What is wrong.
        problem: String,
    },
}

/// Writes a backup of the service in `directory` to `path`, which does not exist yet.
///
/// # Errors
/// Returns an error if something of it cannot be read, or `path` cannot be written. Then there is no such file.
pub fn back_up(directory: &Directory, path: &Path, now: UnixTime) -> Result<Backup, BackupError> {
    let file = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    let outcome = write_backup(directory, &file, now).and_then(|made| {
        file.sync_all()?;
        Ok(made)
    });
    directory.remove(LEDGER_COPY)?;
    if outcome.is_err() {
        let _ = fs::remove_file(path);
    }
    outcome
}

fn write_backup(directory: &Directory, file: &fs::File, now: UnixTime) -> Result<Backup, BackupError> {
    let files = read_files(directory)?;
    let records = match call(directory, &Command::CopyLedger)? {
        CommandOutcome::LedgerCopied { records } => records,
        CommandOutcome::Failed { message } => return Err(BackupError::Refused(message)),
        _ => return Err(BackupError::Refused("the running nebula-ca cannot do this; restart it".to_owned())),
    };
    // A step of a rollover replaces several files.
    if read_files(directory)? != files {
        return Err(BackupError::Changed);
    }
    let mut to = BufWriter::new(file);
    let made = rfc3339(now);
    let ledger = if records.is_some() { Place::Here } else { Place::Database };
    write_line(&mut to, &Line::Head { nebula_ca_backup: FORMAT, made: made.clone(), ledger })?;
    let key_is_elsewhere = files.iter().any(|(name, text)| *name == CA_KEY && text.starts_with("pkcs11:"));
    for (name, text) in &files {
        let mut line = Line::File { file: (*name).to_owned(), text: text.to_string() };
        write_line(&mut to, &line)?;
        line.wipe();
    }
    if records.is_some() {
        io::copy(&mut fs::File::open(directory.file(LEDGER_COPY))?, &mut to)?;
    }
    write_line(&mut to, &Line::End { records: records.unwrap_or(0) })?;
    to.flush()?;
    let files = files.into_iter().map(|(name, _)| name.to_owned()).collect();
    Ok(Backup { made, files, records, key_is_elsewhere })
}

/// Makes the directory of a service from the backup at `path`.
///
/// # Errors
/// Returns an error if the file is no whole backup, there is a CA in the directory, or something cannot be written.
pub fn restore(directory: &Directory, path: &Path) -> Result<Backup, BackupError> {
    for name in FILES.into_iter().chain([STORE]) {
        if directory.has(name) {
            return Err(BackupError::Exists(directory.file(name).display().to_string()));
        }
    }
    // All of it is read before the first file is written.
    let mut files = Vec::new();
    let mut lines = Lines::open(path)?;
    let mut records = 0;
    while let Some(line) = lines.next()? {
        match line {
            Content::File(name, text) => files.push((name, text)),
            Content::Row(_) => records += 1,
        }
    }
    let (made, ledger) = (lines.made.clone(), lines.ledger);
    if let Some(missing) = NEEDED.into_iter().find(|needed| !files.iter().any(|(name, _)| name == needed)) {
        return Err(lines.malformed(format!("it has no {missing}")));
    }
    if !directory.path().exists() {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(directory.path())?;
    }
    let outcome = write_directory(directory, &files, ledger, Lines::open(path)?);
    if let Err(error) = outcome {
        for name in files.iter().map(|(name, _)| *name).chain([STORE]) {
            let _ = directory.remove(name);
        }
        return Err(error);
    }
    let key_is_elsewhere = files.iter().any(|(name, text)| *name == CA_KEY && text.starts_with("pkcs11:"));
    let files = files.into_iter().map(|(name, _)| name.to_owned()).collect();
    Ok(Backup { made, files, records: (ledger == Place::Here).then_some(records), key_is_elsewhere })
}

fn write_directory(
    directory: &Directory,
    files: &[(&'static str, Zeroizing<String>)],
    ledger: Place,
    mut lines: Lines,
) -> Result<(), BackupError> {
    if ledger == Place::Here {
        let mut failure = None;
        let rows = std::iter::from_fn(|| {
            loop {
                match lines.next() {
                    Ok(Some(Content::Row(row))) => return Some(row),
                    Ok(Some(Content::File(..))) => {}
                    Ok(None) => return None,
                    Err(error) => {
                        failure = Some(error);
                        return None;
                    }
                }
            }
        });
        RedbStore::make_file(&directory.file(STORE), rows)?;
        if let Some(error) = failure {
            return Err(error);
        }
    }
    // A directory with a policy is a complete one.
    let is_policy = |name: &str| name == POLICY;
    let (last, first): (Vec<_>, Vec<_>) = files.iter().partition(|(name, _)| is_policy(name));
    for (name, text) in first.into_iter().chain(last) {
        let is_public = [CA_CERTIFICATE, TLS_CERTIFICATE, POLICY].contains(name);
        directory.write_new(name, text, if is_public { 0o644 } else { 0o600 })?;
    }
    Ok(())
}

/// The files that are there, with their text.
fn read_files(directory: &Directory) -> Result<Vec<(&'static str, Zeroizing<String>)>, FileError> {
    let there = FILES.into_iter().filter(|name| directory.has(name));
    there.map(|name| Ok((name, directory.read(name)?))).collect()
}

/// What a line between head and end has.
enum Content {
    File(&'static str, Zeroizing<String>),
    Row(StoredRow),
}

/// Reads a backup, a bounded line at a time.
struct Lines {
    reader: BufReader<fs::File>,
    number: u64,
    made: String,
    ledger: Place,
    rows: u64,
}

impl Lines {
    fn open(path: &Path) -> Result<Self, BackupError> {
        let reader = BufReader::new(fs::File::open(path)?);
        let mut lines = Self { reader, number: 0, made: String::new(), ledger: Place::Here, rows: 0 };
        match lines.line()? {
            Line::Head { nebula_ca_backup: FORMAT, made, ledger } => (lines.made, lines.ledger) = (made, ledger),
            Line::Head { nebula_ca_backup, .. } => {
                return Err(lines.malformed(format!("it was written by another release of nebula-ca (format {nebula_ca_backup}, this one knows {FORMAT})")));
            }
            _ => return Err(lines.malformed("it has no head".to_owned())),
        }
        Ok(lines)
    }

    /// The next file or row; `None` after the last one of a whole backup.
    fn next(&mut self) -> Result<Option<Content>, BackupError> {
        match self.line()? {
            Line::File { file, text } => match FILES.into_iter().find(|name| *name == file) {
                Some(name) => Ok(Some(Content::File(name, Zeroizing::new(text)))),
                None => Err(self.malformed(format!("{file:?} is no file of a CA"))),
            },
            Line::Row { table, key, row } => {
                self.rows += 1;
                let row = hex::decode(&key).and_then(|key| StoredRow::new(&table, key, row.into_bytes()));
                row.map(|row| Some(Content::Row(row))).ok_or_else(|| self.malformed("no row of a ledger".to_owned()))
            }
            Line::End { records } if records == self.rows => Ok(None),
            Line::End { records } => Err(self.malformed(format!("{} of {records} records", self.rows))),
            Line::Head { .. } => Err(self.malformed("a second head".to_owned())),
        }
    }

    fn line(&mut self) -> Result<Line, BackupError> {
        self.number += 1;
        let mut line = Zeroizing::new(Vec::new());
        let read = (&mut self.reader).take(MAX_LINE_BYTES).read_until(b'\n', &mut line)?;
        if read == 0 || line.last() != Some(&b'\n') {
            return Err(self.malformed("it ends here".to_owned()));
        }
        serde_json::from_slice(&line).map_err(|_| self.malformed("not a known object".to_owned()))
    }

    fn malformed(&self, problem: String) -> BackupError {
        BackupError::Malformed { line: self.number, problem }
    }
}

/// All that a service needs besides its ledger.
const FILES: [&str; 10] = [
    CA_CERTIFICATE,
    CA_KEY,
    NEXT_KEY,
    PREVIOUS_KEY,
    TLS_CERTIFICATE,
    TLS_KEY,
    NODE_TOKEN,
    RENEWAL_KEY,
    DATABASE,
    POLICY,
];
/// Without these there is no service.
const NEEDED: [&str; 5] = [CA_CERTIFICATE, CA_KEY, TLS_CERTIFICATE, TLS_KEY, POLICY];
const FORMAT: u64 = 1;
/// A file of the directory has at most 4 MiB, which JSON may make six times as long.
const MAX_LINE_BYTES: u64 = 25 << 20;
