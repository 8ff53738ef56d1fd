//! What stands for the instances of a node: each tells its share of 1,000 new flows a second.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use nebula_cni_contract::flow_records::{Amount, FlowEnd, FlowRecord, FlowRecords, MAX_RECORDS};
use serde_json::json;

/// New flows a second.
pub(super) const FLOWS: u64 = 1000;
pub(super) const PODS: u64 = 110;
const PEERS: u64 = 60;
const PORTS: [u16; 4] = [80, 443, 5432, 53];
/// Milliseconds that each flow lasts, and so the time between its two records.
const LASTS: u64 = 5000;

/// Which flows there are.
#[derive(Debug, Clone, Copy)]
enum Time {
    /// Those that began since then, one each millisecond.
    Running(Instant),
    /// Those of this number of milliseconds, which have all ended.
    Over(u64),
}

#[derive(Debug)]
pub(super) struct Node {
    time: Mutex<Time>,
    /// When the first flow begins, in milliseconds since 1970.
    first_ms: Mutex<u64>,
}

impl Node {
    /// Writes the plugin's records of all pods into a folder, and listens at their sockets.
    pub(super) fn start(state: &Path) -> Arc<Self> {
        fs::create_dir_all(state).expect("a folder");
        let node = Arc::new(Self { time: Mutex::new(Time::Over(0)), first_ms: Mutex::new(0) });
        for pod in 0..PODS {
            let listener = UnixListener::bind(state.join(format!("{pod}.sock"))).expect("a socket");
            let instance = Arc::clone(&node);
            thread::spawn(move || listener.incoming().flatten().for_each(|stream| instance.answer(pod, stream)));
            let (name, namespace) = (format!("pod-{pod}"), format!("ns-{}", pod % 10));
            let record = json!({"version": 1, "state": "running", "process": null, "network": "pods", "container_id": name,
                "status_socket": format!("/run/nebula-cni/pods/{pod}.sock"), "ifname": "eth0", "device": "nebula0",
                "netns": "/run/netns/x", "netns_id": [4, 9], "pod_address": "10.244.1.7",
                "pod": {"namespace": namespace, "name": name, "uid": name}});
            fs::write(state.join(format!("{name}-eth0.json")), record.to_string()).expect("a record");
        }
        node
    }

    /// From now on flows begin.
    pub(super) fn begin(&self) {
        self.set(Time::Running(Instant::now()), now_ms());
    }

    /// All flows of these seconds are over.
    pub(super) fn end(&self, seconds: u64) {
        self.set(Time::Over(seconds * 1000), now_ms() - seconds * 1000 - LASTS);
    }

    fn set(&self, time: Time, first_ms: u64) {
        *self.time.lock().expect("no thread panics") = time;
        *self.first_ms.lock().expect("no thread panics") = first_ms;
    }

    fn answer(&self, pod: u64, mut stream: UnixStream) {
        let _ = stream.set_read_timeout(Some(Duration::from_millis(50)));
        let mut head = [0; 4096];
        // Who asks for the status says nothing.
        let length = stream.read(&mut head).unwrap_or(0);
        let text = String::from_utf8_lossy(&head[..length]).into_owned();
        let after = text.split_once("after=").and_then(|(_, rest)| rest.split(' ').next()?.parse().ok());
        let _ = match after {
            Some(after) => {
                let said = serde_json::to_string(&self.told(pod, after)).expect("JSON");
                write!(stream, "HTTP/1.1 200 OK\r\n\r\n{said}")
            }
            None => write!(stream, "{}", json!({"state": "running", "uid": format!("pod-{pod}")})),
        };
    }

    /// What the instance of a pod tells after a number. Flow N begins after N milliseconds; numbers are odd when a flow
    /// begins, and even when it ends.
    fn told(&self, pod: u64, after: u64) -> FlowRecords {
        let (time, first_ms) =
            (*self.time.lock().expect("no thread panics"), *self.first_ms.lock().expect("no thread panics"));
        let (now, begins) = match time {
            Time::Running(since) => (since.elapsed().as_millis() as u64, true),
            Time::Over(end) => (end + LASTS, false),
        };
        let last = if begins { now } else { now - LASTS };
        // The first flow of this pod that may have something new to tell.
        let from = (after / 2).saturating_sub(LASTS + 1) / PODS * PODS + pod;
        let mut records = Vec::new();
        for flow in (from..last).step_by(PODS as usize) {
            if begins {
                records.push(record(flow, 2 * flow + 1, "created", first_ms));
            }
            if flow + LASTS < now {
                records.push(record(flow, 2 * (flow + LASTS), "ended", first_ms));
            }
            if records.len() > 8 * MAX_RECORDS {
                break;
            }
        }
        records.retain(|record| record.number > after);
        records.sort_by_key(|record| record.number);
        let is_cut = records.len() > MAX_RECORDS;
        records.truncate(MAX_RECORDS);
        let next = records.last().map_or(after, |record| record.number);
        FlowRecords { records, next, is_cut, is_on: true, ..FlowRecords::default() }
    }
}

fn record(flow: u64, number: u64, event: &str, first_ms: u64) -> FlowRecord {
    let (peer, began) = (flow % PEERS, first_ms + flow);
    let has_ended = event == "ended";
    let times = if has_ended { LASTS } else { 0 };
    FlowRecord {
        number,
        id: 2 * flow + 1,
        event: event.to_owned(),
        end: has_ended.then(|| "idle".to_owned()),
        verdict: "allowed".to_owned(),
        direction: "outbound".to_owned(),
        protocol: 6,
        source: FlowEnd {
            address: Some([10, 42, 0, (flow % PODS) as u8].into()),
            port: Some((flow % 28_000 + 32_768) as u16),
            ..FlowEnd::default()
        },
        destination: FlowEnd {
            address: Some([10, 42, 1, peer as u8].into()),
            port: Some(PORTS[(flow % 4) as usize]),
            name: Some(format!("peer-{peer}.pay.pod")),
            groups: vec!["ns:pay".to_owned(), "app:db".to_owned()],
            fingerprint: Some(format!("{peer:02x}").repeat(32)),
            ..FlowEnd::default()
        },
        forward: Amount { packets: flow % 50 + 1, bytes: flow % 90_000 },
        reply: Amount { packets: flow % 70 + 1, bytes: flow % 900_000 },
        rule: Some(0),
        path: Some("direct".to_owned()),
        started_ms: began,
        last_ms: began + times,
        ..FlowRecord::default()
    }
}

fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).expect("a clock").as_millis() as u64
}
