//! The audit log: one JSON line per certificate issued, request refused and command carried out; never a secret. A log
//! that is full becomes `audit.log.1`, the one before it `audit.log.2`, and the oldest is removed.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write},
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use ipnet::IpNet;
use nebula_cert::{UnixTime, visible_json};
use serde::Serialize;

use crate::directory::hand_over;

/// Appends to the log. The file is opened for each line, so others may rotate it as well.
#[derive(Debug, Clone)]
pub(crate) struct AuditLog {
    path: PathBuf,
    /// Size in bytes at which it is rotated.
    most: u64,
    /// Whether the last line may have been written only in part.
    is_torn: Arc<AtomicBool>,
}

/// What happened.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Event<'a> {
    /// `issued`, `repeated`, `refused`, `released`, `node_credential`, `pod_deleted`, `address_reused`,
    /// `token_created`, `token_revoked`, `revoked`, `kept_out`, `readmitted`, `address_released`, `reloaded`,
    /// `reload_refused` or `refusals_left_out`.
    pub(crate) event: &'static str,
    /// Address of the caller, `control` for a command on the CA's own host, or `kubernetes`. Of what somebody asked for
    /// through the API server, it is that server's.
    pub(crate) source: String,
    /// The proof that was given: `token ID`, `node`, `node credential`, `pod` or `certificate`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) proof: Option<String>,
    /// The pod or host concerned.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) subject: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) name: Option<&'a str>,
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    pub(crate) networks: &'a [IpNet],
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    pub(crate) groups: &'a [String],
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) fingerprint: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) not_after: Option<String>,
    /// Who revoked it or tried to, as the API server knows the user.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) user: Option<&'a str>,
    /// Why, in the words of that user.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) reason: Option<&'a str>,
    /// Why it was refused.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) code: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) message: Option<String>,
    /// Number of refusals that were not logged.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) left_out: Option<u64>,
}

impl AuditLog {
    pub(crate) fn new(path: PathBuf) -> Self {
        Self { path, most: MAX_BYTES, is_torn: Arc::default() }
    }

    /// Writes one line. A failure is logged but not returned: the ledger has every certificate as well.
    pub(crate) fn write(&self, event: &Event<'_>, now: UnixTime) {
        if let Err(error) = self.append(event, now) {
            tracing::error!(path = %self.path.display(), %error, "cannot write the audit log");
        }
    }

    fn append(&self, event: &Event<'_>, now: UnixTime) -> io::Result<()> {
        #[derive(Serialize)]
        struct Line<'a> {
            time: String,
            #[serde(flatten)]
            event: &'a Event<'a>,
        }
        // After a partial write (a full disk), start a new line.
        let mut line = if self.is_torn.load(Ordering::Relaxed) { vec![b'\n'] } else { Vec::new() };
        let json = serde_json::to_string(&Line { time: nebula_cert::rfc3339(now), event })?;
        line.extend_from_slice(visible_json(&json).as_bytes());
        line.push(b'\n');
        // One write per line, so that lines of several writers do not mix.
        let mut file = self.open()?;
        let written = file.write_all(&line);
        self.is_torn.store(written.is_err(), Ordering::Relaxed);
        written
    }

    /// The log to append to, rotated if it is full.
    fn open(&self) -> io::Result<File> {
        let open = || {
            let file = OpenOptions::new().append(true).create(true).mode(0o600).open(&self.path)?;
            hand_over(&file, &self.path)?;
            io::Result::Ok(file)
        };
        let file = open()?;
        if file.metadata()?.len() < self.most {
            return Ok(file);
        }
        // Writers take turns, and whoever comes second finds another file under the name.
        file.lock()?;
        let (held, named) = (file.metadata()?, fs::metadata(&self.path));
        if named.is_ok_and(|named| (named.dev(), named.ino()) == (held.dev(), held.ino()))
            && let Err(error) = self.rotate()
        {
            // Better a log that is too long than a line that is lost.
            tracing::warn!(path = %self.path.display(), %error, "cannot rotate the audit log");
            return Ok(file);
        }
        open()
    }

    fn rotate(&self) -> io::Result<()> {
        let numbered = |number: u32| {
            let mut path = self.path.clone().into_os_string();
            path.push(format!(".{number}"));
            PathBuf::from(path)
        };
        for number in (1..KEPT).rev() {
            match fs::rename(numbered(number), numbered(number + 1)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        fs::rename(&self.path, numbered(1))
    }
}

/// About a hundred thousand lines.
const MAX_BYTES: u64 = 32 << 20;
/// Full logs that are kept. With the limits on refusals, an attack fills them in about two days.
const KEPT: u32 = 10;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_log_is_rotated_and_the_oldest_goes_but_no_line_is_lost_before() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("audit.log");
        let log = AuditLog { most: 4_000, ..AuditLog::new(path.clone()) };
        let write =
            |from: i64| (from..from + 100).for_each(|at| log.write(&Event { event: "issued", ..Event::default() }, at));
        std::thread::scope(|scope| [0, 1_000, 2_000, 3_000].map(|from| scope.spawn(move || write(from))).map(drop));
        let files: Vec<_> = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().path()).collect();
        let text: String = files.iter().map(|file| fs::read_to_string(file).unwrap()).collect();
        assert_eq!(text.lines().count(), 400, "{files:?}");
        assert!(text.lines().all(|line| serde_json::from_str::<serde_json::Value>(line).is_ok()));
        assert!((4..=1 + KEPT as usize).contains(&files.len()), "{files:?}");
        assert!(files.iter().all(|file| fs::metadata(file).unwrap().len() < 4_500));
        (0..10).for_each(|from| write(10_000 + 100 * from));
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1 + KEPT as usize);
    }
}
