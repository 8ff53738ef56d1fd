//! Restores what other programs remove from the tun device: its addresses, routes, MTU and up state.
//!
//! Network managers sometimes do this: systemd-networkd removes foreign addresses and routes from every device that
//! matches one of its files.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nebula_config::log;
use nebula_linux::errno;
use nebula_linux::link_events::{LinkEvents, News};
use tracing::Level;

use crate::host::rivals;
use crate::metrics::Repairs;
use crate::overlay::link::{Loss, OverlayLink, interface_index};

/// Watches one link and repairs it.
#[derive(Debug)]
pub(crate) struct LinkRepair {
    /// `None` after an error.
    events: Option<LinkEvents>,
    device: String,
    index: u32,
    schedule: Schedule,
    /// Netlink port id of the socket that made the last change; 0 if unknown.
    port: u32,
    /// Whether a route to one of our networks leads to another interface, so that the removal of any link is of
    /// interest.
    has_rival: bool,
    repairs: Arc<Repairs>,
}

/// The device is gone, so no packets can pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DeviceGone;

impl LinkRepair {
    /// Watches a device in the namespace of the calling thread, starting now.
    ///
    /// # Errors
    /// Returns an error if there is no such device, or no netlink socket can be opened.
    pub(crate) fn new(device: &str, repairs: Arc<Repairs>) -> io::Result<Self> {
        let index = interface_index(device).map_err(io::Error::other)?;
        let events = Some(LinkEvents::subscribe()?);
        let (schedule, device) = (Schedule::default(), device.to_owned());
        Ok(Self { events, device, index, schedule, port: 0, has_rival: false, repairs })
    }

    /// The descriptor to poll for events.
    pub(crate) fn as_fd(&self) -> Option<BorrowedFd<'_>> {
        self.events.as_ref().map(AsFd::as_fd)
    }

    /// When to call [`LinkRepair::attend`] even without events.
    pub(crate) fn due(&self) -> Option<Instant> {
        self.schedule.due
    }

    /// Reads pending events, and repairs the link if that is due. `link` returns the wanted state, and is called only
    /// if needed.
    ///
    /// # Errors
    /// Returns an error if the device no longer exists.
    pub(crate) fn attend(
        &mut self,
        now: Instant,
        link: impl FnOnce() -> Option<OverlayLink>,
    ) -> Result<(), DeviceGone> {
        let Some(events) = &self.events else { return Ok(()) };
        let mut news = Vec::new();
        if let Err(error) = events.read(|event| news.push(event)) {
            tracing::error!(device = self.device, error = errno::text(&error), "The tun device is no longer watched");
            self.events = None;
            return Ok(());
        }
        let is_due = self.schedule.due.is_some_and(|due| now >= due);
        if news.is_empty() && !is_due {
            return Ok(());
        }
        let Some(link) = link() else { return Ok(()) };
        for event in news {
            if event.news == News::LinkGone(self.index) {
                return Err(DeviceGone);
            }
            if self.concerns(event.news, &link) {
                self.schedule.noticed(now);
                self.port = if event.port == 0 { self.port } else { event.port };
            }
        }
        if self.schedule.due.is_some_and(|due| now >= due) { self.repair(now, &link) } else { Ok(()) }
    }

    fn concerns(&mut self, news: News, link: &OverlayLink) -> bool {
        let is_wanted = |network| link.routes.iter().any(|route| route.network.trunc() == network);
        match news {
            News::Link(index) | News::AddressGone(index) => index == self.index,
            News::LinkGone(_) => self.has_rival,
            News::RouteGone(network, _) => is_wanted(network),
            News::RouteReplaced(network, device) if device != self.index && is_wanted(network) => {
                self.has_rival = true;
                let other = interface_name(device);
                if log::admits(Level::WARN, LED_ELSEWHERE, &other) {
                    tracing::warn!(device = self.device, route = %network, interface = other, "{LED_ELSEWHERE}");
                }
                false
            }
            News::RouteReplaced(..) => false,
            News::Lost => true,
        }
    }

    fn repair(&mut self, now: Instant, link: &OverlayLink) -> Result<(), DeviceGone> {
        let found = match link.restore_here(self.index) {
            Ok(Some(found)) => found,
            Ok(None) => return Err(DeviceGone),
            Err(error) => {
                tracing::error!(device = self.device, error = errno::text(&error), "The tun device cannot be checked");
                Vec::new()
            }
        };
        let restored: Vec<_> = found.iter().filter(|(_, outcome)| outcome.is_ok()).map(|(loss, _)| *loss).collect();
        self.schedule.done(now, !restored.is_empty());
        for (loss, error) in found.iter().filter_map(|(loss, outcome)| Some((loss, outcome.as_ref().err()?))) {
            if log::admits(Level::ERROR, NOT_REPAIRED, &self.device) {
                let error = errno::text(error);
                tracing::error!(device = self.device, lost = what(loss), error, "{NOT_REPAIRED}");
            }
        }
        self.report(&restored);
        self.port = 0;
        Ok(())
    }

    /// Logs one line for everything that was lost at once.
    fn report(&self, restored: &[Loss]) {
        if restored.is_empty() {
            return;
        }
        restored.iter().for_each(|loss| self.repairs.count(kind(loss)));
        if log::admits(Level::WARN, REPAIRED, &self.device) {
            let lost = log::structured(restored.iter().take(MAX_NAMED).map(what).collect());
            let more = restored.len().checked_sub(MAX_NAMED).filter(|more| *more > 0);
            let (times, by, hint) =
                (self.repairs.total(), rivals::process(self.port), rivals::manager(&self.device, self.index));
            tracing::warn!(device = self.device, ?lost, more, times, by, hint, "{REPAIRED}");
        }
    }
}

/// The name of this loss in metrics.
fn kind(loss: &Loss) -> &'static str {
    match loss {
        Loss::State => "state",
        Loss::Mtu => "mtu",
        Loss::Address(_) => "address",
        Loss::Route(_) => "route",
    }
}

fn what(loss: &Loss) -> String {
    match loss {
        Loss::State => "up".to_owned(),
        Loss::Mtu => "mtu".to_owned(),
        Loss::Address(address) => format!("address {address}"),
        Loss::Route(network) => format!("route {network}"),
    }
}

fn interface_name(index: u32) -> String {
    let name = nix::net::if_::if_indextoname(index).ok();
    name.map_or_else(|| index.to_string(), |name| name.to_string_lossy().into_owned())
}

const REPAIRED: &str = "Somebody else changed the tun device; what it lost is put back";
const NOT_REPAIRED: &str = "Somebody else changed the tun device, and what it lost cannot be put back";
const LED_ELSEWHERE: &str = "Somebody else led a route of the overlay to another interface; it is left alone";
const MAX_NAMED: usize = 8;

/// Backoff for repairs: soon after the first event, then at growing intervals while the losses recur.
#[derive(Debug)]
struct Schedule {
    due: Option<Instant>,
    /// Delay between one repair and the next.
    wait: Duration,
    /// When something was last repaired; `None` if that is long ago.
    repaired: Option<Instant>,
}

impl Default for Schedule {
    fn default() -> Self {
        Self { due: None, wait: SETTLE, repaired: None }
    }
}

impl Schedule {
    fn noticed(&mut self, now: Instant) {
        if self.repaired.is_none_or(|repaired| now >= repaired + CALM) {
            (self.wait, self.repaired) = (SETTLE, None);
        }
        let next = self.repaired.map_or(now, |repaired| repaired + self.wait);
        self.due.get_or_insert_with(|| next.max(now + SETTLE));
    }

    fn done(&mut self, now: Instant, repaired: bool) {
        self.due = None;
        if repaired {
            self.wait = (self.wait * 2).min(MAX_WAIT);
            self.repaired = Some(now);
        }
    }
}

// Waits for related events: a program that removes an address usually removes routes as well.
const SETTLE: Duration = Duration::from_millis(20);
// A program that keeps removing things is misconfigured, which a person has to fix.
const MAX_WAIT: Duration = Duration::from_secs(30);
const CALM: Duration = Duration::from_secs(120);

#[cfg(test)]
mod tests {
    use super::*;
    use nebula_linux::clock::now;

    #[test]
    fn the_first_repairs_come_soon_and_a_fight_slows_down() {
        let mut at = now();
        let mut schedule = Schedule::default();
        let mut waits = Vec::new();
        // Each repair is undone at once.
        for _ in 0..16 {
            schedule.noticed(at);
            schedule.noticed(at + Duration::from_millis(1));
            let due = schedule.due.unwrap();
            waits.push(due - at);
            at = due;
            schedule.done(at, true);
        }
        assert_eq!(waits[..3], [20, 40, 80].map(Duration::from_millis));
        assert_eq!(waits[15], MAX_WAIT);
        schedule.noticed(at + CALM);
        assert_eq!(schedule.due, Some(at + CALM + SETTLE));
    }

    #[test]
    fn news_without_a_loss_do_not_slow_down() {
        let at = now();
        let mut schedule = Schedule::default();
        for _ in 0..16 {
            schedule.noticed(at);
            assert_eq!(schedule.due, Some(at + SETTLE));
            schedule.done(at, false);
            assert_eq!(schedule.due, None);
        }
    }
}
