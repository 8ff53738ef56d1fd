//! What processes cost, from /proc.

use super::cluster::alive;

/// Sum of one kind of memory in KiB; private memory is freed when the process ends.
pub fn memory_kib(pid: u64, kind: &str) -> f64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).expect("a live process");
    let lines = text.lines().filter(|line| line.starts_with(kind));
    lines.filter_map(|line| line.split_whitespace().nth(1)?.parse::<f64>().ok()).sum()
}

/// User and system time of all processes, in hundredths of a second.
pub fn cpu_ticks(pids: &[u64]) -> u64 {
    let of = |pid: &u64| -> Option<u64> {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let mut fields = stat.rsplit(')').next()?.split_whitespace().skip(11);
        Some(fields.next()?.parse::<u64>().ok()? + fields.next()?.parse::<u64>().ok()?)
    };
    assert!(pids.iter().all(|pid| alive(*pid)));
    pids.iter().filter_map(of).sum()
}

pub fn quantile(values: &[f64], part: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[((sorted.len() - 1) as f64 * part).round() as usize]
}
