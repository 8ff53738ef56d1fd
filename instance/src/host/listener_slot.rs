//! A listener that the configuration asks for: it runs, or is tried again until it does. Its address may come late at
//! boot, and another program may give its port back.

use std::io;
use std::time::{Duration, Instant};

/// One listener and what became of it.
#[derive(Debug)]
pub(crate) struct ListenerSlot<T> {
    /// What the log says when it cannot be opened.
    message: &'static str,
    running: Option<T>,
    missing: Option<Missing>,
}

/// Why a listener does not run.
#[derive(Debug, Clone)]
pub(crate) struct Missing {
    pub(crate) error: String,
    pub(crate) since: Instant,
    tries: u32,
    /// When to try again.
    pub(crate) next: Instant,
}

impl<T> ListenerSlot<T> {
    /// Nothing is asked for yet.
    pub(crate) fn new(message: &'static str) -> Self {
        Self { message, running: None, missing: None }
    }

    /// Replaces what runs by what `start` opens, `None` for nothing. The one before is stopped first: both may use the
    /// same address. A failure is logged once, and stops nothing else.
    pub(crate) fn open(&mut self, now: Instant, start: Option<impl FnOnce() -> io::Result<T>>) {
        self.running = None;
        let before = self.missing.take();
        match start.map(|start| start()) {
            None => {}
            Some(Ok(running)) => {
                self.running = Some(running);
                if let Some(Missing { tries, .. }) = before {
                    tracing::info!(tries, "A listener that could not be opened is open");
                }
            }
            Some(Err(error)) => {
                self.missing = Some(match before {
                    None => {
                        tracing::error!(%error, "{}", self.message);
                        Missing { error: error.to_string(), since: now, tries: 1, next: now + FIRST_WAIT }
                    }
                    Some(Missing { since, tries, .. }) => {
                        tracing::debug!(%error, tries, "{}", self.message);
                        let wait = FIRST_WAIT.saturating_mul(1 << tries.min(6)).min(LONGEST_WAIT);
                        Missing { error: error.to_string(), since, tries: tries + 1, next: now + wait }
                    }
                });
            }
        }
    }

    /// What runs.
    pub(crate) fn running(&self) -> Option<&T> {
        self.running.as_ref()
    }

    /// Why nothing runs, if something should.
    pub(crate) fn missing(&self) -> Option<&Missing> {
        self.missing.as_ref()
    }

    /// When to try again.
    pub(crate) fn due(&self) -> Option<Instant> {
        self.missing.as_ref().map(|missing| missing.next)
    }

    /// Whether to try again.
    pub(crate) fn is_due(&self, now: Instant) -> bool {
        self.due().is_some_and(|due| now >= due)
    }
}

const FIRST_WAIT: Duration = Duration::from_secs(1);
const LONGEST_WAIT: Duration = Duration::from_secs(30);

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;
    use nebula_linux::clock;

    fn listen(address: std::net::SocketAddr) -> Option<impl FnOnce() -> io::Result<TcpListener>> {
        Some(move || TcpListener::bind(address))
    }

    #[test]
    fn a_port_that_another_program_gives_back_is_taken_then() {
        let other = TcpListener::bind("127.0.0.1:0").unwrap();
        let (address, start) = (other.local_addr().unwrap(), clock::now());
        let mut slot = ListenerSlot::new("Failed");
        let (mut now, mut waits) = (start, Vec::new());
        for _ in 0..8 {
            slot.open(now, listen(address));
            assert!(slot.running().is_none() && !slot.is_due(now));
            waits.push((slot.due().unwrap() - now).as_secs());
            now = slot.due().unwrap();
            assert!(slot.is_due(now));
        }
        assert_eq!(waits, [1, 2, 4, 8, 16, 30, 30, 30]);
        assert_eq!(slot.missing().unwrap().since, start);
        drop(other);
        slot.open(now, listen(address));
        assert!(slot.running().is_some() && slot.missing().is_none() && slot.due().is_none());
        // Its own address is free for its successor.
        slot.open(now, listen(address));
        assert!(slot.running().is_some());
        slot.open(now, None::<fn() -> io::Result<TcpListener>>);
        assert!(slot.running().is_none() && slot.due().is_none(), "nothing is asked for any more");
    }
}
