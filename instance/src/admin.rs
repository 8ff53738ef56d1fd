//! Status of one pod's tunnel on a unix socket: each connection gets one JSON document.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use nebula_cert::Identity;
use nebula_core::io::Handle;
use nix::sys::stat::{Mode, umask};
use serde_json::{Value, json};

/// What there is to tell; the owner of the tunnel keeps it up to date.
#[derive(Debug)]
pub struct Status {
    /// `namespace/name`.
    pub pod: String,
    /// UID of the pod.
    pub uid: String,
    /// Tun device in the pod.
    pub device: String,
    /// UDP port in the host namespace.
    pub port: u16,
    /// Whether the data path is open.
    pub open: bool,
    /// Certificate in use.
    pub identity: Option<Identity>,
    /// The running node.
    pub handle: Option<Handle>,
    /// Why there is no (newer) certificate.
    pub last_error: Option<String>,
}

/// Status shared with the thread that answers.
pub type Shared = Arc<Mutex<Status>>;

/// Reads the document of the instance that listens at `path`.
///
/// # Errors
/// Nobody listens, or no document comes in time.
pub fn ask(path: &Path) -> std::io::Result<String> {
    let stream = UnixStream::connect(path)?;
    stream.set_read_timeout(Some(ANSWER_WITHIN))?;
    let mut text = String::new();
    stream.take(LONGEST_ANSWER).read_to_string(&mut text)?;
    Ok(text)
}

/// A listening status socket. Dropping it removes the file.
#[derive(Debug)]
pub struct StatusSocket {
    path: PathBuf,
}

impl StatusSocket {
    /// Listens at `path` (mode 0600) on a thread of its own. A file a former instance left there is replaced.
    ///
    /// # Errors
    /// The socket cannot be made.
    pub fn serve(path: &Path, status: Shared) -> std::io::Result<Self> {
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        // Between bind and a later chmod anybody could connect.
        let before = umask(Mode::from_bits_truncate(0o177));
        let listener = UnixListener::bind(path);
        umask(before);
        let listener = listener?;
        let socket = Self { path: path.to_owned() };
        std::thread::Builder::new().name("status".to_owned()).spawn(move || answer_all(&listener, &status))?;
        Ok(socket)
    }
}

impl Drop for StatusSocket {
    fn drop(&mut self) {
        // Another file may be there already if the next instance was quicker; it makes its own again then.
        let _ = std::fs::remove_file(&self.path);
    }
}

fn answer_all(listener: &UnixListener, status: &Shared) {
    loop {
        match listener.accept() {
            Ok((stream, _)) => answer(stream, status),
            Err(error) => {
                tracing::warn!(%error, "Status socket cannot accept a connection");
                std::thread::sleep(Duration::from_millis(200));
            }
        }
    }
}

fn answer(mut stream: UnixStream, status: &Shared) {
    let document = document(status).to_string();
    // A client that does not read loses its answer and delays the next one by no more than this.
    let written = stream.set_write_timeout(Some(PATIENCE)).and_then(|()| stream.write_all(document.as_bytes()));
    if let Err(error) = written {
        tracing::debug!(%error, "A client of the status socket did not take its answer");
    }
}

/// The document of one moment.
#[must_use]
pub fn document(status: &Shared) -> Value {
    let (mut document, handle) = {
        let status = status.lock().unwrap_or_else(PoisonError::into_inner);
        (fixed_part(&status), status.handle.clone())
    };
    // Asked without the lock: a busy node must not hold up the owner of the status.
    let tunnels = handle.as_ref().map(Handle::tunnels).unwrap_or_default();
    document["tunnels"] = tunnels
        .iter()
        .take(MAX_TUNNELS)
        .map(|tunnel| {
            json!({
                "peer": tunnel.peer,
                "name": tunnel.name,
                "endpoint": tunnel.endpoint.map(|endpoint| endpoint.to_string()),
                "handshake_ms": tunnel.handshake.map(|took| took.as_secs_f64() * 1000.0),
                "primary": tunnel.primary,
            })
        })
        .collect();
    document["counters"] = json!(handle.as_ref().map(Handle::counters).unwrap_or_default());
    document["pid"] = std::process::id().into();
    document
}

fn fixed_part(status: &Status) -> Value {
    let certificate = status.identity.as_ref().map(Identity::primary);
    json!({
        "pod": status.pod,
        "uid": status.uid,
        "device": status.device,
        "overlay": certificate.map(|c| c.networks().iter().map(ToString::to_string).collect::<Vec<_>>()).unwrap_or_default(),
        "groups": certificate.map(|c| c.groups().to_vec()).unwrap_or_default(),
        "certificate": certificate.map(|c| json!({
            "name": c.name(),
            "fingerprint": c.fingerprint().to_string(),
            "not_before": c.not_before(),
            "not_after": c.not_after(),
        })),
        "state": if status.open { "running" } else { "waiting" },
        "last_error": status.last_error,
        "port": status.port,
    })
}

const PATIENCE: Duration = Duration::from_millis(500);
// Keeps one answer within a few hundred KiB.
const MAX_TUNNELS: usize = 2000;

const ANSWER_WITHIN: Duration = Duration::from_secs(3);
const LONGEST_ANSWER: u64 = 16 << 20;

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::os::unix::fs::PermissionsExt;

    fn waiting() -> Shared {
        Arc::new(Mutex::new(Status {
            pod: "shop/web-1".to_owned(),
            uid: "u-1".to_owned(),
            device: "nebula0".to_owned(),
            port: 20_001,
            open: false,
            identity: None,
            handle: None,
            last_error: Some("connection refused".to_owned()),
        }))
    }

    #[test]
    fn a_connection_gets_one_document_and_the_end() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("status.sock");
        std::fs::write(&path, "left over").unwrap();
        let socket = StatusSocket::serve(&path, waiting()).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        for _ in 0..2 {
            let mut text = String::new();
            UnixStream::connect(&path).unwrap().read_to_string(&mut text).unwrap();
            let document: Value = serde_json::from_str(&text).unwrap();
            assert_eq!(document["pod"], "shop/web-1");
            assert_eq!(document["state"], "waiting");
            assert_eq!(document["certificate"], Value::Null);
            assert_eq!(document["tunnels"], json!([]));
            assert_eq!(document["pid"], std::process::id());
        }
        drop(socket);
        assert!(!path.exists());
    }

    #[test]
    fn a_client_that_never_reads_does_not_block_the_next_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("status.sock");
        let status = waiting();
        // More than a socket buffer holds.
        status.lock().unwrap().last_error = Some("x".repeat(4 << 20));
        let _socket = StatusSocket::serve(&path, status).unwrap();
        let _silent = UnixStream::connect(&path).unwrap();
        let mut text = String::new();
        UnixStream::connect(&path).unwrap().read_to_string(&mut text).unwrap();
        assert!(text.ends_with('}'));
    }
}
