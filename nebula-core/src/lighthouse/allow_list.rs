//! Allow lists: which underlay addresses may be used, and which local ones may be advertised.

use std::net::IpAddr;

use ipnet::IpNet;
use prefix_trie::joint::JointPrefixMap;
use regex_lite::Regex;

use super::pattern::translate;

/// Rules by prefix; the longest prefix that contains an address decides. An empty list allows everything.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct AllowList {
    rules: JointPrefixMap<IpNet, bool>,
}

impl AllowList {
    /// Addresses that no rule contains get the opposite of what the rules of their family say; a family without rules
    /// is allowed.
    ///
    /// # Errors
    /// Returns an error if the rules of one family both allow and deny, and none of them covers every address.
    pub fn new(rules: impl IntoIterator<Item = (IpNet, bool)>) -> Result<Self, NoDefault> {
        let mut list = Self::default();
        let (mut v4, mut v6) = (Family::default(), Family::default());
        for (prefix, allowed) in rules {
            let prefix = canonical(prefix);
            let family = if prefix.addr().is_ipv4() { &mut v4 } else { &mut v6 };
            family.add(prefix, allowed);
            list.rules.insert(prefix, allowed);
        }
        for (family, everything) in [(v4, ANY_V4), (v6, ANY_V6)] {
            if let Some(default) = family.default_rule().ok_or(NoDefault(everything))? {
                list.rules.insert(everything, default);
            }
        }
        Ok(list)
    }

    /// Whether this address may be used.
    #[must_use]
    pub fn allows(&self, address: IpAddr) -> bool {
        self.rules.get_lpm(&address.to_canonical().into()).is_none_or(|(_, allowed)| *allowed)
    }

    /// Whether the rule that allows this address lies within `block`.
    fn names(&self, address: IpAddr, block: IpNet) -> bool {
        let rule = self.rules.get_lpm(&address.to_canonical().into());
        rule.is_some_and(|(prefix, allowed)| *allowed && block.contains(&prefix))
    }
}

/// Summary of the rules of one address family.
#[derive(Debug, Default)]
struct Family {
    has_default: bool,
    allows: bool,
    denies: bool,
}

impl Family {
    fn add(&mut self, prefix: IpNet, allowed: bool) {
        self.has_default |= prefix.prefix_len() == 0;
        *if allowed { &mut self.allows } else { &mut self.denies } = true;
    }

    /// The rule to add for all other addresses, if one is needed; `None` if it is ambiguous.
    fn default_rule(&self) -> Option<Option<bool>> {
        match (self.has_default, self.allows, self.denies) {
            (true, _, _) | (_, false, false) => Some(None),
            (false, true, true) => None,
            (false, allows, _) => Some(Some(!allows)),
        }
    }
}

/// The rules of one family contradict each other, and none says what applies to all other addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("contains both true and false rules, but no default set for {0}")]
pub struct NoDefault(pub IpNet);

/// Underlay addresses at which peers may be: one list for all peers, and further ones by range of overlay addresses.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RemoteAllowList {
    everybody: AllowList,
    ranges: JointPrefixMap<IpNet, AllowList>,
}

impl RemoteAllowList {
    /// `ranges` are overlay prefixes; the longest one that contains a peer applies.
    #[must_use]
    pub fn new(everybody: AllowList, ranges: impl IntoIterator<Item = (IpNet, AllowList)>) -> Self {
        let mut remote = Self { everybody, ranges: JointPrefixMap::new() };
        for (range, list) in ranges {
            remote.ranges.insert(canonical(range), list);
        }
        remote
    }

    /// Whether an underlay address may be used at all, before it is known which peer is there.
    pub(crate) fn allows_somebody(&self, underlay: IpAddr) -> bool {
        self.everybody.allows(underlay)
    }

    /// Whether the peer with these overlay addresses may be at `underlay`: each of the addresses must be allowed there.
    pub(crate) fn allows(&self, peer: &[IpAddr], underlay: IpAddr) -> bool {
        let in_range = |address: &IpAddr| {
            let narrowest = self.ranges.get_lpm(&(*address).into());
            narrowest.is_none_or(|(_, list)| list.allows(underlay))
        };
        self.everybody.allows(underlay) && peer.iter().all(in_range)
    }

    /// Whether a rule for all peers, or one for each address of the peer, allows `underlay` by naming addresses within
    /// `block`.
    pub(crate) fn names(&self, peer: &[IpAddr], underlay: IpAddr, block: IpNet) -> bool {
        let in_range = |address: &IpAddr| {
            let narrowest = self.ranges.get_lpm(&(*address).into());
            narrowest.is_some_and(|(_, list)| list.names(underlay, block))
        };
        self.everybody.names(underlay, block) || (!peer.is_empty() && peer.iter().all(in_range))
    }
}

/// Addresses of this host that are advertised to lighthouses.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct LocalAllowList {
    /// By address.
    pub addresses: AllowList,
    /// By the name of the interface, which is checked first.
    pub interfaces: InterfaceRules,
}

impl LocalAllowList {
    pub(crate) fn allows(&self, interface: &str, address: IpAddr) -> bool {
        self.interfaces.allows(interface) && self.addresses.allows(address)
    }
}

/// Names of interfaces whose addresses are advertised, or of those that are excluded. Empty: all are advertised.
#[derive(Debug, Clone, Default)]
pub struct InterfaceRules {
    patterns: Vec<Regex>,
    allowed: bool,
}

impl InterfaceRules {
    /// Interfaces whose name matches one of the patterns, in the syntax of Go's `regexp` between `^` and `$`, get
    /// `allowed`; all others get the opposite.
    ///
    /// # Errors
    /// Returns an error if a pattern is not a regular expression.
    pub fn new<'a>(patterns: impl IntoIterator<Item = &'a str>, allowed: bool) -> Result<Self, BadPattern> {
        let compile = |pattern: &str| {
            let compiled = translate(pattern).and_then(|text| Regex::new(&text).map_err(|error| error.to_string()));
            compiled.map_err(|cause| BadPattern { pattern: pattern.to_owned(), cause })
        };
        Ok(Self { patterns: patterns.into_iter().map(compile).collect::<Result<_, _>>()?, allowed })
    }

    /// Whether addresses of this interface may be advertised.
    #[must_use]
    pub fn allows(&self, interface: &str) -> bool {
        if self.patterns.is_empty() {
            return true;
        }
        self.patterns.iter().any(|pattern| pattern.is_match(interface)) == self.allowed
    }
}

impl PartialEq for InterfaceRules {
    fn eq(&self, other: &Self) -> bool {
        self.allowed == other.allowed
            && self.patterns.iter().map(Regex::as_str).eq(other.patterns.iter().map(Regex::as_str))
    }
}

/// The pattern is not a regular expression.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{pattern}: {cause}")]
pub struct BadPattern {
    /// The pattern as given.
    pub pattern: String,
    /// What is wrong with it.
    pub cause: String,
}

/// Converts a prefix of IPv4-mapped IPv6 addresses to the IPv4 prefix.
pub(super) fn canonical(prefix: IpNet) -> IpNet {
    let unmapped = match prefix {
        IpNet::V6(v6) => v6.addr().to_ipv4_mapped().zip(v6.prefix_len().checked_sub(96)),
        IpNet::V4(_) => None,
    };
    match unmapped.and_then(|(address, length)| IpNet::new(address.into(), length).ok()) {
        Some(v4) => v4.trunc(),
        None => prefix.trunc(),
    }
}

const ANY_V4: IpNet = IpNet::new_assert(IpAddr::V4(std::net::Ipv4Addr::UNSPECIFIED), 0);
const ANY_V6: IpNet = IpNet::new_assert(IpAddr::V6(std::net::Ipv6Addr::UNSPECIFIED), 0);

#[cfg(test)]
mod tests {
    use super::*;

    fn list(rules: &[(&str, bool)]) -> Result<AllowList, NoDefault> {
        AllowList::new(rules.iter().map(|(prefix, allowed)| (prefix.parse().unwrap(), *allowed)))
    }

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn an_empty_list_allows_everything() {
        let list = list(&[]).unwrap();
        assert!(list.allows(ip("10.0.0.1")) && list.allows(ip("2001:db8::1")));
    }

    #[test]
    fn the_longest_prefix_decides() {
        let list = list(&[("0.0.0.0/0", false), ("10.0.0.0/8", true), ("10.1.0.0/16", false), ("10.1.2.3/32", true)]);
        let list = list.unwrap();
        let expected = [("9.9.9.9", false), ("10.9.9.9", true), ("10.1.9.9", false), ("10.1.2.3", true)];
        assert_eq!(expected.map(|(address, _)| list.allows(ip(address))), expected.map(|(_, allowed)| allowed));
    }

    #[test]
    fn rules_that_agree_imply_the_opposite_for_the_rest_of_their_family_only() {
        let only = list(&[("10.0.0.0/8", true)]).unwrap();
        assert!(only.allows(ip("10.0.0.1")) && !only.allows(ip("11.0.0.1")) && only.allows(ip("2001:db8::1")));
        let but = list(&[("2001:db8::/32", false)]).unwrap();
        assert!(!but.allows(ip("2001:db8::1")) && but.allows(ip("2001:db9::1")) && but.allows(ip("10.0.0.1")));
    }

    #[test]
    fn rules_that_disagree_need_a_default() {
        let v4 = list(&[("10.0.0.0/8", true), ("10.1.0.0/16", false)]).unwrap_err();
        assert_eq!(v4.to_string(), "contains both true and false rules, but no default set for 0.0.0.0/0");
        let v6 = list(&[("0.0.0.0/0", true), ("fd00::/8", true), ("fd01::/16", false)]).unwrap_err();
        assert_eq!(v6.to_string(), "contains both true and false rules, but no default set for ::/0");
    }

    #[test]
    fn mapped_prefixes_and_addresses_mean_ipv4() {
        let list = list(&[("::ffff:10.0.0.0/104", false)]).unwrap();
        assert!(!list.allows(ip("10.2.3.4")) && !list.allows(ip("::ffff:10.2.3.4")) && list.allows(ip("::1")));
    }

    #[test]
    fn a_range_restricts_further_and_every_address_of_the_peer_counts() {
        let everybody = list(&[("192.0.2.0/24", false)]).unwrap();
        let range = list(&[("198.51.100.0/24", true)]).unwrap();
        let inner = list(&[]).unwrap();
        let ranges = [("10.42.0.0/16".parse().unwrap(), range), ("10.42.7.0/24".parse().unwrap(), inner)];
        let remote = RemoteAllowList::new(everybody, ranges);
        for (peer, underlay, allowed) in [
            (&["10.42.0.9"][..], "198.51.100.1", true),
            (&["10.42.0.9"], "203.0.113.1", false),
            (&["10.42.7.9"], "203.0.113.1", true),
            (&["10.42.7.9"], "192.0.2.1", false),
            (&["10.99.0.9"], "203.0.113.1", true),
            (&["10.99.0.9", "10.42.0.9"], "203.0.113.1", false),
            (&[], "192.0.2.1", false),
        ] {
            let peer: Vec<_> = peer.iter().map(|text| ip(text)).collect();
            assert_eq!(remote.allows(&peer, ip(underlay)), allowed, "{peer:?} at {underlay}");
        }
        assert!(remote.allows_somebody(ip("203.0.113.1")) && !remote.allows_somebody(ip("192.0.2.1")));
    }

    #[test]
    fn only_a_rule_about_a_block_itself_names_it() {
        let block = "127.0.0.0/8".parse().unwrap();
        for (rules, named) in [
            (&[][..], false),
            (&[("0.0.0.0/0", true)], false),
            (&[("126.0.0.0/7", true)], false),
            (&[("127.0.0.0/8", true)], true),
            (&[("0.0.0.0/0", false), ("127.0.0.1/32", true)], true),
            (&[("127.0.0.0/8", true), ("127.0.0.1/32", false), ("0.0.0.0/0", true)], false),
        ] {
            let list = list(rules).unwrap();
            assert_eq!(RemoteAllowList::new(list.clone(), []).names(&[], ip("127.0.0.1"), block), named, "{rules:?}");
            let range = [("10.42.0.0/16".parse().unwrap(), list)];
            let remote = RemoteAllowList::new(AllowList::default(), range);
            assert_eq!(remote.names(&[ip("10.42.0.9")], ip("127.0.0.1"), block), named, "{rules:?}");
            assert!(
                !remote.names(&[ip("10.43.0.9")], ip("127.0.0.1"), block) && !remote.names(&[], ip("127.0.0.1"), block)
            );
        }
    }

    #[test]
    fn interface_patterns_match_whole_names_and_the_rest_gets_the_opposite() {
        let hidden = InterfaceRules::new(["docker.*", "tun0|tun1"], false).unwrap();
        let expected = [("docker0", false), ("mydocker0", true), ("tun1", false), ("tun10", true), ("eth0", true)];
        assert_eq!(expected.map(|(name, _)| hidden.allows(name)), expected.map(|(_, allowed)| allowed));
        let shown = InterfaceRules::new(["eth[0-9]"], true).unwrap();
        assert!(shown.allows("eth0") && !shown.allows("eth10") && !shown.allows("wlan0"));
        assert!(InterfaceRules::default().allows("anything"));
        assert_eq!(InterfaceRules::new(["["], true).unwrap_err().pattern, "[");
    }
}
