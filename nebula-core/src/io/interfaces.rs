//! Addresses of this host's interfaces, as far as a peer might reach them.

use std::net::{IpAddr, Ipv6Addr};

use nix::errno::Errno;
use nix::ifaddrs::getifaddrs;
use nix::net::if_::InterfaceFlags;

use crate::lighthouse::LocalAddress;

/// Addresses of interfaces that are up in the network namespace of the calling thread, but for those of interface `except`.
pub(super) fn reachable_addresses(except: Option<&str>) -> Result<Vec<LocalAddress>, Errno> {
    let mut addresses: Vec<_> = getifaddrs()?
        .filter(|entry| entry.flags.contains(InterfaceFlags::IFF_UP) && Some(entry.interface_name.as_str()) != except)
        .filter_map(|entry| {
            let address = entry.address?;
            let v4 = address.as_sockaddr_in().map(|v4| IpAddr::V4(v4.ip()));
            let address = v4.or_else(|| address.as_sockaddr_in6().map(|v6| IpAddr::V6(v6.ip())))?;
            Some(LocalAddress { address, interface: entry.interface_name })
        })
        .filter(|local| is_reachable(&local.address))
        .collect();
    // The kernel's order changes; a changed order is not news for anybody.
    addresses.sort_unstable();
    addresses.dedup();
    Ok(addresses)
}

fn is_reachable(address: &IpAddr) -> bool {
    let is_link_local = match address {
        IpAddr::V4(v4) => v4.is_link_local(),
        IpAddr::V6(v6) => v6.is_unicast_link_local() || *v6 == Ipv6Addr::UNSPECIFIED,
    };
    !address.is_loopback() && !address.is_multicast() && !is_link_local
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_that_mean_something_else_to_a_peer_are_left_out() {
        for (address, expected) in [
            ("10.1.2.3", true),
            ("2001:db8::1", true),
            ("fd00::1", true),
            ("127.0.0.1", false),
            ("169.254.9.9", false),
            ("::1", false),
            ("fe80::1", false),
        ] {
            assert_eq!(is_reachable(&address.parse().unwrap()), expected, "{address}");
        }
    }

    #[test]
    fn the_system_can_be_asked() {
        let addresses = reachable_addresses(None).unwrap();
        assert!(addresses.iter().all(|local| is_reachable(&local.address)), "{addresses:?}");
    }
}
