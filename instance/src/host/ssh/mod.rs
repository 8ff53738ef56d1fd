//! Go Nebula's debug console over SSH (feature `ssh`): the same commands, answered by the service behind the control
//! socket.
//!
//! A user logs in with a key from the configuration, or with a certificate of a CA named there; there are no passwords,
//! no forwarding and no file transfers. One thread serves all sessions; without `sshd.enabled` there is none.

mod access;
mod answers;
mod commands;
mod server;
mod session;
mod terminal;
mod words;

use std::io;
use std::sync::{Arc, Weak};
use std::thread::Builder;
use std::time::Instant;

use nebula_config::Sshd;
use nebula_linux::clock;
use tokio::sync::oneshot;

use crate::host::control::ControlService;
use crate::host::listener_slot::{ListenerSlot, Missing};

/// The console as configured. Dropping it ends all sessions.
#[derive(Debug)]
pub(crate) struct Console {
    service: Weak<ControlService>,
    current: Option<Sshd>,
    slot: ListenerSlot<Running>,
}

/// Dropping it ends the thread.
#[derive(Debug)]
struct Running {
    _stop: oneshot::Sender<()>,
}

impl Console {
    /// Creates a console that is off.
    pub(crate) fn new(service: &Arc<ControlService>) -> Self {
        let slot = ListenerSlot::new("Failed to run the SSH server");
        Self { service: Arc::downgrade(service), current: None, slot }
    }

    /// Applies a configuration. If it changed, all sessions end: their users may no longer be allowed.
    pub(crate) fn configure(&mut self, sshd: Option<&Sshd>) {
        if self.current.as_ref() == sshd && self.slot.missing().is_none() {
            return;
        }
        if self.current.as_ref() != sshd {
            sshd.iter().for_each(|sshd| report_users(sshd));
        }
        self.current = sshd.cloned();
        self.open();
    }

    /// Why it does not listen, if it should.
    pub(crate) fn missing(&self) -> Option<&Missing> {
        self.slot.missing()
    }

    /// Tries again to listen if that is due at `now`.
    pub(crate) fn retry(&mut self, now: Instant) {
        if self.slot.is_due(now) {
            self.open();
        }
    }

    fn open(&mut self) {
        let (service, has_predecessor) = (Weak::clone(&self.service), self.slot.running().is_some());
        let start = self.current.clone().map(|sshd| move || Running::start(sshd, service, has_predecessor));
        self.slot.open(clock::now(), start);
    }
}

impl Running {
    fn start(sshd: Sshd, service: Weak<ControlService>, has_predecessor: bool) -> io::Result<Self> {
        let place = |error: io::Error| io::Error::new(error.kind(), format!("listen tcp {}: {error}", sshd.listen));
        let listener = server::bind(&sshd.listen, has_predecessor).map_err(place)?;
        let (stop, stopped) = oneshot::channel();
        let body = move || server::serve(listener, sshd, service, stopped);
        Builder::new().name("sshd".to_owned()).spawn(body).map(|_| Self { _stop: stop })
    }
}

fn report_users(sshd: &Sshd) {
    for (user, key) in &sshd.users {
        let fingerprint = key.fingerprint(russh::keys::HashAlg::Sha256);
        tracing::info!(sshUser = user, sshKey = %fingerprint, "Authorized ssh key");
    }
    for key in &sshd.authorities {
        tracing::info!(sshKey = %key.fingerprint(russh::keys::HashAlg::Sha256), "Trusted CA key");
    }
    if sshd.users.is_empty() {
        tracing::info!("no ssh users to authorize");
    }
}
