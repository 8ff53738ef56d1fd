//! Client of the daemon's control socket.

use std::fmt;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::Value;

/// Why there is no answer.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The daemon refused the request.
    Refused(String),
    /// No daemon could be reached.
    Unreachable(String),
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Self::Refused(text) | Self::Unreachable(text)) = self;
        f.write_str(text)
    }
}

/// Returns the socket that was named, or else finds one.
pub(crate) fn find(named: Option<&Path>) -> Result<PathBuf, Failure> {
    let by_environment = || std::env::var_os("NEBULA_SOCKET").filter(|path| !path.is_empty()).map(PathBuf::from);
    if let Some(path) = named.map(Path::to_owned).or_else(by_environment) {
        return Ok(path);
    }
    let mut sockets: Vec<PathBuf> = std::fs::read_dir(FOLDER)
        .into_iter()
        .flatten()
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.extension().is_some_and(|extension| extension == "sock"))
        .collect();
    sockets.sort();
    match sockets.as_slice() {
        [] => Err(Failure::Unreachable(format!(
            "there is no control socket in {FOLDER}: does nebula run, and may it write there? \
             `nebula -test -config PATH` and its log (`journalctl -u nebula`) say why it does not start. \
             Another place is daemon.control_socket in its configuration, and --socket here"
        ))),
        [only] => Ok(only.clone()),
        several => {
            let several: Vec<_> = several.iter().map(|path| path.display().to_string()).collect();
            let text = format!("several daemons run here, choose one with --socket: {}", several.join(" "));
            Err(Failure::Unreachable(text))
        }
    }
}

/// Sends one request and reads the answer.
pub(crate) fn ask(path: &Path, request: &Value) -> Result<Value, Failure> {
    let unreachable = |error: io::Error| {
        let hint = match error.kind() {
            io::ErrorKind::PermissionDenied => " (only the user that nebula runs as may use it, and root)",
            io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound => " (does nebula run?)",
            _ => "",
        };
        Failure::Unreachable(format!("no answer at {}: {error}{hint}", path.display()))
    };
    let answer = exchange(path, request).map_err(unreachable)?;
    let mut answer: Value = serde_json::from_str(&answer).map_err(|error| not_understood(path, &error))?;
    match answer["error"].as_str() {
        Some(error) => Err(Failure::Refused(error.to_owned())),
        None => Ok(answer["result"].take()),
    }
}

/// Something else than this program's daemon answers there.
pub(crate) fn not_understood(path: &Path, error: &serde_json::Error) -> Failure {
    Failure::Unreachable(format!("{} gives no answer of nebula: {error}", path.display()))
}

fn exchange(path: &Path, request: &Value) -> io::Result<String> {
    let mut stream = UnixStream::connect(path)?;
    stream.set_read_timeout(Some(ANSWER_TIMEOUT))?;
    stream.set_write_timeout(Some(ANSWER_TIMEOUT))?;
    stream.write_all(format!("{request}\n").as_bytes())?;
    let mut answer = String::new();
    stream.take(MAX_ANSWER_BYTES).read_to_string(&mut answer)?;
    Ok(answer)
}

const FOLDER: &str = "/run/nebula";
// A reload may wait for name servers.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);
const MAX_ANSWER_BYTES: u64 = 64 << 20;
