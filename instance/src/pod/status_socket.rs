//! Serves one pod's status on a unix socket over HTTP: `/` is the status document, next to `/metrics` and `/healthz`. A
//! client that sends no request gets the bare document.

use std::io::{ErrorKind, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use nebula_linux::clock::since_epoch;
use nix::sys::stat::{Mode, umask};

use crate::listener::deadline::DeadlineStream;
use crate::listener::http::{self, Answer, Received};
use crate::pod::status::{Shared, Snapshot};

/// Reads the status document of the instance that listens at `path`.
///
/// # Errors
/// Returns an error if no instance listens, or if the document does not arrive in time.
pub fn ask(path: &Path) -> std::io::Result<String> {
    let stream = UnixStream::connect(path)?;
    stream.set_read_timeout(Some(ANSWER_TIMEOUT))?;
    // No request follows, so the instance need not wait for one.
    stream.shutdown(std::net::Shutdown::Write)?;
    let mut text = String::new();
    stream.take(MAX_ANSWER_BYTES).read_to_string(&mut text)?;
    Ok(text)
}

/// A listening status socket. Dropping it removes the file, if it made that.
#[derive(Debug)]
pub struct StatusSocket {
    listener: UnixListener,
    status: Shared,
    /// Of its file, if this instance made it.
    path: Option<PathBuf>,
    /// One reference per client, plus this one.
    clients: Arc<()>,
}

impl StatusSocket {
    /// Listens at `path` (mode 0600), replacing a file that an earlier instance left there.
    ///
    /// # Errors
    /// Returns an error if the socket cannot be created.
    pub fn open(path: &Path, status: Shared) -> std::io::Result<Self> {
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        // If a chmod after bind set the mode, anybody could connect in between.
        let before = umask(Mode::from_bits_truncate(0o177));
        let listener = UnixListener::bind(path);
        umask(before);
        let listener = listener?;
        listener.set_nonblocking(true)?;
        Ok(Self { listener, status, path: Some(path.to_owned()), clients: Arc::new(()) })
    }

    /// Goes on with the listener of the instance before this one.
    pub(crate) fn of(listener: OwnedFd, status: Shared) -> Self {
        Self { listener: listener.into(), status, path: None, clients: Arc::new(()) }
    }

    /// Accepts the next client, if there is one, and answers it on a thread of its own. Clients beyond the limit are
    /// disconnected.
    ///
    /// # Errors
    /// Returns an error if the connection cannot be accepted or its thread cannot be started.
    pub fn admit(&self) -> std::io::Result<()> {
        let stream = match self.listener.accept() {
            Ok((stream, _)) => stream,
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
            Err(error) => return Err(error),
        };
        if Arc::strong_count(&self.clients) > MAX_CLIENTS {
            return Ok(());
        }
        let (status, place) = (Arc::clone(&self.status), Arc::clone(&self.clients));
        let body = move || {
            // A client that does not read loses its answer.
            if let Err(error) = answer(&stream, &status) {
                tracing::debug!(%error, "A client of the status socket did not take its answer");
            }
            drop(place);
        };
        std::thread::Builder::new().name("status".to_owned()).spawn(body).map(drop)
    }
}

impl AsFd for StatusSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

impl Drop for StatusSocket {
    fn drop(&mut self) {
        // The next instance creates its own file only after this one has released the launch file.
        if let Some(path) = &self.path {
            let _ = std::fs::remove_file(path);
        }
    }
}

fn document(snapshot: Snapshot) -> String {
    // Writing it into memory cannot fail: its keys are texts.
    serde_json::to_string(&snapshot.document()).unwrap_or_default()
}

fn answer(stream: &UnixStream, status: &Shared) -> std::io::Result<()> {
    let snapshot = || Snapshot::take(status, since_epoch());
    let received = http::read_request(stream, READ_TIMEOUT, MAX_HEAD_BYTES)?;
    let request = match received {
        Received::Silence => {
            let document = document(snapshot());
            return DeadlineStream::new(stream, WRITE_TIMEOUT).write_all(document.as_bytes());
        }
        Received::Complete(request) | Received::Incomplete(Some(request)) => Some(request),
        Received::Incomplete(None) | Received::Malformed => None,
    };
    let path = request.filter(|request| request.method == "GET").map(|request| request.path);
    let (status, content_type, body) = match path.as_deref() {
        Some("/") => ("200 OK", "application/json", document(snapshot())),
        Some("/metrics") => ("200 OK", "text/plain; version=0.0.4; charset=utf-8", snapshot().metrics()),
        Some("/healthz") => match snapshot().health() {
            Ok(()) => ("200 OK", TEXT_TYPE, "ok\n".to_owned()),
            Err(why) => ("503 Service Unavailable", TEXT_TYPE, format!("{why}\n")),
        },
        _ => ("404 Not Found", TEXT_TYPE, "there are /, /metrics and /healthz\n".to_owned()),
    };
    http::write_answer(stream, WRITE_TIMEOUT, &Answer { status, content_type, body: &body, has_body: true })
}

const TEXT_TYPE: &str = "text/plain; charset=utf-8";
/// For the whole request; a client that has sent nothing by then gets the bare document.
const READ_TIMEOUT: Duration = Duration::from_millis(100);
/// For the whole answer: clients do not wait longer.
const WRITE_TIMEOUT: Duration = ANSWER_TIMEOUT;
const MAX_HEAD_BYTES: usize = 4096;
const MAX_CLIENTS: usize = 16;
const ANSWER_TIMEOUT: Duration = Duration::from_secs(3);
const MAX_ANSWER_BYTES: u64 = 16 << 20;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pod::status::tests::waiting;
    use serde_json::{Value, json};
    use std::os::unix::fs::PermissionsExt;
    use std::sync::atomic::{AtomicBool, Ordering};

    /// Accepts clients until it is dropped.
    struct Served {
        over: Arc<AtomicBool>,
        thread: Option<std::thread::JoinHandle<()>>,
    }

    impl Served {
        fn at(path: &Path, status: Shared) -> Self {
            let socket = StatusSocket::open(path, status).unwrap();
            let over = Arc::new(AtomicBool::new(false));
            let until = Arc::clone(&over);
            let serve = move || {
                while !until.load(Ordering::Relaxed) {
                    socket.admit().unwrap();
                    std::thread::sleep(Duration::from_millis(1));
                }
            };
            Self { over, thread: Some(std::thread::spawn(serve)) }
        }
    }

    impl Drop for Served {
        fn drop(&mut self) {
            self.over.store(true, Ordering::Relaxed);
            let _ = self.thread.take().map(std::thread::JoinHandle::join);
        }
    }

    #[test]
    fn a_connection_without_a_request_gets_one_document_and_the_end() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("status.sock");
        std::fs::write(&path, "left over").unwrap();
        let socket = Served::at(&path, waiting());
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        let mut silent = String::new();
        UnixStream::connect(&path).unwrap().read_to_string(&mut silent).unwrap();
        for text in [silent, ask(&path).unwrap()] {
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
    fn requests_get_the_document_metrics_and_health_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("status.sock");
        let _socket = Served::at(&path, waiting());
        let ask = |request: &str| {
            let mut stream = UnixStream::connect(&path).unwrap();
            stream.write_all(request.as_bytes()).unwrap();
            let mut text = String::new();
            stream.read_to_string(&mut text).unwrap();
            text
        };
        let get = |path: &str| ask(&format!("GET {path} HTTP/1.1\r\nHost: pod\r\n\r\n"));
        assert!(get("/").starts_with("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"));
        assert!(get("/metrics?x=1").contains("\nnebula_pod_open 0\n"));
        let health = get("/healthz");
        assert!(health.starts_with("HTTP/1.1 503 ") && health.contains("connection refused"), "{health}");
        assert!(get("/secrets").starts_with("HTTP/1.1 404 "));
        assert!(ask("POST / HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 404 "));
    }

    #[test]
    fn a_client_that_never_reads_does_not_block_the_next_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("status.sock");
        let status = waiting();
        // More than a socket buffer holds.
        status.lock().unwrap().last_error = Some("x".repeat(4 << 20));
        let _socket = Served::at(&path, status);
        let _silent: Vec<_> = (1..MAX_CLIENTS).map(|_| UnixStream::connect(&path).unwrap()).collect();
        assert!(ask(&path).unwrap().ends_with('}'));
    }
}
