//! Description of a host to simulate: certificate, place on the underlay, configuration.

use std::net::SocketAddr;
use std::time::Duration;

use ipnet::IpNet;
use nebula_cert::{UnixTime, Version};

use super::{HostId, NatId, START, authority};
use crate::Config;

/// A host to be added to a [`SimNet`](super::SimNet). The n-th host is 10.42.0.n/16 in the overlay and
/// 198.51.100.n:4242 on the underlay unless set otherwise, and its firewall lets everything through.
pub struct HostSpec {
    pub(super) name: String,
    pub(super) versions: Vec<Version>,
    pub(super) networks: Option<Vec<IpNet>>,
    pub(super) unsafe_networks: Vec<IpNet>,
    pub(super) groups: Vec<String>,
    pub(super) underlay: Option<SocketAddr>,
    pub(super) also_at: Vec<SocketAddr>,
    pub(super) nat: Option<NatId>,
    pub(super) is_old_go: bool,
    pub(super) not_after: UnixTime,
    pub(super) knows: Vec<HostId>,
    pub(super) lighthouses: Vec<HostId>,
    pub(super) configure: Box<dyn FnOnce(&mut Config)>,
}

impl HostSpec {
    /// A host with a version 2 certificate.
    #[must_use]
    pub fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            versions: vec![Version::V2],
            networks: None,
            unsafe_networks: Vec::new(),
            groups: Vec::new(),
            underlay: None,
            also_at: Vec::new(),
            nat: None,
            is_old_go: false,
            not_after: authority::NOT_AFTER,
            knows: Vec::new(),
            lighthouses: Vec::new(),
            configure: Box::new(|_| {}),
        }
    }

    /// Makes it answer test requests as Go Nebula before 1.11 does, which garbles short bodies and panics at longer
    /// ones.
    #[must_use]
    pub fn old_go(mut self) -> Self {
        self.is_old_go = true;
        self
    }

    /// Gives it certificates of these versions.
    #[must_use]
    pub fn versions(mut self, versions: &[Version]) -> Self {
        self.versions = versions.to_vec();
        self
    }

    /// Sets the overlay addresses.
    #[must_use]
    pub fn networks(mut self, networks: &[&str]) -> Self {
        self.networks = Some(networks.iter().map(|text| text.parse().expect("a network")).collect());
        self
    }

    /// Sets the networks behind the host in its certificate.
    #[must_use]
    pub fn unsafe_networks(mut self, networks: &[&str]) -> Self {
        self.unsafe_networks = networks.iter().map(|text| text.parse().expect("a network")).collect();
        self
    }

    /// Sets the groups in the certificate.
    #[must_use]
    pub fn groups(mut self, groups: &[&str]) -> Self {
        self.groups = groups.iter().map(|&group| group.to_owned()).collect();
        self
    }

    /// Sets the address of the UDP socket.
    #[must_use]
    pub fn underlay(mut self, underlay: &str) -> Self {
        self.underlay = Some(underlay.parse().expect("an endpoint"));
        self
    }

    /// Gives its socket more addresses. A datagram leaves from the one in the /24 or /64 of its destination, and from
    /// the first if there is none.
    #[must_use]
    pub fn also_at(mut self, underlay: &[&str]) -> Self {
        self.also_at = underlay.iter().map(|text| text.parse().expect("an endpoint")).collect();
        self
    }

    /// Puts it behind a NAT, with a private underlay address.
    #[must_use]
    pub fn behind(mut self, nat: NatId) -> Self {
        self.nat = Some(nat);
        self
    }

    /// Makes the certificate expire this long after the start of the simulation.
    #[must_use]
    pub fn expires_after(mut self, life: Duration) -> Self {
        self.not_after = START + UnixTime::try_from(life.as_secs()).unwrap_or(UnixTime::MAX - START);
        self
    }

    /// Adds the endpoint of `host` to its configuration.
    #[must_use]
    pub fn knows(mut self, host: HostId) -> Self {
        self.knows.push(host);
        self
    }

    /// Makes it use `host` as a lighthouse.
    #[must_use]
    pub fn lighthouse(mut self, host: HostId) -> Self {
        self.lighthouses.push(host);
        self.knows(host)
    }

    /// Makes it a lighthouse.
    #[must_use]
    pub fn am_lighthouse(self) -> Self {
        self.config(|config| config.lighthouse.am_lighthouse = true)
    }

    /// Changes anything else in its configuration.
    #[must_use]
    pub fn config(mut self, change: impl FnOnce(&mut Config) + 'static) -> Self {
        let before = std::mem::replace(&mut self.configure, Box::new(|_| {}));
        self.configure = Box::new(|config| {
            before(config);
            change(config);
        });
        self
    }
}
