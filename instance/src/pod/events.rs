//! The event queue of a pod's tunnel: a single thread waits for everything, because every thread that only waits would
//! keep a stack.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use nebula_enrolment::ca_client::{self, TrustAnswer};
use nebula_linux::errno;
use nebula_linux::folder_watch::FolderWatch;
use nebula_linux::rtnetlink::LinkWatch;
use nebula_linux::signals::{Arrived, Signal, Signals};
use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::time::TimeSpec;

use crate::handover::channel::Channel;
use crate::pod::enrolment::Outcome;
use crate::pod::status_socket::StatusSocket;
use crate::pod::successor::{self, SuccessorSocket};

/// An event that the owner of the tunnel handles.
pub(crate) enum Event {
    Signal(Signal),
    LinksChanged,
    /// In the folder of the cluster table.
    TableChanged,
    Enrolment(Box<Outcome>),
    Trust {
        asked: Duration,
        answer: Box<Result<TrustAnswer, ca_client::Error>>,
    },
    DriverEnded(Result<(), nebula_core::io::Error>),
    /// Another instance wants to take over.
    Successor(Channel),
    HandedOver(Box<successor::Outcome>),
}

/// Receives events of other threads, and polls signals, links, the folder of the cluster table and status clients
/// itself.
pub(crate) struct EventQueue {
    events: Receiver<Event>,
    /// Semaphore whose value is the number of queued events.
    waiting: Arc<EventFd>,
    signals: Arrived,
    /// `None` after a failure; the owner also polls at intervals.
    links: Option<LinkWatch>,
    /// Of a captured pod; `None` if it cannot be watched.
    table: Option<FolderWatch>,
    clients: StatusSocket,
    successors: SuccessorSocket,
    /// Clients wait: another instance answers them, or this one will again.
    is_paused: bool,
    /// The last attempt to accept a client failed; the next one waits for [`ACCEPT_RETRY_INTERVAL`].
    accept_failed: bool,
}

/// Sends events of other threads to the queue.
#[derive(Clone)]
pub(crate) struct EventSender {
    sender: Sender<Event>,
    waiting: Arc<EventFd>,
}

impl EventQueue {
    pub(crate) fn new(
        signals: Signals,
        links: LinkWatch,
        table: Option<FolderWatch>,
        clients: StatusSocket,
        successors: SuccessorSocket,
    ) -> io::Result<(Self, EventSender)> {
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_SEMAPHORE;
        let waiting = Arc::new(EventFd::from_flags(flags).map_err(|error| errno::of_call("eventfd", error))?);
        let (sender, events) = channel();
        let out = EventSender { sender, waiting: Arc::clone(&waiting) };
        let (signals, links) = (Arrived::of(signals)?, Some(links));
        let queue = Self {
            events,
            waiting,
            signals,
            links,
            table,
            clients,
            successors,
            is_paused: false,
            accept_failed: false,
        };
        Ok((queue, out))
    }

    /// Whether clients of the status socket wait.
    pub(crate) fn pause_clients(&mut self, is_paused: bool) {
        self.is_paused = is_paused;
    }

    /// The next event within `timeout`. Accepts clients of the status socket while it waits.
    pub(crate) fn next(&mut self, timeout: Duration) -> Option<Event> {
        self.wait(timeout);
        if let Some(signal) = self.signals.next() {
            return Some(Event::Signal(signal));
        }
        if self.waiting.read().is_ok() {
            return self.events.try_recv().ok();
        }
        let admitted = if self.is_paused { Ok(()) } else { self.clients.admit() };
        let successor = self.successors.admit();
        self.accept_failed = admitted.is_err() || successor.is_err();
        if let Err(error) = admitted {
            tracing::warn!(%error, "Status socket cannot accept a connection");
        }
        match successor {
            Ok(Some(channel)) => return Some(Event::Successor(channel)),
            Ok(None) => {}
            Err(error) => tracing::warn!(%error, "An instance that wants to take over cannot be accepted"),
        }
        if self.table.as_ref().is_some_and(FolderWatch::changed) {
            return Some(Event::TableChanged);
        }
        match self.links.as_ref()?.changed() {
            Ok(changed) => changed.then_some(Event::LinksChanged),
            Err(error) => {
                tracing::debug!(%error, "Changes of links are noticed later from now on");
                self.links = None;
                None
            }
        }
    }

    /// The next event sent by another thread within `timeout`; signals, links and clients stay queued.
    pub(crate) fn next_sent(&self, timeout: Duration) -> Option<Event> {
        self.events.recv_timeout(timeout).ok()
    }

    fn wait(&self, timeout: Duration) {
        let timeout = if self.accept_failed { timeout.min(ACCEPT_RETRY_INTERVAL) } else { timeout };
        let mut fds = vec![self.signals.as_fd(), self.waiting.as_fd()];
        fds.extend((!self.accept_failed && !self.is_paused).then(|| self.clients.as_fd()));
        fds.extend((!self.accept_failed).then(|| self.successors.as_fd()));
        fds.extend(self.links.iter().map(AsFd::as_fd));
        fds.extend(self.table.iter().map(AsFd::as_fd));
        let mut fds: Vec<_> = fds.into_iter().map(|fd| PollFd::new(fd, PollFlags::POLLIN)).collect();
        // The caller checks every source, also after an interrupt.
        let _ = ppoll(&mut fds, Some(TimeSpec::from_duration(timeout)), None);
    }
}

impl EventSender {
    /// Queues `event`; does nothing once the queue is gone.
    pub(crate) fn send(&self, event: Event) {
        if self.sender.send(event).is_ok() {
            // Fails only when the counter is at its limit.
            let _ = self.waiting.write(1);
        }
    }
}

const ACCEPT_RETRY_INTERVAL: Duration = Duration::from_millis(200);

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::net::UnixStream;

    use nix::sys::signal::raise;

    use super::*;
    use crate::pod::status::tests::waiting;

    const LONG: Duration = Duration::from_secs(10);

    fn queue(folder: &tempfile::TempDir) -> (EventQueue, EventSender) {
        let clients = StatusSocket::open(&folder.path().join("status.sock"), waiting()).unwrap();
        let table = FolderWatch::new(folder.path(), None).unwrap();
        let successors = SuccessorSocket::open(&folder.path().join("successor.sock")).unwrap();
        EventQueue::new(Signals::block().unwrap(), LinkWatch::new().unwrap(), Some(table), clients, successors).unwrap()
    }

    #[test]
    fn signals_come_first_and_then_every_report_once() {
        let folder = tempfile::tempdir().unwrap();
        let (mut queue, sender) = queue(&folder);
        sender.send(Event::LinksChanged);
        std::thread::spawn(move || sender.send(Event::DriverEnded(Ok(())))).join().unwrap();
        // Sent to this thread only.
        raise(Signal::SIGHUP).unwrap();
        assert!(matches!(queue.next(LONG), Some(Event::Signal(Signal::SIGHUP))));
        assert!(matches!(queue.next(LONG), Some(Event::LinksChanged)));
        assert!(matches!(queue.next(LONG), Some(Event::DriverEnded(Ok(())))));
        assert!(queue.next_sent(Duration::ZERO).is_none());
    }

    #[test]
    fn a_table_that_is_replaced_wakes_whoever_waits() {
        let folder = tempfile::tempdir().unwrap();
        let (mut queue, _sender) = queue(&folder);
        let renamed = folder.path().join("table");
        std::thread::spawn(move || {
            std::fs::write(renamed.with_extension("new"), "").unwrap();
            std::fs::rename(renamed.with_extension("new"), renamed).unwrap();
        });
        // The machine's links may change meanwhile.
        let news = std::iter::from_fn(|| queue.next(LONG)).find(|event| !matches!(event, Event::LinksChanged));
        assert!(matches!(news, Some(Event::TableChanged)));
    }

    #[test]
    fn whoever_waits_lets_clients_of_the_status_socket_in() {
        let folder = tempfile::tempdir().unwrap();
        let (mut queue, _sender) = queue(&folder);
        let mut client = UnixStream::connect(folder.path().join("status.sock")).unwrap();
        let mut text = String::new();
        // The machine's links may change meanwhile.
        while queue.next(Duration::from_millis(10)).is_some() {}
        client.read_to_string(&mut text).unwrap();
        assert!(text.ends_with('}'), "{text}");
    }
}
