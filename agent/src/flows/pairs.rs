//! What flows carry between namespaces, as counters: each change of a record adds what it has more than before.
//!
//! Names of far ends are those of certificates as an instance tells them, and an instance is not trusted: there is a
//! bound on pairs, of which each namespace of this node has its share.

use std::collections::BTreeMap;

use nebula_cni_contract::flow_records::{Amount, FlowEnd, FlowRecord};

use crate::config::is_label;

/// Counters by the namespace of this node's pod, and that of the far end.
#[derive(Debug, Clone, Default)]
pub(crate) struct Pairs {
    by_own: BTreeMap<String, BTreeMap<String, Pair>>,
    folded: u64,
}

/// Of two namespaces.
#[derive(Debug, Clone, Default)]
struct Pair {
    /// Opened by the pod of this node.
    outbound: Counted,
    /// Opened by the far end.
    inbound: Counted,
    /// When something was added last, in milliseconds since 1970.
    used_ms: u64,
}

#[derive(Debug, Clone, Copy, Default)]
struct Counted {
    settled: Tally,
    /// What counts once it is committed.
    staged: Tally,
}

/// Counters of one pair in one direction.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    /// By [`VERDICTS`].
    pub(crate) flows: [u64; 3],
    /// Of flows that were not refused, sent by source and destination.
    pub(crate) bytes: [u64; 2],
    pub(crate) packets: [u64; 2],
    /// Packets that were refused.
    pub(crate) refused: u64,
}

/// What is known of a flow from before a change of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Earlier {
    /// This is its first record.
    Nothing,
    /// Packets and bytes from the source, and back.
    Carried([Amount; 2]),
    /// Its record was evicted: what it carried until now is counted for the most part.
    Forgotten,
}

/// One line for each pair and direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Line<'a> {
    pub(crate) source: &'a str,
    pub(crate) destination: &'a str,
    pub(crate) direction: &'static str,
    pub(crate) tally: Tally,
}

impl Pairs {
    /// Stages what a change adds. `own` is the namespace of the pod whose instance reported it.
    pub(crate) fn add(&mut self, own: &str, record: &FlowRecord, earlier: Earlier, now_ms: u64) {
        let own = if is_label(own) { own } else { UNKNOWN };
        let is_outbound = record.direction == "outbound";
        let far = namespace(if is_outbound { &record.destination } else { &record.source });
        let pair = self.pair(own, far, now_ms);
        pair.used_ms = now_ms;
        let counted = if is_outbound { &mut pair.outbound } else { &mut pair.inbound };
        counted.staged.add(record, earlier);
    }

    /// Counts what is staged.
    pub(crate) fn settle(&mut self) {
        for counted in self.counted() {
            let staged = std::mem::take(&mut counted.staged);
            counted.settled.plus(&staged);
        }
    }

    /// Forgets what is staged: the same records will come again.
    pub(crate) fn take_back(&mut self) {
        self.counted().for_each(|counted| counted.staged = Tally::default());
    }

    /// Number of pairs with counters of their own.
    pub(crate) fn len(&self) -> usize {
        self.by_own.values().map(named).sum()
    }

    /// Changes that count under `_other`, for want of room.
    pub(crate) fn folded(&self) -> u64 {
        self.folded
    }

    /// The counters, in the order of names.
    pub(crate) fn lines(&self) -> impl Iterator<Item = Line<'_>> {
        let pairs = self.by_own.iter().flat_map(|(own, of)| of.iter().map(move |(far, pair)| (&**own, &**far, pair)));
        let both = |(own, far, pair): (_, _, &Pair)| {
            [
                Line { source: own, destination: far, direction: "outbound", tally: pair.outbound.settled },
                Line { source: far, destination: own, direction: "inbound", tally: pair.inbound.settled },
            ]
        };
        pairs.flat_map(both).filter(|line| line.tally != Tally::default())
    }

    fn counted(&mut self) -> impl Iterator<Item = &mut Counted> {
        let pairs = self.by_own.values_mut().flat_map(BTreeMap::values_mut);
        pairs.flat_map(|pair| [&mut pair.outbound, &mut pair.inbound])
    }

    fn pair(&mut self, own: &str, far: &str, now_ms: u64) -> &mut Pair {
        let is_known = self.by_own.get(own).is_some_and(|of| of.contains_key(far));
        let (own, far) = if is_known || self.has_room(own, now_ms) {
            (own, far)
        } else {
            self.folded = self.folded.saturating_add(1);
            (if self.by_own.contains_key(own) { own } else { OTHER }, OTHER)
        };
        let of = self.by_own.entry(own.to_owned()).or_default();
        of.entry(far.to_owned()).or_default()
    }

    /// Whether a further pair of `own` may have counters. One that nothing was added to for long gives way, and
    /// begins at 0 if it comes back.
    fn has_room(&mut self, own: &str, now_ms: u64) -> bool {
        let of_own = self.by_own.get(own).map_or(0, named);
        if of_own < MAX_OF_ONE && self.len() < MAX_PAIRS {
            return true;
        }
        let candidates = self.by_own.iter().filter(|(name, _)| of_own < MAX_OF_ONE || *name == own);
        let candidates = candidates.flat_map(|(name, of)| of.iter().map(move |(far, pair)| (pair.used_ms, name, far)));
        let longest_idle = candidates.filter(|(_, _, far)| *far != OTHER).min_by_key(|(used, ..)| *used);
        let Some((_, name, far)) = longest_idle.filter(|(used, ..)| now_ms.saturating_sub(*used) >= IDLE_MS) else {
            return false;
        };
        let (name, far) = (name.clone(), far.clone());
        if let Some(of) = self.by_own.get_mut(&name) {
            of.remove(&far);
            if of.is_empty() {
                self.by_own.remove(&name);
            }
        }
        true
    }
}

impl Tally {
    fn add(&mut self, record: &FlowRecord, earlier: Earlier) {
        let verdict = VERDICTS.iter().position(|verdict| *verdict == record.verdict).unwrap_or_default();
        let before = match earlier {
            Earlier::Nothing => {
                self.flows[verdict] += 1;
                [Amount::default(); 2]
            }
            Earlier::Carried(before) => before,
            Earlier::Forgotten => return,
        };
        let now = [record.forward, record.reply];
        if VERDICTS[verdict] == "refused" {
            let more = now[0].packets.saturating_sub(before[0].packets);
            self.refused = self.refused.saturating_add(more);
            return;
        }
        for (at, (now, before)) in now.into_iter().zip(before).enumerate() {
            self.bytes[at] = self.bytes[at].saturating_add(now.bytes.saturating_sub(before.bytes));
            self.packets[at] = self.packets[at].saturating_add(now.packets.saturating_sub(before.packets));
        }
    }

    fn plus(&mut self, more: &Self) {
        let own = self.flows.iter_mut().chain(&mut self.bytes).chain(&mut self.packets).chain([&mut self.refused]);
        let more = more.flows.iter().chain(&more.bytes).chain(&more.packets).chain([&more.refused]);
        own.zip(more).for_each(|(own, more)| *own = own.saturating_add(*more));
    }
}

/// Pairs of one namespace of this node that have counters.
fn named(of: &BTreeMap<String, Pair>) -> usize {
    of.len() - usize::from(of.contains_key(OTHER))
}

/// The namespace of an end, by the name that certificates of pods have unless the CA's policy says otherwise.
pub(crate) fn namespace(end: &FlowEnd) -> &str {
    if let Some((namespace, _)) = end.pod.as_ref().and_then(|pod| pod.split_once('/')) {
        return if is_label(namespace) { namespace } else { UNKNOWN };
    }
    let Some(name) = &end.name else { return UNKNOWN };
    let of_pod = name.strip_suffix(".pod").and_then(|name| name.rsplit_once('.'));
    of_pod.map(|(_, namespace)| namespace).filter(|namespace| is_label(namespace)).unwrap_or(HOST)
}

/// The verdicts, as records have them.
pub(crate) const VERDICTS: [&str; 3] = ["allowed", "audit", "refused"];
/// An end with a certificate that is not a pod's. No namespace has a `_` in its name.
pub(crate) const HOST: &str = "_host";
/// An end without a certificate.
pub(crate) const UNKNOWN: &str = "_unknown";
/// All pairs for which there was no room.
pub(crate) const OTHER: &str = "_other";
/// Pairs with counters of their own.
const MAX_PAIRS: usize = 128;
/// Of one namespace of this node.
const MAX_OF_ONE: usize = 32;
/// Longer than any alert looks back.
const IDLE_MS: u64 = 6 * 3600 * 1000;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn record(far: Option<&str>, bytes: u64) -> FlowRecord {
        let amount = Amount { packets: bytes / 10, bytes };
        FlowRecord {
            verdict: "allowed".to_owned(),
            direction: "outbound".to_owned(),
            destination: FlowEnd { name: far.map(str::to_owned), ..FlowEnd::default() },
            forward: amount,
            reply: Amount { packets: 1, bytes: 7 },
            ..FlowRecord::default()
        }
    }

    fn lines(pairs: &Pairs) -> Vec<(String, String, Tally)> {
        pairs.lines().map(|line| (line.source.to_owned(), line.destination.to_owned(), line.tally)).collect()
    }

    #[test]
    fn an_update_adds_what_is_new_and_only_once_it_is_committed() {
        let mut pairs = Pairs::default();
        pairs.add("shop", &record(Some("db.pay.pod"), 100), Earlier::Nothing, 0);
        assert!(lines(&pairs).is_empty(), "nothing is committed");
        pairs.take_back();
        pairs.add("shop", &record(Some("db.pay.pod"), 100), Earlier::Nothing, 0);
        pairs.settle();
        let before = Earlier::Carried([Amount { packets: 10, bytes: 100 }, Amount { packets: 1, bytes: 7 }]);
        pairs.add("shop", &record(Some("db.pay.pod"), 250), before, 0);
        pairs.add("shop", &record(Some("db.pay.pod"), 10), before, 0);
        pairs.add("shop", &record(Some("db.pay.pod"), 9000), Earlier::Forgotten, 0);
        pairs.settle();
        let tally = Tally { flows: [1, 0, 0], bytes: [250, 7], packets: [25, 1], refused: 0 };
        assert_eq!(lines(&pairs), [("shop".to_owned(), "pay".to_owned(), tally)]);
    }

    #[test]
    fn refused_packets_are_no_traffic_and_inbound_flows_have_the_far_end_as_their_source() {
        let mut pairs = Pairs::default();
        let mut refused = record(Some("scan-1"), 400);
        std::mem::swap(&mut refused.source, &mut refused.destination);
        (refused.verdict, refused.direction) = ("refused".to_owned(), "inbound".to_owned());
        pairs.add("shop", &refused, Earlier::Nothing, 0);
        pairs.settle();
        let tally = Tally { flows: [0, 0, 1], refused: 40, ..Tally::default() };
        assert_eq!(lines(&pairs), [("_host".to_owned(), "shop".to_owned(), tally)]);
    }

    #[test]
    fn names_that_are_no_namespaces_have_labels_that_no_namespace_can_have() {
        let of = |name: Option<&str>, pod: Option<&str>| {
            let end = FlowEnd { name: name.map(str::to_owned), pod: pod.map(str::to_owned), ..FlowEnd::default() };
            namespace(&end).to_owned()
        };
        assert_eq!((of(None, None), of(Some("web-1"), None)), (UNKNOWN.to_owned(), HOST.to_owned()));
        assert_eq!((of(Some("a.b.shop.pod"), None), of(Some("x"), Some("pay/db"))), ("shop".into(), "pay".into()));
        for name in ["pod", ".pod", "web.pod", "web..pod", "web._other.pod", "web.\"x\n.pod", "web.Shop.pod"] {
            assert_eq!(of(Some(name), None), HOST, "{name}");
        }
        assert!([HOST, UNKNOWN, OTHER].iter().all(|label| !is_label(label)));
    }

    #[test]
    fn made_up_namespaces_take_one_share_and_the_rest_is_counted_under_other() {
        let mut pairs = Pairs::default();
        pairs.add("pay", &record(Some("db.bank.pod"), 10), Earlier::Nothing, 0);
        for n in 0..100_000 {
            pairs.add("evil", &record(Some(&format!("x.n{n}.pod")), 10), Earlier::Nothing, IDLE_MS - 1);
        }
        pairs.add("pay", &record(Some("db.shop.pod"), 10), Earlier::Nothing, IDLE_MS - 1);
        pairs.settle();
        let others = lines(&pairs).into_iter().find(|(source, far, _)| source == "evil" && far == OTHER).unwrap().2;
        assert_eq!((pairs.len(), pairs.folded()), (MAX_OF_ONE + 2, 100_000 - MAX_OF_ONE as u64));
        assert_eq!(others.flows[0], pairs.folded());
        assert!(lines(&pairs).iter().any(|(source, far, _)| source == "pay" && far == "shop"));
        // Namespaces of the node itself are bounded, too.
        for n in 0..1000 {
            pairs.add(&format!("own{n}"), &record(Some("x.y.pod"), 10), Earlier::Nothing, IDLE_MS - 1);
        }
        pairs.settle();
        assert_eq!(pairs.len(), MAX_PAIRS);
        assert!(lines(&pairs).len() <= MAX_PAIRS + MAX_PAIRS / MAX_OF_ONE + 2);
        assert!(lines(&pairs).iter().any(|(source, far, _)| source == OTHER && far == OTHER));
    }

    #[test]
    fn a_pair_that_was_quiet_for_long_gives_way() {
        let mut pairs = Pairs::default();
        for n in 0..MAX_OF_ONE {
            pairs.add("shop", &record(Some(&format!("x.n{n}.pod")), 10), Earlier::Nothing, n as u64);
        }
        pairs.add("shop", &record(Some("x.new.pod"), 10), Earlier::Nothing, IDLE_MS);
        pairs.settle();
        let names: Vec<_> = lines(&pairs).into_iter().map(|(_, far, _)| far).collect();
        assert!(names.contains(&"new".to_owned()) && !names.contains(&"n0".to_owned()), "{names:?}");
        assert_eq!((pairs.len(), pairs.folded()), (MAX_OF_ONE, 0));
    }

    proptest! {
        /// Changes of several flows in any order, of each flow rising: the counters are the sum over the last ones.
        #[test]
        fn counters_are_a_plain_sum_over_flows_whatever_order_their_updates_come_in(
            changes in prop::collection::vec((0..12_usize, 0..5000_u64, 0..3_usize), 1..200),
            settle_every in 1..20_usize,
        ) {
            let mut pairs = Pairs::default();
            let (mut known, mut last) = (BTreeMap::<usize, FlowRecord>::new(), BTreeMap::new());
            for (at, (flow, more, verdict)) in changes.into_iter().enumerate() {
                let far = ["db.pay.pod", "host", "web.shop.pod"][flow % 3];
                let before = known.get(&flow);
                let bytes = before.map_or(0, |record: &FlowRecord| record.forward.bytes) + more;
                let verdict = before.map_or_else(|| VERDICTS[verdict].to_owned(), |record| record.verdict.clone());
                let now = FlowRecord { verdict, ..record(Some(far), bytes) };
                let earlier = before.map_or(Earlier::Nothing, |record| Earlier::Carried([record.forward, record.reply]));
                pairs.add("own", &now, earlier, at as u64);
                known.insert(flow, now);
                if at % settle_every == 0 {
                    pairs.settle();
                    for (source, far, tally) in lines(&pairs) {
                        let earlier: Tally = last.insert((source, far), tally).unwrap_or_default();
                        prop_assert!(earlier.bytes[0] <= tally.bytes[0] && earlier.refused <= tally.refused);
                    }
                }
            }
            pairs.settle();
            let mut sums = BTreeMap::<String, Tally>::new();
            for record in known.values() {
                let sum = sums.entry(namespace(&record.destination).to_owned()).or_default();
                let verdict = VERDICTS.iter().position(|verdict| *verdict == record.verdict).unwrap();
                sum.flows[verdict] += 1;
                if verdict == 2 {
                    sum.refused += record.forward.packets;
                } else {
                    for (at, amount) in [record.forward, record.reply].into_iter().enumerate() {
                        (sum.bytes[at], sum.packets[at]) = (sum.bytes[at] + amount.bytes, sum.packets[at] + amount.packets);
                    }
                }
            }
            let found: BTreeMap<_, _> = lines(&pairs).into_iter().map(|(_, far, tally)| (far, tally)).collect();
            prop_assert_eq!(found, sums);
        }
    }
}
