//! Endpoints guessed from a peer's overlay address, tried while no lighthouse has answered.

use std::net::{IpAddr, SocketAddr};

use ipnet::IpNet;
use prefix_trie::joint::JointPrefixMap;

use super::allow_list::canonical;

/// Calculations by range of overlay addresses; the longest range that contains a peer applies. Empty: nothing is
/// guessed.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct CalculatedRemotes {
    ranges: JointPrefixMap<IpNet, Vec<Calculation>>,
}

/// One guess: the network part of `mask`, then the host part of the peer's overlay address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Calculation {
    /// Underlay network; its prefix length is the number of bits taken from it.
    pub mask: IpNet,
    /// UDP port.
    pub port: u16,
}

impl CalculatedRemotes {
    /// Ranges are overlay networks. The prefix lengths of a range and its masks may differ.
    ///
    /// # Errors
    /// Returns an error if a mask is of another address family than its range.
    pub fn new(ranges: impl IntoIterator<Item = (IpNet, Vec<Calculation>)>) -> Result<Self, OtherFamily> {
        let mut calculated = Self::default();
        for (range, calculations) in ranges {
            if let Some(other) = calculations.iter().find(|it| it.mask.addr().is_ipv4() != range.addr().is_ipv4()) {
                return Err(OtherFamily { mask: other.mask, range });
            }
            calculated.ranges.insert(canonical(range), calculations);
        }
        Ok(calculated)
    }

    /// Guessed endpoints of the peer with this overlay address.
    pub(crate) fn endpoints(&self, peer: IpAddr) -> Vec<SocketAddr> {
        let calculations = self.ranges.get_lpm(&peer.into()).map_or(&[][..], |(_, calculations)| calculations);
        calculations.iter().filter_map(|calculation| calculation.endpoint(peer)).collect()
    }
}

impl Calculation {
    fn endpoint(&self, peer: IpAddr) -> Option<SocketAddr> {
        let address = match (self.mask, peer) {
            (IpNet::V4(mask), IpAddr::V4(peer)) => {
                ((mask.network() & mask.netmask()) | (peer & mask.hostmask())).into()
            }
            (IpNet::V6(mask), IpAddr::V6(peer)) => {
                ((mask.network() & mask.netmask()) | (peer & mask.hostmask())).into()
            }
            _ => return None,
        };
        Some(SocketAddr::new(address, self.port))
    }
}

/// A mask has another address family than the overlay range it belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("invalid mask: {mask} for cidr: {range}")]
pub struct OtherFamily {
    /// The mask.
    pub mask: IpNet,
    /// The range.
    pub range: IpNet,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn guess(mask: &str, port: u16) -> Calculation {
        Calculation { mask: mask.parse().unwrap(), port }
    }

    fn endpoints(calculated: &CalculatedRemotes, peer: &str) -> Vec<String> {
        calculated.endpoints(peer.parse().unwrap()).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn network_bits_come_from_the_mask_and_host_bits_from_the_overlay_address() {
        let calculated = CalculatedRemotes::new([
            ("10.42.0.0/16".parse().unwrap(), vec![guess("192.168.77.5/16", 4242), guess("172.16.0.0/12", 1)]),
            ("fd42::/64".parse().unwrap(), vec![guess("2001:db8:7:8::/64", 4243)]),
        ])
        .unwrap();
        assert_eq!(endpoints(&calculated, "10.42.9.7"), ["192.168.9.7:4242", "172.26.9.7:1"]);
        assert_eq!(endpoints(&calculated, "fd42::a:b"), ["[2001:db8:7:8::a:b]:4243"]);
        assert_eq!(endpoints(&calculated, "10.43.9.7"), [""; 0]);
        assert_eq!(endpoints(&calculated, "fd43::1"), [""; 0]);
    }

    #[test]
    fn masks_may_have_any_length_up_to_a_whole_address() {
        for (mask, expected) in [
            ("192.0.2.1/32", "192.0.2.1:1"),
            ("192.0.2.0/31", "192.0.2.1:1"),
            ("192.0.2.0/25", "192.0.2.7:1"),
            ("0.0.0.0/0", "10.42.1.7:1"),
        ] {
            let peer = if mask.ends_with("/31") { "10.42.1.5" } else { "10.42.1.7" };
            let calculated = CalculatedRemotes::new([("10.42.0.0/16".parse().unwrap(), vec![guess(mask, 1)])]).unwrap();
            assert_eq!(endpoints(&calculated, peer), [expected], "{mask}");
        }
    }

    #[test]
    fn the_longest_range_counts_alone() {
        let calculated = CalculatedRemotes::new([
            ("10.0.0.0/8".parse().unwrap(), vec![guess("192.0.2.0/24", 1)]),
            ("10.42.3.0/24".parse().unwrap(), vec![guess("198.51.100.0/24", 2)]),
            ("10.42.4.0/24".parse().unwrap(), Vec::new()),
        ])
        .unwrap();
        assert_eq!(endpoints(&calculated, "10.42.2.9"), ["192.0.2.9:1"]);
        assert_eq!(endpoints(&calculated, "10.42.3.9"), ["198.51.100.9:2"]);
        assert_eq!(endpoints(&calculated, "10.42.4.9"), [""; 0]);
    }

    #[test]
    fn a_mask_of_the_other_family_is_refused() {
        let refused = CalculatedRemotes::new([("10.42.0.0/16".parse().unwrap(), vec![guess("2001:db8::/64", 1)])]);
        assert_eq!(refused.unwrap_err().to_string(), "invalid mask: 2001:db8::/64 for cidr: 10.42.0.0/16");
    }
}
