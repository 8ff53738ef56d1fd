//! The daemon's housekeeping thread: signals, control socket clients, changed files, certificate expiry, and repair of
//! the tun device.

use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nebula_cert::UnixTime;
use nebula_core::io::Handle;
use nebula_linux::clock::{now, unix_now};
use nebula_linux::memory;
use nebula_linux::signals::{Arrived, Signal, go_name};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::host::control::{ControlService, ControlSockets};
use crate::host::file_watch::FileWatch;
use crate::host::left_state;
use crate::host::link_repair::{DeviceGone, LinkRepair};
use crate::host::reload::Reloader;
use crate::host::unmet;
use crate::metrics::Metrics;

/// The daemon's housekeeping loop.
#[derive(Debug)]
pub(crate) struct Housekeeping {
    pub(crate) signals: Arrived,
    pub(crate) control: ControlSockets,
    pub(crate) service: Arc<ControlService>,
    pub(crate) reloader: Arc<Mutex<Reloader>>,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) handle: Handle,
    /// `None` without a device.
    pub(crate) repair: Option<LinkRepair>,
}

impl Housekeeping {
    /// Runs until a signal stops the node.
    ///
    /// # Errors
    /// Returns an error if somebody removed the tun device; the node has been told to stop.
    pub(crate) fn run(mut self) -> Result<(), DeviceGone> {
        let mut files = FileWatch::default();
        files.forget_changes(&self.reloader().files());
        let mut expiry_due = now();
        let mut last_check = now();
        let mut flows_due = now() + unmet::LOOK_INTERVAL;
        let mut release_memory_at = Some(now() + RELEASE_MEMORY_AFTER);
        loop {
            if now() >= expiry_due {
                let validity = self.metrics.validity();
                let remedy = remedy(self.reloader().settings().operation.enrolment.is_some());
                report_expiry(validity, unix_now(), remedy);
                expiry_due = now() + next_look(validity, unix_now());
            }
            let watch = self.reloader().settings().operation.watch;
            let check_due = watch.map(|interval| last_check + interval);
            let repair_due = self.repair.as_ref().and_then(LinkRepair::due);
            let listeners_due = self.reloader().listeners_due();
            let due = [check_due, release_memory_at, repair_due, listeners_due, self.control.due(), Some(flows_due)];
            self.wait(due.into_iter().flatten().fold(expiry_due, Instant::min));
            if release_memory_at.take_if(|due| now() >= *due).is_some() {
                memory::release_program_pages();
                memory::release_free_heap();
            }
            while let Some(signal) = self.signals.next() {
                if signal != Signal::SIGHUP {
                    tracing::info!(signal = go_name(signal), "Caught signal, shutting down");
                    self.service.upgrade.give_up();
                    left_state::leave(&self.handle);
                    self.handle.stop();
                    return Ok(());
                }
                tracing::info!("Caught HUP, reloading config");
                // `reload` logs its own failure.
                let _ = self.reloader().reload(unix_now());
                expiry_due = now();
            }
            if self.service.upgrade.has_stopped() {
                self.await_end();
                return Ok(());
            }
            if now() >= flows_due {
                flows_due = now() + unmet::LOOK_INTERVAL;
                self.service.facts.unmet.look_at_flows(&self.handle.counters(), now());
            }
            self.reloader().retry_listeners(now());
            self.control.attend(now());
            // After a reload by SIGHUP, which may change the link as well.
            self.repair_link().inspect_err(|DeviceGone| self.handle.stop())?;
            self.control.admit(&self.service);
            if check_due.is_some_and(|due| now() >= due) {
                last_check = now();
                // A reload by signal, `nebula ctl` or renewal has read what is there already.
                let stamps = self.reloader().take_stamps();
                if let Some(stamps) = stamps {
                    files.were_read(stamps);
                }
                if files.has_settled_change(&self.reloader().files()) {
                    tracing::info!("Files of the configuration changed, reloading config");
                    let _ = self.reloader().reload(unix_now());
                    expiry_due = now();
                }
            }
        }
    }

    /// Waits until whoever asked for an upgrade has the answer, or for a signal. Another process looks after the
    /// device.
    fn await_end(&mut self) {
        loop {
            let upgrade = PollFd::new(self.service.upgrade.as_fd(), PollFlags::POLLIN);
            let mut fds = [upgrade, PollFd::new(self.signals.as_fd(), PollFlags::POLLIN)];
            let _ = poll(&mut fds, PollTimeout::NONE);
            let has_answered = fds[0].any().unwrap_or(true);
            while let Some(signal) = self.signals.next() {
                if signal != Signal::SIGHUP {
                    return;
                }
            }
            if has_answered {
                return;
            }
        }
    }

    fn repair_link(&mut self) -> Result<(), DeviceGone> {
        let Some(repair) = &mut self.repair else { return Ok(()) };
        let wanted = || self.reloader.lock().unwrap_or_else(PoisonError::into_inner).overlay().cloned();
        repair.attend(now(), wanted)
    }

    /// Waits for a signal, a client or a link event, at most until `until`.
    fn wait(&self, until: Instant) {
        let left = until.saturating_duration_since(now());
        // Rounded up: an early wake-up would only poll again.
        let timeout = PollTimeout::try_from(left + Duration::from_millis(1)).unwrap_or(PollTimeout::MAX);
        let mut fds = vec![PollFd::new(self.signals.as_fd(), PollFlags::POLLIN)];
        fds.push(PollFd::new(self.service.upgrade.as_fd(), PollFlags::POLLIN));
        fds.extend(self.control.open_ones().map(|control| PollFd::new(control.as_fd(), PollFlags::POLLIN)));
        fds.extend(self.repair.iter().filter_map(LinkRepair::as_fd).map(|fd| PollFd::new(fd, PollFlags::POLLIN)));
        // The caller checks every source anyway, also after EINTR.
        let _ = poll(&mut fds, timeout);
    }

    fn reloader(&self) -> MutexGuard<'_, Reloader> {
        self.reloader.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

const EXPIRY_CHECK_INTERVAL: Duration = Duration::from_secs(3600);
// By then all threads run and the first handshakes are done, so most memory used by the start can be freed.
const RELEASE_MEMORY_AFTER: Duration = Duration::from_millis(250);

/// What to do about a certificate that ends, on a host of which the CA renews the certificate, or another one.
fn remedy(is_enrolled: bool) -> &'static str {
    if is_enrolled {
        "the CA renews it; if that fails, `nebula ctl doctor` says why"
    } else {
        "renew it, replace pki.cert and send SIGHUP"
    }
}

/// Logs a warning if a certificate of this validity expires soon.
fn report_expiry((not_before, not_after): (UnixTime, UnixTime), now: UnixTime, remedy: &str) {
    let left = not_after - now;
    match look(not_before, not_after, now) {
        Look::Fine => {}
        Look::Early => tracing::error!(
            secondsUntilValid = not_before - now,
            "The certificate of this host is not valid yet, peers refuse it: is the clock of this host right?"
        ),
        Look::Soon => tracing::warn!(secondsLeft = left, "The certificate of this host expires soon: {remedy}"),
        Look::Expired => {
            tracing::error!(secondsLeft = left, "The certificate of this host has expired, peers refuse it: {remedy}")
        }
    }
}

/// How long until the expiry is reported again: hourly, and as soon as the status changes.
fn next_look((not_before, not_after): (UnixTime, UnixTime), now: UnixTime) -> Duration {
    let soon = not_after - notice(not_before, not_after) + 1;
    let changes = [not_before, soon, not_after].into_iter().filter(|at| *at > now).map(|at| at - now);
    let seconds = changes.min().and_then(|left| u64::try_from(left).ok()).map(Duration::from_secs);
    seconds.map_or(EXPIRY_CHECK_INTERVAL, |left| left.min(EXPIRY_CHECK_INTERVAL))
}

#[derive(Debug, PartialEq, Eq)]
enum Look {
    Fine,
    Early,
    Soon,
    Expired,
}

/// Classifies a validity period. A short-lived certificate is renewed often, so the warning comes only in its last
/// quarter.
fn look(not_before: UnixTime, not_after: UnixTime, now: UnixTime) -> Look {
    match not_after - now {
        _ if now < not_before => Look::Early,
        left if left <= 0 => Look::Expired,
        left if left < notice(not_before, not_after) => Look::Soon,
        _ => Look::Fine,
    }
}

fn notice(not_before: UnixTime, not_after: UnixTime) -> i64 {
    ((not_after - not_before) / 4).min(MAX_NOTICE_SECONDS)
}

const MAX_NOTICE_SECONDS: i64 = 30 * 86_400;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_comes_the_moment_a_certificate_expires_and_not_an_hour_later() {
        const DAY: i64 = 86_400;
        let seconds = Duration::from_secs;
        for (now, expected) in [
            (-5, seconds(5)),
            (0, EXPIRY_CHECK_INTERVAL),
            // With 100 days of lifetime the warning comes one second into the last quarter.
            (75 * DAY - 60, seconds(61)),
            (100 * DAY - 7, seconds(7)),
            (100 * DAY, EXPIRY_CHECK_INTERVAL),
        ] {
            assert_eq!(next_look((0, 100 * DAY), now), expected, "{now}");
        }
        assert_eq!(look(0, 100 * DAY, 75 * DAY + 1), Look::Soon);
        assert_eq!(look(0, DAY, -1), Look::Early);
    }

    #[test]
    fn whoever_enrolled_is_not_told_to_replace_files_by_hand() {
        assert!(remedy(true).contains("doctor") && !remedy(true).contains("pki.cert"));
        assert!(remedy(false).contains("pki.cert"));
    }

    #[test]
    fn the_last_month_or_the_last_quarter_is_soon() {
        const DAY: i64 = 86_400;
        for (lifetime, left, expected) in [
            (365 * DAY, 31 * DAY, Look::Fine),
            (365 * DAY, 29 * DAY, Look::Soon),
            (DAY, DAY / 3, Look::Fine),
            (DAY, DAY / 5, Look::Soon),
            (DAY, 0, Look::Expired),
            (365 * DAY, -1, Look::Expired),
        ] {
            assert_eq!(look(0, lifetime, lifetime - left), expected, "{left} of {lifetime}");
        }
    }
}
