//! As much HTTP as a status page needs: one bounded request, one response, then the connection is closed.

use std::io::{self, ErrorKind, Read, Write};
use std::time::Duration;

use super::deadline::{DeadlineStream, TimeoutStream};

/// What a client asks for.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Request {
    pub(crate) method: String,
    /// Without the query string.
    pub(crate) path: String,
    /// The query string; empty if there is none.
    pub(crate) query: String,
}

/// What a client sent before it stopped.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Received {
    /// The whole head of a request.
    Complete(Request),
    /// The client closed its side, or the time was over, before the end of the head; the request line may have arrived.
    Incomplete(Option<Request>),
    /// Nothing arrived in time.
    Silence,
    /// Bytes that are not an HTTP request.
    Malformed,
}

/// A response: the status line without the version, the content type and the body.
pub(crate) struct Answer<'a> {
    pub(crate) status: &'a str,
    pub(crate) content_type: &'a str,
    pub(crate) body: &'a str,
    /// If `false`, only the headers are sent, as for HEAD.
    pub(crate) has_body: bool,
}

/// Reads the head of a request, which has at most `max_bytes`, within `timeout`.
///
/// # Errors
/// Returns an error if the connection fails or the head is too long.
pub(crate) fn read_request<S: TimeoutStream>(stream: &S, timeout: Duration, max_bytes: usize) -> io::Result<Received> {
    let mut stream = DeadlineStream::new(stream, timeout);
    let mut head = Vec::new();
    let mut chunk = [0; 1024];
    let mut request_line = None;
    loop {
        match stream.read(&mut chunk) {
            Ok(0) => break,
            Ok(read) if head.len() + read <= max_bytes => head.extend_from_slice(&chunk[..read]),
            Ok(_) => return Err(ErrorKind::InvalidData.into()),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => break,
            Err(error) => return Err(error),
        }
        let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
        let mut request = httparse::Request::new(&mut headers);
        let Ok(parsed) = request.parse(&head) else { return Ok(Received::Malformed) };
        request_line = request.method.zip(request.path).map(|(method, target)| {
            let (path, query) = target.split_once('?').unwrap_or((target, ""));
            Request { method: method.to_owned(), path: path.to_owned(), query: query.to_owned() }
        });
        if parsed.is_complete() {
            return Ok(request_line.map_or(Received::Malformed, Received::Complete));
        }
    }
    Ok(if head.is_empty() { Received::Silence } else { Received::Incomplete(request_line) })
}

/// Writes a response within `timeout`.
///
/// # Errors
/// Returns an error if the client does not read or is gone.
pub(crate) fn write_answer<S: TimeoutStream>(stream: &S, timeout: Duration, answer: &Answer<'_>) -> io::Result<()> {
    let Answer { status, content_type, body, has_body } = answer;
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    let mut stream = DeadlineStream::new(stream, timeout);
    stream.write_all(head.as_bytes())?;
    if *has_body { stream.write_all(body.as_bytes()) } else { Ok(()) }
}

const MAX_HEADERS: usize = 64;

#[cfg(test)]
mod tests {
    use std::net::Shutdown;
    use std::os::unix::net::UnixStream;

    use super::*;

    fn received(sent: &[u8]) -> io::Result<Received> {
        let (mut client, served) = UnixStream::pair().unwrap();
        client.write_all(sent).unwrap();
        client.shutdown(Shutdown::Write).unwrap();
        read_request(&served, Duration::from_secs(5), 100)
    }

    fn request(method: &str, path: &str) -> Request {
        let (path, query) = path.split_once('?').unwrap_or((path, ""));
        Request { method: method.to_owned(), path: path.to_owned(), query: query.to_owned() }
    }

    #[test]
    fn a_request_is_read_to_the_end_of_its_head() {
        let whole = received(b"GET /metrics?x=1 HTTP/1.1\r\nHost: h\r\n\r\nbody").unwrap();
        assert_eq!(whole, Received::Complete(request("GET", "/metrics?x=1")));
        let cut = received(b"GET / HTTP/1.1\r\nHost: ").unwrap();
        assert_eq!(cut, Received::Incomplete(Some(request("GET", "/"))));
        assert_eq!(received(b"GE").unwrap(), Received::Incomplete(None));
        assert_eq!(received(b"").unwrap(), Received::Silence);
        assert_eq!(received(b"\x01\x02 what\r\n\r\n").unwrap(), Received::Malformed);
    }

    #[test]
    fn a_head_without_end_is_refused_and_a_silent_client_is_left_in_time() {
        let long = format!("GET / HTTP/1.1\r\nX: {}", "x".repeat(200));
        assert_eq!(received(long.as_bytes()).unwrap_err().kind(), ErrorKind::InvalidData);
        let (_silent, served) = UnixStream::pair().unwrap();
        assert_eq!(read_request(&served, Duration::from_millis(50), 100).unwrap(), Received::Silence);
    }
}
