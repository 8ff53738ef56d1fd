//! Metrics of the cluster table.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::{Duration, Instant};

use super::{head, one};

/// What became of an attempt to write the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Written {
    /// The version that is there now.
    pub version: u64,
    /// Its length in bytes; `None`: the file says all of it already.
    pub bytes: Option<usize>,
    /// How long it took.
    pub took: Duration,
}

/// What was written last; nothing while nothing is captured.
#[derive(Debug, Default)]
pub(super) struct TableNumbers {
    last: Option<(Written, Instant)>,
    writes: u64,
    seconds: Duration,
    bytes: usize,
    entries: BTreeMap<&'static str, usize>,
    /// Whether each input is followed.
    pub(super) inputs: BTreeMap<&'static str, bool>,
}

impl TableNumbers {
    pub(super) fn written(&mut self, written: &Written, counts: &[(&'static str, usize)], now: Instant) {
        self.last = Some((*written, now));
        self.seconds += written.took;
        if let Some(bytes) = written.bytes {
            (self.writes, self.bytes) = (self.writes + 1, bytes);
        }
        self.entries = counts.iter().copied().collect();
    }

    pub(super) fn write_to(&self, out: &mut String, now: Instant) {
        if !self.inputs.is_empty() {
            head(out, "nebula_cni_table_input_ok", "gauge", "Whether an input of the cluster table is followed.");
            for (input, is_ok) in &self.inputs {
                let _ = writeln!(out, "nebula_cni_table_input_ok{{input=\"{input}\"}} {}", u8::from(*is_ok));
            }
        }
        let Some((written, at)) = &self.last else { return };
        one(out, "nebula_cni_table_version", "gauge", "Version of the cluster table.", written.version);
        let age = now.saturating_duration_since(*at).as_secs_f64();
        one(out, "nebula_cni_table_age_seconds", "gauge", "Time since the cluster table was written.", age);
        one(out, "nebula_cni_table_bytes", "gauge", "Length of the cluster table.", self.bytes);
        one(out, "nebula_cni_table_writes_total", "counter", "Cluster tables that were written.", self.writes);
        let seconds = self.seconds.as_secs_f64();
        one(out, "nebula_cni_table_write_seconds_total", "counter", "Time spent on making cluster tables.", seconds);
        head(out, "nebula_cni_table_entries", "gauge", "What the cluster table is made of, by kind.");
        for (kind, count) in &self.entries {
            let _ = writeln!(out, "nebula_cni_table_entries{{kind=\"{kind}\"}} {count}");
        }
    }
}

#[cfg(test)]
mod tests {
    use nebula_cni_contract::clock::{Clock, SystemClock};

    use super::*;

    #[test]
    fn a_node_without_capture_has_no_series_and_others_have_all() {
        let (mut numbers, mut out) = (TableNumbers::default(), String::new());
        let now = SystemClock.now();
        numbers.write_to(&mut out, now);
        assert_eq!(out, "");
        let written = Written { version: 7, bytes: Some(4_000), took: Duration::from_millis(20) };
        numbers.written(&written, &[("enrolled", 3)], now);
        numbers.written(&Written { bytes: None, ..written }, &[("enrolled", 3)], now);
        numbers.inputs = [("directory", false)].into();
        numbers.write_to(&mut out, now + Duration::from_secs(5));
        for line in [
            "nebula_cni_table_version 7\n",
            "nebula_cni_table_age_seconds 5\n",
            "nebula_cni_table_bytes 4000\n",
            "nebula_cni_table_writes_total 1\n",
            "nebula_cni_table_write_seconds_total 0.04\n",
            "nebula_cni_table_entries{kind=\"enrolled\"} 3\n",
            "nebula_cni_table_input_ok{input=\"directory\"} 0\n",
        ] {
            assert!(out.contains(line), "{line}: {out}");
        }
    }
}
