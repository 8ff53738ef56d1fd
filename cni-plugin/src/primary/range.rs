//! A range of addresses that pods get, and the search for a free one in it.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;

/// A prefix without the addresses of it that no pod can have: the network's own and, of IPv4, the broadcast address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Range {
    network: IpNet,
    first: u128,
    last: u128,
}

impl Range {
    /// The range of a prefix. In one of one or two addresses all can be used.
    #[must_use]
    pub fn new(network: IpNet) -> Self {
        let (first, last) = (number(network.network()), number(network.broadcast()));
        let is_v4 = network.addr().is_ipv4();
        let (first, last) = match network.max_prefix_len() - network.prefix_len() {
            0 | 1 => (first, last),
            _ if is_v4 => (first + 1, last - 1),
            // 0 is the anycast address of routers (RFC 4291, section 2.6.1).
            _ => (first + 1, last),
        };
        Self { network, first, last }
    }

    /// Its prefix.
    #[must_use]
    pub fn network(&self) -> IpNet {
        self.network
    }

    /// How many addresses it has, at most `u64::MAX`.
    #[must_use]
    pub fn size(&self) -> u64 {
        u64::try_from(self.last - self.first).map_or(u64::MAX, |size| size.saturating_add(1))
    }

    /// The first address after `last_given`, going around, that is in none of `reserved` and that `is_taken` does not
    /// know. Asks about at most `most_taken` addresses that are taken.
    pub fn free(
        &self,
        last_given: Option<IpAddr>,
        reserved: &[IpNet],
        most_taken: usize,
        mut is_taken: impl FnMut(IpAddr) -> bool,
    ) -> Option<IpAddr> {
        let last_given = last_given.filter(|last| self.network.contains(last)).map(number);
        let start = last_given.and_then(|last| last.checked_add(1)).filter(|next| self.has(*next));
        let start = start.unwrap_or(self.first);
        let mut steps = reserved.len().saturating_add(most_taken).saturating_mul(2).saturating_add(2);
        let (mut next, mut has_gone_around) = (start, false);
        loop {
            steps = steps.checked_sub(1)?;
            let address = self.address(next);
            let skipped = reserved.iter().find(|reserved| reserved.contains(&address));
            if skipped.is_none() && !is_taken(address) {
                return Some(address);
            }
            let end = skipped.map_or(next, |reserved| number(reserved.broadcast()));
            next = match end.checked_add(1).filter(|next| self.has(*next)) {
                Some(next) => next,
                None if has_gone_around => return None,
                None => {
                    has_gone_around = true;
                    self.first
                }
            };
            if has_gone_around && next >= start {
                return None;
            }
        }
    }

    fn has(&self, number: u128) -> bool {
        (self.first..=self.last).contains(&number)
    }

    fn address(&self, number: u128) -> IpAddr {
        match self.network {
            // Within a range of IPv4 no number has more than 32 bits.
            IpNet::V4(_) => Ipv4Addr::from_bits(u32::try_from(number).unwrap_or(u32::MAX)).into(),
            IpNet::V6(_) => Ipv6Addr::from_bits(number).into(),
        }
    }
}

fn number(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(address) => address.to_bits().into(),
        IpAddr::V6(address) => address.to_bits(),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn range(text: &str) -> Range {
        Range::new(text.parse().unwrap())
    }

    fn nets(all: &[&str]) -> Vec<IpNet> {
        all.iter().map(|text| text.parse().unwrap()).collect()
    }

    fn given(range: &Range, last: Option<&str>, reserved: &[&str], taken: &[&str]) -> Option<String> {
        let taken: Vec<IpAddr> = taken.iter().map(|text| text.parse().unwrap()).collect();
        let last = last.map(|text| text.parse().unwrap());
        let free = range.free(last, &nets(reserved), taken.len(), |address| taken.contains(&address));
        free.map(|address| address.to_string())
    }

    #[test]
    fn network_and_broadcast_address_are_nobodys() {
        for (text, size) in [
            ("10.0.0.0/24", 254),
            ("10.0.0.0/30", 2),
            ("10.0.0.0/31", 2),
            ("10.0.0.7/32", 1),
            ("0.0.0.0/0", (1 << 32) - 2),
            ("fd00::/126", 3),
            ("fd00::/127", 2),
            ("fd00::/64", u64::MAX),
            ("::/0", u64::MAX),
        ] {
            assert_eq!(range(text).size(), size, "{text}");
        }
        assert_eq!(given(&range("10.0.0.0/24"), None, &[], &[]).unwrap(), "10.0.0.1");
        assert_eq!(given(&range("fd00::/64"), None, &[], &[]).unwrap(), "fd00::1");
    }

    #[test]
    fn the_search_begins_behind_the_last_one_and_goes_around_once() {
        let four = range("10.0.0.0/29");
        assert_eq!(given(&four, Some("10.0.0.3"), &[], &[]).unwrap(), "10.0.0.4");
        assert_eq!(given(&four, Some("10.0.0.6"), &[], &[]).unwrap(), "10.0.0.1");
        assert_eq!(given(&four, Some("10.9.0.3"), &[], &[]).unwrap(), "10.0.0.1", "of another range");
        let but_two = ["10.0.0.1", "10.0.0.3", "10.0.0.4", "10.0.0.5", "10.0.0.6"];
        assert_eq!(given(&four, Some("10.0.0.4"), &[], &but_two).unwrap(), "10.0.0.2");
        let all = ["10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4", "10.0.0.5", "10.0.0.6"];
        for last in [None, Some("10.0.0.1"), Some("10.0.0.6")] {
            assert_eq!(given(&four, last, &[], &all), None);
        }
    }

    #[test]
    fn a_reserved_prefix_is_one_step_however_large() {
        assert_eq!(given(&range("fd00::/64"), None, &["fd00::/65"], &[]).unwrap(), "fd00::8000:0:0:0");
        assert_eq!(given(&range("10.0.0.0/24"), None, &["10.0.0.0/24"], &[]), None);
        assert_eq!(given(&range("10.0.0.0/24"), None, &["0.0.0.0/0"], &[]), None);
        assert_eq!(given(&range("255.255.255.254/31"), None, &["255.255.255.254/32"], &[]).unwrap(), "255.255.255.255");
        assert_eq!(given(&range("ffff::/16"), None, &["ffff::/16"], &[]), None);
    }

    proptest! {
        #[test]
        fn every_free_address_is_found_and_no_other(
            bits in 26u8..=32, last in proptest::option::of(0u32..64), taken in proptest::collection::btree_set(0u32..64, 0..64),
            reserved in proptest::collection::vec((0u32..64, 28u8..=32), 0..4),
        ) {
            let address = |offset: u32| IpAddr::from(Ipv4Addr::from_bits(0x0a00_0000 + offset));
            let range = Range::new(IpNet::new(address(0), bits).unwrap());
            let reserved: Vec<IpNet> = reserved.iter().map(|(offset, bits)| IpNet::new(address(*offset), *bits).unwrap().trunc()).collect();
            let usable: BTreeSet<IpAddr> = (0..64).map(address).filter(|address| range.has(number(*address))).collect();
            let taken: BTreeSet<IpAddr> = taken.into_iter().map(address).collect();
            let free: Vec<IpAddr> = usable.iter().copied()
                .filter(|address| !taken.contains(address) && !reserved.iter().any(|net| net.contains(address))).collect();
            let last = last.map(address);
            let found = range.free(last, &reserved, taken.len(), |address| taken.contains(&address));
            let after = last.filter(|last| usable.contains(last)).and_then(|last| free.iter().find(|free| **free > last));
            prop_assert_eq!(found, after.or_else(|| free.first()).copied());
        }
    }
}
