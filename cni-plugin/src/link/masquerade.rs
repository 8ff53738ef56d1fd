//! What pods of a network send to elsewhere leaves with an address of the node: rules of the node, in a table of our
//! own.

use std::io;

use ipnet::IpNet;
use nebula_cni_contract::hash::fnv1a;
use nebula_cni_contract::netlink::nftables::{self, Chain, Family, Hook, Match, Rule, Table, Verdict};

use crate::link::ip::{Ip, not_within};

/// The rules of one network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Masquerade {
    /// Ranges of the pods.
    pub ranges: Vec<IpNet>,
    /// Destinations that see the pods' own addresses, besides the ranges.
    pub except: Vec<IpNet>,
}

impl Masquerade {
    /// Installs the rules of a network if they are not there, in place of those for other ranges.
    ///
    /// # Errors
    /// Returns the kernel's error.
    pub fn install(&self, network: &str) -> io::Result<()> {
        let (name, there) = (self.name(network), tables(network)?);
        if !there.contains(&name) {
            let chain = Chain::new(Hook::Leave, self.rules()).otherwise(Verdict::Accept);
            Table::new(Family::Inet, name.as_str()).with(chain).install()?;
        }
        there.iter().filter(|other| **other != name).try_for_each(|other| nftables::remove(Family::Inet, other))
    }

    fn rules(&self) -> Vec<Rule> {
        let rule = |range: &IpNet| {
            let ip = Ip::of(&range.addr());
            let stays = self.ranges.iter().chain(&self.except).copied().chain([ip.multicast()]);
            let leaves = stays.filter(|network| ip.has(network)).map(|network| not_within(ip.destination, network));
            Rule::masquerade([Match::Source(*range)].into_iter().chain(leaves).collect())
        };
        self.ranges.iter().map(rule).collect()
    }

    /// Other rules have another name, so that what is there need not be compared.
    fn name(&self, network: &str) -> String {
        let text = |networks: &[IpNet]| networks.iter().map(|network| format!("{network} ")).collect::<String>();
        let number = fnv1a(&[&text(&self.ranges), "\0", &text(&self.except)]);
        format!("{}{number:016x}", prefix(network))
    }
}

/// Whether a network has rules, whichever they are.
///
/// # Errors
/// Returns the kernel's error.
pub fn is_installed(network: &str) -> io::Result<bool> {
    Ok(!tables(network)?.is_empty())
}

/// Removes the rules of a network, whichever they are.
///
/// # Errors
/// Returns the kernel's error.
pub fn remove(network: &str) -> io::Result<()> {
    tables(network)?.iter().try_for_each(|name| nftables::remove(Family::Inet, name))
}

fn tables(network: &str) -> io::Result<Vec<String>> {
    let prefix = prefix(network);
    let mut tables = nftables::tables_if_any(Family::Inet)?;
    tables.retain(|name| name.starts_with(&prefix));
    Ok(tables)
}

/// A network's name may be longer than that of a table.
fn prefix(network: &str) -> String {
    format!("nebula-masquerade-{:016x}-", fnv1a(&[network]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nets(all: &[&str]) -> Vec<IpNet> {
        all.iter().map(|text| text.parse().unwrap()).collect()
    }

    #[test]
    fn each_range_has_a_rule_about_destinations_of_its_family() {
        let masquerade = Masquerade { ranges: nets(&["10.244.1.0/24", "fd00:1::/64"]), except: nets(&["10.0.0.0/8"]) };
        let [v4, v6] = &masquerade.rules()[..] else { panic!("two rules") };
        let expected = |range: &str, ip: Ip, stays: &[&str]| {
            let stays = nets(stays).into_iter().chain([ip.multicast()]).map(|net| not_within(ip.destination, net));
            let from = [Match::Source(range.parse().unwrap())];
            Rule::masquerade(from.into_iter().chain(stays).collect())
        };
        assert_eq!(*v4, expected("10.244.1.0/24", crate::link::ip::V4, &["10.244.1.0/24", "10.0.0.0/8"]));
        assert_eq!(*v6, expected("fd00:1::/64", crate::link::ip::V6, &["fd00:1::/64"]));
    }

    #[test]
    fn other_rules_and_other_networks_have_other_names() {
        let one = Masquerade { ranges: nets(&["10.244.1.0/24"]), except: Vec::new() };
        let two = Masquerade { ranges: Vec::new(), except: nets(&["10.244.1.0/24"]) };
        assert_ne!(one.name("net"), two.name("net"));
        assert_ne!(one.name("net"), one.name("other"));
        assert!(one.name("net").starts_with(&prefix("net")) && one.name(&"n".repeat(250)).len() < 64);
    }
}
