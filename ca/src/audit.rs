//! The audit log: one JSON line per certificate issued, request refused and command carried out; never a secret.

use std::{
    fs::OpenOptions,
    io::{self, Write},
    os::unix::fs::OpenOptionsExt,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use ipnet::IpNet;
use nebula_cert::UnixTime;
use serde::Serialize;

use crate::directory::hand_over;

/// Appends to the log. The file is opened for each line, so it may be rotated at any time.
#[derive(Debug, Clone)]
pub(crate) struct AuditLog {
    path: PathBuf,
    /// Whether the last line may have been written only in part.
    is_torn: Arc<AtomicBool>,
}

/// What happened.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Event<'a> {
    /// `issued`, `repeated`, `refused`, `released`, `pod_deleted`, `address_reused`, `token_created`, `token_revoked`,
    /// `revoked`, `kept_out`, `readmitted`, `reloaded`, `reload_refused` or `refusals_left_out`.
    pub(crate) event: &'static str,
    /// Address of the caller, `control` for a command on the CA's own host, or `kubernetes`.
    pub(crate) source: String,
    /// The proof that was given: `token ID`, `node`, `pod` or `certificate`.
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
        Self { path, is_torn: Arc::default() }
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
        serde_json::to_writer(&mut line, &Line { time: nebula_cert::rfc3339(now), event })?;
        line.push(b'\n');
        // One write per line, so that lines of several writers do not mix.
        let mut file = OpenOptions::new().append(true).create(true).mode(0o600).open(&self.path)?;
        hand_over(&file, &self.path)?;
        let written = file.write_all(&line);
        self.is_torn.store(written.is_err(), Ordering::Relaxed);
        written
    }
}
