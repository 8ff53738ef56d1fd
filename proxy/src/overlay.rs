//! The way into the overlay, and nowhere else.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, PoisonError, RwLock};

use ipnet::IpNet;
use nebula_config::log;
use nebula_net::{Net, TcpStream};
use tracing::Level;

use crate::target::{Host, Target};

/// The node, and the networks that belong to the overlay.
#[derive(Debug, Clone)]
pub(crate) struct Overlay {
    pub(crate) net: Net,
    networks: Arc<RwLock<Vec<IpNet>>>,
}

/// Why a target cannot be reached.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Unreached {
    /// Not in a network of the certificate, and not in `tun.unsafe_routes`.
    #[error("{0} is not in the overlay")]
    Outside(IpAddr),
    #[error("no peer with a tunnel and no lighthouse knows the name {0}")]
    UnknownName(String),
    #[error("{0}")]
    Failed(#[from] io::Error),
}

impl Overlay {
    pub(crate) fn new(net: Net, networks: Vec<IpNet>) -> Self {
        Self { net, networks: Arc::new(RwLock::new(networks)) }
    }

    pub(crate) fn set_networks(&self, networks: Vec<IpNet>) {
        *self.networks.write().unwrap_or_else(PoisonError::into_inner) = networks;
    }

    /// The address of a target, which is in the overlay.
    pub(crate) async fn resolve(&self, target: &Target) -> Result<SocketAddr, Unreached> {
        let address = match &target.host {
            Host::Address(address) => *address,
            Host::Name(name) => self.net.look_up(name).await.map_err(|error| match error.kind() {
                io::ErrorKind::NotFound => Unreached::UnknownName(name.clone()),
                _ => error.into(),
            })?,
        };
        // Also for names: a lighthouse does not decide where this host connects to.
        if self.contains(address) {
            Ok(SocketAddr::new(address, target.port))
        } else {
            Err(Unreached::Outside(address))
        }
    }

    pub(crate) async fn connect(&self, target: &Target) -> Result<TcpStream, Unreached> {
        let address = self.resolve(target).await?;
        let peer = self.net.dial_address(address).await?;
        // Until it is complete.
        peer.set_reset_on_drop(true);
        Ok(peer)
    }

    fn contains(&self, address: IpAddr) -> bool {
        self.networks.read().unwrap_or_else(PoisonError::into_inner).iter().any(|network| network.contains(&address))
    }
}

/// Logs that a target cannot be reached; one outside of the overlay as a warning, with what to do.
pub(crate) fn log_unreached(way: &str, client: SocketAddr, target: &dyn std::fmt::Display, error: &Unreached) {
    const OUTSIDE: &str = "Refused an address that is not in the overlay: this is no proxy to the Internet; networks behind a node \
                           belong into tun.unsafe_routes";
    const FAILED: &str = "Cannot connect to a target";
    let source = client.ip().to_string();
    if matches!(error, Unreached::Outside(_)) {
        if log::admits(Level::WARN, OUTSIDE, &source) {
            tracing::warn!(by = way, %client, %target, "{OUTSIDE}");
        }
    } else if log::admits(Level::INFO, FAILED, &source) {
        tracing::info!(by = way, %client, %target, %error, "{FAILED}");
    }
}
