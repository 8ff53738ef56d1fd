//! Ranges of addresses, and of protocols and ports, as disjoint intervals of numbers.

use std::net::{IpAddr, Ipv6Addr};

use ipnet::IpNet;

/// The first and the last number of an interval.
pub(super) type Interval = (u128, u128);

/// Addresses as intervals of each family.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Addresses {
    pub(super) v4: Vec<Interval>,
    pub(super) v6: Vec<Interval>,
}

impl Addresses {
    /// Adds a range without its exceptions.
    pub(super) fn add(&mut self, range: IpNet, except: &[IpNet]) {
        let (is_v4, range) = interval(range);
        let of_family = except.iter().map(|range| interval(*range)).filter(|(family, _)| *family == is_v4);
        let holes = merged(of_family.map(|(_, hole)| hole).collect());
        let into = if is_v4 { &mut self.v4 } else { &mut self.v6 };
        let (mut start, end) = range;
        for (first, last) in holes {
            if first > end {
                break;
            }
            if first > start {
                into.push((start, first - 1));
            }
            match last.checked_add(1) {
                Some(next) => start = start.max(next),
                None => return,
            }
        }
        if start <= end {
            into.push((start, end));
        }
    }

    pub(super) fn add_address(&mut self, address: IpAddr) {
        self.add(address.to_canonical().into(), &[]);
    }

    pub(super) fn merged(self) -> Self {
        Self { v4: merged(self.v4), v6: merged(self.v6) }
    }

    pub(super) const fn is_empty(&self) -> bool {
        self.v4.is_empty() && self.v6.is_empty()
    }
}

/// Intervals in order, without those that overlap or touch.
pub(super) fn merged(mut intervals: Vec<Interval>) -> Vec<Interval> {
    intervals.sort_unstable();
    let mut merged: Vec<Interval> = Vec::with_capacity(intervals.len());
    for (first, last) in intervals {
        match merged.last_mut() {
            Some((_, end)) if first <= end.saturating_add(1) => *end = last.max(*end),
            _ => merged.push((first, last)),
        }
    }
    merged
}

/// Whether a range is of IPv4, and its first and last address. Ranges of mapped addresses are of IPv4.
fn interval(range: IpNet) -> (bool, Interval) {
    match range {
        IpNet::V4(range) => (true, (range.network().to_bits().into(), range.broadcast().to_bits().into())),
        IpNet::V6(range) => {
            let (first, last) = (range.network().to_bits(), range.broadcast().to_bits());
            if first >= MAPPED && range.prefix_len() >= 96 && first >> 32 == MAPPED >> 32 {
                return (true, (first & u128::from(u32::MAX), last & u128::from(u32::MAX)));
            }
            (false, (first, last))
        }
    }
}

const MAPPED: u128 = Ipv6Addr::new(0, 0, 0, 0, 0, 0xffff, 0, 0).to_bits();

#[cfg(test)]
mod tests {
    use super::*;

    fn of(range: &str, except: &[&str]) -> Vec<(String, String)> {
        let except: Vec<_> = except.iter().map(|range| range.parse().unwrap()).collect();
        let mut addresses = Addresses::default();
        addresses.add(range.parse().unwrap(), &except);
        let addresses = addresses.merged();
        let v4 = addresses
            .v4
            .iter()
            .map(|&(first, last)| [first, last].map(|n| std::net::Ipv4Addr::from_bits(n as u32).to_string()));
        let v6 = addresses.v6.iter().map(|&(first, last)| [first, last].map(|n| Ipv6Addr::from_bits(n).to_string()));
        v4.chain(v6).map(|[first, last]| (first, last)).collect()
    }

    fn pairs(expected: &[(&str, &str)]) -> Vec<(String, String)> {
        expected.iter().map(|(first, last)| ((*first).into(), (*last).into())).collect()
    }

    #[test]
    fn exceptions_are_cut_out_of_a_range() {
        assert_eq!(of("10.0.0.0/24", &[]), pairs(&[("10.0.0.0", "10.0.0.255")]));
        let cut = of("10.0.0.0/24", &["10.0.0.64/26", "10.0.0.0/30", "10.0.0.64/28"]);
        assert_eq!(cut, pairs(&[("10.0.0.4", "10.0.0.63"), ("10.0.0.128", "10.0.0.255")]));
        assert_eq!(of("10.0.0.0/24", &["10.0.0.0/8"]), []);
        assert_eq!(of("0.0.0.0/0", &["255.255.255.255/32"]), pairs(&[("0.0.0.0", "255.255.255.254")]));
        assert_eq!(of("::/0", &["8000::/1"]), pairs(&[("::", "7fff:ffff:ffff:ffff:ffff:ffff:ffff:ffff")]));
        assert_eq!(of("10.0.0.0/24", &["::/0", "11.0.0.0/8"]), pairs(&[("10.0.0.0", "10.0.0.255")]));
    }

    #[test]
    fn a_range_of_mapped_addresses_is_one_of_ipv4_and_no_other_is() {
        assert_eq!(of("::ffff:10.0.0.0/120", &[]), pairs(&[("10.0.0.0", "10.0.0.255")]));
        assert_eq!(of("fd00::/126", &[]), pairs(&[("fd00::", "fd00::3")]));
        assert_eq!(of("::1:0:0/96", &[]), pairs(&[("::1:0:0", "::1:ffff:ffff")]));
    }
}
