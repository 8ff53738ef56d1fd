//! The relays that a lighthouse offers to its hosts.

use std::collections::BTreeMap;
use std::net::IpAddr;

use ipnet::IpNet;

use super::MAX_OFFERS;
use crate::capture::scramble_address;
use crate::lighthouse::address_for;

/// Hosts with a tunnel to this lighthouse whose certificate has a group of relays.
#[derive(Debug, Default)]
pub(in crate::node) struct Offers {
    /// All overlay addresses, by the first.
    members: BTreeMap<IpAddr, Vec<IpAddr>>,
}

impl Offers {
    /// Adds a member. There is no room for more than [`MAX_MEMBERS`].
    pub(super) fn add(&mut self, addresses: &[IpAddr]) {
        let Some(&first) = addresses.first() else { return };
        if self.members.len() < MAX_MEMBERS || self.members.contains_key(&first) {
            self.members.insert(first, addresses.to_vec());
        }
    }

    /// The last tunnel to a host is gone.
    pub(super) fn remove(&mut self, addresses: &[IpAddr]) {
        if let Some(first) = addresses.first() {
            self.members.remove(first);
        }
    }

    pub(super) fn clear(&mut self) {
        self.members.clear();
    }

    /// What to offer to the host with these addresses and networks: of all members that `is_there`, those with the
    /// highest hashes. Each host gets others, and always the same.
    pub(in crate::node) fn for_host(
        &self,
        (addresses, networks): (&[IpAddr], &[IpNet]),
        is_there: impl Fn(IpAddr) -> bool,
    ) -> Vec<IpAddr> {
        let Some(&host) = addresses.first() else { return Vec::new() };
        let others = self.members.iter().filter(|(member, _)| **member != host);
        let mut ranked: Vec<_> = others.map(|(member, all)| (lot(host, *member), *member, all)).collect();
        ranked.sort_unstable_by_key(|(lot, member, _)| (std::cmp::Reverse(*lot), *member));
        let there = ranked.into_iter().filter(|(_, member, _)| is_there(*member));
        there.filter_map(|(_, _, all)| address_for(all, networks)).take(MAX_OFFERS).collect()
    }
}

/// Rendezvous hash of a host and a relay, by their first addresses.
pub(in crate::node) fn lot(host: IpAddr, relay: IpAddr) -> u64 {
    [host, relay].into_iter().fold(0, scramble_address)
}

/// More members than a network needs. The cost of an offer grows with their number.
const MAX_MEMBERS: usize = 256;

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    fn relay(n: u16) -> IpAddr {
        let [high, low] = n.to_be_bytes();
        IpAddr::from([10, 1, high, low])
    }

    fn offer(offers: &Offers, host: u16) -> Vec<IpAddr> {
        let [high, low] = host.to_be_bytes();
        let host = IpAddr::from([10, 2, high, low]);
        offers.for_host((&[host], &["10.0.0.1/8".parse().unwrap()]), |_| true)
    }

    #[test]
    fn each_host_gets_a_stable_selection_and_every_relay_is_offered_about_equally_often() {
        let mut offers = Offers::default();
        (0..100).for_each(|n| offers.add(&[relay(n)]));
        let mut times: BTreeMap<IpAddr, u32> = BTreeMap::new();
        for host in 0..5000 {
            let offered = offer(&offers, host);
            assert_eq!(offered.len(), MAX_OFFERS);
            assert_eq!(offered, offer(&offers, host));
            offered.into_iter().for_each(|relay| *times.entry(relay).or_default() += 1);
        }
        assert_eq!(times.len(), 100);
        assert!(times.values().all(|times| (400..=600).contains(times)), "{times:?}");
    }

    #[test]
    fn a_member_that_leaves_changes_one_relay_of_those_hosts_that_were_offered_it() {
        let mut offers = Offers::default();
        (0..50).for_each(|n| offers.add(&[relay(n)]));
        let before: Vec<_> = (0..100).map(|host| offer(&offers, host)).collect();
        offers.remove(&[relay(7)]);
        for (host, before) in before.into_iter().enumerate() {
            let after = offer(&offers, host as u16);
            let kept = before.iter().filter(|relay| after.contains(relay)).count();
            assert_eq!(kept, MAX_OFFERS - usize::from(before.contains(&relay(7))));
        }
    }

    #[test]
    fn a_member_is_not_offered_to_itself_and_their_number_is_bounded() {
        let mut offers = Offers::default();
        (0..1000).for_each(|n| offers.add(&[relay(n)]));
        assert_eq!(offers.members.len(), MAX_MEMBERS);
        let own = relay(3);
        let offered = offers.for_host((&[own], &["10.0.0.1/8".parse().unwrap()]), |_| true);
        assert!(!offered.contains(&own));
        assert!(offers.for_host((&[own], &[]), |_| false).is_empty());
    }
}
