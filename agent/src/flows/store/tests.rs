//! Tests of the store: what was committed is there, bounds hold, nobody pushes out others, and answers are those of a
//! plain look at every record.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::os::unix::fs::PermissionsExt;

use nebula_cni_contract::flow_records::{Amount, Filter, FlowEnd, FlowRecord, Original, PolicyDecision};
use nebula_cni_contract::launch::Pod;
use proptest::prelude::*;
use tempfile::TempDir;

use super::*;

pub(super) const PLENTY: Bound = Bound { bytes: 64 << 20, age: Duration::from_secs(86_400) };
pub(super) const NOW: u64 = 1_700_000_000_000;
pub(super) const ALL: Limits = Limits { records: 10_000_000, time: Duration::from_secs(60) };

pub(super) fn attached(namespace: &str, name: &str) -> Attached {
    let pod = Pod { namespace: namespace.to_owned(), name: name.to_owned(), uid: format!("uid-{namespace}-{name}") };
    Attached { attachment: format!("net/{namespace}-{name}-eth0"), pod, socket: PathBuf::new() }
}

fn end(last: u8, port: u16, name: &str) -> FlowEnd {
    FlowEnd {
        address: Some(IpAddr::from([10, 42, 0, last])),
        port: Some(port),
        name: Some(name.to_owned()),
        groups: vec!["pods".to_owned()],
        fingerprint: Some("ab".repeat(32)),
        pod: None,
    }
}

pub(super) fn record(id: u64, peer: u8, port: u16) -> FlowRecord {
    FlowRecord {
        number: id,
        id: 1_700_000_000_000_000 + id,
        event: "created".to_owned(),
        verdict: "allowed".to_owned(),
        direction: "outbound".to_owned(),
        protocol: 6,
        source: end(1, 40_000, "own"),
        destination: end(peer, port, &format!("peer-{peer}.pay.pod")),
        forward: Amount { packets: 3, bytes: 300 },
        started_ms: NOW - 1000,
        last_ms: NOW,
        path: Some("direct".to_owned()),
        ..FlowRecord::default()
    }
}

impl Store {
    fn keep_now(&mut self, answers: Vec<(&Attached, FlowRecords)>, now_ms: u64) -> Result<bool, StoreError> {
        let is_written = self.keep(answers, now_ms)?;
        self.commit().map(|()| is_written)
    }
}

pub(super) fn answer(records: Vec<FlowRecord>) -> FlowRecords {
    let next = records.last().map_or(0, |record| record.number);
    FlowRecords { records, next, is_on: true, ..FlowRecords::default() }
}

fn all(folder: &TempDir, filter: &Filter) -> Vec<FlowRecord> {
    let answer = Reader::open(folder.path()).unwrap().ask(filter, 0, ALL).unwrap();
    assert!(!answer.is_late && !answer.is_cut);
    answer.records
}

fn of(pod: &str) -> Filter {
    Filter { pod: Some(pod.to_owned()), ..Filter::default() }
}

/// What the files are if the machine stops now.
fn crashed(folder: &TempDir) -> TempDir {
    let copy = tempfile::tempdir().unwrap();
    for name in [FILE, "flows.db-wal"] {
        let _ = fs::copy(folder.path().join(name), copy.path().join(name));
    }
    copy
}

#[test]
fn a_later_record_of_a_flow_replaces_it_and_comes_last() {
    let folder = tempfile::tempdir().unwrap();
    let mut store = Store::open(folder.path(), PLENTY).unwrap();
    let web = attached("shop", "web");
    assert!(store.keep_now(vec![(&web, answer(vec![record(1, 2, 80), record(2, 2, 80)]))], NOW).unwrap());
    let ended = FlowRecord { number: 3, event: "ended".to_owned(), ..record(1, 2, 80) };
    store.keep_now(vec![(&web, answer(vec![ended]))], NOW).unwrap();
    assert!(
        !store.keep_now(vec![(&web, FlowRecords { next: 3, ..FlowRecords::default() })], NOW).unwrap(),
        "nothing new"
    );
    let events: Vec<_> =
        all(&folder, &Filter::default()).into_iter().map(|record| (record.id % 10, record.event)).collect();
    assert_eq!(events, [(2, "created".to_owned()), (1, "ended".to_owned())]);
    assert_eq!((store.cursor(&web.attachment).next, store.cursor("other").next), (3, 0));
    assert_eq!(store.fill().unwrap().records, 2);
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(folder.path()), 0o700);
    for name in [FILE, "flows.db-wal", "flows.db-shm"] {
        assert_eq!(mode(&folder.path().join(name)), 0o600, "{name}");
    }
}

#[test]
fn two_agents_do_not_write_one_store() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(folder.path(), PLENTY).unwrap();
    assert!(matches!(Store::open(folder.path(), PLENTY), Err(StoreError::Taken)));
    assert!(all(&folder, &Filter::default()).is_empty(), "it can be read");
    drop(store);
    drop(Store::open(folder.path(), PLENTY).unwrap());
}

#[test]
fn what_an_instance_says_of_its_own_end_and_of_the_future_does_not_count() {
    let folder = tempfile::tempdir().unwrap();
    let mut store = Store::open(folder.path(), PLENTY).unwrap();
    let mut forged = record(1, 2, 80);
    (forged.source.pod, forged.source.name) = (Some("pay/db".to_owned()), Some("db.pay.pod".to_owned()));
    forged.destination.pod = Some("pay/db".to_owned());
    (forged.started_ms, forged.last_ms) = (u64::MAX, u64::MAX);
    forged.forward = Amount { packets: u64::MAX, bytes: u64::MAX };
    forged.id = u64::MAX;
    let mut inbound = FlowRecord { direction: "?".to_owned(), ..forged.clone() };
    inbound.id = 0;
    store.keep_now(vec![(&attached("shop", "web"), answer(vec![forged, inbound]))], NOW).unwrap();
    let namespace = |namespace: &str| Filter { namespace: Some(namespace.to_owned()), ..Filter::default() };
    assert!(all(&folder, &namespace("pay")).is_empty() && all(&folder, &of("pay/db")).is_empty());
    assert!(all(&folder, &namespace("sho")).is_empty() && all(&folder, &namespace("shop/")).is_empty());
    let kept = all(&folder, &namespace("shop"));
    assert_eq!(kept.len(), 2);
    for record in kept {
        let own = record.own_end();
        assert_eq!((own.pod.as_deref(), own.name.as_deref(), own.groups.len()), (Some("shop/web"), None, 0));
        assert_eq!((record.last_ms, record.started_ms), (NOW, NOW));
        let pods = [&record.source.pod, &record.destination.pod].into_iter().flatten().count();
        assert_eq!(pods, 1, "an instance knows its own pod only");
    }
}

#[test]
fn a_pod_with_a_hundred_thousand_flows_or_names_pushes_out_its_own_records_only() {
    for is_wordy in [false, true] {
        let folder = tempfile::tempdir().unwrap();
        let bound = Bound { bytes: OF_THE_LOG + (4 << 20), ..PLENTY };
        let mut store = Store::open(folder.path(), bound).unwrap();
        let (noisy, quiet) = (attached("a", "noisy"), ["x", "y", "z"].map(|name| attached("b", name)));
        let mut flow = 0;
        for round in 0..100_u64 {
            let records = (0..if is_wordy { 50 } else { 1000 }).map(|_| {
                flow += 1;
                let mut record = record(flow, (flow % 200) as u8, 443);
                if is_wordy {
                    record.destination.groups = vec![format!("{flow}-{}", "g".repeat(490)); 8];
                }
                record
            });
            store.keep_now(vec![(&noisy, answer(records.collect()))], NOW).unwrap();
            for pod in &quiet {
                let records = (0..10).map(|n| record(round * 10 + n, 7, 53)).collect();
                store.keep_now(vec![(pod, answer(records))], NOW).unwrap();
            }
            assert!(store.fill().unwrap().bytes <= bound.bytes, "{:?}", store.fill());
        }
        for pod in &quiet {
            let name = format!("b/{}", pod.pod.name);
            assert_eq!(all(&folder, &of(&name)).len(), 1000, "{name}");
        }
        let kept = all(&folder, &of("a/noisy"));
        let first = kept.first().unwrap().id;
        assert!(kept.len() as u64 == store.fill().unwrap().records - 3000 && first > 1_700_000_000_000_001);
        assert_eq!(kept.last().unwrap().id, 1_700_000_000_000_000 + flow, "the oldest give way");
        assert!(kept.len() > 300 && store.counts().evicted > 0, "{} {:?}", kept.len(), store.counts());
        drop(store);
        let store = Store::open(folder.path(), bound).unwrap();
        assert_eq!(store.fill().unwrap().records as usize, kept.len() + 3000);
    }
}

#[test]
fn what_is_too_old_goes_and_pods_that_are_gone_go_with_their_last_record() {
    let folder = tempfile::tempdir().unwrap();
    let mut store = Store::open(folder.path(), Bound { age: Duration::from_secs(3600), ..PLENTY }).unwrap();
    let (old, web) = (attached("shop", "old"), attached("shop", "web"));
    let at = |id, ms| FlowRecord { last_ms: ms, started_ms: ms, ..record(id, 2, 80) };
    let hour = 3_600_000;
    store.keep_now(vec![(&old, answer(vec![at(1, NOW)]))], NOW).unwrap();
    store.keep_now(vec![(&web, answer(vec![at(1, NOW), at(2, NOW + hour)]))], NOW + hour).unwrap();
    let names = [web.attachment.clone()].into();
    assert!(!store.tidy(&names, NOW + hour - 60_000).unwrap());
    assert_eq!(store.fill().unwrap().records, 3);
    assert!(!store.tidy(&names, NOW + hour + 60_000).unwrap());
    let left = all(&folder, &Filter::default());
    assert!(left.len() == 2 && left.iter().all(|record| record.source.pod.as_deref() == Some("shop/web")));
    assert_eq!((store.cursor(&old.attachment).next, store.counts().expired), (0, 1));
    let since = Filter { since_ms: Some(NOW + hour), ..Filter::default() };
    assert_eq!(all(&folder, &since).len(), 1);
    // A clock that was put back hides nothing.
    store.keep_now(vec![(&web, answer(vec![at(9, NOW - hour)]))], NOW - hour).unwrap();
    let since = Filter { since_ms: Some(NOW - hour), ..Filter::default() };
    assert_eq!(all(&folder, &since).len(), 3);
}

#[test]
fn lost_records_are_counted_by_pod_and_a_process_that_began_anew_counts_anew() {
    let folder = tempfile::tempdir().unwrap();
    let mut store = Store::open(folder.path(), PLENTY).unwrap();
    let web = attached("shop", "web");
    for (id, lost) in [(1, 5), (2, 8), (3, 2)] {
        let answer = FlowRecords { lost, ..answer(vec![record(id, 2, 80)]) };
        store.keep_now(vec![(&web, answer)], NOW).unwrap();
    }
    assert_eq!(store.counts().lost, 10);
    drop(store);
    let lost = |namespace: &str| {
        let filter = Filter { namespace: Some(namespace.to_owned()), ..Filter::default() };
        Reader::open(folder.path()).unwrap().ask(&filter, 0, ALL).unwrap().lost
    };
    assert_eq!((lost("shop"), lost("pay")), (10, 0));
    let mut store = Store::open(folder.path(), PLENTY).unwrap();
    store.keep_now(vec![(&web, FlowRecords { lost: 3, next: 4, ..FlowRecords::default() })], NOW).unwrap();
    assert_eq!(store.counts().lost, 1);
}

#[test]
fn a_file_that_is_none_or_is_overwritten_is_damaged_and_a_new_one_takes_its_place() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(FILE);
    fs::write(&path, "x".repeat(10_000)).unwrap();
    let damaged = |folder: &TempDir| matches!(Store::open(folder.path(), PLENTY), Err(StoreError::Damaged(_)));
    assert!(damaged(&folder));
    assert_eq!(Store::set_aside(folder.path()).unwrap(), folder.path().join(ASIDE));
    let mut store = Store::open(folder.path(), PLENTY).unwrap();
    let records = (0..5000).map(|id| record(id, (id % 100) as u8, 80)).collect();
    store.keep_now(vec![(&attached("shop", "web"), answer(records))], NOW).unwrap();
    drop(store);
    let mut bytes = fs::read(&path).unwrap();
    for page in bytes.chunks_mut(4096).skip(3).step_by(2) {
        page[..64].fill(0xff);
    }
    fs::write(&path, bytes).unwrap();
    assert!(damaged(&folder));
    Store::set_aside(folder.path()).unwrap();
    assert!(Store::open(folder.path(), PLENTY).unwrap().fill().unwrap().records == 0);
    // One of another program, and one of another version.
    let connection = Connection::open(&path).unwrap();
    connection.execute_batch("PRAGMA user_version = 99").unwrap();
    drop(connection);
    assert!(damaged(&folder));
    assert!(matches!(Reader::open(folder.path()), Err(StoreError::Damaged(_))));
}

#[test]
fn a_log_that_ends_in_the_middle_is_a_store_of_an_earlier_moment() {
    let folder = tempfile::tempdir().unwrap();
    let mut store = Store::open(folder.path(), PLENTY).unwrap();
    let web = attached("shop", "web");
    for id in 0..20 {
        store.keep_now(vec![(&web, answer(vec![record(id, 2, 80)]))], NOW).unwrap();
    }
    let log = fs::read(folder.path().join("flows.db-wal")).unwrap();
    let mut seen = 0;
    for length in (0..log.len()).step_by(3001).chain([log.len()]) {
        let copy = crashed(&folder);
        fs::write(copy.path().join("flows.db-wal"), &log[..length]).unwrap();
        let store = Store::open(copy.path(), PLENTY).unwrap();
        let records = store.fill().unwrap().records;
        assert!(records >= seen && (records == 0 || store.cursor(&web.attachment).next == records - 1), "{length}");
        seen = records;
    }
    assert_eq!(seen, 20);
}

#[test]
fn a_question_that_takes_too_long_ends_and_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let mut store = Store::open(folder.path(), PLENTY).unwrap();
    let records: Vec<_> = (0..30_000).map(|id| record(id, (id % 100) as u8, 80)).collect();
    store.keep_now(vec![(&attached("shop", "web"), answer(records))], NOW).unwrap();
    let limits = Limits { records: 100, time: Duration::ZERO };
    let filter = Filter { port: Some(1), ..Filter::default() };
    let answer = Reader::open(folder.path()).unwrap().ask(&filter, 0, limits).unwrap();
    assert!(answer.is_late && answer.records.is_empty());
    let limits = Limits { records: 100, time: Duration::from_secs(60) };
    let newest = Reader::open(folder.path()).unwrap().ask(&Filter::default(), 0, limits).unwrap();
    assert!(newest.is_cut && newest.records.len() == 100 && newest.records[99].number == newest.newest);
    let later = Reader::open(folder.path()).unwrap().ask(&Filter::default(), newest.newest - 7, limits).unwrap();
    assert_eq!(later.records, newest.records[93..]);
}

/// Records with few different values, so that conditions hit and flows replace each other.
fn any_record() -> impl Strategy<Value = FlowRecord> {
    let what = (0..40_u64, 0..6_u8, 0..4_u8, 0..3_u8, proptest::bool::ANY, 0..4_u8, 0..600_000_u64);
    what.prop_map(|(id, peer, port, verdict, is_outbound, more, ago)| {
        let port = [80, 443, 53, 8080][port as usize];
        let mut record = record(id, peer, port);
        record.verdict = ["allowed", "audit", "refused"][verdict as usize].to_owned();
        (record.protocol, record.last_ms) = ([6, 17][usize::from(port == 53)], NOW - ago);
        record.started_ms = record.last_ms - u64::from(more) * 1000;
        if more & 1 > 0 {
            let source = "10.42.0.1:40000".parse().unwrap();
            record.original = Some(Original { source, destination: format!("10.96.0.{peer}:80").parse().unwrap() });
            record.policy =
                Some(PolicyDecision { reason: "rule".into(), policy: Some("p".into()), ..Default::default() });
        }
        if more & 2 > 0 {
            (record.end, record.rule, record.relay) = (Some("idle".into()), Some(4), Some([10, 42, 0, 9].into()));
            record.source.port = None;
            record.destination.name = None;
        }
        if !is_outbound {
            record.direction = "inbound".to_owned();
            std::mem::swap(&mut record.source, &mut record.destination);
        }
        record
    })
}

fn any_filter() -> impl Strategy<Value = Filter> {
    fn maybe<T: Clone + std::fmt::Debug + 'static>(values: &[T]) -> impl Strategy<Value = Option<T>> + use<T> {
        let values = values.to_vec();
        prop_oneof![3 => Just(None), 2 => proptest::sample::select(values).prop_map(Some)]
    }
    let texts = |texts: &[&str]| maybe(&texts.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>());
    let pods = ["a/web", "b/web", "pay/peer-2", "peer-3.pay.pod", "web", "a/none"];
    let peers = ["10.42.0.2", "10.96.0.3", "peer-1.pay.pod", "b/web", "::ffff:10.42.0.5", "own"];
    (
        texts(&["a", "b", "c"]),
        texts(&["web", "a/web", "b/db", "c/web"]),
        texts(&pods),
        texts(&pods),
        texts(&peers),
        maybe(&[80_u16, 53, 8080, 1]),
        maybe(&[6_u8, 17]),
        texts(&["allowed", "refused"]),
        maybe(&[NOW - 300_000, NOW - 1, NOW + 1]),
    )
        .prop_map(|(namespace, pod, from_pod, to_pod, peer, port, protocol, verdict, since_ms)| Filter {
            namespace,
            pod,
            from_pod,
            to_pod,
            peer,
            port,
            protocol,
            verdict,
            since_ms,
        })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn what_was_committed_survives_a_crash_and_answers_are_those_of_a_plain_look(
        batches in proptest::collection::vec((0..4_usize, proptest::collection::vec(any_record(), 0..30)), 1..12),
        crash_every in 1..4_usize,
        filters in proptest::collection::vec(any_filter(), 12),
    ) {
        let pods = [("a", "web"), ("a", "db"), ("b", "web"), ("b", "db")].map(|(namespace, name)| attached(namespace, name));
        let mut folder = tempfile::tempdir().unwrap();
        let mut store = Store::open(folder.path(), PLENTY).unwrap();
        // By pod and flow, with the number of the store.
        let mut plain: BTreeMap<(usize, u64), FlowRecord> = BTreeMap::new();
        let mut seq = 0;
        for (at, (pod, records)) in batches.into_iter().enumerate() {
            for record in &records {
                seq += 1;
                let name = format!("{}/{}", pods[pod].pod.namespace, pods[pod].pod.name);
                let number = FlowRecord { number: seq, ..rows::corrected(record.clone(), &name, NOW) };
                plain.insert((pod, record.id), number);
            }
            store.keep_now(vec![(&pods[pod], answer(records))], NOW).unwrap();
            if at % crash_every == 0 {
                folder = crashed(&folder);
                store = Store::open(folder.path(), PLENTY).unwrap();
            }
        }
        prop_assert_eq!(store.fill().unwrap().records, plain.len() as u64);
        let mut plain: Vec<_> = plain.into_values().collect();
        plain.sort_by_key(|record| record.number);
        prop_assert_eq!(&all(&folder, &Filter::default()), &plain);
        let mut reader = Reader::open(folder.path()).unwrap();
        for filter in filters {
            let wanted: Vec<_> = plain.iter().filter(|record| filter.matches(record)).cloned().collect();
            let found = reader.ask(&filter, 0, ALL).unwrap().records;
            prop_assert_eq!(&found, &wanted, "{:?}", filter);
            let few = reader.ask(&filter, 0, Limits { records: 3, ..ALL }).unwrap();
            prop_assert_eq!(&few.records, &wanted[wanted.len().saturating_sub(3)..]);
            prop_assert_eq!(few.is_cut, wanted.len() > 3);
        }
    }

}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(6))]

    #[test]
    fn over_the_bound_what_is_left_is_what_was_last_told_of_it(
        batches in proptest::collection::vec((0..4_usize, 100..2000_u64, 1..400_u64), 5..40),
    ) {
        let pods = [("a", "web"), ("a", "db"), ("b", "web"), ("b", "db")].map(|(namespace, name)| attached(namespace, name));
        let folder = tempfile::tempdir().unwrap();
        let bound = Bound { bytes: OF_THE_LOG + (1 << 20), ..PLENTY };
        let mut store = Store::open(folder.path(), bound).unwrap();
        let mut plain: BTreeMap<(String, u64), FlowRecord> = BTreeMap::new();
        for (pod, first, count) in batches {
            let records: Vec<_> = (first..first + count * 8).map(|id| record(id, (id % 50) as u8, count as u16)).collect();
            let name = format!("{}/{}", pods[pod].pod.namespace, pods[pod].pod.name);
            for record in &records {
                plain.insert((name.clone(), record.id), rows::corrected(record.clone(), &name, NOW));
            }
            store.keep_now(vec![(&pods[pod], answer(records))], NOW).unwrap();
            prop_assert!(store.fill().unwrap().bytes <= bound.bytes);
        }
        while store.tidy(&HashSet::new(), NOW).unwrap() {}
        let kept = all(&folder, &Filter::default());
        prop_assert_eq!(store.fill().unwrap().records, kept.len() as u64);
        for record in kept {
            let known = &plain[&(record.source.pod.clone().unwrap(), record.id)];
            prop_assert_eq!(&FlowRecord { number: known.number, ..record }, known);
        }
    }
}
