//! Which peer an overlay address is reached through: own networks first, subnet routes after them.

use std::net::IpAddr;

use ipnet::IpNet;

/// Own networks. Subnet routes (gateways by longest prefix and weight) belong here too, behind [`Routes::peer`].
#[derive(Debug)]
pub(super) struct Routes {
    /// Own addresses with the prefix of their networks; one or two of them.
    networks: Vec<IpNet>,
}

impl Routes {
    pub(super) fn new(networks: &[IpNet]) -> Self {
        Self { networks: networks.to_vec() }
    }
    /// The peer to send a packet for `destination` to.
    pub(super) fn peer(&self, destination: IpAddr) -> Option<IpAddr> {
        self.is_overlay(destination).then_some(destination)
    }
    /// Whether an address lies inside the own overlay networks.
    pub(super) fn is_overlay(&self, address: IpAddr) -> bool {
        self.networks.iter().any(|network| network.contains(&address))
    }
    /// Whether an address is an own overlay address.
    pub(super) fn is_own(&self, address: IpAddr) -> bool {
        self.networks.iter().any(|network| network.addr() == address)
    }
    /// Whether an address is the IPv4 broadcast address of an own network.
    pub(super) fn is_broadcast(&self, address: IpAddr) -> bool {
        address.is_ipv4() && self.networks.iter().any(|network| network.broadcast() == address)
    }
}
