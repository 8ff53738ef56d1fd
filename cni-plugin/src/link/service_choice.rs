//! Where the node leads what captured pods send past their tunnels to a Service, if some of the Service's endpoints
//! are not for clear traffic: kube-proxy chooses among all of them, and the guards of the pods refuse its choice when
//! that is an enrolled pod. These rules come before kube-proxy's, hold for captured pods of this node only, and
//! choose among the endpoints that are known not to be enrolled. conntrack keeps each connection to its endpoint and
//! translates the answers.

use std::io;
use std::net::{IpAddr, SocketAddr};

use ipnet::IpNet;
use nebula_cni_contract::hash::fnv1a;
use nebula_cni_contract::netlink::nftables::{
    self, AddressSet, Chain, EndpointMap, Family, Field, Header, Hook, MapEntry, Match, Rule, SLOTS, Transaction,
    Verdict,
};

/// A port of a Service with the endpoints to choose from, all of the Service's family.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Choice {
    /// The Service's address and port.
    pub service: SocketAddr,
    /// IP protocol number.
    pub protocol: u8,
    /// Whether all connections of a pod get the same endpoint (session affinity).
    pub by_client: bool,
    /// At least one.
    pub endpoints: Vec<SocketAddr>,
}

/// Replaces the rules: `pods` are the addresses of captured pods of this node. Without pods or choices there are none.
///
/// # Errors
/// Returns the kernel's error; nothing has changed then.
pub fn replace(pods: &[IpAddr], choices: &[Choice]) -> io::Result<()> {
    let is_there = nftables::tables(Family::Inet)?.iter().any(|name| name == TABLE);
    if pods.is_empty() || choices.is_empty() {
        return if is_there { nftables::remove(Family::Inet, TABLE) } else { Ok(()) };
    }
    let mut change = Transaction::new();
    if is_there {
        change.remove_table(Family::Inet, TABLE);
    }
    change.table(Family::Inet, TABLE);
    let pods: Vec<IpNet> = pods.iter().copied().map(IpNet::from).collect();
    let (mut rules, mut number) = (Vec::new(), 0);
    for is_v4 in [true, false] {
        let set = AddressSet { name: if is_v4 { "pods4" } else { "pods6" }.into(), is_v4, of_prefixes: false };
        change.address_set(Family::Inet, TABLE, &set, number);
        change.add(Family::Inet, TABLE, &set, &pods);
        number += 1;
        for by_client in [false, true] {
            let name = match (is_v4, by_client) {
                (true, false) => "endpoints4",
                (true, true) => "kept4",
                (false, false) => "endpoints6",
                (false, true) => "kept6",
            };
            let map = EndpointMap { name, is_v4 };
            change.endpoint_map(Family::Inet, TABLE, &map, number);
            number += 1;
            let own = choices.iter().filter(|choice| choice.by_client == by_client);
            let entries: Vec<MapEntry> = own.flat_map(Choice::entries).collect();
            change.add_entries(Family::Inet, TABLE, &map, &entries);
            let (offset, len) = if is_v4 { (12, 4) } else { (8, 16) };
            let source = Field::Bytes { header: Header::Network, offset, len };
            let of_pod = vec![Match::IsV4(is_v4), Match::In(set.name.clone(), vec![source])];
            rules.push(Rule::translate(of_pod, map, by_client));
        }
    }
    change.chain(Family::Inet, TABLE, &Chain::new(Hook::Translate, rules).otherwise(Verdict::Accept));
    change.run()
}

/// The handle of the table with the rules; `None` if there are none. Whoever makes the table anew gets another one.
///
/// # Errors
/// Returns the kernel's error.
pub fn handle() -> io::Result<Option<u64>> {
    nftables::table_handle(Family::Inet, TABLE)
}

impl Choice {
    fn entries(&self) -> impl Iterator<Item = MapEntry> {
        let Self { service, protocol, by_client, endpoints } = self;
        (0..SLOTS).filter_map(move |slot| {
            let endpoint = match by_client {
                false => endpoints.get(slot as usize % endpoints.len().max(1)),
                // The highest weight wins: when others come and go, a client keeps its endpoint.
                true => endpoints.iter().max_by_key(|endpoint| fnv1a(&[&slot.to_string(), &endpoint.to_string()])),
            };
            Some(MapEntry { service: *service, protocol: *protocol, slot, endpoint: *endpoint? })
        })
    }
}

const TABLE: &str = "nebula-cni-services";

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn choice(by_client: bool, endpoints: &[&str]) -> Choice {
        let endpoints = endpoints.iter().map(|text| text.parse().unwrap()).collect();
        Choice { service: "10.96.0.1:80".parse().unwrap(), protocol: 6, by_client, endpoints }
    }

    #[test]
    fn every_number_that_may_be_drawn_leads_to_an_endpoint_and_a_client_keeps_its_own() {
        let three = ["10.0.0.1:80", "10.0.0.2:80", "10.0.0.3:80"];
        let counts = |choice: &Choice| {
            let mut counts = BTreeMap::new();
            choice.entries().for_each(|entry| *counts.entry(entry.endpoint).or_insert(0) += 1);
            counts
        };
        assert_eq!(counts(&choice(false, &three)).into_values().collect::<Vec<_>>(), [22, 21, 21]);
        let [all, fewer] = [&three[..], &three[1..]].map(|endpoints| choice(true, endpoints));
        assert!(counts(&all).values().all(|count| *count > 8) && counts(&all).len() == 3, "{:?}", counts(&all));
        let gone = all.endpoints[0];
        assert!(all.entries().zip(fewer.entries()).all(|(one, other)| one.endpoint == gone || one == other));
        assert_eq!(choice(false, &[]).entries().count() + choice(true, &[]).entries().count(), 0);
    }
}
