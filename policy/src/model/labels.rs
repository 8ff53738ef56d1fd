//! What a pod is to policies: its labels, those of its namespace, and its named ports.

use std::collections::BTreeMap;

use super::limits::{MAX_LABELS, MAX_NAMED_PORTS, MAX_STRING};
use super::ports::Protocol;

/// Labels by key.
pub type Labels = BTreeMap<String, String>;

/// A named port of a pod's container.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NamedPort {
    /// Its name.
    pub name: String,
    /// Its protocol.
    pub protocol: Protocol,
    /// Its number.
    pub port: u16,
}

/// All that policies can ask about a pod. Pods with equal profiles have the same identity.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Profile {
    namespace: String,
    namespace_labels: Listed,
    labels: Listed,
    ports: Vec<NamedPort>,
}

/// Labels in the order of their keys. A map of one label takes half a kilobyte, and a cluster has thousands of
/// profiles.
type Listed = Box<[(String, String)]>;

/// Labels, names or ports of a pod are more than [`super::MAX_LABELS`] and its neighbours allow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("labels, names or named ports of the pod are too many or too long for an identity")]
pub struct TooLarge;

impl Profile {
    /// The profile of a pod with these named ports. Of several containers with the same name for a port, all count.
    ///
    /// # Errors
    /// Returns an error if something is too large. Such a pod has no identity ([`crate::program::Who::Unnumbered`]).
    pub fn new(
        namespace: impl Into<String>,
        namespace_labels: Labels,
        labels: Labels,
        mut ports: Vec<NamedPort>,
    ) -> Result<Self, TooLarge> {
        let namespace = namespace.into();
        ports.sort_unstable();
        ports.dedup();
        let both = || namespace_labels.iter().chain(&labels).flat_map(|(key, value)| [key, value]);
        let is_short = |text: &String| text.len() <= MAX_STRING;
        let fits = [&namespace_labels, &labels].iter().all(|labels| labels.len() <= MAX_LABELS)
            && ports.len() <= MAX_NAMED_PORTS
            && both().chain([&namespace]).chain(ports.iter().map(|port| &port.name)).all(is_short);
        if !fits {
            return Err(TooLarge);
        }
        ports.shrink_to_fit();
        let listed = |labels: Labels| labels.into_iter().collect();
        Ok(Self { namespace, namespace_labels: listed(namespace_labels), labels: listed(labels), ports })
    }

    /// Namespace of the pod.
    #[must_use]
    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    /// The value of a label of that namespace.
    #[must_use]
    pub fn namespace_label(&self, key: &str) -> Option<&str> {
        value(&self.namespace_labels, key)
    }

    /// The value of a label of the pod.
    #[must_use]
    pub fn label(&self, key: &str) -> Option<&str> {
        value(&self.labels, key)
    }

    /// All labels of the pod.
    #[must_use]
    pub fn labels(&self) -> Labels {
        self.labels.iter().cloned().collect()
    }

    /// All labels of its namespace.
    #[must_use]
    pub fn namespace_labels(&self) -> Labels {
        self.namespace_labels.iter().cloned().collect()
    }

    /// Named ports, in order.
    #[must_use]
    pub fn ports(&self) -> &[NamedPort] {
        &self.ports
    }
}

fn value<'a>(labels: &'a Listed, key: &str) -> Option<&'a str> {
    let found = labels.binary_search_by(|(other, _)| other.as_str().cmp(key)).ok()?;
    labels.get(found).map(|(_, value)| value.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_profile_has_the_labels_that_it_was_given() {
        let labels = |all: &[(&str, &str)]| -> Labels {
            all.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
        };
        let pod = labels(&[("tier", "b"), ("app", "web"), ("zone", "")]);
        let profile = Profile::new("shop", labels(&[("team", "x")]), pod, vec![]).unwrap();
        let of_pod = ["app", "tier", "zone", "team", "a"].map(|key| profile.label(key));
        assert_eq!(of_pod, [Some("web"), Some("b"), Some(""), None, None]);
        assert_eq!(["team", "app"].map(|key| profile.namespace_label(key)), [Some("x"), None]);
    }

    #[test]
    fn a_profile_is_bounded_and_does_not_depend_on_the_order_of_ports() {
        let labels = |n: usize| -> Labels { (0..n).map(|n| (n.to_string(), String::new())).collect() };
        let port = |port| NamedPort { name: "web".into(), protocol: Protocol::Tcp, port };
        let profile = |ports| Profile::new("shop", labels(MAX_LABELS), labels(MAX_LABELS), ports);
        assert_eq!(profile(vec![port(1), port(2), port(1)]), profile(vec![port(2), port(1)]));
        assert_eq!(profile(vec![port(1)]).unwrap().ports(), [port(1)]);
        assert_eq!(profile((0..=MAX_NAMED_PORTS as u16).map(port).collect()), Err(TooLarge));
        assert_eq!(Profile::new("shop", labels(MAX_LABELS + 1), labels(0), vec![]), Err(TooLarge));
        assert_eq!(Profile::new("shop", labels(0), labels(MAX_LABELS + 1), vec![]), Err(TooLarge));
        let long = Labels::from([("key".into(), "v".repeat(MAX_STRING + 1))]);
        assert_eq!(Profile::new("shop", labels(0), long, vec![]), Err(TooLarge));
    }
}
