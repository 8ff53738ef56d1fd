//! Underlay addresses that nobody should be sent to, since no peer can be there.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;

/// The block of an address that means a different machine to each host that uses it: loopback or link-local, which
/// includes the metadata services of clouds. A message may direct traffic there only if an allow list names addresses
/// of the block.
pub(super) fn local_block(address: IpAddr) -> Option<IpNet> {
    let block = match address {
        IpAddr::V4(v4) if v4.is_loopback() => LOOPBACK_V4,
        IpAddr::V4(v4) if v4.is_link_local() => LINK_LOCAL_V4,
        IpAddr::V6(v6) if v6.is_loopback() => LOOPBACK_V6,
        IpAddr::V6(v6) if v6.is_unicast_link_local() => LINK_LOCAL_V6,
        _ => return None,
    };
    Some(block)
}

/// Whether no host has this address.
pub(super) fn is_nobodys(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => v4.octets()[0] == 0 || v4.is_multicast() || v4.is_broadcast(),
        // The first 96 bits are zero in the unspecified address and in IPv4-compatible addresses, which are deprecated.
        IpAddr::V6(v6) => v6.is_multicast() || (!v6.is_loopback() && v6.segments()[..6] == [0; 6]),
    }
}

const LOOPBACK_V4: IpNet = IpNet::new_assert(IpAddr::V4(Ipv4Addr::new(127, 0, 0, 0)), 8);
const LINK_LOCAL_V4: IpNet = IpNet::new_assert(IpAddr::V4(Ipv4Addr::new(169, 254, 0, 0)), 16);
const LOOPBACK_V6: IpNet = IpNet::new_assert(IpAddr::V6(Ipv6Addr::LOCALHOST), 128);
const LINK_LOCAL_V6: IpNet = IpNet::new_assert(IpAddr::V6(Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 0)), 10);

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn loopback_and_link_local_addresses_are_local_and_private_ones_are_not() {
        for address in ["127.0.0.1", "127.255.0.9", "169.254.169.254", "::1", "fe80::1", "febf::1"] {
            assert!(local_block(ip(address)).is_some_and(|block| block.contains(&ip(address))), "{address}");
            assert!(!is_nobodys(ip(address)), "{address}");
        }
        for address in ["10.1.2.3", "172.16.0.1", "192.168.1.1", "100.64.0.1", "203.0.113.1", "fd00::1", "2001:db8::1"]
        {
            assert!(local_block(ip(address)).is_none() && !is_nobodys(ip(address)), "{address}");
        }
    }

    #[test]
    fn nobody_has_an_unspecified_multicast_or_broadcast_address() {
        for address in ["0.0.0.0", "0.1.2.3", "224.0.0.1", "239.9.9.9", "255.255.255.255", "::", "::7f00:1", "ff02::1"]
        {
            assert!(is_nobodys(ip(address)), "{address}");
        }
    }
}
