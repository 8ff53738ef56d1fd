//! Which labels and names of ports the policies of this node ask for. Whatever nobody asks for makes no two pods
//! differ: a cluster of ten thousand pods has a few hundred sets of labels that count.

use std::collections::{BTreeMap, BTreeSet};

use nebula_cni_policy::model::{
    ClusterNetworkPolicy, ClusterPeer, Direction, Namespaces, NetworkPolicy, Peer, PodSelector, PortMatch, Requirement,
    Selector,
};

/// What is mentioned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    /// The key of a label of pods.
    Pods,
    /// The key of a label of namespaces.
    Namespaces,
    /// The name of a port.
    Ports,
    /// Nodes, by any label.
    Nodes,
}

/// What one policy mentions, each once. A list, because there are thousands of policies and a set takes more memory.
#[derive(Debug, Default)]
pub(super) struct Mentioned(Box<[(Kind, Box<str>)]>);

/// What of a policy has been read so far.
#[derive(Default)]
struct Found<'a>(BTreeSet<(Kind, &'a str)>);

impl Mentioned {
    pub(super) fn by_policy(policy: &NetworkPolicy) -> Self {
        let mut found = Found::default();
        found.labels(Kind::Pods, &policy.subject);
        for rule in Direction::ALL.iter().flat_map(|direction| policy.rules(*direction)) {
            for peer in &rule.peers {
                if let Peer::Pods(pods) = peer {
                    found.pods(pods);
                }
            }
            found.ports(&rule.ports);
        }
        found.all()
    }

    pub(super) fn by_cluster_policy(policy: &ClusterNetworkPolicy) -> Self {
        let mut found = Found::default();
        found.pods(&policy.subject);
        for rule in Direction::ALL.iter().flat_map(|direction| policy.rules(*direction)) {
            for peer in &rule.peers {
                match peer {
                    ClusterPeer::Pods(pods) => found.pods(pods),
                    ClusterPeer::Nodes(_) => drop(found.0.insert((Kind::Nodes, ""))),
                    ClusterPeer::Networks(_) | ClusterPeer::DomainNames(_) | ClusterPeer::Unreadable => {}
                }
            }
            found.ports(&rule.protocols);
        }
        found.all()
    }
}

impl<'a> Found<'a> {
    fn all(self) -> Mentioned {
        Mentioned(self.0.into_iter().map(|(kind, name)| (kind, name.into())).collect())
    }

    fn pods(&mut self, selector: &'a PodSelector) {
        if let Namespaces::Matching(namespaces) = &selector.namespaces {
            self.labels(Kind::Namespaces, namespaces);
        }
        self.labels(Kind::Pods, &selector.pods);
    }

    fn labels(&mut self, kind: Kind, selector: &'a Selector) {
        self.0.extend(selector.requirements().iter().map(|requirement| {
            let (Requirement::In(key, _)
            | Requirement::NotIn(key, _)
            | Requirement::Exists(key)
            | Requirement::DoesNotExist(key)) = requirement;
            (kind, key.as_str())
        }));
    }

    fn ports(&mut self, ports: &'a [PortMatch]) {
        self.0.extend(ports.iter().filter_map(|port| match port {
            PortMatch::Name { name, .. } => Some((Kind::Ports, name.as_str())),
            PortMatch::Protocol(_) | PortMatch::Ports { .. } | PortMatch::Unreadable => None,
        }));
    }
}

/// What all policies of this node mention, and how many of them do.
#[derive(Debug, Default)]
pub(super) struct Mentions {
    counts: BTreeMap<Kind, BTreeMap<String, usize>>,
    /// Another number whenever a pod may have other labels that count.
    version: u64,
}

impl Mentions {
    pub(super) fn add(&mut self, mentioned: &Mentioned) {
        for (kind, name) in &mentioned.0 {
            let count = self.counts.entry(*kind).or_default().entry(String::from(&**name)).or_default();
            *count += 1;
            self.version += u64::from(*count == 1);
        }
    }

    pub(super) fn remove(&mut self, mentioned: &Mentioned) {
        for (kind, name) in &mentioned.0 {
            let Some(names) = self.counts.get_mut(kind) else { continue };
            let Some(count) = names.get_mut(&**name) else { continue };
            *count -= 1;
            if *count == 0 {
                names.remove(&**name);
                self.version += 1;
            }
        }
    }

    pub(super) const fn version(&self) -> u64 {
        self.version
    }

    pub(super) fn has_label(&self, key: &str) -> bool {
        self.has(Kind::Pods, key)
    }

    pub(super) fn has_namespace_label(&self, key: &str) -> bool {
        self.has(Kind::Namespaces, key)
    }

    pub(super) fn has_port(&self, name: &str) -> bool {
        self.has(Kind::Ports, name)
    }

    pub(super) fn has_nodes(&self) -> bool {
        self.has(Kind::Nodes, "")
    }

    fn has(&self, kind: Kind, name: &str) -> bool {
        self.counts.get(&kind).is_some_and(|names| names.contains_key(name))
    }
}

#[cfg(test)]
mod tests {
    use nebula_cni_policy::model::{Action, ClusterRule, ClusterTier, Rule};

    use super::*;

    #[test]
    fn every_place_of_a_policy_that_names_a_label_or_port_counts_until_the_last_policy_is_gone() {
        let pods = |namespace: &str, app: &str| PodSelector {
            namespaces: Namespaces::Matching(Selector::new([Some(Requirement::Exists(namespace.to_owned()))])),
            pods: Selector::new([Some(Requirement::NotIn(app.to_owned(), vec!["x".to_owned()]))]),
        };
        let named = |name: &str| PortMatch::Name { protocol: None, name: name.to_owned() };
        let policy = NetworkPolicy {
            subject: Selector::new([Some(Requirement::DoesNotExist("subject".to_owned()))]),
            ingress: vec![Rule { peers: vec![Peer::Pods(pods("space", "peer"))], ports: vec![named("web")] }],
            ..NetworkPolicy::new("shop", "a")
        };
        let rule = ClusterRule {
            name: String::new(),
            action: Action::Deny,
            peers: vec![ClusterPeer::Pods(pods("space", "other")), ClusterPeer::Nodes(Selector::everything())],
            protocols: vec![named("db")],
        };
        let wide = ClusterNetworkPolicy {
            name: "b".to_owned(),
            is_audited: false,
            tier: ClusterTier::Admin,
            priority: 0,
            subject: pods("team", "wide"),
            ingress: vec![],
            egress: vec![rule],
        };
        let (mut mentions, one, two) =
            (Mentions::default(), Mentioned::by_policy(&policy), Mentioned::by_cluster_policy(&wide));
        mentions.add(&one);
        assert!(["subject", "peer"].iter().all(|key| mentions.has_label(key)) && !mentions.has_label("space"));
        assert!(mentions.has_namespace_label("space") && !mentions.has_namespace_label("team"));
        assert!(mentions.has_port("web") && !mentions.has_port("db") && !mentions.has_nodes());
        mentions.add(&two);
        assert!(["wide", "other"].iter().all(|key| mentions.has_label(key)));
        assert!(mentions.has_namespace_label("team") && mentions.has_port("db") && mentions.has_nodes());
        let version = mentions.version();
        mentions.add(&two);
        mentions.remove(&two);
        assert_eq!(mentions.version(), version, "nothing new is mentioned");
        mentions.remove(&one);
        assert!(mentions.version() > version && !mentions.has_label("peer"));
        assert!(mentions.has_namespace_label("space"), "the other one mentions it, too");
    }
}
