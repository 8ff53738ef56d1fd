//! Go Nebula's debug console over SSH: the same commands, answered by a running node and its [`Daemon`].
//!
//! A user logs in with a key from the configuration, or with a certificate of a CA named there. There are no
//! passwords, no forwarding and no file transfers. One thread serves all sessions; without `sshd.enabled` there is
//! none.

mod access;
mod answers;
mod commands;
mod server;
mod session;
mod terminal;
mod words;

use std::io;
use std::net::IpAddr;
use std::sync::Weak;
use std::thread::Builder;

use ipnet::IpNet;
use nebula_cert::Certificate;
use nebula_config::{LogLevel, Sshd};
use nebula_core::io::Handle;
use tokio::sync::oneshot;

/// The program around the node, as the console asks it.
pub trait Daemon: Send + Sync {
    /// The running node.
    fn handle(&self) -> &Handle;

    /// Name of the device.
    fn device(&self) -> &str;

    /// This node's networks in the overlay.
    fn networks(&self) -> Vec<IpNet>;

    /// The certificate with which this node begins handshakes.
    fn certificate(&self) -> Option<Certificate>;

    /// Closes the tunnel to a peer, and says so to the peer unless `quietly`. Returns whether there was one.
    fn close(&self, peer: IpAddr, quietly: bool) -> bool;

    /// Changes the log level, if one is given.
    ///
    /// # Errors
    /// Returns why it is not changed.
    fn set_log_level(&self, level: Option<LogLevel>) -> Result<(), String>;

    /// Reads the configuration again.
    ///
    /// # Errors
    /// Returns why nothing was changed.
    fn reload(&self) -> Result<(), String>;
}

/// A console that listens. Dropping it ends all sessions.
#[derive(Debug)]
pub struct Running {
    _stop: oneshot::Sender<()>,
}

impl Running {
    /// Listens, on a thread of its own. With a predecessor, whose address this one may have, waits for that to close.
    ///
    /// # Errors
    /// Returns the system's error.
    pub fn start(sshd: Sshd, daemon: Weak<dyn Daemon>, has_predecessor: bool) -> io::Result<Self> {
        let place = |error: io::Error| io::Error::new(error.kind(), format!("listen tcp {}: {error}", sshd.listen));
        let listener = server::bind(&sshd.listen, has_predecessor).map_err(place)?;
        let (stop, stopped) = oneshot::channel();
        let body = move || server::serve(listener, sshd, daemon, stopped);
        Builder::new().name("sshd".to_owned()).spawn(body).map(|_| Self { _stop: stop })
    }
}

/// Logs who may log in.
pub fn report_users(sshd: &Sshd) {
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
