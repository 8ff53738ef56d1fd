//! Settings of a lighthouse and of its clients.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use super::{CalculatedRemotes, LocalAllowList, RemoteAllowList};

/// Rendezvous settings.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Lighthouse {
    /// This node answers the queries of others.
    pub am_lighthouse: bool,
    /// Overlay addresses of the lighthouses; each needs an entry in [`static_hosts`](crate::Config::static_hosts).
    pub hosts: Vec<IpAddr>,
    /// Time between updates to the lighthouses; `None`: updates are sent only on events.
    pub interval: Option<Duration>,
    /// Extra endpoints to advertise; port 0 means [`listen_port`](crate::Config::listen_port).
    pub advertise: Vec<SocketAddr>,
    /// Endpoints to guess for peers that have no entry in [`static_hosts`](crate::Config::static_hosts).
    pub calculated_remotes: CalculatedRemotes,
    /// Underlay addresses at which peers may be.
    pub remote_allow: RemoteAllowList,
    /// Addresses of this host that may be advertised.
    pub local_allow: LocalAllowList,
}

impl Default for Lighthouse {
    fn default() -> Self {
        Self {
            am_lighthouse: false,
            hosts: Vec::new(),
            interval: Some(Duration::from_secs(10)),
            advertise: Vec::new(),
            calculated_remotes: CalculatedRemotes::default(),
            remote_allow: RemoteAllowList::default(),
            local_allow: LocalAllowList::default(),
        }
    }
}
