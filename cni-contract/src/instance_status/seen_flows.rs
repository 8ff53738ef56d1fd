//! The flows that an instance saw, which it says only to whoever asks for them.

use std::io::{self, Read, Write};
use std::net::IpAddr;
use std::os::unix::net::UnixStream;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::{ANSWER_WITHIN, body_of};

/// The flows in the tunnel of a captured pod that network policies allowed, as far as the instance remembers them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SeenFlows {
    /// One entry for each peer, protocol, port and direction; those that were seen last.
    pub flows: Vec<SeenFlow>,
    /// Flows that are in no entry any more, because there were too many kinds of them.
    #[serde(default)]
    pub lost: u64,
}

/// Flows of one kind.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SeenFlow {
    /// `ingress` or `egress`.
    pub direction: String,
    /// Address of the other end.
    pub peer: IpAddr,
    /// That of the peer's certificate; 0 if it is no pod.
    pub incarnation: u64,
    /// Number of the protocol.
    pub protocol: u8,
    /// Destination port; 0 for protocols without ports.
    pub port: u16,
    /// How many there were.
    pub flows: u64,
    /// When the last one began, in seconds since 1970.
    pub last: u64,
}

/// Asks the instance behind a socket which flows it saw.
///
/// # Errors
/// Returns the system's error; `Unsupported` if the instance is of a release that does not know, `InvalidData` if it
/// answers something else.
pub fn seen_flows(socket: &Path) -> io::Result<SeenFlows> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(ANSWER_WITHIN))?;
    stream.set_write_timeout(Some(ANSWER_WITHIN))?;
    stream.write_all(format!("GET {FLOWS_PATH} HTTP/1.1\r\nHost: pod\r\nConnection: close\r\n\r\n").as_bytes())?;
    let mut bytes = Vec::new();
    stream.take(MAX_ANSWER).read_to_end(&mut bytes)?;
    let invalid = || io::Error::new(io::ErrorKind::InvalidData, "the instance does not say which flows it saw");
    let body = body_of(&bytes, "its instance is of a release that remembers no flows", invalid)?;
    let mut seen: SeenFlows = serde_json::from_str(body).map_err(|_| invalid())?;
    seen.flows.truncate(MAX_FLOWS);
    Ok(seen)
}

/// Path of the answer on the status socket.
pub const FLOWS_PATH: &str = "/flows";
const MAX_ANSWER: u64 = 1 << 20;
/// More than an instance remembers: what another process says is bounded here.
const MAX_FLOWS: usize = 1024;

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};
    use std::os::unix::net::UnixListener;

    use super::*;

    fn answered(answer: &str) -> io::Result<SeenFlows> {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("socket");
        let listener = UnixListener::bind(&socket).unwrap();
        let answer = answer.to_owned();
        let instance = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            // The whole request: to close a socket with unread bytes resets the connection.
            let head = BufReader::new(&stream).lines().map_while(Result::ok).take_while(|line| !line.is_empty());
            let head: Vec<String> = head.collect();
            assert!(head[0].starts_with("GET /flows HTTP/"));
            stream.write_all(answer.as_bytes()).unwrap();
        });
        let seen = seen_flows(&socket);
        instance.join().unwrap();
        seen
    }

    #[test]
    fn what_an_instance_says_is_read_and_bounded() {
        let flow = r#"{"direction":"egress","peer":"10.0.0.1","incarnation":18446744073709551615,"protocol":6,"port":80,"flows":2,"last":9,"later":1}"#;
        let seen = answered(&format!("HTTP/1.1 200 OK\r\nA: b\r\n\r\n{{\"flows\":[{flow}],\"lost\":3}}")).unwrap();
        assert_eq!((seen.lost, seen.flows[0].incarnation, seen.flows[0].port), (3, u64::MAX, 80));
        let many = vec![flow; MAX_FLOWS + 1].join(",");
        let many = answered(&format!("HTTP/1.1 200 OK\r\n\r\n{{\"flows\":[{many}]}}")).unwrap();
        assert_eq!(many.flows.len(), MAX_FLOWS);
        let kind = |answer: &str| answered(answer).unwrap_err().kind();
        assert_eq!(kind("HTTP/1.1 404 Not Found\r\n\r\nthere are /"), io::ErrorKind::Unsupported);
        for wrong in ["", "HTTP/1.1 200 OK", "HTTP/1.1 200 OK\r\n\r\n[]", "HTTP/1.1 200 OK\r\n\r\n{\"flows\":[{}]}"] {
            assert_eq!(kind(wrong), io::ErrorKind::InvalidData, "{wrong:?}");
        }
    }
}
