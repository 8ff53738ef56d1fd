//! The cost of reading, writing and exporting 1,000 new flows a second of 110 pods, with two records each.
//!
//! `SECONDS_OF_FLOWS=60 cargo test -p nebula-agent -- --nocapture a_thousand_flows_a_second_are_exported`

use nebula_cni_contract::flow_records::{Amount, FlowRecord, FlowRecords, read_answer};
use nebula_cni_contract::launch::Pod;
use nix::time::{ClockId, clock_gettime};

use super::receiver::{Asked, Receiver};
use super::tests::{Bench, NOW, record};
use super::*;
use crate::flows::Attached;

const FLOWS: u64 = 1000;
const PODS: u64 = 110;
/// A flow ends this number of seconds after it began.
const LASTS: u64 = 5;

/// CPU time of each step.
#[derive(Debug, Default)]
struct Cost {
    parsing: Duration,
    writing: Duration,
    otlp: Duration,
    lines: Duration,
}

#[test]
fn a_thousand_flows_a_second_are_exported() {
    let seconds: u64 = std::env::var("SECONDS_OF_FLOWS").ok().map_or(10, |text| text.parse().unwrap());
    let receiver = Receiver::new();
    let mut bench = Bench::patient(receiver.address);
    let lines = Box::new(Lines::new(bench.folder.path().join("flows.jsonl"), 64 << 20));
    let (_stop, stopped) = mpsc::channel();
    let mut file = Exporter::new(Target::File, lines, Arc::clone(&bench.progress), bench.about.clone(), stopped);
    let mut cost = Cost::default();
    let (mut sent, mut told) = (0, 0);
    for second in 0..seconds {
        for answer in answers(second) {
            told += answer.1.records.len();
            let text = format!("HTTP/1.1 200 OK\r\n\r\n{}", serde_json::to_string(&answer.1).unwrap());
            let read = timed(&mut cost.parsing, || read_answer(text.as_bytes()).unwrap());
            timed(&mut cost.writing, || bench.store.keep(vec![(&answer.0, read)], NOW + second * 1000).unwrap());
        }
        timed(&mut cost.writing, || bench.store.commit().unwrap());
        timed(&mut cost.otlp, || while bench.exporter.step() == Duration::ZERO {});
        timed(&mut cost.lines, || while file.step() == Duration::ZERO {});
        sent += receiver.asked().iter().map(|asked: &Asked| asked.records().len()).sum::<usize>();
    }
    assert_eq!(sent, told, "each change was exported");
    let percent = |cost: Duration| cost.as_secs_f64() * 100.0 / seconds as f64;
    eprintln!(
        "% of a core: reading {:.1}, writing {:.1}, OTLP {:.1}, lines {:.1}",
        percent(cost.parsing),
        percent(cost.writing),
        percent(cost.otlp),
        percent(cost.lines)
    );
}

/// What the pods tell in a second: the flows that begin, and the ends of those that began `LASTS` seconds ago.
fn answers(second: u64) -> Vec<(Attached, FlowRecords)> {
    let mut records = vec![Vec::new(); PODS as usize];
    for flow in second * FLOWS..(second + 1) * FLOWS {
        records[(flow % PODS) as usize].push(change(flow, second, "created"));
        if let Some(old) = flow.checked_sub(LASTS * FLOWS) {
            records[(old % PODS) as usize].push(change(old, second, "ended"));
        }
    }
    let of_pod = |(pod, records): (usize, Vec<FlowRecord>)| {
        let (namespace, name) = (format!("ns-{}", pod % 10), format!("pod-{pod}"));
        let attached = Attached {
            attachment: format!("net/{name}"),
            pod: Pod { uid: name.clone(), namespace, name },
            socket: PathBuf::new(),
        };
        (attached, FlowRecords { records, next: second + 1, is_on: true, ..FlowRecords::default() })
    };
    records.into_iter().enumerate().map(of_pod).collect()
}

fn change(flow: u64, second: u64, event: &str) -> FlowRecord {
    let mut record = record(flow);
    record.source.port = Some((flow % 28_000 + 32_768) as u16);
    record.destination.name = Some(format!("peer-{}.pay.pod", flow % 60));
    record.destination.fingerprint = Some("ab".repeat(32));
    record.path = Some("direct".to_owned());
    (record.event, record.last_ms) = (event.to_owned(), NOW + second * 1000);
    record.forward = Amount { packets: flow % 50 + 1, bytes: flow % 90_000 };
    record.reply = Amount { packets: flow % 70 + 1, bytes: flow % 900_000 };
    record
}

fn timed<T>(cost: &mut Duration, work: impl FnOnce() -> T) -> T {
    let cpu = || Duration::from(clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).unwrap());
    let before = cpu();
    let done = work();
    *cost += cpu() - before;
    done
}
