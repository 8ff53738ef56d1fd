//! One pod's status on a unix socket, as HTTP: `/` the status document, `/metrics`, `/healthz`. Who connects and says nothing
//! gets the document alone.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use nix::sys::stat::{Mode, umask};

use crate::capabilities;
use crate::pod_status::{Shared, Snapshot};

/// Reads the document of the instance that listens at `path`.
///
/// # Errors
/// Nobody listens, or no document comes in time.
pub fn ask(path: &Path) -> std::io::Result<String> {
    let stream = UnixStream::connect(path)?;
    stream.set_read_timeout(Some(ANSWER_WITHIN))?;
    // There is no request to wait for.
    stream.shutdown(std::net::Shutdown::Write)?;
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
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        // Between bind and a later chmod anybody could connect.
        let before = umask(Mode::from_bits_truncate(0o177));
        let listener = UnixListener::bind(path);
        umask(before);
        let listener = listener?;
        let socket = Self { path: path.to_owned() };
        let answer = move || {
            capabilities::give_up();
            answer_all(&listener, &status);
        };
        std::thread::Builder::new().name("status".to_owned()).spawn(answer)?;
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
            Ok((stream, _)) => {
                // A client that does not read loses its answer and delays the next one by no more than the patience.
                if let Err(error) = answer(stream, status) {
                    tracing::debug!(%error, "A client of the status socket did not take its answer");
                }
            }
            Err(error) => {
                tracing::warn!(%error, "Status socket cannot accept a connection");
                std::thread::sleep(Duration::from_millis(200));
            }
        }
    }
}

fn answer(mut stream: UnixStream, status: &Shared) -> std::io::Result<()> {
    stream.set_write_timeout(Some(PATIENCE))?;
    stream.set_read_timeout(Some(PATIENCE_FOR_A_REQUEST))?;
    let snapshot = || Snapshot::take(status, now());
    let Some(target) = read_target(&mut stream)? else {
        return stream.write_all(snapshot().document().to_string().as_bytes());
    };
    let (code, kind, body) = match target.as_str() {
        "GET /" => ("200 OK", "application/json", snapshot().document().to_string()),
        "GET /metrics" => ("200 OK", "text/plain; version=0.0.4; charset=utf-8", snapshot().metrics()),
        "GET /healthz" => match snapshot().health() {
            Ok(()) => ("200 OK", TEXT, "ok\n".to_owned()),
            Err(why) => ("503 Service Unavailable", TEXT, format!("{why}\n")),
        },
        _ => ("404 Not Found", TEXT, "there are /, /metrics and /healthz\n".to_owned()),
    };
    let head = format!(
        "HTTP/1.1 {code}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes())?;
    stream.write_all(body.as_bytes())
}

/// Method and path of the request; `None`: there is no request.
fn read_target(stream: &mut UnixStream) -> std::io::Result<Option<String>> {
    let mut head = Vec::new();
    let mut chunk = [0; 512];
    while !head.windows(4).any(|end| end == b"\r\n\r\n") {
        match stream.read(&mut chunk) {
            Ok(0) => break,
            Ok(read) if head.len() + read <= LONGEST_HEAD => head.extend_from_slice(&chunk[..read]),
            Ok(_) => return Err(ErrorKind::InvalidData.into()),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => break,
            Err(error) => return Err(error),
        }
    }
    let line = head.split(|byte| *byte == b'\r').next().unwrap_or_default();
    let line = String::from_utf8_lossy(line);
    let mut words = line.split([' ', '?']);
    Ok(words
        .next()
        .filter(|word| !word.is_empty())
        .map(|method| format!("{method} {}", words.next().unwrap_or_default())))
}

#[allow(clippy::disallowed_methods, reason = "the rim reads the clock")]
fn now() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

const TEXT: &str = "text/plain; charset=utf-8";
const PATIENCE: Duration = Duration::from_millis(500);
const PATIENCE_FOR_A_REQUEST: Duration = Duration::from_millis(100);
const LONGEST_HEAD: usize = 4096;
const ANSWER_WITHIN: Duration = Duration::from_secs(3);
const LONGEST_ANSWER: u64 = 16 << 20;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pod_status::tests::waiting;
    use serde_json::{Value, json};
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_connection_without_a_request_gets_one_document_and_the_end() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("status.sock");
        std::fs::write(&path, "left over").unwrap();
        let socket = StatusSocket::serve(&path, waiting()).unwrap();
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
        let _socket = StatusSocket::serve(&path, waiting()).unwrap();
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
        let _socket = StatusSocket::serve(&path, status).unwrap();
        let _silent = UnixStream::connect(&path).unwrap();
        assert!(ask(&path).unwrap().ends_with('}'));
    }
}
