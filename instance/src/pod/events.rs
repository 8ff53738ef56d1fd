//! What the owner of a pod's tunnel waits for, all on its one thread: each thread that only waits would keep a stack.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::time::TimeSpec;

use crate::ca_client::{self, TrustAnswer};
use crate::linux::link_watch::LinkWatch;
use crate::linux::signals::{Arrived, Signal, Signals};
use crate::pod::enrolment::Answer;
use crate::pod::status_socket::StatusSocket;

/// Something happened.
pub(crate) enum Input {
    Signal(Signal),
    LinksChanged,
    Answer(Box<Answer>),
    Trust { asked: Duration, answer: Box<Result<TrustAnswer, ca_client::Error>> },
    DriverEnded(Result<(), nebula_core::io::Error>),
}

/// Takes what other threads report, and sees signals, links and clients itself.
pub(crate) struct Inbox {
    reports: Receiver<Input>,
    /// Counts the reports.
    waiting: Arc<EventFd>,
    signals: Arrived,
    /// None once it failed: the owner looks now and then anyway.
    links: Option<LinkWatch>,
    clients: StatusSocket,
    /// No client can be let in for now.
    full: bool,
}

/// Where other threads report.
#[derive(Clone)]
pub(crate) struct Reports {
    sender: Sender<Input>,
    waiting: Arc<EventFd>,
}

impl Inbox {
    pub(crate) fn new(signals: Signals, links: LinkWatch, clients: StatusSocket) -> io::Result<(Self, Reports)> {
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_SEMAPHORE;
        let waiting = Arc::new(EventFd::from_flags(flags)?);
        let (sender, reports) = channel();
        let out = Reports { sender, waiting: Arc::clone(&waiting) };
        Ok((Self { reports, waiting, signals: Arrived::of(signals)?, links: Some(links), clients, full: false }, out))
    }

    /// What happens next, if it does within `patience`. Meanwhile clients of the status socket are let in.
    pub(crate) fn next(&mut self, patience: Duration) -> Option<Input> {
        self.wait(patience);
        if let Some(signal) = self.signals.next() {
            return Some(Input::Signal(signal));
        }
        if self.waiting.read().is_ok() {
            return self.reports.try_recv().ok();
        }
        let admitted = self.clients.admit();
        self.full = admitted.is_err();
        if let Err(error) = admitted {
            tracing::warn!(%error, "Status socket cannot accept a connection");
        }
        match self.links.as_ref()?.changed() {
            Ok(changed) => changed.then_some(Input::LinksChanged),
            Err(error) => {
                tracing::debug!(%error, "Changes of links are noticed later from now on");
                self.links = None;
                None
            }
        }
    }

    /// The next report; signals and the like wait meanwhile.
    pub(crate) fn report(&self, patience: Duration) -> Option<Input> {
        self.reports.recv_timeout(patience).ok()
    }

    fn wait(&self, patience: Duration) {
        let patience = if self.full { patience.min(REST) } else { patience };
        let mut fds = vec![self.signals.as_fd(), self.waiting.as_fd()];
        fds.extend((!self.full).then(|| self.clients.as_fd()));
        fds.extend(self.links.iter().map(AsFd::as_fd));
        let mut fds: Vec<_> = fds.into_iter().map(|fd| PollFd::new(fd, PollFlags::POLLIN)).collect();
        // Interrupted or not, everything is looked at.
        let _ = ppoll(&mut fds, Some(TimeSpec::from_duration(patience)), None);
    }
}

impl Reports {
    /// After the end of the owner nobody listens any more.
    pub(crate) fn send(&self, input: Input) {
        if self.sender.send(input).is_ok() {
            // Fails only at the counter's limit.
            let _ = self.waiting.write(1);
        }
    }
}

// Before the next try to let a client in.
const REST: Duration = Duration::from_millis(200);

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::net::UnixStream;

    use nix::sys::signal::raise;

    use super::*;
    use crate::pod::status::tests::waiting;

    const LONG: Duration = Duration::from_secs(10);

    fn inbox(folder: &tempfile::TempDir) -> (Inbox, Reports) {
        let clients = StatusSocket::open(&folder.path().join("status.sock"), waiting()).unwrap();
        Inbox::new(Signals::block().unwrap(), LinkWatch::new().unwrap(), clients).unwrap()
    }

    #[test]
    fn signals_come_first_and_then_every_report_once() {
        let folder = tempfile::tempdir().unwrap();
        let (mut inbox, reports) = inbox(&folder);
        reports.send(Input::LinksChanged);
        std::thread::spawn(move || reports.send(Input::DriverEnded(Ok(())))).join().unwrap();
        // To this thread alone.
        raise(Signal::SIGHUP).unwrap();
        assert!(matches!(inbox.next(LONG), Some(Input::Signal(Signal::SIGHUP))));
        assert!(matches!(inbox.next(LONG), Some(Input::LinksChanged)));
        assert!(matches!(inbox.next(LONG), Some(Input::DriverEnded(Ok(())))));
        assert!(inbox.report(Duration::ZERO).is_none());
    }

    #[test]
    fn whoever_waits_lets_clients_of_the_status_socket_in() {
        let folder = tempfile::tempdir().unwrap();
        let (mut inbox, _reports) = inbox(&folder);
        let mut client = UnixStream::connect(folder.path().join("status.sock")).unwrap();
        let mut text = String::new();
        // Links of the machine may change meanwhile.
        while inbox.next(Duration::from_millis(10)).is_some() {}
        client.read_to_string(&mut text).unwrap();
        assert!(text.ends_with('}'), "{text}");
    }
}
