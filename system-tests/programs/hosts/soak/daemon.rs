//! What can be observed of a running daemon from outside: its memory, its threads, and the counters that ours logs at
//! exit.

use std::collections::BTreeMap;
use std::fs;

/// Resident memory in KiB.
pub(super) fn resident(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("the daemon runs");
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).expect("it has memory");
    line.split_whitespace().nth(1).and_then(|number| number.parse().ok()).expect("a number")
}

/// CPU time in nanoseconds of each thread whose name starts with `prefix`.
pub(super) fn busy(pid: u32, prefix: &str) -> BTreeMap<String, u64> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).expect("the daemon runs").flatten();
    let of_task = tasks.filter_map(|task| {
        let name = fs::read_to_string(task.path().join("comm")).ok()?.trim().to_owned();
        let spent = fs::read_to_string(task.path().join("schedstat")).ok()?;
        Some((name, spent.split(' ').next()?.parse().ok()?))
    });
    of_task.filter(|(name, _)| name.starts_with(prefix)).collect()
}

/// Counters by name, from the last log line that has them; that line omits zeros.
pub(in crate::hosts) fn counters(log: &str) -> BTreeMap<String, u64> {
    let line = log.lines().rfind(|line| line.contains("counters=")).unwrap_or_else(|| panic!("no counters in\n{log}"));
    let said = line.split_once("counters=\"").and_then(|(_, rest)| rest.split_once('"')).expect("counters in quotes").0;
    let pair = |pair: &str| {
        let (name, value) = pair.split_once('=')?;
        Some((name.to_owned(), value.parse().ok()?))
    };
    said.split_whitespace().filter_map(pair).collect()
}
