//! Tests of the drain with its writer: hostile instances beside a good one, and a disk that is full.

use std::collections::HashSet;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use nebula_cni_contract::flow_records::{Filter, FlowEnd, FlowRecord, FlowRecords};
use nebula_cni_contract::launch::Pod;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tempfile::TempDir;
use tokio::sync::oneshot;

use super::store::{Bound, Limits, Reader, Store};
use super::writer::{Job, Kept, NotKept};
use super::*;
use crate::config::Config;

const BOUND: Bound = Bound { bytes: 64 << 20, age: Duration::from_secs(3600) };

fn attached(namespace: &str, name: &str, socket: &Path) -> Attached {
    let pod = Pod { namespace: namespace.to_owned(), name: name.to_owned(), uid: format!("uid-{namespace}-{name}") };
    Attached { attachment: format!("net/{namespace}-{name}-eth0"), pod, socket: socket.to_owned() }
}

fn record(id: u64) -> FlowRecord {
    let end =
        |last: u8, port| FlowEnd { address: Some([10, 42, 0, last].into()), port: Some(port), ..FlowEnd::default() };
    FlowRecord {
        number: id,
        id,
        event: "created".to_owned(),
        verdict: "allowed".to_owned(),
        direction: "outbound".to_owned(),
        protocol: 17,
        source: end(1, 4000),
        destination: FlowEnd { name: Some(format!("peer-{id}")), ..end(2, 53) },
        last_ms: 1,
        ..FlowRecord::default()
    }
}

/// An instance that answers each connection like this.
fn instance(folder: &TempDir, name: &str, answer: impl Fn(UnixStream, u64) + Send + Sync + 'static) -> Attached {
    let path = folder.path().join(name);
    let listener = UnixListener::bind(&path).unwrap();
    let answer = Arc::new(answer);
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let answer = Arc::clone(&answer);
            std::thread::spawn(move || {
                let mut stream = stream;
                let mut head = [0; 4096];
                let length = stream.read(&mut head).unwrap_or(0);
                let text = String::from_utf8_lossy(&head[..length]).into_owned();
                let after = text.split_once("after=").and_then(|(_, rest)| rest.split(' ').next()?.parse().ok());
                answer(stream, after.unwrap_or(0));
            });
        }
    });
    attached("shop", name, &path)
}

fn say(mut stream: UnixStream, records: &FlowRecords) {
    let text = format!("HTTP/1.1 200 OK\r\n\r\n{}", serde_json::to_string(records).unwrap());
    let _ = stream.write_all(text.as_bytes());
}

fn kept(store: &Path, pod: &str) -> Vec<FlowRecord> {
    let filter = Filter { pod: Some(pod.to_owned()), ..Filter::default() };
    let limits = Limits { records: 100_000, time: Duration::from_secs(30) };
    Reader::open(store).map_or_else(|_| Vec::new(), |mut reader| reader.ask(&filter, 0, limits).unwrap().records)
}

fn writer(folder: &Path, metrics: &Arc<Metrics>) -> (mpsc::Sender<Job>, std::thread::JoinHandle<()>) {
    let (jobs, taken) = mpsc::channel(8);
    let progress = Arc::new(Progress::new(Vec::new()));
    let readiness = crate::readiness::Readiness::default();
    let writer = Writer::new(folder.to_owned(), BOUND, readiness, Arc::clone(metrics), progress);
    (jobs, std::thread::spawn(move || writer.run(taken)))
}

#[tokio::test]
async fn instances_that_are_silent_slow_large_or_lie_keep_nobody_else_from_being_heard() {
    let folder = tempfile::tempdir().unwrap();
    let store = folder.path().join("store");
    static GIVEN: AtomicU64 = AtomicU64::new(0);
    const AT_ONCE: u64 = 150;
    let mut all = vec![
        instance(&folder, "good", |stream, after| {
            let records: Vec<_> = (after + 1..=after + AT_ONCE).map(record).collect();
            GIVEN.fetch_max(after + AT_ONCE, Ordering::Relaxed);
            say(stream, &FlowRecords { next: after + AT_ONCE, records, is_on: true, ..FlowRecords::default() });
        }),
        instance(&folder, "forger", |stream, after| {
            let mut lie = record(1);
            (lie.source.pod, lie.source.name) = (Some("shop/good".to_owned()), Some("peer-1".to_owned()));
            (lie.destination.pod, lie.last_ms) = (Some("shop/good".to_owned()), u64::MAX);
            let (lost, next) = (u64::MAX - after, u64::MAX);
            say(stream, &FlowRecords { records: vec![lie], next, lost, is_on: true, is_cut: true });
        }),
        attached("shop", "gone", &folder.path().join("nobody")),
    ];
    for n in 0..6 {
        all.push(instance(&folder, &format!("silent-{n}"), |_stream, _| std::thread::sleep(Duration::from_secs(30))));
        all.push(instance(&folder, &format!("slow-{n}"), |mut stream, _| {
            while stream.write_all(b" ").is_ok() {
                std::thread::sleep(Duration::from_millis(200));
            }
        }));
    }
    for n in 0..3 {
        all.push(instance(
            &folder,
            &format!("large-{n}"),
            |mut stream, _| {
                while stream.write_all(&[b' '; 65_536]).is_ok() {}
            },
        ));
    }
    let metrics = Arc::new(Metrics::new(false));
    let (jobs, thread) = writer(&store, &metrics);
    let config = Config::parse(r#"{"ca": {"url": "https://ca"}}"#).unwrap();
    let host = HostRoot::new(Some(folder.path().to_owned()));
    let drain = Drain::new(host, Node::new(config).retirement, Arc::clone(&metrics), jobs).of(all);
    let heard = async {
        while GIVEN.load(Ordering::Relaxed) < AT_ONCE * 5 {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::select! {
        () = drain.run() => {}
        () = tokio::time::sleep(Duration::from_secs(60)) => {}
        () = heard => {}
    }
    thread.join().unwrap();
    let good = kept(&store, "shop/good");
    assert!(good.len() as u64 >= AT_ONCE * 4, "asked often enough: {}", good.len());
    // The last answer may have come too late to be kept.
    let ids: Vec<_> = good.iter().map(|record| record.id).collect();
    assert_eq!(ids, (1..=good.len() as u64).collect::<Vec<_>>(), "each once, none lost");
    assert!(GIVEN.load(Ordering::Relaxed) - good.len() as u64 <= AT_ONCE);
    let forged = kept(&store, "shop/forger");
    assert_eq!(forged.len(), 1);
    assert_eq!((forged[0].source.pod.as_deref(), forged[0].source.name.as_deref()), (Some("shop/forger"), None));
    assert!(forged[0].destination.pod.is_none() && forged[0].last_ms < u64::MAX);
    let text = metrics.text();
    for reason in ["gone", "late", "long"] {
        assert!(!text.contains(&format!("nebula_cni_flow_asks_failed_total{{reason=\"{reason}\"}} 0\n")), "{text}");
    }
}

async fn keep(jobs: &mpsc::Sender<Job>, ids: std::ops::Range<u64>) -> Result<Kept, NotKept> {
    let (next, records) = (ids.end, ids.map(record).collect());
    let records = FlowRecords { records, next, is_on: true, ..FlowRecords::default() };
    let answer = format!("HTTP/1.1 200 OK\r\n\r\n{}", serde_json::to_string(&records).unwrap()).into_bytes();
    let (reply, kept) = oneshot::channel();
    jobs.send(Job::Keep { attached: attached("shop", "web", Path::new("/none")), answer, reply }).await.unwrap();
    kept.await.unwrap()
}

#[tokio::test]
async fn a_store_that_cannot_be_opened_is_tried_again_and_a_damaged_one_is_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let store = folder.path().join("store");
    std::fs::write(&store, "no folder").unwrap();
    let metrics = Arc::new(Metrics::new(false));
    let (jobs, thread) = writer(&store, &metrics);
    assert_eq!(keep(&jobs, 0..10).await.unwrap_err(), NotKept::NoStore);
    assert!(metrics.text().contains("nebula_cni_flow_store_up 0\n"));
    std::fs::remove_file(&store).unwrap();
    assert_eq!(keep(&jobs, 0..10).await.unwrap_err(), NotKept::NoStore, "not at once");
    tokio::time::sleep(Duration::from_millis(1100)).await;
    assert_eq!(keep(&jobs, 0..10).await.unwrap().records, 10);
    jobs.send(Job::Tidy { attached: HashSet::new() }).await.unwrap();
    drop(jobs);
    thread.join().unwrap();
    let text = metrics.text();
    assert!(
        text.contains("nebula_cni_flow_store_up 1\n") && text.contains("nebula_cni_flow_store_errors_total 1\n"),
        "{text}"
    );
    assert!(text.contains("nebula_cni_flow_records_written_total 10\n"), "{text}");
    std::fs::write(store.join("flows.db"), "z".repeat(100_000)).unwrap();
    let (jobs, thread) = writer(&store, &metrics);
    let _ = keep(&jobs, 0..5).await;
    assert_eq!(keep(&jobs, 0..5).await.unwrap().records, 5);
    drop(jobs);
    thread.join().unwrap();
    assert_eq!(kept(&store, "web").len(), 5);
    assert!(store.join("flows.db.damaged").exists());
}

/// Files of this process may not become larger than this.
fn limit_files(bytes: u64) {
    let (_, hard) = getrlimit(Resource::RLIMIT_FSIZE).unwrap();
    setrlimit(Resource::RLIMIT_FSIZE, bytes, hard).unwrap();
}

/// Runs itself in a process of its own: the limit is one of the whole process, and its signal must be ignored.
#[tokio::test]
async fn a_full_disk_ends_nothing_and_what_was_kept_before_stays() {
    const IS_LIMITED: &str = "NEBULA_TEST_FILES_ARE_LIMITED";
    if std::env::var_os(IS_LIMITED).is_none() {
        let name = "flows::tests::a_full_disk_ends_nothing_and_what_was_kept_before_stays";
        let script = format!("trap '' XFSZ; exec \"$0\" --exact {name}");
        let program = std::env::current_exe().unwrap();
        let done = Command::new("sh").args(["-c", &script]).arg(program).env(IS_LIMITED, "").output().unwrap();
        let said = String::from_utf8_lossy(&done.stdout);
        assert!(done.status.success() && said.contains("1 passed"), "{said}{}", String::from_utf8_lossy(&done.stderr));
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let metrics = Arc::new(Metrics::new(false));
    let (jobs, thread) = writer(folder.path(), &metrics);
    limit_files(600 << 10);
    let (mut id, mut failures) = (0, 0);
    // After the first failure there is room again, for the log becomes part of the file.
    while failures < 2 {
        if keep(&jobs, id..id + 500).await.is_ok() {
            (id, failures) = (id + 500, 0);
        } else {
            failures += 1;
            // What was not committed is asked for again.
            id = kept(folder.path(), "web").len() as u64;
            tokio::time::sleep(Duration::from_millis(1100)).await;
        }
        assert!(id < 1_000_000, "the disk never becomes full");
    }
    assert!(id > 0 && kept(folder.path(), "web").len() as u64 == id);
    assert!(metrics.text().contains("nebula_cni_flow_store_up 0\n"));
    limit_files(u64::MAX >> 1);
    let mut tried = 0;
    while keep(&jobs, id..id + 500).await.is_err() {
        tokio::time::sleep(Duration::from_millis(500)).await;
        tried += 1;
        assert!(tried < 60, "it is never tried again");
    }
    drop(jobs);
    thread.join().unwrap();
    assert_eq!(kept(folder.path(), "web").len() as u64, id + 500);
    assert!(!metrics.text().contains("nebula_cni_flow_store_errors_total 0\n"));
    drop(Store::open(folder.path(), BOUND).unwrap());
}
