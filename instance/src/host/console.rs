//! The debug console over SSH (feature `ssh`), as the configuration asks for it, answered by the service behind the
//! control socket.

use std::net::IpAddr;
use std::sync::{Arc, Weak};
use std::time::Instant;

use ipnet::IpNet;
use nebula_cert::{Certificate, Version};
use nebula_config::{LogLevel, Sshd};
use nebula_core::io::Handle;
use nebula_linux::clock;
use nebula_ssh_console::{Daemon, Running, report_users};

use crate::host::control::{ControlService, Request};
use crate::host::listener_slot::{ListenerSlot, Missing};

/// The console as configured. Dropping it ends all sessions.
#[derive(Debug)]
pub(crate) struct Console {
    daemon: Weak<dyn Daemon>,
    current: Option<Sshd>,
    slot: ListenerSlot<Running>,
}

impl Console {
    /// Creates a console that is off.
    pub(crate) fn new(service: &Arc<ControlService>) -> Self {
        let slot = ListenerSlot::new("Failed to run the SSH server");
        let daemon: Weak<ControlService> = Arc::downgrade(service);
        Self { daemon, current: None, slot }
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
        let (daemon, has_predecessor) = (Weak::clone(&self.daemon), self.slot.running().is_some());
        let start = self.current.clone().map(|sshd| move || Running::start(sshd, daemon, has_predecessor));
        self.slot.open(clock::now(), start);
    }
}

impl Daemon for ControlService {
    fn handle(&self) -> &Handle {
        &self.handle
    }

    fn device(&self) -> &str {
        &self.facts.device
    }

    fn networks(&self) -> Vec<IpNet> {
        let reloader = self.reloader();
        reloader.settings().pki.as_ref().map(|pki| pki.identity.networks().to_vec()).unwrap_or_default()
    }

    fn certificate(&self) -> Option<Certificate> {
        let reloader = self.reloader();
        let settings = reloader.settings();
        let identity = &settings.pki.as_ref()?.identity;
        let wanted = settings.initiating_version.unwrap_or(Version::V1);
        Some(identity.certificate(wanted).unwrap_or_else(|| identity.primary()).clone())
    }

    fn close(&self, peer: IpAddr, quietly: bool) -> bool {
        self.answer(Request::Close { peer: peer.to_string(), quietly }).is_ok()
    }

    fn set_log_level(&self, level: Option<LogLevel>) -> Result<(), String> {
        self.answer(Request::LogLevel(level)).map(drop).map_err(|refusal| refusal.to_string())
    }

    fn reload(&self) -> Result<(), String> {
        self.answer(Request::Reload).map(drop).map_err(|refusal| refusal.to_string())
    }
}
