//! The records of a lighthouse: addresses by name and by group, names by address.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::net::IpAddr;
use std::sync::atomic::{AtomicUsize, Ordering};

use hickory_resolver::proto::rr::RecordType;

use super::message::{Answer, Query};

/// A host as its certificate describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Host {
    pub(crate) name: String,
    pub(crate) addresses: Vec<IpAddr>,
    pub(crate) groups: Vec<String>,
    /// No other host has this name already.
    pub(crate) holds_name: bool,
}

/// All records. Names are in lower case.
#[derive(Debug, Default)]
pub(super) struct Records {
    domain: Option<String>,
    /// The first address of each family.
    hosts: HashMap<String, FirstOfFamily>,
    names: HashMap<IpAddr, String>,
    groups: HashMap<String, Vec<FirstOfFamily>>,
    /// All addresses of all hosts.
    addresses: HashSet<IpAddr>,
    /// Where the next answer for a group begins, so that its hosts share the clients.
    turn: AtomicUsize,
}

type FirstOfFamily = [Option<IpAddr>; 2];

impl Records {
    /// Of hosts with the same name, the first counts. One that does not hold its name is found by its groups only.
    pub(super) fn new(domain: Option<String>, hosts: impl Iterator<Item = Host>) -> Self {
        let mut records = Self { domain, ..Self::default() };
        for Host { name, addresses, groups, holds_name } in hosts {
            let first = |v4: bool| addresses.iter().copied().find(|address| address.is_ipv4() == v4);
            let (name, first) = (name.to_ascii_lowercase(), [first(true), first(false)]);
            for group in groups {
                records.groups.entry(group.to_ascii_lowercase()).or_default().push(first);
            }
            records.addresses.extend(&addresses);
            if let (true, Entry::Vacant(free)) = (holds_name, records.hosts.entry(name.clone())) {
                free.insert(first);
                records.names.extend(addresses.into_iter().map(|address| (address, name.clone())));
            }
        }
        // Otherwise the order would be that of a hash table, another one each time.
        records.groups.values_mut().for_each(|hosts| hosts.sort_unstable());
        records.add_host_names_of_groups();
        records
    }

    /// Adds `team-a` for the group `team:a`: resolvers of programs look up host names only (RFC 952). A name that
    /// could mean two such groups means neither. It never means a group that is called `team-a`: while any group
    /// begins with `team:`, names that begin with `team-` are for such groups only, so that a label cannot take the
    /// place of a namespace.
    fn add_host_names_of_groups(&mut self) {
        let mut added: HashMap<String, Option<Vec<FirstOfFamily>>> = HashMap::new();
        let mut beginnings = HashSet::new();
        for (group, hosts) in &self.groups {
            let Some(end) = group.find(is_replaced) else { continue };
            beginnings.insert(format!("{}-", &group[..end]));
            let name = group.replace(is_replaced, "-");
            added.entry(name).and_modify(|it| *it = None).or_insert_with(|| Some(hosts.clone()));
        }
        self.groups.retain(|group, _| {
            let is_plain = group.find(is_replaced).is_none();
            !is_plain || !group.match_indices('-').any(|(at, _)| beginnings.contains(&group[..=at]))
        });
        self.groups.extend(added.into_iter().filter_map(|(name, hosts)| Some((name, hosts?))));
    }

    pub(super) fn answer(&self, query: &Query) -> Answer {
        if query.kind == RecordType::PTR {
            return self.name(query);
        }
        let Some(name) = self.inside(&query.name) else {
            // As in Go Nebula, which knows no domain and no other types.
            let host = self.hosts.get(&query.name);
            return host.and_then(|host| of_kind([host], query.kind, PLAIN_TTL)).unwrap_or(Answer::NO_SUCH_NAME);
        };
        // A name that exists must not be denied because of its type (RFC 8020).
        if let Some(host) = self.hosts.get(name) {
            return of_kind([host], query.kind, NAME_TTL).unwrap_or(Answer::NOTHING);
        }
        let group = name.strip_suffix(GROUPS).and_then(|group| self.groups.get(group));
        group.map_or(Answer::NO_SUCH_NAME, |hosts| {
            let start = self.turn.fetch_add(1, Ordering::Relaxed) % hosts.len();
            let some = of_kind(hosts[start..].iter().chain(&hosts[..start]), query.kind, GROUP_TTL);
            some.map_or(Answer::NOTHING, |some| Answer { is_choice: true, ..some })
        })
    }

    /// Whether this is an address of a host.
    pub(super) fn is_host(&self, address: IpAddr) -> bool {
        self.addresses.contains(&address)
    }

    /// An address of the host with this name.
    pub(super) fn address(&self, name: &str) -> Option<IpAddr> {
        self.hosts.get(self.inside(name)?)?.iter().flatten().next().copied()
    }

    fn name(&self, query: &Query) -> Answer {
        let name = query.reverse().and_then(|address| self.names.get(&address));
        name.map_or(Answer::NO_SUCH_NAME, |name| match &self.domain {
            Some(domain) => Answer::name(&format!("{name}.{domain}"), NAME_TTL),
            None => Answer::name(name, NAME_TTL),
        })
    }

    /// A name of the domain, without the domain.
    fn inside<'a>(&self, name: &'a str) -> Option<&'a str> {
        name.strip_suffix(self.domain.as_deref()?)?.strip_suffix('.')
    }
}

/// Whether a host name cannot have this character of a group.
fn is_replaced(it: char) -> bool {
    !it.is_ascii_alphanumeric() && !"-_.".contains(it)
}

/// `None` for a type of which there are no records.
fn of_kind<'a>(hosts: impl IntoIterator<Item = &'a FirstOfFamily>, kind: RecordType, ttl: u32) -> Option<Answer> {
    let family = match kind {
        RecordType::A => 0,
        RecordType::AAAA => 1,
        _ => return None,
    };
    Some(Answer::addresses(hosts.into_iter().filter_map(|host| host[family]).take(MAX_ADDRESSES), ttl))
}

/// What stands between the name of a group and the domain.
const GROUPS: &str = ".groups";
/// Addresses in one answer. A query from a forged source must not make a far longer answer.
const MAX_ADDRESSES: usize = 8;
/// In seconds, as Go Nebula: addresses belong to certificates, so they rarely change.
const PLAIN_TTL: u32 = 3600;
/// In seconds, for names of the domain.
const NAME_TTL: u32 = 60;
/// In seconds: hosts come and go.
const GROUP_TTL: u32 = 10;

#[cfg(test)]
mod tests {
    use super::super::message::tests::query;
    use super::*;

    const A: RecordType = RecordType::A;
    const AAAA: RecordType = RecordType::AAAA;

    fn host(name: &str, addresses: &[&str], groups: &[&str]) -> Host {
        let addresses = addresses.iter().map(|address| address.parse().unwrap()).collect();
        let groups = groups.iter().map(|&group| group.to_owned()).collect();
        Host { name: name.to_owned(), addresses, groups, holds_name: true }
    }

    fn records(domain: Option<&str>) -> Records {
        let one = host("One", &["10.0.0.1", "fd00::1", "10.0.0.9"], &["Web", "team:a"]);
        Records::new(domain.map(str::to_owned), [one, host("two.x", &["10.0.0.2"], &["web"])].into_iter())
    }

    fn addresses(texts: &[&str], ttl: u32) -> Answer {
        let answer = Answer::addresses(texts.iter().map(|text| text.parse().unwrap()), ttl);
        Answer { is_choice: ttl == GROUP_TTL, ..answer }
    }

    #[test]
    fn names_have_the_first_address_of_each_family_and_no_other_types() {
        let records = records(None);
        let answer = |name: &str, kind| records.answer(&query(name, kind));
        assert_eq!(answer("oNe", A), addresses(&["10.0.0.1"], 3600));
        assert_eq!(answer("one", AAAA), addresses(&["fd00::1"], 3600));
        assert_eq!(answer("two.x", AAAA), addresses(&[], 3600));
        assert_eq!(answer("two.x", RecordType::MX), Answer::NO_SUCH_NAME);
        assert_eq!(answer("two", A), Answer::NO_SUCH_NAME);
        assert_eq!(answer("", A), Answer::NO_SUCH_NAME);
        assert_eq!(answer("web.groups", A), Answer::NO_SUCH_NAME);
    }

    #[test]
    fn a_domain_adds_names_and_groups_below_it_and_takes_nothing_away() {
        let records = records(Some("nebula.internal"));
        let answer = |name: &str, kind| records.answer(&query(name, kind));
        assert_eq!(answer("one", A), addresses(&["10.0.0.1"], 3600));
        assert_eq!(answer("ONE.nebula.Internal", A), addresses(&["10.0.0.1"], 60));
        assert_eq!(answer("two.x.nebula.internal", A), addresses(&["10.0.0.2"], 60));
        for wrong in [
            "nebula.internal",
            ".nebula.internal",
            "onenebula.internal",
            "three.nebula.internal",
            "groups.nebula.internal",
        ] {
            assert_eq!(answer(wrong, A), Answer::NO_SUCH_NAME, "{wrong}");
        }
        assert_eq!(answer("one.nebula.internal", RecordType::HTTPS), Answer::NOTHING);
        let (first, second) = (answer("web.groups.nebula.internal", A), answer("web.groups.nebula.internal", A));
        assert_eq!(first, addresses(&["10.0.0.1", "10.0.0.2"], 10));
        assert_eq!(second, addresses(&["10.0.0.2", "10.0.0.1"], 10), "they take turns");
        for team in ["team:a.groups.nebula.internal", "team-a.groups.nebula.internal"] {
            assert_eq!(answer(team, AAAA), addresses(&["fd00::1"], 10));
        }
        assert_eq!(records.address("two.x.nebula.internal"), Some("10.0.0.2".parse().unwrap()));
    }

    #[test]
    fn a_name_that_could_mean_two_groups_means_neither() {
        let hosts = [host("one", &["10.0.0.1"], &["a:b", "a/b", "c:d"])];
        let records = Records::new(Some("n".to_owned()), hosts.into_iter());
        let answer = |name: &str| records.answer(&query(name, A));
        assert_eq!(answer("a-b.groups.n"), Answer::NO_SUCH_NAME);
        assert_eq!(answer("a:b.groups.n"), addresses(&["10.0.0.1"], 10));
        assert_eq!(answer("c-d.groups.n"), addresses(&["10.0.0.1"], 10));
    }

    #[test]
    fn a_group_that_is_called_like_a_namespace_does_not_take_its_name() {
        let evil = host("evil", &["10.0.0.66"], &["ns-shop", "ns-pay", "ns-", "web-tier", "web"]);
        let hosts = [host("one", &["10.0.0.1"], &["ns:shop"]), evil.clone()];
        let records = Records::new(Some("n".to_owned()), hosts.into_iter());
        let answer = |name: &str| records.answer(&query(name, A));
        assert_eq!(answer("ns-shop.groups.n"), addresses(&["10.0.0.1"], 10));
        assert_eq!(answer("ns-pay.groups.n"), Answer::NO_SUCH_NAME, "nobody of that namespace is here now");
        assert_eq!(answer("ns-.groups.n"), Answer::NO_SUCH_NAME);
        for group in ["web-tier", "web"] {
            assert_eq!(answer(&format!("{group}.groups.n")), addresses(&["10.0.0.66"], 10), "{group}");
        }
        let records = Records::new(Some("n".to_owned()), [evil].into_iter());
        let answer = records.answer(&query("ns-shop.groups.n", A));
        assert_eq!(answer, addresses(&["10.0.0.66"], 10), "no group of this network has a colon");
    }

    #[test]
    fn a_name_means_the_lighthouse_itself_or_who_had_it_first() {
        let mut second = host("db", &["10.0.0.66"], &["web"]);
        second.holds_name = false;
        let mut own_name = host("lighthouse", &["10.0.0.67"], &[]);
        let hosts = |more: Host| {
            [host("lighthouse", &["10.0.0.1"], &[]), second.clone(), host("DB", &["10.0.0.7"], &["web"]), more]
        };
        let records = Records::new(Some("n".to_owned()), hosts(own_name.clone()).into_iter());
        let answer = |name: &str, kind| records.answer(&query(name, kind));
        for domain in ["", ".n"] {
            let ttl = if domain.is_empty() { 3600 } else { 60 };
            assert_eq!(answer(&format!("db{domain}"), A), addresses(&["10.0.0.7"], ttl));
            assert_eq!(answer(&format!("lighthouse{domain}"), A), addresses(&["10.0.0.1"], ttl));
        }
        assert_eq!(records.address("db.n"), Some([10, 0, 0, 7].into()), "the certificate, too");
        for other in ["66.0.0.10.in-addr.arpa", "67.0.0.10.in-addr.arpa"] {
            assert_eq!(answer(other, RecordType::PTR), Answer::NO_SUCH_NAME, "{other}");
        }
        assert_eq!(answer("7.0.0.10.in-addr.arpa", RecordType::PTR), Answer::name("db.n", 60));
        assert_eq!(answer("web.groups.n", A).data.len(), 2, "the group is in both certificates");
        own_name.holds_name = false;
        let alone = Records::new(None, [own_name].into_iter());
        assert_eq!(alone.answer(&query("lighthouse", A)), Answer::NO_SUCH_NAME, "who had it comes back in a moment");
    }

    #[test]
    fn every_address_has_a_name_which_is_in_the_domain_if_there_is_one() {
        let name = |records: &Records, name| records.answer(&query(name, RecordType::PTR));
        let reverse = "9.0.0.10.in-addr.arpa";
        assert_eq!(name(&records(None), reverse), Answer::name("one", 60));
        assert_eq!(name(&records(Some("n.internal")), reverse), Answer::name("one.n.internal", 60));
        assert_eq!(name(&records(None), "8.0.0.10.in-addr.arpa"), Answer::NO_SUCH_NAME);
        assert_eq!(name(&records(None), "one"), Answer::NO_SUCH_NAME);
    }

    #[test]
    fn an_answer_has_eight_addresses_at_most() {
        let hosts = (1..=20).map(|n| host(&format!("h{n}"), &[&format!("10.0.0.{n}")], &["web"]));
        let records = Records::new(Some("n".to_owned()), hosts);
        assert_eq!(records.answer(&query("web.groups.n", A)).data.len(), 8);
    }
}
