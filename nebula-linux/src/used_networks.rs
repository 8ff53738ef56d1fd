//! Which networks this machine uses already: its addresses, its routes and their gateways, its name servers.

use std::io;
use std::net::IpAddr;
use std::path::Path;

use ipnet::IpNet;
use nebula_cni_contract::netlink;
use nix::libc;

use crate::link_contents::{Address, IFADDRMSG};
use crate::next_hop::NextHop;
use crate::rtnetlink::RTMSG;

/// A network in use, and by what.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Used {
    /// The network; a single address has the full length.
    pub network: IpNet,
    /// What it is, for the user.
    pub what: String,
}

/// Everything in use in the network namespace of the calling thread, except for what belongs to the tun device `own`.
/// Default routes count by their gateways only.
///
/// # Errors
/// Returns an error if the kernel does not tell.
pub fn used_networks(own: &str) -> io::Result<Vec<Used>> {
    // Another device of that name is none that a former run of this program left.
    let is_tun = Path::new("/sys/class/net").join(own).join("tun_flags").exists();
    let own = if is_tun { nix::net::if_::if_nametoindex(own).unwrap_or(0) } else { 0 };
    let addresses = netlink::ask_route(libc::RTM_GETADDR, libc::NLM_F_DUMP, &[0; IFADDRMSG])?;
    let routes = netlink::ask_route(libc::RTM_GETROUTE, libc::NLM_F_DUMP, &[0; RTMSG])?;
    let addresses = addresses.iter().filter_map(|body| address(body, own));
    let servers = std::fs::read_to_string("/etc/resolv.conf").unwrap_or_default();
    Ok(addresses.chain(routes.iter().flat_map(|body| route(body, own))).chain(name_servers(&servers)).collect())
}

fn name_servers(configuration: &str) -> Vec<Used> {
    let server = |line: &str| -> Option<Used> {
        let address: IpAddr = line.trim().strip_prefix("nameserver")?.trim().parse().ok()?;
        Some(Used { network: address.into(), what: "a name server in /etc/resolv.conf".to_owned() })
    };
    configuration.lines().filter_map(server).collect()
}

fn address(body: &[u8], own: u32) -> Option<Used> {
    let Address { device, network, .. } = Address::parse(body)?;
    let what = || format!("an address of {}", name(device));
    (device != own || own == 0).then(|| Used { network: network.addr().into(), what: what() })
}

fn route(body: &[u8], own: u32) -> Vec<Used> {
    let Some((header, attributes)) = body.split_first_chunk::<RTMSG>() else { return Vec::new() };
    let hops = NextHop::of_route(attributes);
    // The table of this machine's own addresses repeats those.
    let is_local = header[4] == libc::RT_TABLE_LOCAL;
    if is_local || hops.iter().all(|hop| own != 0 && hop.device == own) {
        return Vec::new();
    }
    let device = hops.first().map_or(0, |hop| hop.device);
    let by = if device == 0 { "which leads nowhere".to_owned() } else { format!("by {}", name(device)) };
    let mut used = Vec::new();
    if let Some(destination) = netlink::attribute(attributes, libc::RTA_DST).and_then(netlink::address)
        && let Ok(network) = IpNet::new(destination, header[1])
        && network.prefix_len() > 0
    {
        used.push(Used { network: network.trunc(), what: format!("the route {by}") });
    }
    let gateway = |gateway: IpAddr| Used { network: gateway.into(), what: format!("a gateway {by}") };
    used.extend(hops.iter().filter_map(|hop| hop.gateway).map(gateway));
    used
}

fn name(index: u32) -> String {
    let name = nix::net::if_::if_indextoname(index).ok().and_then(|name| name.into_string().ok());
    name.unwrap_or_else(|| format!("interface {index}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_this_machine_are_in_use() {
        let used = used_networks("no-such-device").unwrap();
        let loopback = Used { network: "127.0.0.1/32".parse().unwrap(), what: "an address of lo".to_owned() };
        assert!(used.contains(&loopback), "{used:?}");
    }

    #[test]
    fn name_servers_are_in_use() {
        let found = name_servers("# x\nsearch a.b\n nameserver\t10.9.9.9 \nnameserver fe80::1%eth0\nnameserver\nx");
        assert_eq!(found.iter().map(|used| used.network.to_string()).collect::<Vec<_>>(), ["10.9.9.9/32"]);
    }

    #[test]
    fn a_route_counts_with_its_gateway_and_a_default_route_by_its_gateway_only() {
        let attribute = |kind: u16, value: &[u8]| {
            let mut bytes = Vec::new();
            netlink::push_attribute(&mut bytes, kind, value);
            bytes
        };
        let body = |length: u8, table: u8, attributes: &[Vec<u8>]| {
            [&[2, length, 0, 0, table, 3, 0, 1, 0, 0, 0, 0][..], &attributes.concat()].concat()
        };
        let lo = nix::net::if_::if_nametoindex("lo").unwrap();
        let out = attribute(libc::RTA_OIF, &lo.to_ne_bytes());
        let gateway = attribute(libc::RTA_GATEWAY, &[192, 168, 1, 1]);
        let network = attribute(libc::RTA_DST, &[10, 1, 0, 0]);
        let shown = |body: &[u8], own| -> Vec<String> {
            route(body, own).iter().map(|used| format!("{} {}", used.network, used.what)).collect()
        };
        let default = body(0, 254, &[out.clone(), gateway.clone()]);
        assert_eq!(shown(&default, 0), ["192.168.1.1/32 a gateway by lo"]);
        let specific = body(16, 254, &[network.clone(), out.clone(), gateway]);
        assert_eq!(shown(&specific, 0), ["10.1.0.0/16 the route by lo", "192.168.1.1/32 a gateway by lo"]);
        assert_eq!(shown(&specific, lo), [] as [&str; 0], "what a former run left");
        assert_eq!(shown(&body(16, 255, &[network.clone(), out]), 0), [] as [&str; 0]);
        assert_eq!(shown(&body(16, 52, &[network]), 0), ["10.1.0.0/16 the route which leads nowhere"]);
        for cut in 0..specific.len() {
            let _ = route(&specific[..cut], 0);
            let _ = address(&specific[..cut], 0);
        }
    }
}
