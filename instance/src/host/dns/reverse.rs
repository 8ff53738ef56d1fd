//! Zones of the reverse names of networks (RFC 1035 section 3.5, RFC 3596 section 2.5).

use ipnet::IpNet;

/// The zones that together cover the networks. A network that needs more than 16 has none.
pub(super) fn zones(networks: &[IpNet]) -> Vec<String> {
    networks.iter().flat_map(zones_of).collect()
}

fn zones_of(network: &IpNet) -> Vec<String> {
    let bits_per_label = if network.addr().is_ipv4() { 8 } else { 4 };
    let length = network.prefix_len().next_multiple_of(bits_per_label);
    let extra = length - network.prefix_len();
    if length == 0 || extra > MAX_EXTRA_BITS {
        return Vec::new();
    }
    let labels = usize::from(length / bits_per_label);
    let zone = |part: IpNet| match part {
        IpNet::V4(part) => {
            let labels: Vec<_> = part.network().octets()[..labels].iter().rev().map(u8::to_string).collect();
            format!("{}.in-addr.arpa", labels.join("."))
        }
        IpNet::V6(part) => {
            let nibbles = part.network().octets().into_iter().flat_map(|octet| [octet >> 4, octet & 15]);
            let labels: Vec<_> = nibbles.take(labels).map(|nibble| format!("{nibble:x}")).collect();
            format!("{}.ip6.arpa", labels.into_iter().rev().collect::<Vec<_>>().join("."))
        }
    };
    network.trunc().subnets(length).map(|parts| parts.map(zone).collect()).unwrap_or_default()
}

const MAX_EXTRA_BITS: u8 = 4;

#[cfg(test)]
mod tests {
    use super::*;

    fn zones_of(network: &str) -> Vec<String> {
        zones(&[network.parse().unwrap()])
    }

    #[test]
    fn a_zone_ends_where_a_label_does() {
        assert_eq!(zones_of("10.42.0.7/16"), ["42.10.in-addr.arpa"]);
        assert_eq!(zones_of("10.42.5.7/24"), ["5.42.10.in-addr.arpa"]);
        assert_eq!(zones_of("10.42.5.6/23"), ["4.42.10.in-addr.arpa", "5.42.10.in-addr.arpa"]);
        assert_eq!(zones_of("10.42.5.7/32"), ["7.5.42.10.in-addr.arpa"]);
        assert_eq!(zones_of("fd42::7/16"), ["2.4.d.f.ip6.arpa"]);
        assert_eq!(zones_of("fd40::7/11"), ["4.d.f.ip6.arpa", "5.d.f.ip6.arpa"]);
        assert_eq!(zones_of("10.42.0.0/12").len(), 16);
    }

    #[test]
    fn a_network_of_too_many_zones_has_none() {
        assert_eq!(zones_of("100.64.0.0/10"), [""; 0]);
        assert_eq!(zones_of("0.0.0.0/0"), [""; 0]);
    }
}
