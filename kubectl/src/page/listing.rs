//! The records that a browser asks for: conditions, and one page after another, the newest first.

use nebula_cni_contract::flow_records::{BadFilter, Filter, FlowEnd, FlowRecord};
use serde::Serialize;

use super::held::{Held, Kept, Position};
use super::topology::Party;

/// What is asked for.
#[derive(Debug, Default)]
pub(super) struct Wanted {
    /// Peer, port and verdict: as commands have them.
    filter: Filter,
    /// One end is a pod of this namespace.
    namespace: Option<String>,
    /// One end is this pod.
    pod: Option<String>,
    /// It was opened by this side of the topology.
    from: Option<String>,
    /// It was opened to this side of the topology.
    to: Option<String>,
    before: Option<Position>,
}

/// Why a query is none.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum BadQuery {
    #[error(transparent)]
    Filter(#[from] BadFilter),
    #[error("{0:?} is no place among the records")]
    Position(String),
    #[error("no condition is that long")]
    Long,
}

/// A page of records.
#[derive(Debug, Serialize)]
pub(super) struct Page<'a> {
    records: Vec<Row<'a>>,
    /// What to ask from (`before=`) for older ones.
    #[serde(skip_serializing_if = "Option::is_none")]
    next: Option<String>,
}

#[derive(Debug, Serialize)]
struct Row<'a> {
    node: &'a str,
    #[serde(flatten)]
    record: &'a FlowRecord,
}

impl Wanted {
    /// Reads a query; empty values are no conditions.
    pub(super) fn of(query: &str, now_ms: u64) -> Result<Self, BadQuery> {
        let mut wanted = Self::default();
        let mut further = Vec::new();
        for (key, value) in form_urlencoded::parse(query.as_bytes()) {
            let value = value.trim();
            if value.len() > MOST_TEXT {
                return Err(BadQuery::Long);
            }
            let text = || Some(value.to_owned());
            match &*key {
                _ if value.is_empty() => {}
                "namespace" => wanted.namespace = text(),
                "pod" => wanted.pod = text(),
                "from" => wanted.from = text(),
                "to" => wanted.to = text(),
                "before" => {
                    wanted.before = Some(value.parse().map_err(|()| BadQuery::Position(value.to_owned()))?);
                }
                "since" => wanted.filter.since_ms = Some(now_ms.saturating_sub(Filter::span_ms(value)?)),
                "peer" | "port" | "verdict" => further.push((key, value.to_owned())),
                _ => {}
            }
        }
        let since_ms = wanted.filter.since_ms;
        let pairs = further.iter().map(|(key, value)| (&**key, value.as_str()));
        wanted.filter = Filter { since_ms, ..Filter::of_pairs(pairs)? };
        Ok(wanted)
    }

    fn matches(&self, record: &FlowRecord) -> bool {
        let (source, destination) = (&record.source, &record.destination);
        let parties = || [Party::of(source), Party::of(destination)];
        let of_namespace = |namespace: &String| {
            let wanted = format!("namespace/{namespace}");
            parties().iter().any(|party| party.is(&wanted))
        };
        self.filter.matches(record)
            && self.namespace.as_ref().is_none_or(of_namespace)
            && self.pod.as_ref().is_none_or(|pod| is_pod(source, pod) || is_pod(destination, pod))
            && self.from.as_ref().is_none_or(|from| Party::of(source).is(from))
            && self.to.as_ref().is_none_or(|to| Party::of(destination).is(to))
    }

    /// A page of what is held. It ends early where records are long.
    pub(super) fn page<'a>(&self, held: &'a Held) -> Page<'a> {
        let (mut records, mut last, mut texts) = (Vec::new(), None, 0);
        for (position, Kept { node, record, texts: own }) in held.before(self.before) {
            if self.filter.since_ms.is_some_and(|since| record.last_ms < since) {
                break;
            }
            if !self.matches(record) {
                continue;
            }
            if records.len() == AT_ONCE || texts > MOST_TEXTS {
                return Page { records, next: last.map(|last: Position| last.to_string()) };
            }
            texts += own;
            last = Some(position);
            records.push(Row { node, record });
        }
        Page { records, next: None }
    }
}

/// Names a pod as commands do, or by its name alone.
fn is_pod(end: &FlowEnd, text: &str) -> bool {
    let is_name = |pod: &String| pod.split_once('/').is_some_and(|(_, name)| name == text);
    end.is_pod(text) || end.pod.as_ref().is_some_and(is_name)
}

/// Records of a page.
const AT_ONCE: usize = 100;
/// Bytes of their texts.
const MOST_TEXTS: usize = 2 << 20;
/// Bytes of a condition.
const MOST_TEXT: usize = 512;

#[cfg(test)]
mod tests {
    use nebula_cni_contract::flow_records::FlowEnd;

    use super::super::held::tests::record;
    use super::*;

    fn held() -> Held {
        let mut held = Held::default();
        for id in 0..250 {
            let to = if id % 2 == 0 { "pay/api" } else { "pay/db" };
            let mut record = record(&format!("shop/web-{}", id % 5), to, id, 1000 + id);
            if id % 50 == 0 {
                record.verdict = "refused".to_owned();
                record.destination = FlowEnd { name: Some("edge".to_owned()), port: Some(22), ..FlowEnd::default() };
            }
            held.take("n1", record, u64::MAX);
        }
        held
    }

    fn ids(held: &Held, query: &str) -> (Vec<u64>, Option<String>) {
        let page = Wanted::of(query, 1_000_000).unwrap().page(held);
        (page.records.iter().map(|row| row.record.id).collect(), page.next)
    }

    #[test]
    fn pages_follow_each_other_without_a_gap_while_records_come() {
        let mut held = held();
        let (mut all, mut next) = ids(&held, "");
        assert_eq!((all.len(), all[0]), (AT_ONCE, 249));
        held.take("n1", record("shop/new", "pay/api", 999, 5000), u64::MAX);
        while let Some(before) = next {
            let (page, further) = ids(&held, &format!("before={before}"));
            all.extend(page);
            next = further;
        }
        assert_eq!(all, (0..250).rev().collect::<Vec<_>>());
    }

    #[test]
    fn conditions_are_those_of_a_record_and_of_both_its_ends() {
        let held = held();
        let count = |query: &str| ids(&held, query).0.len();
        for (query, found) in [
            ("verdict=refused", 5),
            ("port=22&verdict=", 5),
            ("peer=edge", 5),
            ("namespace=pay&pod=db", 100),
            ("pod=shop%2Fweb-3", 50),
            ("pod=web-3&port=443", 50),
            ("from=namespace/shop&to=host/edge", 5),
            ("from=namespace/pay", 0),
            ("namespace=nothing", 0),
            ("since=999s", 100),
            ("since=1s&other=1", 0),
        ] {
            assert_eq!(count(query), found, "{query}");
        }
        assert_eq!(ids(&held, "since=999s").0.last(), Some(&150), "the newest are on the first page");
    }

    #[test]
    fn a_query_that_cannot_be_one_is_refused() {
        for bad in ["port=x", "port=65536", "verdict=maybe", "since=soon", "before=1"] {
            assert!(Wanted::of(bad, 0).is_err(), "{bad}");
        }
        assert_eq!(Wanted::of(&format!("pod={}", "x".repeat(600)), 0).unwrap_err(), BadQuery::Long);
    }

    #[test]
    fn a_page_of_long_records_ends_early() {
        let mut held = Held::default();
        for id in 0..20 {
            held.take("n1", record(&"x".repeat(500 << 10), "b/z", id, id), u64::MAX);
        }
        let (first, next) = ids(&held, "");
        assert_eq!((first.len(), next.is_some()), (5, true));
    }
}
