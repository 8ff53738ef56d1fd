//! Who speaks with whom, and who is refused: flow records, summed up by namespace, outside host and identity.

use std::collections::HashMap;
use std::hash::Hash;

use nebula_cni_contract::flow_records::{Amount, FlowEnd, FlowRecord};
use serde::Serialize;

use super::held::Kept;

/// What a flow counts for in the topology.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Kind {
    /// Of pods.
    Namespace,
    /// A machine with a certificate that is no pod.
    Host,
    /// Addresses of which no certificate is known.
    Unnamed,
}

/// One side of the topology.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
pub(super) struct Party<'a> {
    kind: Kind,
    name: &'a str,
}

/// An end of flows.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
struct Identity<'a> {
    #[serde(flatten)]
    party: Party<'a>,
    /// `namespace/name` of a pod, the name of a certificate, or an address.
    identity: String,
}

/// What became of flows.
#[derive(Debug, Default, Clone, Serialize)]
pub(super) struct Sum {
    flows: u64,
    bytes: u64,
    /// Flows that were refused, and kinds of packets.
    refused: u64,
    refused_packets: u64,
    /// Flows that policies in audit would refuse.
    audit: u64,
    last_ms: u64,
    /// What each of both ends recorded: most flows inside the cluster are recorded by both, and count once.
    #[serde(skip)]
    recorded: [Side; 2],
}

#[derive(Debug, Default, Clone, Copy)]
struct Side {
    flows: u64,
    bytes: u64,
}

/// Sums, the most refused first and then those with the most bytes.
#[derive(Debug, Serialize)]
pub(super) struct Sums<T> {
    rows: Vec<Row<T>>,
    /// Further ones.
    left_out: usize,
}

#[derive(Debug, Serialize)]
struct Row<T> {
    #[serde(flatten)]
    of: T,
    #[serde(flatten)]
    sum: Sum,
}

/// Source and destination of flows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
pub(super) struct Pair<'a> {
    from: Party<'a>,
    to: Party<'a>,
}

impl<'a> Party<'a> {
    pub(super) fn of(end: &'a FlowEnd) -> Self {
        let pod = end.pod.as_deref().and_then(|pod| pod.split_once('/'));
        if let Some((namespace, _)) = pod.or_else(|| pod_of_name(end.name.as_deref()?)) {
            return Self { kind: Kind::Namespace, name: clipped(namespace) };
        }
        match &end.name {
            Some(name) => Self { kind: Kind::Host, name: clipped(name) },
            None => Self { kind: Kind::Unnamed, name: "" },
        }
    }

    /// Whether it is the one that a query names: `namespace/NAME`, `host/NAME` or `unnamed/`.
    pub(super) fn is(&self, text: &str) -> bool {
        let kind = match self.kind {
            Kind::Namespace => "namespace",
            Kind::Host => "host",
            Kind::Unnamed => "unnamed",
        };
        text.split_once('/') == Some((kind, self.name))
    }
}

/// Namespace and name of the pod whose certificate has this name, unless the CA gives others.
fn pod_of_name(name: &str) -> Option<(&str, &str)> {
    let (pod, namespace) = name.strip_suffix(".pod")?.rsplit_once('.')?;
    (!pod.is_empty() && !namespace.is_empty()).then_some((namespace, pod))
}

impl<'a> Identity<'a> {
    fn of(end: &'a FlowEnd) -> Self {
        let of_name = end.name.as_deref().and_then(pod_of_name).map(|(namespace, pod)| format!("{namespace}/{pod}"));
        let known = end.pod.as_deref().map(|pod| clipped(pod).to_owned()).or(of_name);
        let name = || end.name.as_deref().map(|name| clipped(name).to_owned());
        let address = || end.address.map_or_else(|| "unknown".to_owned(), |address| address.to_string());
        Self { party: Party::of(end), identity: known.or_else(name).unwrap_or_else(address) }
    }
}

impl Sum {
    /// Adds a record that the end `side` wrote, of two.
    fn add(&mut self, record: &FlowRecord, side: usize) {
        let Amount { packets, .. } = record.forward;
        self.last_ms = self.last_ms.max(record.last_ms);
        if record.verdict == "refused" {
            // The end that refuses is the only one that records it.
            self.refused += 1;
            self.refused_packets = self.refused_packets.saturating_add(packets);
            return;
        }
        self.audit += u64::from(record.verdict == "audit");
        let recorded = &mut self.recorded[side];
        recorded.flows += 1;
        recorded.bytes = recorded.bytes.saturating_add(record.forward.bytes).saturating_add(record.reply.bytes);
        self.flows = self.flows.max(recorded.flows);
        self.bytes = self.bytes.max(recorded.bytes);
    }
}

/// Sums by source and destination.
pub(super) fn pairs<'a>(kept: impl Iterator<Item = &'a Kept>) -> Sums<Pair<'a>> {
    let mut sums: HashMap<Pair<'a>, Sum> = HashMap::new();
    for Kept { record, .. } in kept {
        let pair = Pair { from: Party::of(&record.source), to: Party::of(&record.destination) };
        sums.entry(pair).or_default().add(record, usize::from(record.direction == "inbound"));
    }
    Sums::of(sums, MOST_PAIRS)
}

/// Sums by each end.
pub(super) fn identities<'a>(kept: impl Iterator<Item = &'a Kept>) -> Sums<impl Serialize> {
    let mut sums: HashMap<Identity<'a>, Sum> = HashMap::new();
    for Kept { record, .. } in kept {
        let own = record.own_end();
        for end in [&record.source, &record.destination] {
            let is_far = !std::ptr::eq(own, end);
            sums.entry(Identity::of(end)).or_default().add(record, usize::from(is_far));
        }
    }
    Sums::of(sums, MOST_IDENTITIES)
}

impl<T: Eq + Hash + Ord> Sums<T> {
    fn of(sums: HashMap<T, Sum>, most: usize) -> Self {
        let mut rows: Vec<_> = sums.into_iter().map(|(of, sum)| Row { of, sum }).collect();
        rows.sort_unstable_by(|a, b| (b.sum.refused, b.sum.bytes, &a.of).cmp(&(a.sum.refused, a.sum.bytes, &b.of)));
        let left_out = rows.len().saturating_sub(most);
        rows.truncate(most);
        Self { rows, left_out }
    }
}

/// A name of a certificate may be long; those of Kubernetes are not.
fn clipped(name: &str) -> &str {
    &name[..name.floor_char_boundary(MOST_NAME)]
}

const MOST_NAME: usize = 255;
const MOST_PAIRS: usize = 2000;
const MOST_IDENTITIES: usize = 4000;

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::{Value, json};

    use super::super::held::tests::record;
    use super::super::held::{Held, MOST};
    use super::*;

    fn shown(records: Vec<FlowRecord>) -> (Value, Value) {
        let mut held = Held::default();
        for (at, record) in records.into_iter().enumerate() {
            held.take(&format!("n{at}"), record, u64::MAX);
        }
        let kept = || held.before(None).map(|(_, kept)| kept);
        (serde_json::to_value(pairs(kept())).unwrap(), serde_json::to_value(identities(kept())).unwrap())
    }

    fn inbound(record: FlowRecord) -> FlowRecord {
        FlowRecord { direction: "inbound".to_owned(), ..record }
    }

    #[test]
    fn a_flow_that_both_ends_recorded_counts_once_and_a_refusal_is_added() {
        let refused = FlowRecord {
            verdict: "refused".to_owned(),
            forward: Amount { packets: 5, bytes: 300 },
            ..inbound(record("shop/web", "pay/api", 3, 9))
        };
        let (pairs, identities) = shown(vec![
            record("shop/web", "pay/api", 1, 7),
            inbound(record("shop/web", "pay/api", 1, 8)),
            record("shop/web", "pay/api", 2, 6),
            refused,
        ]);
        let row = &pairs["rows"][0];
        assert_eq!(row["from"], json!({"kind": "namespace", "name": "shop"}));
        assert_eq!(row["to"], json!({"kind": "namespace", "name": "pay"}));
        assert_eq!([&row["flows"], &row["bytes"], &row["refused"]], [&json!(2), &json!(2000), &json!(1)]);
        assert_eq!([&row["refused_packets"], &row["last_ms"]], [&json!(5), &json!(9)]);
        assert_eq!(pairs["rows"].as_array().unwrap().len(), 1);
        let rows = identities["rows"].as_array().unwrap();
        let names: Vec<_> = rows.iter().map(|row| row["identity"].as_str().unwrap()).collect();
        assert_eq!(names, ["pay/api", "shop/web"], "both have one refusal and 2000 bytes: {identities}");
        assert!(rows.iter().all(|row| row["bytes"] == 2000 && row["flows"] == 2), "{identities}");
    }

    #[test]
    fn ends_are_namespaces_outside_hosts_or_unnamed() {
        let party = |pod: Option<&str>, name: Option<&str>| {
            let end = FlowEnd { pod: pod.map(str::to_owned), name: name.map(str::to_owned), ..FlowEnd::default() };
            let party = Party::of(&end);
            (party.kind, party.name.to_owned(), Identity::of(&end).identity)
        };
        let namespace = |identity: &str| (Kind::Namespace, "shop".to_owned(), identity.to_owned());
        assert_eq!(party(Some("shop/web"), Some("db")), namespace("shop/web"));
        assert_eq!(party(None, Some("web.1.shop.pod")), namespace("shop/web.1"));
        for host in ["db-1", ".shop.pod", "x..pod", ".pod", "pod"] {
            assert_eq!(party(None, Some(host)), (Kind::Host, host.to_owned(), host.to_owned()));
        }
        assert_eq!(party(None, None), (Kind::Unnamed, String::new(), "unknown".to_owned()));
        let long = "é".repeat(300);
        assert_eq!(party(None, Some(&long)).1.len(), 254);
        let end = FlowEnd { name: Some("a/b".to_owned()), ..FlowEnd::default() };
        assert!(Party::of(&end).is("host/a/b") && !Party::of(&end).is("namespace/a/b"));
        assert!(Party::of(&FlowEnd::default()).is("unnamed/"));
    }

    #[test]
    fn two_thousand_identities_and_fifty_thousand_records_are_summed_within_bounds() {
        let mut held = Held::default();
        for id in 0..MOST as u64 + 1000 {
            let pod = |number: u64| format!("ns-{}/pod-{number}", number % 50);
            let mut record = record(&pod(id % 1900), &pod((id * 7) % 1900), id, id);
            if id % 10 == 0 {
                record.destination = FlowEnd { name: Some(format!("host-{}", id % 1000)), ..FlowEnd::default() };
            }
            held.take("n1", record, u64::MAX);
        }
        let began = tokio::time::Instant::now();
        let kept = || held.before(None).map(|(_, kept)| kept);
        let (pairs, identities) = (pairs(kept()), identities(kept()));
        let took = began.elapsed();
        assert!(took < Duration::from_secs(5), "{took:?}");
        assert_eq!(pairs.rows.iter().map(|row| row.sum.flows).sum::<u64>(), MOST as u64);
        assert_eq!((identities.rows.len(), identities.left_out), (2000, 0));
        let bytes = serde_json::to_string(&identities).unwrap().len();
        assert!(bytes < 512 << 10, "{bytes}");
        let mut held = Held::default();
        for id in 0..5000 {
            held.take("n1", record(&format!("ns-{id}/x"), "b/z", id, id), u64::MAX);
        }
        let sums = super::pairs(held.before(None).map(|(_, kept)| kept));
        assert_eq!((sums.rows.len(), sums.left_out), (MOST_PAIRS, 3000));
    }
}
