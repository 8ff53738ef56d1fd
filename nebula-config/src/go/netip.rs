//! Addresses and prefixes as Go's `net/netip` parses them: stricter than most parsers about leading zeros, and with
//! zones.

use std::net::IpAddr;

pub(crate) use nebula_cert::prefix;

/// Parses an address, and the zone of an IPv6 address (`fe80::1%eth0`).
pub(crate) fn address(text: &str) -> Option<(IpAddr, Option<&str>)> {
    match text.split_once('%') {
        None => Some((text.parse().ok()?, None)),
        Some((address, zone)) => {
            let address = address.parse::<IpAddr>().ok()?;
            (address.is_ipv6() && !zone.is_empty()).then_some((address, Some(zone)))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_addresses_of_version_6_have_a_zone() {
        let v6: IpAddr = "fe80::1".parse().unwrap();
        assert_eq!(address("fe80::1%eth0"), Some((v6, Some("eth0"))));
        assert_eq!(address("fe80::1"), Some((v6, None)));
        for text in ["fe80::1%", "1.2.3.4%eth0", "%eth0", "x"] {
            assert_eq!(address(text), None, "{text}");
        }
    }
}
