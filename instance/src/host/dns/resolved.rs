//! Tells systemd-resolved of the host's resolver. What it is told belongs to the overlay device and ends with it, also after
//! `kill -9`.

use std::io;
use std::net::SocketAddr;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use crate::linux::clock;

/// What systemd-resolved is told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Registration {
    pub(super) device: String,
    pub(super) server: SocketAddr,
    /// Names in it go to the server; it also completes names of one label.
    pub(super) domain: String,
    /// Names in them go to the server, too.
    pub(super) zones: Vec<String>,
}

/// Why systemd-resolved was not told.
#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("resolvectl cannot be run: {0}")]
    NotRun(#[source] io::Error),
    #[error("resolvectl {command} failed: {said}")]
    Failed { command: &'static str, said: String },
    #[error("resolvectl {0} did not end within {t} s", t = TIMEOUT.as_secs())]
    Timeout(&'static str),
}

impl Registration {
    /// A failure is logged, with what to do instead.
    pub(super) fn register(&self) {
        let Self { device, server, domain, .. } = self;
        let zones = self.zones.iter().map(|zone| format!("~{zone}"));
        let domains = [device.clone(), domain.clone()].into_iter().chain(zones).collect::<Vec<_>>();
        let told = resolvectl("dns", &[device.clone(), server.to_string()])
            .and_then(|()| resolvectl("domain", &domains))
            // Other names keep their servers.
            .and_then(|()| resolvectl("default-route", &[device.clone(), "false".to_owned()]));
        match told {
            Ok(()) => tracing::info!(domain, device, "Told systemd-resolved of the overlay's names"),
            Err(error) => tracing::warn!(
                %error, domain,
                "Could not tell systemd-resolved of the overlay's names: forward the domain to {server} in this host's \
                 resolver, and set resolver.register to false"
            ),
        }
    }

    /// For a resolver that ends while the device stays.
    pub(super) fn revert(&self) {
        if let Err(error) = resolvectl("revert", std::slice::from_ref(&self.device)) {
            tracing::debug!(%error, "Could not take the overlay's names from systemd-resolved");
        }
    }
}

fn resolvectl(command: &'static str, arguments: &[String]) -> Result<(), Error> {
    let mut child = Command::new("resolvectl")
        .arg(command)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        // A few lines at most, which the pipe holds.
        .stderr(Stdio::piped())
        .spawn()
        .map_err(Error::NotRun)?;
    let until = clock::now() + TIMEOUT;
    while child.try_wait().map_err(Error::NotRun)?.is_none() {
        if clock::now() >= until {
            let _ = child.kill();
            let _ = child.wait();
            return Err(Error::Timeout(command));
        }
        thread::sleep(POLL);
    }
    let output = child.wait_with_output().map_err(Error::NotRun)?;
    let said = || String::from_utf8_lossy(&output.stderr).trim().to_owned();
    if output.status.success() { Ok(()) } else { Err(Error::Failed { command, said: said() }) }
}

const TIMEOUT: Duration = Duration::from_secs(5);
const POLL: Duration = Duration::from_millis(10);
