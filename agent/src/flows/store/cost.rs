//! A node with 1,000 new flows a second: what is written is there to be found, and what it costs is printed.
//!
//! The test has 20 seconds of such flows. docs/flows.md has the figures of an hour:
//! `SECONDS_OF_FLOWS=3600 MAX_MIB=1024 cargo test --release -p nebula-agent -- --nocapture a_thousand_flows`.

use nebula_cni_contract::clock::{Clock, SystemClock};
use nebula_cni_contract::flow_records::{Amount, Filter, FlowRecord};

use super::tests::{ALL, NOW, PLENTY, answer, attached, record};
use super::*;

/// What is asked, and which flows the answer has.
type Question<'a> = (&'a str, Filter, &'a dyn Fn(u64) -> bool);

const FLOWS: u64 = 1000;
const PODS: u64 = 110;
const PEERS: u64 = 60;
const PORTS: [u16; 4] = [80, 443, 5432, 53];
/// Duration of a flow, in seconds.
const LASTS: u64 = 10;

#[test]
fn a_thousand_flows_a_second_are_written_and_found() {
    let seconds = from_environment("SECONDS_OF_FLOWS", 20);
    let folder = tempfile::tempdir().unwrap();
    let bound = Bound { bytes: from_environment("MAX_MIB", 64) << 20, ..PLENTY };
    let mut store = Store::open(folder.path(), bound).unwrap();
    let pods: Vec<_> = (0..PODS).map(|n| attached(&format!("ns-{}", n % 10), &format!("pod-{n}"))).collect();
    let (memory, mut cpu) = (anonymous_kib(), Duration::ZERO);
    for second in 0..seconds {
        let answers = answers_of(second, &pods);
        let before = cpu_time();
        for chunk in answers.chunks(5) {
            store.keep(chunk.to_vec(), NOW + second * 1000).unwrap();
        }
        store.commit().unwrap();
        if second % 5 == 0 {
            store.tidy(&HashSet::new(), NOW + second * 1000).unwrap();
        }
        cpu += cpu_time() - before;
    }
    let fill = store.fill().unwrap();
    let percent = cpu.as_secs_f64() * 100.0 / seconds as f64;
    eprintln!("{fill:?}: {} bytes a record, {:?}", fill.bytes / fill.records, store.counts());
    eprintln!("writing takes {percent:.1} % of a core, and {} KiB", anonymous_kib().saturating_sub(memory));
    assert!(fill.bytes <= bound.bytes && fill.records <= seconds * FLOWS);
    let are_all_kept = fill.records == seconds * FLOWS;
    assert!(are_all_kept || fill.bytes * 10 > bound.bytes * 7, "records are missing in a store that is not full");

    // What each question finds of the flows that were made.
    let of_pod = |flow: u64, pod: u64| flow % PODS == pod;
    let text = |text: &str| Some(text.to_owned());
    let since = seconds * 3 / 4;
    let questions: [Question<'_>; 8] = [
        ("all", Filter::default(), &|_| true),
        ("the last quarter", Filter { since_ms: Some(NOW + since * 1000), ..Filter::default() }, &|flow| {
            last_second(flow, seconds) >= since
        }),
        ("one pod", Filter { pod: text("ns-3/pod-3"), ..Filter::default() }, &|flow| of_pod(flow, 3)),
        ("one namespace", Filter { namespace: text("ns-3"), ..Filter::default() }, &|flow| flow % PODS % 10 == 3),
        ("a peer that is not there", Filter { peer: text("10.9.9.9"), ..Filter::default() }, &|_| false),
        ("a port that is not there", Filter { port: Some(1), ..Filter::default() }, &|_| false),
        ("refused", Filter { verdict: text("refused"), ..Filter::default() }, &|_| false),
        ("one peer", Filter { peer: text("peer-7.pay.pod"), ..Filter::default() }, &|flow| flow % PEERS == 7),
    ];
    for (what, filter, is_meant) in questions {
        let wanted = (0..seconds * FLOWS).filter(|flow| is_meant(*flow)).count();
        for records in [1000, 100_000] {
            let (began, before) = (SystemClock.now(), cpu_time());
            let limits = Limits { records, ..ALL };
            let answer = Reader::open(folder.path()).unwrap().ask(&filter, 0, limits).unwrap();
            let (took, used) = (began.elapsed(), cpu_time() - before);
            eprintln!("{what}: {} of at most {records} in {took:?} ({used:?} of CPU)", answer.records.len());
            assert!(!answer.is_late, "{what}");
            if are_all_kept {
                assert_eq!(answer.records.len(), wanted.min(records), "{what}");
            }
        }
    }
}

/// What the pods tell in a second: the flows that begin, and the ends of those that began [`LASTS`] seconds ago.
fn answers_of(second: u64, pods: &[Attached]) -> Vec<(&Attached, FlowRecords)> {
    let mut records = vec![Vec::new(); pods.len()];
    for flow in second * FLOWS..(second + 1) * FLOWS {
        records[(flow % PODS) as usize].push(told(flow, second, "created"));
        if let Some(old) = flow.checked_sub(LASTS * FLOWS) {
            records[(old % PODS) as usize].push(told(old, second, "ended"));
        }
    }
    pods.iter().zip(records).map(|(pod, records)| (pod, answer(records))).collect()
}

fn told(flow: u64, second: u64, event: &str) -> FlowRecord {
    let ms = NOW + second * 1000;
    let mut record = record(flow, (flow % PEERS) as u8, PORTS[(flow % 4) as usize]);
    record.source.port = Some((flow % 28_000 + 32_768) as u16);
    (record.event, record.last_ms, record.started_ms) = (event.to_owned(), ms, NOW + flow / FLOWS * 1000);
    record.forward = Amount { packets: flow % 50 + 1, bytes: flow % 90_000 };
    record.reply = Amount { packets: flow % 70 + 1, bytes: flow % 900_000 };
    record
}

/// The second of the last record of a flow.
fn last_second(flow: u64, seconds: u64) -> u64 {
    let (began, end) = (flow / FLOWS, flow / FLOWS + LASTS);
    if end < seconds { end } else { began }
}

fn from_environment(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).ok().map_or(otherwise, |text| text.parse().unwrap())
}

fn cpu_time() -> Duration {
    Duration::from(nix::time::clock_gettime(nix::time::ClockId::CLOCK_THREAD_CPUTIME_ID).unwrap())
}

fn anonymous_kib() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    line.trim_end_matches("kB").trim().parse().unwrap()
}
