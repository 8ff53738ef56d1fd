//! The Unix socket through which a running service takes commands: one JSON line in, one JSON line out.
//!
//! The store file has one owner at a time. Going through the owner's socket keeps all work in one process; where no
//! service runs, the asking process opens the store itself for one command.

use std::{
    fs,
    io::{self, BufRead, BufReader, Read, Write},
    os::unix::{fs::PermissionsExt, net::UnixStream},
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt},
    net::UnixListener,
    sync::watch,
};

use crate::{
    audit::AuditLog,
    authority::{self, AuthorityError},
    control::{Command, CommandOutcome, Operator},
    directory::{AUDIT_LOG, CONTROL_SOCKET, DATABASE, Directory, FileError, POLICY, STORE},
    policy::{Policy, PolicyError},
    store::{self, Beginning, StoreError},
    time,
};

/// Why a command reached neither a service nor the store.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// The socket exists but the exchange failed.
    #[error("the running nebula-ca did not answer on its control socket {}", path.display())]
    Socket {
        /// The socket.
        path: PathBuf,
        /// What failed.
        #[source]
        source: io::Error,
    },
    /// The answer cannot be parsed.
    #[error("the running nebula-ca answered something else than expected; is it of another version?")]
    CommandOutcome(#[source] serde_json::Error),
    /// The store cannot be opened.
    #[error("cannot use the store ({STORE}, or what {DATABASE} names)")]
    Store(#[from] StoreError),
    /// A file of the directory cannot be read.
    #[error("the directory is not complete; was it made with `nebula-ca init`?")]
    File(#[from] FileError),
    /// The policy is not valid.
    #[error("cannot use {POLICY}")]
    Policy(#[from] PolicyError),
    /// The CA certificate is not valid.
    #[error("cannot use the CA certificate")]
    Authority(#[from] AuthorityError),
}

/// Sends a command to the running service of a directory, or carries it out here if none is running.
///
/// # Errors
/// Returns an error if neither works. A command that was refused is a [`CommandOutcome::Failed`].
pub fn call(directory: &Directory, command: &Command) -> Result<CommandOutcome, ControlError> {
    let path = directory.file(CONTROL_SOCKET);
    // While a service starts or stops, it may hold the store without listening on its socket, or the reverse, or drop
    // a connection that it has not accepted yet: retry.
    for _ in 0..ATTEMPTS {
        match UnixStream::connect(&path) {
            Ok(stream) => match talk(stream, command, path.clone()) {
                Err(ControlError::Socket { source, .. }) if was_dropped(&source) => thread::sleep(BETWEEN_ATTEMPTS),
                outcome => return outcome,
            },
            Err(error) if is_nobody_there(&error) => {}
            Err(source) => return Err(ControlError::Socket { path, source }),
        }
        match obey_alone(directory, command) {
            Err(ControlError::Store(StoreError::InUse)) => thread::sleep(BETWEEN_ATTEMPTS),
            outcome => return outcome,
        }
    }
    Err(StoreError::InUse.into())
}

fn is_nobody_there(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused)
}

/// Whether the service closed the connection before it read the command. It answers each command that it has read,
/// also while it stops.
fn was_dropped(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, NotConnected, UnexpectedEof};
    matches!(error.kind(), BrokenPipe | ConnectionReset | NotConnected | UnexpectedEof)
}

fn obey_alone(directory: &Directory, command: &Command) -> Result<CommandOutcome, ControlError> {
    let (_, authorities) = authority::read_bundle(directory)?;
    let policy = Policy::parse(&directory.read(POLICY)?)?;
    let audit = AuditLog::new(directory.file(AUDIT_LOG));
    let store = store::open(directory, Beginning::of(&authorities, time::now()))?;
    let operator =
        Operator { directory, store: store.as_ref(), authorities: &authorities, policy: &policy, audit: &audit };
    Ok(operator.obey(command, time::now()))
}

fn talk(mut stream: UnixStream, command: &Command, path: PathBuf) -> Result<CommandOutcome, ControlError> {
    let json = serde_json::to_vec(command).map_err(ControlError::CommandOutcome)?;
    let exchange = || {
        stream.set_read_timeout(Some(ANSWER_WITHIN))?;
        stream.set_write_timeout(Some(ANSWER_WITHIN))?;
        stream.write_all(&json)?;
        stream.write_all(b"\n")?;
        let mut answer = String::new();
        match BufReader::new(stream.take(MAX_ANSWER_BYTES)).read_line(&mut answer)? {
            0 => Err(io::Error::from(io::ErrorKind::UnexpectedEof)),
            _ => Ok(answer),
        }
    };
    let answer: String = exchange().map_err(|source| ControlError::Socket { path, source })?;
    serde_json::from_str(&answer).map_err(ControlError::CommandOutcome)
}

/// The listening socket; its file is removed when dropped.
pub(crate) struct ControlSocket {
    listener: UnixListener,
    path: PathBuf,
}

impl ControlSocket {
    /// Listens, for the owner of the directory only. The caller owns the store, so an existing socket is stale.
    pub(crate) fn bind(directory: &Directory) -> io::Result<Self> {
        let path = directory.file(CONTROL_SOCKET);
        let unready = directory.file(".control.sock.new");
        remove(&unready)?;
        let listener = UnixListener::bind(&unready)?;
        // Restrict access before the rename, so that the final name never has wider rights.
        fs::set_permissions(&unready, fs::Permissions::from_mode(0o600))?;
        fs::rename(&unready, &path)?;
        Ok(Self { listener, path })
    }

    /// Serves commands until the sender of `stop` is gone, one at a time; a command that was accepted before is
    /// answered. `obey` may block.
    pub(crate) async fn serve(
        self,
        obey: impl Fn(Command) -> CommandOutcome + Clone + Send + 'static,
        mut stop: watch::Receiver<()>,
    ) {
        loop {
            let accepted = tokio::select! {
                _ = stop.changed() => return,
                accepted = self.listener.accept() => accepted,
            };
            match accepted {
                Ok((stream, _)) => {
                    let answered = tokio::time::timeout(ANSWER_WITHIN, answer(stream, obey.clone())).await;
                    if let Ok(Err(error)) = answered {
                        tracing::warn!(%error, "a command on the control socket was not answered");
                    }
                }
                Err(error) => {
                    // Most likely out of descriptors: retrying at once would only burn CPU.
                    tracing::warn!(%error, "cannot accept on the control socket");
                    tokio::time::sleep(BETWEEN_ATTEMPTS).await;
                }
            }
        }
    }
}

impl Drop for ControlSocket {
    fn drop(&mut self) {
        if let Err(error) = remove(&self.path) {
            tracing::warn!(path = %self.path.display(), %error, "cannot remove the control socket");
        }
    }
}

async fn answer(
    stream: tokio::net::UnixStream,
    obey: impl Fn(Command) -> CommandOutcome + Send + 'static,
) -> io::Result<()> {
    let (reader, mut writer) = stream.into_split();
    let mut line = Vec::new();
    tokio::io::BufReader::new(reader.take(MAX_COMMAND_BYTES)).read_until(b'\n', &mut line).await?;
    let answer = match serde_json::from_slice(&line) {
        Ok(command) => tokio::task::spawn_blocking(move || obey(command)).await.map_err(io::Error::other)?,
        Err(error) => CommandOutcome::Failed { message: format!("not a command of this version: {error}") },
    };
    let mut json = serde_json::to_vec(&answer)?;
    json.push(b'\n');
    writer.write_all(&json).await?;
    writer.shutdown().await
}

fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// In bytes; a token with many networks and groups stays far below.
const MAX_COMMAND_BYTES: u64 = 64 * 1024;
const MAX_ANSWER_BYTES: u64 = 1 << 30;
const ANSWER_WITHIN: Duration = Duration::from_secs(30);
const BETWEEN_ATTEMPTS: Duration = Duration::from_millis(50);
/// 15 seconds: a service that stops holds its store until the requests in flight are answered.
const ATTEMPTS: u32 = 300;
