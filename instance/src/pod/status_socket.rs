//! Serves one pod's status on a unix socket over HTTP: `/` is the status document, next to `/metrics`, `/healthz`,
//! `/flows` (whom the pod spoke to) and `/records` (flow by flow). A client that sends no request gets the bare
//! document.

use std::io::{ErrorKind, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use nebula_cni_contract::flow_records::RECORDS_PATH;
use nebula_cni_contract::instance_status;
use nebula_linux::clock::since_epoch;
use nix::sys::socket::SockType;
use nix::sys::stat::{Mode, umask};

use crate::flow_records;
use crate::listener::deadline::DeadlineStream;
use crate::listener::http::{self, Answer, Received};
use crate::pod::predecessor::listener;
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

    /// Goes on with the listener of the previous instance.
    ///
    /// # Errors
    /// Returns an error if it is no listener for streams.
    pub(crate) fn of(socket: OwnedFd, status: Shared) -> std::io::Result<Self> {
        let listener = listener(socket, SockType::Stream)?;
        Ok(Self { listener, status, path: None, clients: Arc::new(()) })
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

fn flows(status: &Shared) -> String {
    let verdicts = status.lock().unwrap_or_else(PoisonError::into_inner).verdicts.clone();
    let seen = verdicts.map(|verdicts| verdicts.seen()).unwrap_or_default();
    serde_json::to_string(&seen).unwrap_or_default()
}

fn records(status: &Shared, query: &str) -> Option<String> {
    let after = match query {
        "" => None,
        query => Some(query.strip_prefix("after=")?.parse().ok()?),
    };
    let (handle, pod) = {
        let status = status.lock().unwrap_or_else(PoisonError::into_inner);
        (status.handle.clone(), status.pod.clone())
    };
    let asked = flow_records::Asked { after, ..flow_records::Asked::default() };
    let records = handle.map(|handle| flow_records::answer(&handle, asked, Some(&pod))).unwrap_or_default();
    serde_json::to_string(&records).ok()
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
    let asked = request.filter(|request| request.method == "GET");
    let query = asked.as_ref().map_or("", |request| &request.query);
    let (status, content_type, body) = match asked.as_ref().map(|request| &*request.path) {
        Some("/") => ("200 OK", "application/json", document(snapshot())),
        Some("/metrics") => ("200 OK", "text/plain; version=0.0.4; charset=utf-8", snapshot().metrics()),
        Some("/healthz") => match snapshot().health() {
            Ok(()) => ("200 OK", TEXT_TYPE, "ok\n".to_owned()),
            Err(why) => ("503 Service Unavailable", TEXT_TYPE, format!("{why}\n")),
        },
        Some(instance_status::FLOWS_PATH) => ("200 OK", "application/json", flows(status)),
        Some(RECORDS_PATH) => match records(status, query) {
            Some(records) => ("200 OK", "application/json", records),
            None => ("400 Bad Request", TEXT_TYPE, "ask /records or /records?after=NUMBER\n".to_owned()),
        },
        _ => ("404 Not Found", TEXT_TYPE, "there are /, /metrics, /healthz, /flows and /records\n".to_owned()),
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
    use nebula_cni_contract::flow_records::{FlowRecords, read_answer, request};
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
        assert!(get("/flows").ends_with("\r\n\r\n{\"flows\":[],\"lost\":0}"), "{}", get("/flows"));
        let seen = instance_status::seen_flows(&path).unwrap();
        assert_eq!(seen, instance_status::SeenFlows::default());
        let records = read_answer(ask(&request(7)).as_bytes()).unwrap();
        assert_eq!(records, FlowRecords::default());
        assert!(get("/records").starts_with("HTTP/1.1 200 OK\r\n"));
        for wrong in ["after=", "after=-1", "after=x", "before=1", "after=1&after=2", "after=18446744073709551616"] {
            assert!(get(&format!("/records?{wrong}")).starts_with("HTTP/1.1 400 "), "{wrong}");
        }
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
