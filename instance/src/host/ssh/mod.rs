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

use std::sync::{Arc, Weak};
use std::thread::Builder;

use tokio::sync::oneshot;

use crate::config::Sshd;
use crate::host::control::ControlService;

/// The console as configured. Dropping it ends all sessions.
#[derive(Debug)]
pub(crate) struct Console {
    service: Weak<ControlService>,
    current: Option<Sshd>,
    running: Option<Running>,
}

/// Dropping it ends the thread.
#[derive(Debug)]
struct Running {
    _stop: oneshot::Sender<()>,
}

impl Console {
    /// Creates a console that is off.
    pub(crate) fn new(service: &Arc<ControlService>) -> Self {
        Self { service: Arc::downgrade(service), current: None, running: None }
    }

    /// Applies a configuration. If it changed, all sessions end: their users may no longer be allowed.
    pub(crate) fn configure(&mut self, sshd: Option<&Sshd>) {
        if self.current.as_ref() == sshd {
            return;
        }
        self.current = sshd.cloned();
        self.running = None;
        let Some(sshd) = sshd.cloned() else { return };
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
        let (stop, stopped) = oneshot::channel();
        let service = Weak::clone(&self.service);
        let body = move || server::serve(sshd, service, stopped);
        match Builder::new().name("sshd".to_owned()).spawn(body) {
            Ok(_) => self.running = Some(Running { _stop: stop }),
            Err(error) => tracing::warn!(%error, "Failed to run the SSH server"),
        }
    }
}
