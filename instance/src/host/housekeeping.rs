//! The one thread for everything rare: signals, clients of the control socket, changed files, the end of the certificate.

use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nebula_core::io::{Handle, release_free_heap, release_program_pages};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::host::control::{ControlService, ControlSocket};
use crate::host::expiry;
use crate::host::file_watch::FileWatch;
use crate::host::reload::Reloader;
use crate::linux::clock::{now, unix_now};
use crate::linux::signals::{Arrived, Signal, go_name};
use crate::metrics::Metrics;

/// Waits, and does what there is to do.
#[derive(Debug)]
pub(crate) struct Housekeeping {
    pub(crate) signals: Arrived,
    pub(crate) control: Option<ControlSocket>,
    pub(crate) service: Arc<ControlService>,
    pub(crate) reloader: Arc<Mutex<Reloader>>,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) handle: Handle,
}

impl Housekeeping {
    /// Returns when a signal ended the node.
    pub(crate) fn run(self) {
        let mut files = FileWatch::default();
        files.forget_changes(&self.reloader().files());
        let mut expiry_due = now();
        let mut last_look = now();
        let mut started = Some(now() + START);
        loop {
            if now() >= expiry_due {
                expiry::report(self.metrics.validity(), unix_now());
                expiry_due = now() + EXPIRY_INTERVAL;
            }
            let watch = self.reloader().settings().operation.watch;
            let look_due = watch.map(|interval| last_look + interval);
            self.wait([look_due, started].into_iter().flatten().fold(expiry_due, Instant::min));
            if started.take_if(|due| now() >= *due).is_some() {
                release_program_pages();
                release_free_heap();
            }
            while let Some(signal) = self.signals.next() {
                if signal != Signal::SIGHUP {
                    tracing::info!(signal = go_name(signal), "Caught signal, shutting down");
                    self.handle.stop();
                    return;
                }
                tracing::info!("Caught HUP, reloading config");
                // Reported there.
                let _ = self.reloader().reload(unix_now());
            }
            if let Some(control) = &self.control {
                control.admit(&self.service);
            }
            if look_due.is_some_and(|due| now() >= due) {
                last_look = now();
                if files.look(&self.reloader().files()) {
                    tracing::info!("Files of the configuration changed, reloading config");
                    let _ = self.reloader().reload(unix_now());
                }
            }
        }
    }

    /// Until something is there, or that moment.
    fn wait(&self, until: Instant) {
        let left = until.saturating_duration_since(now());
        // A little late rather than early: the moment is looked at again.
        let timeout = PollTimeout::try_from(left + Duration::from_millis(1)).unwrap_or(PollTimeout::MAX);
        let mut fds = vec![PollFd::new(self.signals.as_fd(), PollFlags::POLLIN)];
        fds.extend(self.control.iter().map(|control| PollFd::new(control.as_fd(), PollFlags::POLLIN)));
        // Interrupted or not, everything is looked at.
        let _ = poll(&mut fds, timeout);
    }

    fn reloader(&self) -> MutexGuard<'_, Reloader> {
        self.reloader.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

const EXPIRY_INTERVAL: Duration = Duration::from_secs(3600);
// Threads have begun and the first handshakes are over; nearly nothing that this took is needed again.
const START: Duration = Duration::from_millis(250);
