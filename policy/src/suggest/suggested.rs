//! Makes policies of flows: for each set of labels one that allows its pods what they were seen to do, and nothing
//! else.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use nebula_cni_contract::agent_api::is_name;
use nebula_cni_contract::hash::fnv1a;
use nebula_cni_contract::seen::{Flow, Peer, Seen, StableLabels};
use serde_json::{Value, json};

use super::Suggestion;
use crate::model::{MAX_REQUIREMENTS, MAX_RULES};

/// A NetworkPolicy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Suggested {
    pub(super) namespace: String,
    pub(super) name: String,
    pub(super) subject: Selector,
    /// For ingress and egress.
    pub(super) rules: [Vec<Rule>; 2],
    /// What was seen and cannot be allowed by a policy, or by none that allows nothing else.
    pub(super) left_out: Vec<String>,
    /// Namespaces all of whose pods it allows, since nobody says which of them were seen.
    pub(super) wider: BTreeSet<String>,
}

/// Selects pods of one namespace; without labels all of them.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Selector {
    pub(super) labels: StableLabels,
    /// Labels that other pods have in addition, and these have not.
    pub(super) absent: BTreeSet<String>,
}

/// Allows one peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Rule {
    pub(super) end: End,
    /// By protocol and port.
    pub(super) ports: BTreeMap<(&'static str, u16), Count>,
}

/// Whom a rule allows.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum End {
    Pods {
        /// `None`: that of the policy.
        namespace: Option<String>,
        selector: Selector,
    },
    Address(IpAddr),
}

/// How often something was seen, and when last (in seconds since 1970). 0 times: it is allowed all the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Count {
    pub(super) flows: u64,
    pub(super) last: u64,
}

impl Suggestion {
    /// The policies that allow what was seen since then.
    #[must_use]
    pub fn of(seen: &Seen, since: u64) -> Self {
        Maker(seen).suggestion(since)
    }
}

/// Makes policies of what was seen.
struct Maker<'a>(&'a Seen);

impl Maker<'_> {
    fn suggestion(&self, since: u64) -> Suggestion {
        let mut by_pods: BTreeMap<&StableLabels, Vec<&Flow>> = BTreeMap::new();
        for flow in self.0.flows.iter().filter(|flow| flow.last >= since) {
            by_pods.entry(&flow.labels).or_default().push(flow);
        }
        let (mut names, sets) = (BTreeSet::new(), by_pods.len());
        let policies = by_pods.into_iter().filter_map(|(labels, flows)| {
            let mut policy = self.policy(labels, &flows)?;
            // Labels can be made up so that their sums are equal.
            let free = (1..).map(|n| if n == 1 { policy.name.clone() } else { format!("{}-{n}", policy.name) });
            policy.name = free.into_iter().find(|name| names.insert(name.clone()))?;
            Some(policy)
        });
        let policies: Vec<Suggested> = policies.collect();
        let without = sets - policies.len();
        Suggestion { policies, without }
    }

    fn policy(&self, labels: &StableLabels, flows: &[&Flow]) -> Option<Suggested> {
        let subject = self.selector(&self.0.namespace, labels)?;
        let mut rules: [BTreeMap<End, BTreeMap<_, Count>>; 2] = Default::default();
        let mut left_out: BTreeMap<String, Count> = BTreeMap::new();
        let mut note = |what: String, flow: &Flow| left_out.entry(what).or_default().add(flow.flows, flow.last);
        let mut wider = BTreeSet::new();
        for flow in flows {
            let side = usize::from(flow.is_egress);
            let way = if flow.is_egress { "to" } else { "from" };
            match (self.end(&flow.peer), protocol(flow.protocol)) {
                (Err(why), _) => note(format!("{way} {why}"), flow),
                // A rule for it would allow all ports as well.
                (Ok(_), None) => note(format!("protocol {} {way} {}", flow.protocol, shown(&flow.peer)), flow),
                (Ok(end), Some(_)) if rules[side].len() >= MAX_RULES && !rules[side].contains_key(&end) => {
                    note(format!("{way} further peers: a policy has room for {MAX_RULES}"), flow);
                }
                (Ok(end), Some(protocol)) => {
                    wider.extend(without_labels(&flow.peer));
                    let ports = rules[side].entry(end).or_default();
                    ports.entry((protocol, flow.port)).or_default().add(flow.flows, flow.last);
                }
            }
        }
        if let Some(dns) = self.0.dns.as_ref() {
            wider.extend(without_labels(dns));
            let ports = rules[1].entry(self.end_of_dns(dns)).or_default();
            for protocol in ["TCP", "UDP"] {
                ports.entry((protocol, DNS)).or_default();
            }
        }
        let rules = rules.map(|rules| rules.into_iter().map(|(end, ports)| Rule { end, ports }).collect());
        let left_out = left_out.into_iter().map(|(what, count)| format!("{} flow(s) {what}", count.flows)).collect();
        let wider = wider.into_iter().map(str::to_owned).collect();
        Some(Suggested { namespace: self.0.namespace.clone(), name: name(labels), subject, rules, left_out, wider })
    }

    fn end(&self, peer: &Peer) -> Result<End, &'static str> {
        match peer {
            Peer::Pod { namespace, labels } => Ok(End::Pods {
                selector: self.selector(namespace, labels).ok_or("pods with more labels than a selector can name")?,
                namespace: (*namespace != self.0.namespace).then(|| namespace.clone()),
            }),
            Peer::Address(address) => Ok(End::Address(*address)),
            Peer::Gone(_) => Err("pods that are gone by now"),
            Peer::Namespace(namespace) => Ok(self.all_of(namespace)),
        }
    }

    /// Its labels are those that its Service selects by, and its pods may have more.
    fn end_of_dns(&self, dns: &Peer) -> End {
        match dns {
            Peer::Pod { namespace, labels } => End::Pods {
                selector: Selector { labels: labels.clone(), absent: BTreeSet::new() },
                namespace: (*namespace != self.0.namespace).then(|| namespace.clone()),
            },
            Peer::Address(address) | Peer::Gone(address) => End::Address(*address),
            Peer::Namespace(namespace) => self.all_of(namespace),
        }
    }

    fn all_of(&self, namespace: &str) -> End {
        End::Pods {
            selector: Selector::default(),
            namespace: (*namespace != self.0.namespace).then(|| namespace.to_owned()),
        }
    }

    /// Selects the pods with exactly these labels, of those that are known: a selector of labels alone would also
    /// select pods that have more of them.
    fn selector(&self, namespace: &str, labels: &StableLabels) -> Option<Selector> {
        let others = self.0.known.get(namespace).into_iter().flatten();
        let has_all = |other: &&StableLabels| labels.iter().all(|(key, value)| other.get(key) == Some(value));
        let mut absent = BTreeSet::new();
        for other in others.filter(has_all) {
            let mut more = other.keys().filter(|key| !labels.contains_key(*key)).peekable();
            let first = more.peek().copied();
            if let Some(key) = first.filter(|_| !more.any(|key| absent.contains(key))) {
                absent.insert(key.clone());
            }
        }
        (labels.len() + absent.len() <= MAX_REQUIREMENTS).then(|| Selector { labels: labels.clone(), absent })
    }
}

impl Count {
    fn add(&mut self, flows: u64, last: u64) {
        self.flows = self.flows.saturating_add(flows);
        self.last = self.last.max(last);
    }
}

impl Suggested {
    /// As the API server takes it.
    #[must_use]
    pub fn object(&self) -> Value {
        let [ingress, egress] = &self.rules;
        let rules = |key: &str, rules: &[Rule]| -> Vec<Value> {
            let port = |(protocol, port): &(&str, u16)| json!({"protocol": protocol, "port": port});
            let ports = |rule: &Rule| rule.ports.keys().map(port).collect::<Vec<_>>();
            rules.iter().map(|rule| json!({key: [rule.end.object()], "ports": ports(rule)})).collect()
        };
        json!({
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": {"name": self.name, "namespace": self.namespace},
            "spec": {
                "podSelector": self.subject.object(),
                "policyTypes": ["Ingress", "Egress"],
                "ingress": rules("from", ingress),
                "egress": rules("to", egress),
            },
        })
    }
}

impl Selector {
    fn object(&self) -> Value {
        let mut object = json!({});
        if !self.labels.is_empty() {
            object["matchLabels"] = json!(self.labels);
        }
        if !self.absent.is_empty() {
            let absent = self.absent.iter().map(|key| json!({"key": key, "operator": "DoesNotExist"}));
            object["matchExpressions"] = absent.collect();
        }
        object
    }
}

impl End {
    fn object(&self) -> Value {
        match self {
            Self::Pods { namespace: None, selector } => json!({"podSelector": selector.object()}),
            Self::Pods { namespace: Some(namespace), selector } => json!({
                "namespaceSelector": {"matchLabels": {NAME_OF_NAMESPACE: namespace}},
                "podSelector": selector.object(),
            }),
            Self::Address(address) => json!({"ipBlock": {"cidr": ipnet::IpNet::from(*address).to_string()}}),
        }
    }
}

/// Valid and stable, whatever the labels are.
fn name(labels: &StableLabels) -> String {
    let app = ["app.kubernetes.io/name", "app", "k8s-app"].iter().find_map(|key| labels.get(*key));
    let is_fit = |text: &&String| is_name(text) && text.len() <= 63 && !text.ends_with(['.', '-']);
    let app = app.filter(is_fit).map_or("pods", String::as_str);
    let texts: Vec<&str> = labels.iter().flat_map(|(key, value)| [key.as_str(), "=", value.as_str(), ","]).collect();
    format!("seen-{app}-{:08x}", fnv1a(&texts) as u32)
}

/// As the API names it; `None` for protocols without ports.
const fn protocol(number: u8) -> Option<&'static str> {
    match number {
        6 => Some("TCP"),
        17 => Some("UDP"),
        132 => Some("SCTP"),
        _ => None,
    }
}

fn shown(peer: &Peer) -> String {
    match peer {
        Peer::Pod { namespace, labels } => {
            let labels: Vec<String> = labels.iter().map(|(key, value)| format!("{key}={value}")).collect();
            format!("pods of {namespace} with {}", labels.join(","))
        }
        Peer::Address(address) | Peer::Gone(address) => address.to_string(),
        Peer::Namespace(namespace) => format!("pods of {namespace}"),
    }
}

/// The namespace of a pod whose labels are not known.
fn without_labels(peer: &Peer) -> Option<&str> {
    if let Peer::Namespace(namespace) = peer { Some(namespace) } else { None }
}

/// The label that the API server gives each namespace.
pub(super) const NAME_OF_NAMESPACE: &str = "kubernetes.io/metadata.name";
const DNS: u16 = 53;

#[cfg(test)]
mod tests;
