//! From which ranges each node gives addresses to its pods.

use std::collections::BTreeMap;
use std::net::IpAddr;

use ipnet::IpNet;

use crate::table::judgement::first_host;
use crate::table::nodes::NodeFacts;

/// All nodes with their ranges. Where two nodes have parts of the same range, the older one has it.
#[derive(Debug, Default)]
pub(crate) struct NodeRanges(BTreeMap<String, Ranges>);

#[derive(Debug, PartialEq, Eq)]
struct Ranges {
    all: Vec<IpNet>,
    created: i64,
}

impl NodeRanges {
    /// Takes over what the API server shows of a node, and returns whether that is news: most changes of a node are
    /// signs of life.
    pub(super) fn put(&mut self, name: String, facts: &NodeFacts) -> bool {
        let now = Ranges { all: facts.ranges().to_vec(), created: facts.created() };
        let is_news = self.0.get(&name) != Some(&now);
        self.0.insert(name, now);
        is_news
    }

    /// The node is gone. Returns whether it was there.
    pub(super) fn remove(&mut self, name: &str) -> bool {
        self.0.remove(name).is_some()
    }

    /// The ranges of a node.
    ///
    /// # Errors
    /// Returns why it has none, as a sentence.
    pub(super) fn of(&self, name: &str) -> Result<Vec<IpNet>, String> {
        let known = self.0.get(name).ok_or_else(|| format!("the API server knows no node {name}"))?;
        if known.all.is_empty() {
            return Err(format!("node {name} has no range of addresses for its pods (spec.podCIDRs)"));
        }
        match known.all.iter().find_map(|range| Some((range, self.owner_before(name, range)?))) {
            Some((range, owner)) => Err(format!("the range {range} of node {name} is of node {owner} as well")),
            None => Ok(known.all.clone()),
        }
    }

    /// The ranges of all nodes but `name`, each with the overlay address of its node's gateway.
    pub(super) fn elsewhere(&self, name: &str) -> impl Iterator<Item = (IpNet, IpAddr)> {
        let others = self.0.iter().filter(move |(other, _)| *other != name);
        others.flat_map(move |(other, known)| {
            let free = known.all.iter().filter(move |range| self.owner_before(other, range).is_none());
            free.filter_map(|range| {
                let is_v4 = range.addr().is_ipv4();
                let first = known.all.iter().find(|first| first.addr().is_ipv4() == is_v4)?;
                Some((*range, first_address(*first)))
            })
        })
    }

    /// An older node that has addresses of a range of `name`, too.
    fn owner_before(&self, name: &str, range: &IpNet) -> Option<&str> {
        let created = self.0.get(name)?.created;
        let meets = |other: &IpNet| other.contains(range) || range.contains(other);
        let is_older = |other: &str, known: &Ranges| (known.created, other) < (created, name);
        let mut others = self.0.iter().filter(|(_, known)| known.all.iter().any(meets));
        others.find(|(other, known)| is_older(other, known)).map(|(other, _)| other.as_str())
    }
}

/// The address of the node itself in a range of its pods: the CA gives it to the node's gateway.
pub(super) fn first_address(range: IpNet) -> IpAddr {
    first_host(range).unwrap_or_else(|| range.network())
}

#[cfg(test)]
pub(super) mod tests {
    use serde_json::json;

    use super::*;

    /// A node that was made on this day.
    pub(in crate::network) fn put(nodes: &mut NodeRanges, name: &str, day: u32, ranges: &[&str]) {
        let node = json!({"metadata": {"name": name, "creationTimestamp": format!("2026-01-{day:02}T00:00:00Z")},
            "spec": {"podCIDRs": ranges}});
        nodes.put(name.to_owned(), &NodeFacts::of(&serde_json::from_value(node).unwrap()));
    }

    #[test]
    fn a_node_has_its_ranges_and_others_are_behind_their_gateways() {
        let mut nodes = NodeRanges::default();
        put(&mut nodes, "n1", 1, &["10.244.1.0/24", "fd00:244:0:1::/64"]);
        put(&mut nodes, "n2", 2, &["10.244.2.0/24", "10.244.9.0/24", "fd00:244:0:2::/64"]);
        put(&mut nodes, "n3", 3, &[]);
        assert_eq!(nodes.of("n1").unwrap().len(), 2);
        assert!(nodes.of("n3").unwrap_err().contains("spec.podCIDRs"));
        assert!(nodes.of("n4").unwrap_err().contains("knows no node n4"));
        let elsewhere: Vec<String> = nodes.elsewhere("n1").map(|(range, via)| format!("{range} {via}")).collect();
        let expected = ["10.244.2.0/24 10.244.2.1", "10.244.9.0/24 10.244.2.1", "fd00:244:0:2::/64 fd00:244:0:2::1"];
        assert_eq!(elsewhere, expected);
        nodes.remove("n2");
        assert_eq!(nodes.elsewhere("n1").count(), 0);
    }

    #[test]
    fn a_range_that_two_nodes_have_is_the_older_ones() {
        let mut nodes = NodeRanges::default();
        put(&mut nodes, "old", 1, &["10.244.1.0/24"]);
        put(&mut nodes, "new", 2, &["10.244.1.128/25", "10.244.2.0/24"]);
        assert!(nodes.of("old").is_ok());
        assert!(nodes.of("new").unwrap_err().contains("node old"));
        let elsewhere: Vec<String> = nodes.elsewhere("n1").map(|(range, _)| range.to_string()).collect();
        assert_eq!(elsewhere, ["10.244.2.0/24", "10.244.1.0/24"]);
    }
}
