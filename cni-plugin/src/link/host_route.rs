//! The node's host route to a pod whose address in Kubernetes is its overlay address: it leads through the pod's
//! interface, so that the kubelet's probes reach the pod without a tunnel (rtnetlink).

use std::io;
use std::net::IpAddr;

use ipnet::IpNet;
use nebula_cni_contract::netlink::policy::{DeadEnd, Fate, LAST_METRIC};
use nebula_cni_contract::netlink::route::{ONLINK, header, route_to};
use nebula_cni_contract::netlink::{self, octets, push_attribute};
use nix::libc;
use serde::{Deserialize, Serialize};

/// A route to one address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostRoute {
    /// The pod's overlay address.
    pub destination: IpAddr,
    /// Next hop: the pod's primary address, or the gateway on the way there.
    pub next_hop: IpAddr,
    /// Index of the interface on the node.
    pub interface: u32,
}

/// The node's routes.
pub trait Routes {
    /// Returns a route to `destination` along the path that packets for `pod` take now.
    ///
    /// # Errors
    /// Returns an error if the pod is unreachable.
    fn like(&self, pod: IpAddr, destination: IpAddr) -> io::Result<HostRoute>;

    /// Adds the route, replacing any other to the same address.
    ///
    /// # Errors
    /// Returns the kernel's error.
    fn add(&self, route: &HostRoute) -> io::Result<()>;

    /// The route to `destination` that this plugin added, if there is one.
    fn ours_to(&self, destination: IpAddr) -> Option<HostRoute>;

    /// Removes the route; does nothing if it is gone already.
    ///
    /// # Errors
    /// Returns the kernel's error.
    fn remove(&self, route: &HostRoute) -> io::Result<()>;

    /// Whether packets to the destination take this route.
    fn is_used(&self, route: &HostRoute) -> bool;

    /// Refuses what the node would send to an overlay network in clear, where no better route leads there; does
    /// nothing if that is so already.
    ///
    /// # Errors
    /// Returns the kernel's error.
    fn refuse(&self, network: IpNet) -> io::Result<()>;

    /// Ends [`Routes::refuse`].
    ///
    /// # Errors
    /// Returns the kernel's error.
    fn end_refusal(&self, network: IpNet) -> io::Result<()>;
}

/// The kernel's routes, in the plugin's own network namespace.
#[derive(Debug)]
pub struct SystemRoutes;

impl Routes for SystemRoutes {
    fn like(&self, pod: IpAddr, destination: IpAddr) -> io::Result<HostRoute> {
        let found = route_to(pod, 0)?;
        Ok(HostRoute { destination, next_hop: found.gateway.unwrap_or(pod), interface: found.interface })
    }

    fn add(&self, route: &HostRoute) -> io::Result<()> {
        let flags = libc::NLM_F_CREATE | libc::NLM_F_REPLACE;
        netlink::ask_route(libc::RTM_NEWROUTE, flags, &body_of(route)).map(drop)
    }

    fn ours_to(&self, destination: IpAddr) -> Option<HostRoute> {
        let found = route_to(destination, libc::RTM_F_FIB_MATCH).ok().filter(|found| found.is_ours)?;
        Some(HostRoute { destination, next_hop: found.gateway?, interface: found.interface })
    }

    fn remove(&self, route: &HostRoute) -> io::Result<()> {
        match netlink::ask_route(libc::RTM_DELROUTE, 0, &body_of(route)) {
            // The route or its interface is gone already.
            Err(e) if [libc::ESRCH, libc::ENODEV].contains(&e.raw_os_error().unwrap_or_default()) => Ok(()),
            other => other.map(drop),
        }
    }

    fn is_used(&self, route: &HostRoute) -> bool {
        route_to(route.destination, 0)
            .is_ok_and(|found| (found.interface, found.gateway) == (route.interface, Some(route.next_hop)))
    }

    fn refuse(&self, network: IpNet) -> io::Result<()> {
        refusal(network).add()
    }

    fn end_refusal(&self, network: IpNet) -> io::Result<()> {
        refusal(network).remove()
    }
}

fn refusal(network: IpNet) -> DeadEnd {
    DeadEnd { network, table: libc::RT_TABLE_MAIN.into(), fate: Fate::Unreachable, metric: LAST_METRIC }
}

fn body_of(route: &HostRoute) -> Vec<u8> {
    let mut body = header(route.destination, ONLINK);
    push_attribute(&mut body, libc::RTA_DST, &octets(route.destination));
    push_attribute(&mut body, libc::RTA_GATEWAY, &octets(route.next_hop));
    push_attribute(&mut body, libc::RTA_OIF, &route.interface.to_ne_bytes());
    body
}

#[cfg(test)]
mod tests {
    use super::*;
    use nebula_cni_contract::netlink::route::read;

    #[test]
    fn a_route_is_encoded_as_the_kernel_reads_it() {
        let route = HostRoute {
            destination: "10.42.0.7".parse().unwrap(),
            next_hop: "10.4.0.7".parse().unwrap(),
            interface: 3,
        };
        let bytes = body_of(&route);
        assert_eq!(bytes.len(), 12 + 3 * 8);
        assert_eq!(&bytes[..12], &[2, 32, 0, 0, 254, 78, 0, 1, 4, 0, 0, 0]);
        assert_eq!(&bytes[12..20], &[8, 0, 1, 0, 10, 42, 0, 7]);
        assert_eq!(netlink::attribute(&bytes[12..], libc::RTA_GATEWAY), Some(&[10, 4, 0, 7][..]));
        let found = read(&bytes, route.destination).unwrap();
        assert_eq!((found.interface, found.gateway, found.is_ours), (3, Some(route.next_hop), true));
    }
}
