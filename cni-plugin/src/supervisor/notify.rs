//! The plugin's end of systemd's readiness protocol (sd_notify): a datagram socket that accepts messages from one
//! process.

use std::fs;
use std::io::{self, IoSliceMut};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, PermissionsExt, lchown};
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use nix::cmsg_space;
use nix::errno::Errno;
use nix::sys::socket::{ControlMessageOwned, MsgFlags, UnixCredentials, recvmsg, setsockopt, sockopt};

/// The socket. Its file is removed on drop.
#[derive(Debug)]
pub(super) struct NotifySocket {
    socket: UnixDatagram,
    path: PathBuf,
}

/// The contents of a notification.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Notification {
    pub(super) ready: bool,
    pub(super) status: Option<String>,
}

impl NotifySocket {
    pub(super) fn bind(path: &Path) -> io::Result<Self> {
        let bound = Self::bind_only(path)?;
        fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
        setsockopt(&bound.socket, sockopt::PassCred, &true)?;
        Ok(bound)
    }

    /// Binds a socket that belongs to the owner of its directory.
    pub(super) fn bind_for_owner(path: &Path) -> io::Result<Self> {
        let folder = path.parent().ok_or(io::ErrorKind::InvalidInput)?.metadata()?;
        let bound = Self::bind_only(path)?;
        // lchown does not follow a symbolic link that the owner may have put in its place.
        lchown(path, Some(folder.uid()), Some(folder.gid()))?;
        Ok(bound)
    }

    fn bind_only(path: &Path) -> io::Result<Self> {
        match fs::remove_file(path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
        let socket = UnixDatagram::bind(path);
        let socket = socket.map_err(|e| io::Error::new(e.kind(), format!("AF_UNIX socket {}: {e}", path.display())))?;
        Ok(Self { socket, path: path.to_owned() })
    }

    /// Returns the socket for use as the standard input of another process; reads time out after `patience`.
    pub(super) fn as_input(&self, patience: Duration) -> io::Result<Stdio> {
        self.socket.set_read_timeout(Some(patience))?;
        Ok(OwnedFd::from(self.socket.try_clone()?).into())
    }

    /// Waits for the next message. Returns `None` if none arrives within `patience`, or if it is not from process
    /// `from`.
    pub(super) fn receive(&self, from: i32, patience: Duration) -> io::Result<Option<Notification>> {
        // To the kernel, zero means no timeout.
        self.socket.set_read_timeout(Some(patience.max(Duration::from_millis(1))))?;
        let mut bytes = [0; 4096];
        let mut control = cmsg_space!(UnixCredentials);
        let mut parts = [IoSliceMut::new(&mut bytes)];
        let received = recvmsg::<()>(self.socket.as_raw_fd(), &mut parts, Some(&mut control), MsgFlags::empty());
        let message = match received {
            Err(Errno::EAGAIN | Errno::EINTR) => return Ok(None),
            other => other?,
        };
        let sender = message.cmsgs()?.find_map(|control| match control {
            ControlMessageOwned::ScmCredentials(credentials) => Some(credentials.pid()),
            _ => None,
        });
        let length = message.bytes;
        Ok((sender == Some(from)).then(|| parse(&bytes[..length.min(4096)])))
    }
}

impl Drop for NotifySocket {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

fn parse(bytes: &[u8]) -> Notification {
    let mut notification = Notification::default();
    for line in String::from_utf8_lossy(bytes).lines() {
        match line.split_once('=') {
            Some(("READY", "1")) => notification.ready = true,
            Some(("STATUS", status)) => notification.status = Some(status.to_owned()),
            _ => {}
        }
    }
    notification
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bound(dir: &Path) -> NotifySocket {
        NotifySocket::bind(&dir.join("notify")).unwrap()
    }

    #[test]
    fn a_notification_is_taken_from_the_expected_process_only() {
        let dir = tempfile::tempdir().unwrap();
        let socket = bound(dir.path());
        let patience = Duration::from_millis(20);
        let sender = UnixDatagram::unbound().unwrap();
        let me = std::process::id() as i32;
        sender.send_to(b"STATUS=asking\nREADY=1", &socket.path).unwrap();
        sender.send_to(b"READY=1", &socket.path).unwrap();
        let expected = Notification { ready: true, status: Some("asking".into()) };
        assert_eq!(socket.receive(me, patience).unwrap(), Some(expected));
        assert_eq!(socket.receive(me + 1, patience).unwrap(), None);
        assert_eq!(socket.receive(me, patience).unwrap(), None);
    }

    #[test]
    fn strange_notifications_say_nothing() {
        for bytes in [&b""[..], b"READY", b"READY=0", b"\xff\xfe=1", b"=\n==", b"ready=1"] {
            assert_eq!(parse(bytes), Notification::default());
        }
    }

    #[test]
    fn the_socket_file_is_private_and_goes_with_the_socket() {
        let dir = tempfile::tempdir().unwrap();
        let socket = bound(dir.path());
        let path = socket.path.clone();
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        drop(socket);
        assert!(!path.exists());
    }
}
