//! What policies can ask about a pod. Pods of one Deployment say the same, so each set is in memory once.

use std::collections::{BTreeMap, HashSet};
use std::hash::Hash;
use std::sync::Arc;

use nebula_cni_policy::model::{Labels, MAX_LABELS, MAX_NAMED_PORTS, MAX_STRING, NamedPort, Protocol};
use serde::Deserialize;

/// A container of a pod.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct Container {
    restart_policy: String,
    ports: Vec<Port>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Port {
    name: String,
    container_port: u16,
    protocol: String,
}

/// Labels as one string, which takes a quarter of the memory of a map.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub(crate) struct Packed(Box<str>);

impl Packed {
    /// `None` if they are more or longer than an identity can have.
    pub(crate) fn of(labels: &BTreeMap<String, String>) -> Option<Self> {
        let fits = |text: &String| text.len() <= MAX_STRING && !text.contains(END);
        if labels.len() > MAX_LABELS || !labels.iter().all(|(key, value)| fits(key) && fits(value)) {
            return None;
        }
        let mut packed = String::new();
        for text in labels.iter().flat_map(|(key, value)| [key, value]) {
            packed.push_str(text);
            packed.push(END);
        }
        Some(Self(packed.into()))
    }

    /// Those whose keys are wanted.
    pub(crate) fn only(&self, is_wanted: impl Fn(&str) -> bool) -> Labels {
        let mut texts = self.0.split_terminator(END);
        let pairs = std::iter::from_fn(|| Some((texts.next()?, texts.next()?)));
        pairs.filter(|(key, _)| is_wanted(key)).map(|(key, value)| (key.to_owned(), value.to_owned())).collect()
    }
}

/// What policies can ask about a pod, but for the labels of its namespace.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Described {
    pub(crate) namespace: Arc<str>,
    /// `None` if they are too many or too long: such a pod gets no number, so its peers refuse it.
    pub(crate) labels: Option<Packed>,
    pub(crate) ports: Arc<[NamedPort]>,
}

impl Described {
    /// `init` are the init containers, of which those with the restart policy `Always` go on running.
    pub(crate) fn new<'a>(
        namespace: &str,
        labels: Option<&BTreeMap<String, String>>,
        containers: impl IntoIterator<Item = &'a Container>,
        init: impl IntoIterator<Item = &'a Container>,
    ) -> Self {
        let running = init.into_iter().filter(|container| container.restart_policy == "Always");
        let all = containers.into_iter().chain(running).flat_map(|container| &container.ports);
        let named = all.filter(|port| !port.name.is_empty() && port.name.len() <= MAX_STRING).filter_map(|port| {
            let protocol = match port.protocol.as_str() {
                "" => Protocol::Tcp,
                name => Protocol::from_name(name)?,
            };
            Some(NamedPort { name: port.name.clone(), protocol, port: port.container_port })
        });
        // One more than an identity can have, so that it gets none.
        let mut ports: Vec<NamedPort> = named.take(MAX_NAMED_PORTS + 1).collect();
        ports.sort_unstable();
        ports.dedup();
        let labels = labels.map_or_else(|| Some(Packed::default()), Packed::of);
        Self { namespace: namespace.into(), labels, ports: ports.into() }
    }
}

/// Makes each set be in memory once, and of sets that differ in their labels only what is the same.
#[derive(Debug, Default)]
pub(crate) struct Descriptions {
    all: HashSet<Arc<Described>>,
    namespaces: HashSet<Arc<str>>,
    ports: HashSet<Arc<[NamedPort]>>,
    /// How many there are when those that nobody has any more are looked for.
    limit: usize,
}

impl Descriptions {
    pub(crate) fn share(&mut self, mut described: Described) -> Arc<Described> {
        if let Some(known) = self.all.get(&described) {
            return Arc::clone(known);
        }
        if self.all.len() >= self.limit {
            self.all.retain(|known| Arc::strong_count(known) > 1);
            self.namespaces.retain(|known| Arc::strong_count(known) > 1);
            self.ports.retain(|known| Arc::strong_count(known) > 1);
            self.limit = (2 * self.all.len()).max(MIN_LIMIT);
        }
        once(&mut self.namespaces, &mut described.namespace);
        once(&mut self.ports, &mut described.ports);
        let described = Arc::new(described);
        self.all.insert(Arc::clone(&described));
        described
    }
}

/// Replaces a value by the equal one that is known.
fn once<T: Hash + Eq + ?Sized>(known: &mut HashSet<Arc<T>>, value: &mut Arc<T>) {
    match known.get(value) {
        Some(known) => *value = Arc::clone(known),
        None => drop(known.insert(Arc::clone(value))),
    }
}

/// No key and no value of Kubernetes has it.
const END: char = '\0';
const MIN_LIMIT: usize = 256;

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn labels(all: &[(&str, &str)]) -> BTreeMap<String, String> {
        all.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn packed_labels_are_those_that_were_given_and_bounded() {
        let all = labels(&[("app", "web"), ("empty", ""), ("tier", "a=b")]);
        assert_eq!(Packed::of(&all).unwrap().only(|_| true), all);
        assert_eq!(Packed::of(&all).unwrap().only(|key| key == "empty"), labels(&[("empty", "")]));
        assert!(Packed::of(&labels(&[])).unwrap().only(|_| true).is_empty());
        assert_eq!(Packed::of(&labels(&[("a", "b\0c")])), None);
        assert_eq!(Packed::of(&labels(&[("a", &"b".repeat(MAX_STRING + 1))])), None);
        assert_eq!(Packed::of(&(0..=MAX_LABELS).map(|n| (n.to_string(), String::new())).collect()), None);
    }

    #[test]
    fn named_ports_are_those_of_containers_that_go_on_running() {
        let container = |restart: &str, name: &str, port: u16, protocol: &str| -> Container {
            let ports = json!([{"name": name, "containerPort": port, "protocol": protocol}, {"containerPort": 1}]);
            serde_json::from_value(json!({"restartPolicy": restart, "ports": ports})).unwrap()
        };
        let main = [container("", "web", 80, ""), container("", "dns", 53, "UDP"), container("", "x", 1, "QUIC")];
        let init = [container("", "once", 7, ""), container("Always", "sidecar", 9, "TCP")];
        let described = Described::new("shop", None, &main, &init);
        let shown: Vec<(&str, Protocol, u16)> =
            described.ports.iter().map(|port| (port.name.as_str(), port.protocol, port.port)).collect();
        assert_eq!(shown, [("dns", Protocol::Udp, 53), ("sidecar", Protocol::Tcp, 9), ("web", Protocol::Tcp, 80)]);
    }

    #[test]
    fn equal_pods_share_one_description_and_those_of_nobody_are_forgotten() {
        let mut all = Descriptions::default();
        let mut of = |value: usize| {
            let labels = labels(&[("n", &value.to_string())]);
            all.share(Described::new("shop", Some(&labels), [], []))
        };
        let kept = of(0);
        assert!(Arc::ptr_eq(&kept, &of(0)) && Arc::ptr_eq(&kept.ports, &of(1).ports));
        for n in 1..10 * MIN_LIMIT {
            drop(of(n));
        }
        assert!(Arc::ptr_eq(&kept, &of(0)));
        assert!(all.all.len() <= MIN_LIMIT + 1, "{}", all.all.len());
    }
}
