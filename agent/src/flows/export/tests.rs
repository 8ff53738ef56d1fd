//! Tests of exporters with a real store: what a collector does never costs more than its own records, and what is lost
//! is counted.

use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::sync::mpsc::Sender;
use std::time::Instant;

use nebula_cni_contract::clock::{Clock, SystemClock};
use nebula_cni_contract::flow_records::{Amount, FlowEnd, FlowRecords};
use nebula_cni_contract::launch::Pod;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use tempfile::TempDir;

use super::receiver::{Answer, Asked, Receiver, attribute, nobody};
use super::*;
use crate::flows::Attached;
use crate::flows::store::{Bound, Store};

const BOUND: Bound = Bound { bytes: 64 << 20, age: Duration::from_secs(86_400) };
pub(super) const NOW: u64 = 1_700_000_000_000;
/// Longer than a busy machine needs for an answer.
const SHORT: Duration = Duration::from_secs(2);

/// A store with one exporter to a collector.
pub(super) struct Bench {
    pub(super) folder: TempDir,
    pub(super) store: Store,
    pub(super) progress: Arc<Progress>,
    pub(super) exporter: Exporter,
    pub(super) about: Surroundings,
    _stop: Sender<std::convert::Infallible>,
}

fn surroundings(folder: &Path) -> Surroundings {
    Surroundings {
        host: HostRoot::new(Some(folder.to_owned())),
        folder: folder.to_owned(),
        node: Some("node-1".to_owned()),
        readiness: Readiness::default(),
        metrics: Arc::new(Metrics::new(false)),
    }
}

fn collector(address: SocketAddr, about: &Surroundings) -> Collector {
    let otlp = OtlpExport { endpoint: format!("http://{address}/"), headers: None, roots: None };
    Collector::new(otlp, &about.host, about.node.as_deref()).within(SHORT)
}

impl Bench {
    fn new(address: SocketAddr) -> Self {
        Self::in_folder(tempfile::tempdir().unwrap(), address, BOUND)
    }

    /// For as long as an answer takes.
    pub(super) fn patient(address: SocketAddr) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let about = surroundings(folder.path());
        let sink = Box::new(collector(address, &about).within(Duration::from_secs(60)));
        Self::with(folder, about, sink, BOUND)
    }

    pub(super) fn in_folder(folder: TempDir, address: SocketAddr, bound: Bound) -> Self {
        let about = surroundings(folder.path());
        let sink = Box::new(collector(address, &about));
        Self::with(folder, about, sink, bound)
    }

    fn with(folder: TempDir, about: Surroundings, sink: Box<dyn Sink>, bound: Bound) -> Self {
        let progress = Arc::new(Progress::new(vec![Target::Otlp]));
        let mut store = Store::open(folder.path(), bound).unwrap();
        let positions = store.follow(progress.targets()).unwrap();
        progress.opened(&positions, store.newest());
        let (stop, stopped) = mpsc::channel();
        about.metrics.flows(|flows| flows.exports_to(Target::Otlp));
        about.readiness.set(Part::FlowExport, Standing::good("flow records are exported"));
        let exporter = Exporter::new(Target::Otlp, sink, Arc::clone(&progress), about.clone(), stopped);
        Self { folder, store, progress, exporter, about, _stop: stop }
    }

    /// Keeps flows, as the writer does.
    fn keep(&mut self, ids: std::ops::Range<u64>) {
        let pod = Pod { namespace: "shop".to_owned(), name: "web-0".to_owned(), uid: "1".to_owned() };
        let attached = Attached { attachment: "a".to_owned(), pod, socket: PathBuf::new() };
        let (next, records) = (ids.end, ids.map(record).collect());
        let answer = FlowRecords { records, next, is_on: true, ..FlowRecords::default() };
        self.progress.all().into_iter().for_each(|(target, number)| self.store.exported(target, number));
        self.store.keep(vec![(&attached, answer)], NOW).unwrap();
        self.store.commit().unwrap();
    }

    /// The agent ends, and starts again.
    fn restart(mut self, address: SocketAddr, bound: Bound) -> Self {
        self.progress.all().into_iter().for_each(|(target, number)| self.store.exported(target, number));
        self.store.tidy(&["a".to_owned()].into(), NOW).unwrap();
        drop(self.store);
        Self::in_folder(self.folder, address, bound)
    }

    fn metric(&self, name: &str) -> u64 {
        let unexported = self.store.counts();
        self.about.metrics.flows(|flows| flows.counts = unexported);
        let text = self.about.metrics.text();
        let line = text.lines().find_map(|line| line.strip_prefix(&format!("nebula_cni_flow_export_{name} ")));
        line.unwrap_or_else(|| panic!("{name} is not in {text}")).parse().unwrap()
    }

    fn standing(&self) -> Standing {
        self.about.readiness.now()[&Part::FlowExport].clone()
    }
}

pub(super) fn record(id: u64) -> FlowRecord {
    let address = |last: u8| Some(IpAddr::from([10, 42, 0, last]));
    FlowRecord {
        number: id,
        id,
        event: "created".to_owned(),
        verdict: "allowed".to_owned(),
        direction: "outbound".to_owned(),
        protocol: 6,
        source: FlowEnd { address: address(1), port: Some(40_112), ..FlowEnd::default() },
        destination: FlowEnd {
            address: address(9),
            port: Some(5432),
            name: Some("db-0.pay.pod".to_owned()),
            groups: vec!["ns:pay".to_owned()],
            ..FlowEnd::default()
        },
        forward: Amount { packets: 3, bytes: 300 },
        started_ms: NOW - 1500,
        last_ms: NOW - 500,
        rule: Some(2),
        ..FlowRecord::default()
    }
}

#[test]
fn records_arrive_once_in_order_and_with_the_names_of_the_conventions() {
    let receiver = Receiver::new();
    let mut bench = Bench::new(receiver.address);
    bench.keep(1..601);
    while bench.exporter.step() == Duration::ZERO {}
    let asked = receiver.asked();
    assert_eq!(asked.iter().flat_map(Asked::numbers).collect::<Vec<_>>(), (1..=600).collect::<Vec<_>>());
    assert!(asked[0].head.starts_with("POST /v1/logs HTTP/1.1\r\n"), "{}", asked[0].head);
    assert!(asked[0].head.to_lowercase().contains("content-type: application/x-protobuf\r\n"), "{}", asked[0].head);
    let resource = &asked[0].request.resource_logs[0].resource.as_ref().unwrap().attributes;
    let text = |text: &str| Some(Value::StringValue(text.to_owned()));
    assert_eq!(attribute(resource, "k8s.node.name").cloned(), text("node-1"));
    let record = asked[0].records()[0];
    assert_eq!((record.time_unix_nano, &*record.event_name), ((NOW - 500) * 1_000_000, "nebula.flow"));
    for (key, value) in [
        ("k8s.namespace.name", text("shop")),
        ("k8s.pod.name", text("web-0")),
        ("network.transport", text("tcp")),
        ("network.type", text("ipv4")),
        ("source.address", text("10.42.0.1")),
        ("source.port", Some(Value::IntValue(40_112))),
        ("destination.address", text("10.42.0.9")),
        ("destination.port", Some(Value::IntValue(5432))),
        ("nebula.source.namespace", text("shop")),
        ("nebula.destination.namespace", text("pay")),
        ("nebula.destination.name", text("db-0.pay.pod")),
        ("nebula.flow.verdict", text("allowed")),
        ("nebula.flow.forward.bytes", Some(Value::IntValue(300))),
        ("nebula.flow.duration_ms", Some(Value::IntValue(1000))),
        ("nebula.rule", Some(Value::IntValue(2))),
        ("nebula.relay.address", None),
    ] {
        assert_eq!(attribute(&record.attributes, key).cloned(), value, "{key}");
    }
    let body = record.body.as_ref().and_then(|body| body.value.clone());
    assert_eq!(body, text("allowed tcp shop/web-0 10.42.0.1:40112 -> db-0.pay.pod 10.42.0.9:5432"));
    assert_eq!(
        (bench.metric("records_total{target=\"otlp\"}"), bench.metric("behind_records{target=\"otlp\"}")),
        (600, 0)
    );
}

#[test]
fn a_collector_that_is_away_gets_everything_once_it_is_back_and_holds_up_nobody() {
    let address = nobody();
    let mut bench = Bench::new(address);
    let mut pauses = Vec::new();
    for n in 0..6 {
        bench.keep(n * 100 + 1..n * 100 + 101);
        pauses.push(bench.exporter.step());
    }
    assert!(pauses.iter().all(|pause| *pause >= Duration::from_secs(1)), "{pauses:?}");
    assert!(pauses[5] > pauses[0] * 4, "{pauses:?}");
    assert_eq!(bench.metric("failures_total{target=\"otlp\"}"), 6);
    assert_eq!(bench.metric("behind_records{target=\"otlp\"}"), 600);
    let receiver = Receiver::on(address, None);
    while bench.exporter.step() == Duration::ZERO {}
    let asked = receiver.asked();
    assert_eq!(asked.iter().flat_map(Asked::numbers).collect::<Vec<_>>(), (1..=600).collect::<Vec<_>>());
    assert_eq!(bench.metric("failing_seconds{target=\"otlp\"}"), 0);
    assert_eq!(bench.metric("lost_total{target=\"otlp\",reason=\"gone\"}"), 0);
}

#[test]
fn one_that_hangs_or_answers_garbage_or_redirects_gets_the_same_batch_again() {
    let receiver = Receiver::new();
    let elsewhere = Receiver::new();
    let mut bench = Bench::new(receiver.address);
    bench.keep(1..11);
    let moved =
        format!("HTTP/1.1 307 X\r\nLocation: http://{}/v1/logs\r\nContent-Length: 0\r\n\r\n", elsewhere.address);
    let page = "HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 4\r\n\r\n<b/>".to_owned();
    let broken =
        "HTTP/1.1 200 OK\r\nContent-Type: application/x-protobuf\r\nContent-Length: 2\r\n\r\n\x0a\x7f".to_owned();
    let endless = format!("HTTP/1.1 200 OK\r\nContent-Type: application/x-protobuf\r\n\r\n{}\0", "z".repeat(1 << 20));
    let raw = |text: &str| Answer::Raw(text.as_bytes().to_vec());
    for answer in [
        Answer::Nothing,
        raw(&moved),
        raw(&page),
        raw(&broken),
        raw(&endless),
        raw("\u{1}\u{2}\u{3}\r\n\r\n"),
        raw(""),
        Answer::Status(503, ""),
        Answer::Status(429, "Retry-After: soon\r\n"),
    ] {
        receiver.answer(answer.clone());
        let began = SystemClock.now();
        let pause = bench.exporter.step();
        assert!(pause >= Duration::from_secs(1), "{answer:?}: {pause:?}");
        assert!(began.elapsed() < SHORT * 10, "{answer:?} took {:?}", began.elapsed());
        for asked in receiver.asked() {
            assert_eq!(asked.numbers(), (1..=10).collect::<Vec<_>>(), "{answer:?}");
        }
    }
    assert!(elsewhere.asked().is_empty(), "a redirect is followed");
    assert_eq!(bench.metric("records_total{target=\"otlp\"}"), 0);
    receiver.answer(Answer::Taken);
    bench.exporter.step();
    assert_eq!(bench.metric("records_total{target=\"otlp\"}"), 10);
}

#[test]
fn the_pause_that_a_busy_collector_asks_for_is_kept() {
    let receiver = Receiver::new();
    let mut bench = Bench::new(receiver.address);
    bench.keep(1..2);
    receiver.answer(Answer::Status(503, "Retry-After: 45\r\n"));
    let pause = bench.exporter.step();
    assert!((45..52).contains(&pause.as_secs()), "{pause:?}");
    assert!(bench.standing().ok, "a collector that restarts is no news");
}

#[test]
fn what_a_collector_rejects_or_refuses_is_counted_and_not_sent_again() {
    let receiver = Receiver::new();
    let mut bench = Bench::new(receiver.address);
    bench.keep(1..11);
    receiver.answer(Answer::Rejected(4));
    bench.exporter.step();
    bench.keep(11..21);
    receiver.answer(Answer::Status(400, ""));
    let pause = bench.exporter.step();
    assert!(pause >= Duration::from_secs(1), "the next batch would be refused, too: {pause:?}");
    let standing = bench.standing();
    assert!(!standing.ok && standing.reason.contains("refuses them with status 400"), "{standing:?}");
    bench.keep(21..31);
    receiver.answer(Answer::Taken);
    bench.exporter.step();
    let numbers: Vec<_> = receiver.asked().iter().map(Asked::numbers).collect();
    assert_eq!(numbers, [(1..=10).collect::<Vec<_>>(), (11..=20).collect(), (21..=30).collect()]);
    assert!(bench.standing().ok);
    assert_eq!(bench.metric("records_total{target=\"otlp\"}"), 16);
    assert_eq!(bench.metric("lost_total{target=\"otlp\",reason=\"rejected\"}"), 4);
    assert_eq!(bench.metric("lost_total{target=\"otlp\",reason=\"refused\"}"), 10);
    // It cannot reject more than it was sent.
    bench.keep(31..32);
    receiver.answer(Answer::Rejected(i64::MAX));
    bench.exporter.step();
    assert_eq!(bench.metric("lost_total{target=\"otlp\",reason=\"rejected\"}"), 5);
}

#[test]
fn a_restart_goes_on_where_it_stopped_and_counts_what_the_store_lost_meanwhile() {
    let receiver = Receiver::new();
    let mut bench = Bench::new(receiver.address);
    bench.keep(1..11);
    bench.exporter.step();
    receiver.asked();
    bench.keep(11..21);
    let mut bench = bench.restart(receiver.address, BOUND);
    bench.exporter.step();
    assert_eq!(receiver.asked()[0].numbers(), (11..=20).collect::<Vec<_>>());
    // With a store that holds less than what comes while the collector is away.
    let small = Bound { bytes: 7 << 20, ..BOUND };
    let mut bench = bench.restart(nobody(), small);
    for start in (21..40_021).step_by(1000) {
        bench.keep(start..start + 1000);
    }
    bench.exporter.step();
    let kept = bench.store.fill().unwrap().records;
    let mut bench = bench.restart(receiver.address, small);
    let counted = bench.metric("lost_total{target=\"otlp\",reason=\"gone\"}");
    assert_eq!(counted, 0, "counters begin at 0");
    while bench.exporter.step() == Duration::ZERO {}
    let numbers: Vec<_> = receiver.asked().iter().flat_map(Asked::numbers).collect();
    assert!(kept < 40_000 && numbers.len() as u64 <= kept, "{kept}");
    assert_eq!(numbers.last(), Some(&40_020));
}

#[test]
fn what_gives_way_before_it_was_exported_is_counted() {
    let receiver = Receiver::new();
    let small = Bound { bytes: 7 << 20, ..BOUND };
    let mut bench = Bench::in_folder(tempfile::tempdir().unwrap(), receiver.address, small);
    bench.keep(1..201);
    bench.exporter.step();
    for start in (201..30_201).step_by(1000) {
        bench.keep(start..start + 1000);
    }
    let counts = bench.store.counts();
    assert!(counts.evicted > 1000, "{counts:?}");
    assert_eq!(counts.unexported[Target::Otlp as usize], counts.evicted - 200, "those that were exported are not lost");
    while bench.exporter.step() == Duration::ZERO {}
    let exported = bench.metric("records_total{target=\"otlp\"}");
    assert_eq!(exported + bench.metric("lost_total{target=\"otlp\",reason=\"gone\"}"), 30_200);
}

#[test]
fn an_exporter_that_is_new_begins_with_what_is_told_from_now_on() {
    let receiver = Receiver::new();
    let folder = tempfile::tempdir().unwrap();
    drop(Bench::in_folder(folder, receiver.address, BOUND));
    let mut bench = Bench::new(receiver.address);
    bench.keep(1..6);
    bench.store.follow(&[]).unwrap();
    let positions = bench.store.follow(&[Target::Otlp]).unwrap();
    assert_eq!(positions, [(Target::Otlp, 5)]);
}

#[test]
fn a_store_that_takes_the_place_of_a_damaged_one_is_exported_from_its_start() {
    let receiver = Receiver::new();
    let mut bench = Bench::new(receiver.address);
    bench.keep(1..101);
    bench.exporter.step();
    receiver.asked();
    bench.progress.closed(true);
    let elsewhere = tempfile::tempdir().unwrap();
    drop(std::mem::replace(&mut bench.store, Store::open(elsewhere.path(), BOUND).unwrap()));
    Store::set_aside(bench.folder.path()).unwrap();
    bench.store = Store::open(bench.folder.path(), BOUND).unwrap();
    assert_eq!(bench.exporter.step(), Duration::from_secs(1), "no store is open");
    let positions = bench.store.follow(&[Target::Otlp]).unwrap();
    bench.progress.opened(&positions, bench.store.newest());
    bench.keep(1..4);
    bench.exporter.step();
    assert_eq!(receiver.asked()[0].numbers(), [1, 2, 3]);
}

#[test]
fn records_with_long_names_are_sent_in_smaller_batches() {
    let receiver = Receiver::new();
    let mut bench = Bench::new(receiver.address);
    let pod = Pod { namespace: "evil".to_owned(), name: "x".to_owned(), uid: "1".to_owned() };
    let attached = Attached { attachment: "e".to_owned(), pod, socket: PathBuf::new() };
    let mut records: Vec<_> = (1..101).map(record).collect();
    for record in &mut records {
        record.destination.groups = vec!["g".repeat(512); 256];
    }
    bench.store.keep(vec![(&attached, FlowRecords { records, next: 100, ..FlowRecords::default() })], NOW).unwrap();
    bench.store.commit().unwrap();
    while bench.exporter.step() == Duration::ZERO {}
    let asked = receiver.asked();
    assert_eq!(asked.iter().map(|asked| asked.records().len()).sum::<usize>(), 100);
    assert!(asked.iter().all(|asked| asked.records().len() <= 2));
}

#[test]
fn secret_headers_reach_the_collector_and_nothing_else_also_when_they_change() {
    let receiver = Receiver::new();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("headers");
    let about = surroundings(folder.path());
    let endpoint = format!("http://{}", receiver.address);
    let otlp = OtlpExport { endpoint, headers: Some(file.clone()), roots: None };
    let sink = Box::new(Collector::new(otlp, &about.host, None).within(SHORT));
    let mut bench = Bench::with(folder, about, sink, BOUND);
    bench.keep(1..2);
    assert!(bench.exporter.step() >= Duration::from_secs(1), "no file of headers, no request");
    assert!(receiver.asked().is_empty());
    std::fs::write(&file, "Authorization: Bearer s3cret\n").unwrap();
    receiver.answer(Answer::Status(401, ""));
    bench.exporter.step();
    assert!(receiver.asked()[0].head.to_lowercase().contains("authorization: bearer s3cret\r\n"));
    let said = format!("{:?}", bench.standing());
    assert!(said.contains("status 401") && !said.contains("s3cret"), "{said}");
    std::fs::write(&file, "Authorization: Bearer an0ther\n").unwrap();
    let later = std::time::UNIX_EPOCH + Duration::from_secs(4_000_000_000);
    std::fs::File::options().write(true).open(&file).unwrap().set_modified(later).unwrap();
    receiver.answer(Answer::Taken);
    bench.keep(2..3);
    bench.exporter.step();
    assert!(receiver.asked()[0].head.contains("Bearer an0ther"));
}

#[test]
fn a_collector_with_tls_is_believed_by_its_root_only() {
    let made = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
    let key = rustls::pki_types::PrivateKeyDer::try_from(made.signing_key.serialize_der()).unwrap();
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let tls = rustls::ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    let tls = tls.with_no_client_auth().with_single_cert(vec![made.cert.der().clone()], key).unwrap();
    let receiver = Receiver::on("127.0.0.1:0".parse().unwrap(), Some(Arc::new(tls)));
    let other = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
    for (root, is_good) in [(&other.cert, false), (&made.cert, true)] {
        let folder = tempfile::tempdir().unwrap();
        let roots = folder.path().join("ca.crt");
        std::fs::write(&roots, root.pem()).unwrap();
        let about = surroundings(folder.path());
        let endpoint = format!("https://localhost:{}", receiver.address.port());
        let otlp = OtlpExport { endpoint, headers: None, roots: Some(roots) };
        let sink = Box::new(Collector::new(otlp, &about.host, None).within(Duration::from_secs(5)));
        let mut bench = Bench::with(folder, about, sink, BOUND);
        bench.keep(1..2);
        bench.exporter.step();
        assert_eq!(receiver.asked().len(), usize::from(is_good));
    }
}

/// Takes nothing until it is let go on.
struct Stuck(mpsc::Receiver<()>);

impl Sink for Stuck {
    fn place(&self) -> String {
        "nowhere".to_owned()
    }

    fn send(&mut self, _: &[FlowRecord]) -> Result<Sent, SendError> {
        let _ = self.0.recv();
        Ok(Sent::default())
    }
}

#[test]
fn a_disk_or_a_collector_that_hangs_does_not_slow_the_store() {
    let mut bench = Bench::new(nobody());
    bench.keep(1..301);
    let ((go_on, stuck), (stop, stopped)) = (mpsc::channel(), mpsc::channel());
    let sink = Box::new(Stuck(stuck));
    let exporter = Exporter::new(Target::Otlp, sink, Arc::clone(&bench.progress), bench.about.clone(), stopped);
    let thread = std::thread::spawn(move || exporter.run());
    let began: Instant = SystemClock.now();
    for start in (301..5301).step_by(500) {
        bench.keep(start..start + 500);
    }
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
    assert_eq!(bench.store.fill().unwrap().records, 5300);
    assert_eq!(bench.progress.all(), [(Target::Otlp, 0)], "the exporter still has its first batch");
    drop((go_on, stop));
    thread.join().unwrap();
}
