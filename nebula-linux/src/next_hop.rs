//! The next hops of a route, as rtnetlink(7) tells them.

use std::net::IpAddr;

use nebula_cni_contract::netlink;
use nix::libc;

/// One next hop of a route.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct NextHop {
    pub gateway: Option<IpAddr>,
    /// Interface index of the device.
    pub device: u32,
    /// Beyond that of the others, which have 0 then.
    pub weight: u32,
}

impl NextHop {
    /// All next hops of a route with these attributes.
    pub fn of_route(attributes: &[u8]) -> Vec<Self> {
        let mut single = Self::default();
        let mut several = Vec::new();
        for (kind, value) in netlink::attributes(attributes) {
            match kind {
                libc::RTA_MULTIPATH => several = next_hops(value),
                _ => single.note(kind, value),
            }
        }
        if several.is_empty() { vec![single] } else { several }
    }

    fn note(&mut self, kind: u16, value: &[u8]) {
        match kind {
            libc::RTA_GATEWAY => self.gateway = netlink::address(value),
            // A gateway of the other address family; the value starts with the family (two bytes).
            libc::RTA_VIA => self.gateway = value.get(2..).and_then(netlink::address),
            libc::RTA_OIF => self.device = value.try_into().map_or(0, u32::from_ne_bytes),
            _ => {}
        }
    }
}

/// Parses struct rtnexthop: length, flags, weight minus one, interface index; attributes follow.
fn next_hops(mut value: &[u8]) -> Vec<NextHop> {
    let mut hops = Vec::new();
    while let Some(&[a, b, _, weight, c, d, e, f]) = value.first_chunk::<RTNEXTHOP>() {
        let len = usize::from(u16::from_ne_bytes([a, b]));
        let Some(attributes) = value.get(RTNEXTHOP..len) else { break };
        let mut hop = NextHop { gateway: None, device: u32::from_ne_bytes([c, d, e, f]), weight: weight.into() };
        netlink::attributes(attributes).for_each(|(kind, value)| hop.note(kind, value));
        hops.push(hop);
        value = value.get(len.next_multiple_of(4)..).unwrap_or_default();
    }
    hops
}

const RTNEXTHOP: usize = 8;
