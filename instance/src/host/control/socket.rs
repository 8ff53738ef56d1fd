//! The listening socket, its file, and the connections of its clients.

use std::cell::Cell;
use std::fs::Permissions;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, PermissionsExt as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use nebula_cert::json_line;
use nebula_cert::listener::{Place, Places, Source};
use nebula_config::{ControlPath, Whois};
use nebula_linux::{errno, memory};
use nix::sys::stat::{Mode, umask};
use serde_json::{Value, json};

use super::ControlService;
use super::refusal::Refusal;
use super::request::Request;
use crate::host::account::{self, Account};
use crate::listener::deadline::DeadlineStream;

/// A listening control socket.
#[derive(Debug)]
pub(crate) struct ControlSocket {
    listener: UnixListener,
    serves: Serves,
    /// By user: one of them who keeps connections open does not keep the others from their answers.
    places: Arc<Places>,
}

/// Which requests a socket answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Serves {
    Everything,
    /// The identity of an overlay address, for other programs of this host.
    Identities,
}

/// The file of a control socket, removed on drop. It is separate from the socket because the socket's thread may still
/// wait for clients when the daemon exits.
#[derive(Debug)]
pub(crate) struct SocketFile {
    path: PathBuf,
    /// The folder, if it was created for this socket.
    folder: Option<PathBuf>,
}

impl ControlSocket {
    /// Opens the configured control socket, `None` if there is to be none. `name` identifies this instance among others
    /// on the host, and `owner` is the user that the daemon will switch to.
    ///
    /// # Errors
    /// Returns an error if the socket cannot be made.
    pub(super) fn open(
        asked: &ControlPath,
        name: &str,
        owner: Option<&Account>,
    ) -> Option<io::Result<(Self, SocketFile)>> {
        let (path, folder) = match asked {
            ControlPath::Off => return None,
            ControlPath::At(path) => (path.clone(), None),
            ControlPath::Usual => (Path::new(FOLDER).join(file_name(name)), Some(Path::new(FOLDER))),
        };
        let place =
            |error: io::Error| io::Error::new(error.kind(), format!("{}: {}", path.display(), errno::text(&error)));
        let opened = Self::bind(&path, folder, Serves::Everything).map_err(place);
        match &opened {
            Ok((_, file)) => {
                tracing::info!(path = %path.display(), "Control socket is open");
                if let Some(Err(error)) = owner.map(|owner| file.give_to(owner)) {
                    tracing::warn!(%error, path = %path.display(), "The control socket does not belong to daemon.user");
                }
            }
            // Who has not the rights to make it there has not asked for it.
            Err(error) if folder.is_some() && error.kind() != io::ErrorKind::AddrInUse => {
                tracing::debug!(%error, "There is no control socket");
                return None;
            }
            Err(_) => {}
        }
        Some(opened)
    }

    /// Opens the socket that answers `whois` to the members of a group.
    ///
    /// # Errors
    /// Returns an error if the socket cannot be made or given to the group; nobody could use it.
    pub(super) fn open_identities(whois: &Whois, owner: Option<&Account>) -> io::Result<(Self, SocketFile)> {
        let place = |error: io::Error| {
            io::Error::new(error.kind(), format!("{}: {}", whois.path.display(), errno::text(&error)))
        };
        let group = whois.group.as_deref().map(account::group).transpose()?;
        let (socket, file) = Self::bind(&whois.path, None, Serves::Identities).map_err(place)?;
        if let Some(owner) = owner {
            file.give_to(owner)?;
        }
        nix::unistd::chown(&file.path, None, group)?;
        std::fs::set_permissions(&file.path, Permissions::from_mode(if group.is_some() { 0o660 } else { 0o666 }))?;
        tracing::info!(path = %file.path.display(), group = whois.group, "Socket for whois is open");
        Ok((socket, file))
    }

    fn bind(path: &Path, folder: Option<&Path>, serves: Serves) -> io::Result<(Self, SocketFile)> {
        let made = folder.filter(|folder| std::fs::DirBuilder::new().mode(0o755).create(folder).is_ok());
        remove_stale(path)?;
        // With a chmod after the bind, any user could connect in between.
        let before = umask(Mode::from_bits_truncate(0o177));
        let listener = UnixListener::bind(path);
        umask(before);
        let listener = listener?;
        let file = SocketFile { path: path.to_owned(), folder: made.map(Path::to_owned) };
        listener.set_nonblocking(true)?;
        Ok((Self { listener, serves, places: Places::new(MAX_CLIENTS) }, file))
    }

    /// Accepts the next client, if any, and answers it on a separate thread.
    pub(crate) fn admit(&self, service: &Arc<ControlService>) {
        let Ok((stream, _)) = self.listener.accept() else { return };
        let Ok(source) = Source::of_unix(&stream) else { return };
        let stream = Arc::new(stream);
        let served = Arc::clone(&stream);
        let end = move || drop(stream.shutdown(Shutdown::Both));
        let Some(place) = self.places.admit(source, end) else {
            // The send buffer of a fresh connection has room for this message.
            let _ = served.set_nonblocking(true).and_then(|()| (&*served).write_all(BUSY));
            return;
        };
        let (service, serves) = (Arc::clone(service), self.serves);
        let body = move || {
            let is_upgrade = Cell::new(false);
            let answer = |request| {
                is_upgrade.set(matches!(request, Request::Upgrade(_)));
                service.answer(serves.admit(request)?)
            };
            if let Err(error) = converse(&served, &place, answer) {
                tracing::debug!(%error, "A client of the control socket went away");
            }
            let _ = served.shutdown(Shutdown::Both);
            if is_upgrade.get() {
                service.upgrade.finish();
            }
            // Requests are rare, so the code that answered this one need not stay mapped.
            memory::release_program_pages();
            drop(place);
        };
        let started = std::thread::Builder::new().name("control".to_owned()).stack_size(STACK_BYTES).spawn(body);
        if let Err(error) = started {
            tracing::warn!(%error, "Cannot answer on the control socket");
        }
    }
}

impl Serves {
    fn admit(self, request: Request) -> Result<Request, Refusal> {
        match (self, &request) {
            (Self::Everything, _) | (Self::Identities, Request::Whois { .. }) => Ok(request),
            (Self::Identities, _) => Err(Refusal::OnlyIdentities),
        }
    }
}

impl AsFd for ControlSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

impl SocketFile {
    /// Whether somebody removed it, so that nobody reaches the socket any more.
    pub(super) fn is_gone(&self) -> bool {
        matches!(std::fs::symlink_metadata(&self.path), Err(error) if error.kind() == io::ErrorKind::NotFound)
    }

    fn give_to(&self, owner: &Account) -> io::Result<()> {
        owner.own(&self.path)?;
        // Removing the file requires write permission on the folder.
        self.folder.as_deref().map_or(Ok(()), |folder| owner.own(folder))
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
        // Fails, as intended, while the folder still holds another instance's socket.
        let _ = self.folder.as_ref().map(std::fs::remove_dir);
    }
}

/// Removes a stale socket that no process listens on, and nothing else.
fn remove_stale(path: &Path) -> io::Result<()> {
    match std::fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
        Ok(found) if !found.file_type().is_socket() => {
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, "there is a file that is no socket"));
        }
        Ok(_) => {}
    }
    match UnixStream::connect(path) {
        Ok(_) => Err(io::Error::new(io::ErrorKind::AddrInUse, "another instance answers there")),
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => std::fs::remove_file(path),
        Err(error) => Err(error),
    }
}

/// Returns `NAME.sock`, with every character other than letters, digits, `-` and `_` replaced, so that the file stays
/// in the folder.
fn file_name(name: &str) -> String {
    let harmless = |c: char| if c.is_ascii_alphanumeric() || matches!(c, '-' | '_') { c } else { '_' };
    let name: String = name.chars().map(harmless).take(MAX_NAME_CHARS).collect();
    format!("{name}.sock")
}

/// Reads one request and writes its answer.
fn converse(
    stream: &UnixStream,
    place: &Place,
    answer: impl FnOnce(Request) -> Result<Value, Refusal>,
) -> io::Result<()> {
    let line = read_line(stream)?;
    place.has_asked();
    let asked = serde_json::from_slice(&line).map_err(|error| Refusal::NotJson(error.to_string()));
    let answered = asked.and_then(|object: Value| Request::read(&object)).and_then(answer);
    let document = match answered {
        Ok(result) => json!({ "result": result }),
        Err(refusal) => json!({ "error": refusal.visible() }),
    };
    write_line(stream, &json_line(document.to_string()))
}

fn read_line(stream: &UnixStream) -> io::Result<Vec<u8>> {
    let mut stream = DeadlineStream::new(stream, READ_TIMEOUT);
    let mut line = Vec::new();
    let mut chunk = [0; 512];
    loop {
        let read = stream.read(&mut chunk)?;
        let end = chunk[..read].iter().position(|byte| *byte == b'\n');
        line.extend_from_slice(&chunk[..end.unwrap_or(read)]);
        if line.len() > MAX_REQUEST_BYTES {
            return Err(io::Error::other("a request is too long"));
        }
        if read == 0 || end.is_some() {
            return Ok(line);
        }
    }
}

fn write_line(stream: &UnixStream, line: &str) -> io::Result<()> {
    DeadlineStream::new(stream, WRITE_TIMEOUT).write_all(line.as_bytes())
}

const FOLDER: &str = "/run/nebula";
const MAX_NAME_CHARS: usize = 64;
/// Beyond this limit, clients of the user who has the most are disconnected.
const MAX_CLIENTS: usize = 16;
const BUSY: &[u8] = b"{\"error\":\"too many clients at once, try again\"}\n";
const READ_TIMEOUT: Duration = Duration::from_secs(2);
const WRITE_TIMEOUT: Duration = Duration::from_secs(5);
const MAX_REQUEST_BYTES: usize = 4096;
// Address space; only touched pages use memory.
const STACK_BYTES: usize = 256 << 10;

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn only_a_socket_that_nobody_listens_at_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.sock");
        std::fs::write(&path, "a file").unwrap();
        assert!(ControlSocket::bind(&path, None, Serves::Everything).is_err());
        std::fs::remove_file(&path).unwrap();
        let first = ControlSocket::bind(&path, None, Serves::Everything).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(ControlSocket::bind(&path, None, Serves::Everything).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        assert!(path.exists(), "the refused one left it alone");
        drop(first);
        assert!(!path.exists());
        // As after SIGKILL: the file remains.
        drop(UnixListener::bind(&path).unwrap());
        assert!(ControlSocket::bind(&path, None, Serves::Everything).is_ok());
    }

    #[test]
    fn a_folder_that_was_made_goes_with_its_last_socket() {
        let folder = tempfile::tempdir().unwrap();
        let own = folder.path().join("nebula");
        let first = ControlSocket::bind(&own.join("a.sock"), Some(&own), Serves::Everything).unwrap();
        let second = ControlSocket::bind(&own.join("b.sock"), Some(&own), Serves::Everything).unwrap();
        drop(first);
        assert!(own.exists(), "another instance uses it");
        drop(second);
        let third = ControlSocket::bind(&own.join("a.sock"), Some(&own), Serves::Everything).unwrap();
        drop(third);
        assert!(own.exists(), "who did not make it leaves it");
    }

    #[test]
    fn names_from_outside_stay_inside_the_folder() {
        assert_eq!(file_name("neb-1_x"), "neb-1_x.sock");
        assert_eq!(file_name("../../etc/passwd"), "______etc_passwd.sock");
        assert_eq!(file_name(&"x".repeat(500)).len(), MAX_NAME_CHARS + 5);
    }

    fn exchange(request: &[u8], answer: impl FnOnce(Request) -> Result<Value, Refusal>) -> io::Result<Value> {
        let (mut client, server) = UnixStream::pair().unwrap();
        client.write_all(request).unwrap();
        client.shutdown(Shutdown::Write).unwrap();
        let place = Places::new(1).admit(Source::User(0), || ()).unwrap();
        converse(&server, &place, answer)?;
        drop(server);
        let mut text = String::new();
        client.read_to_string(&mut text).unwrap();
        assert!(text.ends_with('\n'));
        Ok(serde_json::from_str(&text).unwrap())
    }

    #[test]
    fn every_request_gets_one_object_and_a_wrong_one_says_why() {
        let ok = |_| Ok(json!({"a": 1}));
        assert_eq!(exchange(b"{\"command\":\"status\"}\n", ok).unwrap(), json!({"result": {"a": 1}}));
        assert_eq!(exchange(b"{\"command\":\"status\"}", ok).unwrap(), json!({"result": {"a": 1}}));
        for wrong in [&b"\n"[..], b"status\n", b"[]\n", b"{\"command\":\"no\"}\n", b"\xff\n", b""] {
            let answer = exchange(wrong, ok).unwrap();
            assert!(answer["error"].is_string(), "{answer}");
        }
        let refused = exchange(b"{\"command\":\"status\"}\n", |_| Err(Refusal::Reload("no".to_owned()))).unwrap();
        assert_eq!(refused, json!({"error": "no"}));
    }

    #[test]
    fn a_socket_for_identities_answers_nothing_else() {
        let whois = || Request::Whois { address: [10, 42, 0, 7].into() };
        for serves in [Serves::Everything, Serves::Identities] {
            assert_eq!(serves.admit(whois()), Ok(whois()));
        }
        assert_eq!(Serves::Everything.admit(Request::Reload), Ok(Request::Reload));
        for request in [Request::Reload, Request::Peers, Request::LogLevel(None), Request::Doctor] {
            assert_eq!(Serves::Identities.admit(request), Err(Refusal::OnlyIdentities));
        }
    }

    #[test]
    fn a_request_without_end_is_refused_before_it_takes_memory() {
        let long = vec![b'x'; MAX_REQUEST_BYTES + 1];
        assert!(exchange(&long, |_| Ok(Value::Null)).is_err());
    }

    #[test]
    fn who_writes_nothing_and_who_reads_nothing_is_left_in_time() {
        #[allow(clippy::disallowed_methods, reason = "a test on a real clock")]
        let now = std::time::Instant::now;
        let (_silent, server) = UnixStream::pair().unwrap();
        let start = now();
        assert!(read_line(&server).is_err());
        assert!(now() - start < READ_TIMEOUT * 2);
        let start = now();
        assert!(write_line(&server, &"x".repeat(8 << 20)).is_err());
        assert!(now() - start < WRITE_TIMEOUT * 2);
    }
}
