//! What a daemon records and its device counts, asked all the time.

use std::collections::{HashMap, VecDeque};
use std::io::{self, Read, Write};
use std::net::IpAddr;
use std::ops::AddAssign;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use nebula_cni_contract::flow_records::{FlowRecord, FlowRecords};
use serde_json::{Value, json};

use super::mixture::Opened;

const EVERY: Duration = Duration::from_millis(200);
const REMEMBERED: usize = 100;
/// Clocks of the test and of records differ by what a thread waited for a processor.
const ABOUT_MS: u64 = 2000;

/// What a host sent into its device, and what came out of it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Bytes(pub(super) [u64; 2]);

impl AddAssign for Bytes {
    fn add_assign(&mut self, other: Self) {
        *self = Self([self.0[0] + other.0[0], self.0[1] + other.0[1]]);
    }
}

impl std::iter::Sum for Bytes {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        all.fold(Self::default(), |mut sum, one| {
            sum += one;
            sum
        })
    }
}

/// What the device has counted that this process uses; `None` without it.
pub(super) fn device(pid: i32) -> Option<Bytes> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/net/dev")).ok()?;
    let counters = text.lines().find_map(|line| line.trim_start().strip_prefix("neb0:"))?;
    let field = |n| counters.split_whitespace().nth(n)?.parse().ok();
    Some(Bytes([field(8)?, field(0)?]))
}

/// The records told after a number, or all as they stand.
pub(super) fn answer_of(socket: &Path, after: Option<u64>) -> io::Result<FlowRecords> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(Duration::from_secs(5)))?;
    let request =
        after.map_or_else(|| json!({"command": "flows"}), |after| json!({"command": "flows", "after": after}));
    stream.write_all(format!("{request}\n").as_bytes())?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let mut answer: Value = serde_json::from_str(&answer)?;
    Ok(serde_json::from_value(answer["result"].take())?)
}

/// Protocol, who opened it, from which port, and to which.
type Kind = (u8, Option<IpAddr>, Option<u16>, Option<u16>);

#[derive(Default)]
struct Seen {
    /// When flows began that records tell of.
    flows: HashMap<Kind, Vec<u64>>,
    device: VecDeque<(Instant, Bytes)>,
}

impl Seen {
    fn note(&mut self, record: &FlowRecord) {
        let FlowRecord { source, destination, .. } = record;
        let began = self.flows.entry((record.protocol, source.address, source.port, destination.port)).or_default();
        if began.last() != Some(&record.started_ms) {
            began.push(record.started_ms);
        }
    }
}

/// Asks until it is dropped.
pub(super) struct Watched {
    socket: PathBuf,
    pid: Arc<AtomicI32>,
    seen: Arc<Mutex<Seen>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Watched {
    pub(super) fn start(socket: PathBuf, pid: i32) -> Self {
        let (pid, stop, seen) = (Arc::new(AtomicI32::new(pid)), Arc::new(AtomicBool::new(false)), Arc::default());
        let thread = thread::spawn({
            let (socket, pid, stop, seen) = (socket.clone(), Arc::clone(&pid), Arc::clone(&stop), Arc::clone(&seen));
            move || watch(&socket, &pid, &stop, &seen)
        });
        Self { socket, pid, seen, stop, thread: Some(thread) }
    }

    pub(super) fn socket(&self) -> &Path {
        &self.socket
    }

    /// Another process took over, or was started.
    pub(super) fn set_pid(&self, pid: i32) {
        self.pid.store(pid, Ordering::Relaxed);
        lock(&self.seen).device.clear();
    }

    /// What the device of the process that runs had counted at this time.
    pub(super) fn device_before(&self, time: Instant) -> Option<Bytes> {
        lock(&self.seen).device.iter().rev().find(|(at, _)| *at <= time).map(|(_, bytes)| *bytes)
    }

    /// Whether a record tells of this flow.
    pub(super) fn has(&self, flow: &Opened) -> bool {
        let kind = (flow.protocol, Some(flow.from.ip()), Some(flow.from.port()), Some(flow.to));
        let meant = flow.began_ms.saturating_sub(ABOUT_MS)..=flow.last_ms + ABOUT_MS;
        lock(&self.seen).flows.get(&kind).is_some_and(|began| began.iter().any(|ms| meant.contains(ms)))
    }

    pub(super) fn stop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.join().expect("the watch");
        }
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

fn watch(socket: &Path, pid: &AtomicI32, stop: &AtomicBool, seen: &Mutex<Seen>) {
    let mut next = 0;
    while !stop.load(Ordering::Relaxed) {
        let before = pid.load(Ordering::Relaxed);
        let counted = device(before);
        {
            let mut seen = lock(seen);
            // Not those of a process that ended meanwhile.
            if let Some(bytes) = counted.filter(|_| before == pid.load(Ordering::Relaxed)) {
                seen.device.push_back((Instant::now(), bytes));
                if seen.device.len() > REMEMBERED {
                    seen.device.pop_front();
                }
            }
        }
        // A daemon that was just killed does not answer.
        if let Ok(answer) = answer_of(socket, Some(next)) {
            let mut seen = lock(seen);
            answer.records.iter().for_each(|record| seen.note(record));
            next = answer.next;
            if answer.is_cut {
                continue;
            }
        }
        thread::sleep(EVERY);
    }
}

fn lock(seen: &Mutex<Seen>) -> MutexGuard<'_, Seen> {
    seen.lock().expect("no thread of the watch panics")
}
