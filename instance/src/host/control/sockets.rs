//! The sockets by which programs of the host reach a daemon: opened before it changes its user, and again where they
//! could not be or where somebody removed their files.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nebula_config::{ControlPath, Operation, Whois};
use nebula_linux::clock;

use super::ControlService;
use super::socket::{ControlSocket, SocketFile};
use crate::host::account::Account;
use crate::host::listener_slot::ListenerSlot;
use crate::host::unmet::Unmet;

/// The control socket and the one for whois, as far as they are configured.
#[derive(Debug)]
pub(crate) struct ControlSockets {
    control: ControlPath,
    whois: Option<Whois>,
    name: String,
    owner: Option<Account>,
    slots: [ListenerSlot<ControlSocket>; 2],
    files: SocketFiles,
    unmet: Arc<Unmet>,
    /// When to look whether the files are still there.
    look_at: Instant,
}

/// The files of open sockets, which are removed when the last clone is gone or they are cleared. The daemon has one
/// apart from the sockets, whose thread may still wait for clients when it ends.
#[derive(Debug, Clone, Default)]
pub(crate) struct SocketFiles(Arc<Mutex<[Option<SocketFile>; 2]>>);

impl SocketFiles {
    /// Removes the files, which nobody of this process makes again.
    pub(crate) fn remove(&self) {
        *self.lock() = [None, None];
    }

    fn lock(&self) -> MutexGuard<'_, [Option<SocketFile>; 2]> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Removes the files when it is dropped.
#[derive(Debug)]
pub(crate) struct RemovedAtEnd(SocketFiles);

impl RemovedAtEnd {
    pub(crate) fn files(&self) -> SocketFiles {
        self.0.clone()
    }
}

impl Drop for RemovedAtEnd {
    fn drop(&mut self) {
        self.0.remove();
    }
}

impl ControlSockets {
    /// Opens the sockets that `operation` asks for. `name` and `owner`: see [`ControlSocket::open`].
    pub(crate) fn open(
        operation: &Operation,
        name: String,
        owner: Option<Account>,
        unmet: &Arc<Unmet>,
    ) -> (Self, RemovedAtEnd) {
        let now = clock::now();
        let slots = ["Failed to open the control socket", "Failed to open daemon.whois_socket"].map(ListenerSlot::new);
        let (control, whois) = (operation.control.clone(), operation.whois.clone());
        let files = SocketFiles::default();
        let removed = RemovedAtEnd(files.clone());
        let mut sockets =
            Self { control, whois, name, owner, slots, files, unmet: Arc::clone(unmet), look_at: now + LOOK_INTERVAL };
        sockets.open_one(CONTROL, now);
        sockets.open_one(WHOIS, now);
        (sockets, removed)
    }

    /// Opens again what is due at `now`, and what lost its file.
    pub(crate) fn attend(&mut self, now: Instant) {
        let looks = now >= self.look_at;
        if looks {
            self.look_at = now + LOOK_INTERVAL;
        }
        for which in [CONTROL, WHOIS] {
            let is_gone = looks && self.files.lock()[which].as_ref().is_some_and(SocketFile::is_gone);
            if is_gone {
                tracing::warn!("Somebody removed the file of a socket of this daemon, which makes it again");
            }
            if is_gone || self.slots[which].is_due(now) {
                self.open_one(which, now);
            }
        }
    }

    /// When to call [`ControlSockets::attend`].
    pub(crate) fn due(&self) -> Option<Instant> {
        let retries = self.slots.iter().filter_map(ListenerSlot::due);
        let looks = self.open_ones().next().map(|_| self.look_at);
        retries.chain(looks).min()
    }

    /// The sockets that are open.
    pub(crate) fn open_ones(&self) -> impl Iterator<Item = &ControlSocket> {
        self.slots.iter().filter_map(ListenerSlot::running)
    }

    /// Accepts the next client of each.
    pub(crate) fn admit(&self, service: &Arc<ControlService>) {
        self.open_ones().for_each(|socket| socket.admit(service));
    }

    fn open_one(&mut self, which: usize, now: Instant) {
        // A file that is still there would be refused as that of another instance.
        self.files.lock()[which] = None;
        let owner = self.owner.as_ref();
        let opened = match which {
            CONTROL => ControlSocket::open(&self.control, &self.name, owner),
            _ => self.whois.as_ref().map(|whois| ControlSocket::open_identities(whois, owner)),
        };
        let files = &self.files;
        let start = opened.map(|opened| {
            move || -> io::Result<ControlSocket> {
                let (socket, file) = opened?;
                files.lock()[which] = Some(file);
                Ok(socket)
            }
        });
        self.slots[which].open(now, start);
        self.unmet.note_listener(KEYS[which], self.slots[which].missing());
    }
}

const CONTROL: usize = 0;
const WHOIS: usize = 1;
const KEYS: [&str; 2] = ["daemon.control_socket", "daemon.whois_socket"];
const LOOK_INTERVAL: Duration = Duration::from_secs(30);

#[cfg(test)]
mod tests {
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::path::Path;

    use super::*;

    fn sockets(control: &Path) -> (ControlSockets, RemovedAtEnd) {
        let operation = Operation {
            control: ControlPath::At(control.to_owned()),
            whois: None,
            watch: None,
            raise_priority: false,
            user: None,
            enrolment: None,
        };
        ControlSockets::open(&operation, "x".to_owned(), None, &Arc::default())
    }

    #[test]
    fn a_socket_that_another_instance_held_or_whose_file_was_removed_is_opened_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.sock");
        let other = UnixListener::bind(&path).unwrap();
        let (mut sockets, removed) = sockets(&path);
        assert_eq!((sockets.open_ones().count(), sockets.unmet.counts().0), (0, 1));
        let due = sockets.due().unwrap();
        drop(other);
        sockets.attend(due);
        assert!(UnixStream::connect(&path).is_ok());
        assert_eq!(sockets.unmet.counts().0, 0);
        std::fs::remove_file(&path).unwrap();
        let due = sockets.due().unwrap();
        sockets.attend(due);
        assert!(UnixStream::connect(&path).is_ok());
        assert_eq!(sockets.open_ones().count(), 1);
        drop(removed);
        assert!(!path.exists());
    }
}
