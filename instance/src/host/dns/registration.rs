//! Tells the resolver that the host's programs use which names go to the daemon: systemd-resolved, or else openresolv.
//!
//! The daemon registers only with a resolver that can choose a server by domain. The C library cannot: it asks each
//! server in `/etc/resolv.conf` for every name. A daemon listed there would have to answer all queries, and the host
//! would lose all names when it stops. On such a host the daemon logs a line, and `nebula ctl doctor` reports a
//! finding.

use std::net::SocketAddr;
use std::sync::{Mutex, PoisonError};

use super::openresolv::{self, Entry};
use super::{command, resolved};

/// What the daemon registers with a resolver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Registration {
    pub(super) device: String,
    pub(super) server: SocketAddr,
    /// Names in it go to the server; it also completes names of one label.
    pub(super) domain: String,
    /// Names in these go to the server, too. Registered with systemd-resolved only.
    pub(super) zones: Vec<String>,
}

/// A registration, and which resolver has it.
#[derive(Debug)]
pub(crate) struct Registered {
    registration: Registration,
    told: Mutex<Option<Result<Told, Refused>>>,
}

#[derive(Debug)]
enum Told {
    Resolved,
    Openresolv(Entry),
}

/// Why none was told.
#[derive(Debug, thiserror::Error)]
#[error("{resolved}; {openresolv}")]
struct Refused {
    resolved: command::Error,
    openresolv: openresolv::Error,
}

impl Registered {
    /// [`Self::register`] tells a resolver.
    pub(super) fn new(registration: Registration) -> Self {
        Self { registration, told: Mutex::default() }
    }

    /// A failure is logged, with what to do instead.
    pub(super) fn register(&self) {
        let registration = &self.registration;
        let Registration { device, server, domain, .. } = registration;
        let told = resolved::register(registration).map(|()| Told::Resolved).or_else(|resolved| {
            let entry = Entry::add(registration).map(Told::Openresolv);
            entry.map_err(|openresolv| Refused { resolved, openresolv })
        });
        match &told {
            Ok(told) => tracing::info!(domain, device, "Told {} of the overlay's names", told.name()),
            Err(error) => tracing::warn!(
                %error, domain,
                "This host has no resolver that can be told of the overlay's names: forward the domain to {server} in a local \
                 one such as dnsmasq, and set resolver.register to false"
            ),
        }
        *self.told.lock().unwrap_or_else(PoisonError::into_inner) = Some(told);
    }

    /// For a resolver that ends while the device stays.
    pub(super) fn revert(&self) {
        match self.told.lock().unwrap_or_else(PoisonError::into_inner).take() {
            // Also after a failure: the first command may have succeeded.
            Some(Ok(Told::Resolved) | Err(_)) => {
                if let Err(error) = resolved::revert(&self.registration.device) {
                    tracing::debug!(%error, "Could not take the overlay's names from systemd-resolved");
                }
            }
            Some(Ok(Told::Openresolv(entry))) => entry.remove(),
            None => {}
        }
    }

    pub(crate) fn registration(&self) -> &Registration {
        &self.registration
    }

    /// The resolver that was told, or why none was; `None` while it is being told.
    pub(crate) fn told(&self) -> Option<Result<&'static str, String>> {
        let told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        told.as_ref().map(|told| told.as_ref().map(Told::name).map_err(ToString::to_string))
    }
}

impl Registration {
    pub(crate) fn domain(&self) -> &str {
        &self.domain
    }

    pub(crate) fn server(&self) -> SocketAddr {
        self.server
    }
}

impl Told {
    fn name(&self) -> &'static str {
        match self {
            Self::Resolved => "systemd-resolved",
            Self::Openresolv(_) => "openresolv",
        }
    }
}
