//! Networks of this machine's other interfaces that an unsafe route leads into the overlay: the kernel replaces its
//! own route by it, or prefers it, and the machines on that link are no longer reached directly.

use std::io;
use std::net::IpAddr;

use ipnet::IpNet;
use nebula_cni_contract::netlink;
use nebula_config::TunSettings;
use nix::libc;

/// A network of a link that is led into the overlay.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Replaced {
    /// The unsafe route: the network itself, or a part of it.
    pub(crate) route: IpNet,
    /// The network of the link.
    pub(crate) network: IpNet,
    /// The link's interface.
    pub(crate) interface: String,
}

/// Those of the network namespace of the calling thread; `device` is the overlay's.
///
/// # Errors
/// Returns the kernel's error.
pub(crate) fn replaced(settings: &TunSettings, device: &str) -> io::Result<Vec<Replaced>> {
    let installed = settings.routes.subnets.iter().filter(|subnet| subnet.install);
    let routes: Vec<IpNet> = installed.map(|subnet| subnet.route.network).collect();
    if routes.is_empty() {
        return Ok(Vec::new());
    }
    let own = nix::net::if_::if_nametoindex(device).unwrap_or_default();
    let addresses = netlink::ask_route(libc::RTM_GETADDR, libc::NLM_F_DUMP, &[0; IFADDRMSG])?;
    let links = addresses.iter().filter_map(|body| link_network(body)).filter(|(index, _)| *index != own);
    Ok(links.flat_map(|(index, network)| of_link(&routes, index, network)).collect())
}

/// Logs them.
pub(crate) fn report(settings: &TunSettings, device: &str) {
    for Replaced { route, network, interface } in replaced(settings, device).unwrap_or_default() {
        tracing::warn!(route = %route, network = %network, interface, device,
            "tun.unsafe_routes leads a network of this machine's own link into the overlay");
    }
}

fn of_link(routes: &[IpNet], index: u32, network: IpNet) -> impl Iterator<Item = Replaced> {
    // A wider route leaves the link its own, which is more specific.
    let taken = routes.iter().filter(move |route| network.contains(&route.trunc()));
    let name = nix::net::if_::if_indextoname(index).ok().and_then(|name| name.into_string().ok());
    let interface = name.unwrap_or_else(|| format!("interface {index}"));
    taken.map(move |route| Replaced { route: route.trunc(), network, interface: interface.clone() })
}

/// The index of the link of an address, and the network that the address puts there.
fn link_network(body: &[u8]) -> Option<(u32, IpNet)> {
    let (header, attributes) = body.split_first_chunk::<IFADDRMSG>()?;
    let [_, length, _, _, index @ ..] = *header;
    // On a point-to-point link this is the other end.
    let address = netlink::attribute(attributes, libc::IFA_ADDRESS).and_then(netlink::address)?;
    let is_of_link = match address {
        IpAddr::V4(address) => !address.is_loopback() && !address.is_link_local(),
        IpAddr::V6(address) => !address.is_loopback() && !address.is_unicast_link_local(),
    };
    let network = IpNet::new(address, length).ok().filter(|_| is_of_link)?;
    Some((u32::from_ne_bytes(index), network.trunc()))
}

/// Length of struct ifaddrmsg.
const IFADDRMSG: usize = 8;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_route_to_the_network_of_a_link_or_to_a_part_of_it_takes_its_place_and_a_wider_one_does_not() {
        let routes: Vec<IpNet> =
            ["192.168.7.0/24", "192.168.7.128/25", "192.168.0.0/16", "0.0.0.0/0", "10.0.0.0/8", "fd00:7::/64"]
                .map(|text| text.parse().unwrap())
                .to_vec();
        let taken = |network: &str| -> Vec<String> {
            of_link(&routes, 0, network.parse().unwrap()).map(|replaced| replaced.route.to_string()).collect()
        };
        assert_eq!(taken("192.168.7.0/24"), ["192.168.7.0/24", "192.168.7.128/25"]);
        assert_eq!(taken("fd00:7::/64"), ["fd00:7::/64"]);
        assert!(taken("172.16.0.0/12").is_empty());
    }

    #[test]
    fn the_network_of_an_address_is_that_of_its_link_and_loopback_is_none() {
        let body = |length: u8, address: &[u8]| {
            let mut body = vec![2, length, 0, 0];
            body.extend(7_u32.to_ne_bytes());
            netlink::push_attribute(&mut body, libc::IFA_ADDRESS, address);
            body
        };
        assert_eq!(link_network(&body(24, &[192, 168, 7, 20])), Some((7, "192.168.7.0/24".parse().unwrap())));
        assert_eq!(link_network(&body(8, &[127, 0, 0, 1])), None);
        assert_eq!(link_network(&body(16, &[169, 254, 1, 1])), None);
        assert_eq!(link_network(&body(33, &[192, 168, 7, 20])), None);
        assert_eq!(link_network(&[2, 24, 0]), None);
    }
}
