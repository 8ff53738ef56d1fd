//! What processes cost, from /proc.

use std::path::Path;
use std::time::Duration;

use nix::time::{clock_getcpuclockid, clock_gettime};
use nix::unistd::Pid;

use super::chaos::number;
use super::cluster::alive;

/// Sum of one kind of memory in KiB; private memory is freed when the process ends.
pub fn memory_kib(pid: u64, kind: &str) -> f64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).expect("a live process");
    let lines = text.lines().filter(|line| line.starts_with(kind));
    lines.filter_map(|line| line.split_whitespace().nth(1)?.parse::<f64>().ok()).sum()
}

/// User and system time of all processes, in hundredths of a second.
pub fn cpu_ticks(pids: &[u64]) -> u64 {
    assert!(pids.iter().all(|pid| alive(*pid)));
    pids.iter().map(|pid| ticks(*pid, 2)).sum()
}

/// User and system time of all threads of a process, also of those that have ended.
pub fn cpu_time(pid: u64) -> Duration {
    let pid = Pid::from_raw(i32::try_from(pid).expect("a process id"));
    clock_getcpuclockid(pid).and_then(clock_gettime).expect("a live process").into()
}

/// User and system time in hundredths of a second, of one process and of those that it started and that have ended.
pub fn cpu_ticks_with_children(pid: u64) -> u64 {
    assert!(alive(pid));
    ticks(pid, 4)
}

/// The first of `utime`, `stime`, `cutime` and `cstime` (proc_pid_stat(5)).
fn ticks(pid: u64, count: usize) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace().skip(11);
    fields.take(count).filter_map(|field| field.parse::<u64>().ok()).sum()
}

pub fn quantile(values: &[f64], part: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[((sorted.len() - 1) as f64 * part).round() as usize]
}

/// How many times its bar a time may be (`COST_SLACK`, 2): on an idle machine a factor of 1 should be enough, but this
/// one may be shared.
pub fn slack() -> f64 {
    number("COST_SLACK", 2) as f64
}

/// Whether the programs are those of a release build, which bars are for.
pub fn is_release() -> bool {
    std::env::var_os("NEBULA_BIN_DIR").is_some_and(|dir| Path::new(&dir).ends_with("release"))
}
