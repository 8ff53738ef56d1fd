//! Metrics of kept flow records.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::{Duration, Instant};

use nebula_cni_contract::clock::{Clock, SystemClock};

use super::{escaped, head, one};
use crate::flows::AskError;
use crate::flows::export::Target;
use crate::flows::pairs::{Line, Pairs, Tally, VERDICTS};
use crate::flows::store::{Counts, Fill};

/// What is kept, and what was lost.
#[derive(Debug, Default)]
pub(crate) struct FlowNumbers {
    pub(crate) counts: Counts,
    pub(crate) fill: Fill,
    pub(crate) is_open: bool,
    /// Failures of the store.
    pub(crate) errors: u64,
    pub(crate) pairs: Pairs,
    failed: BTreeMap<AskError, u64>,
    exports: BTreeMap<Target, ExportNumbers>,
}

/// Of an exporter.
#[derive(Debug, Default)]
struct ExportNumbers {
    exported: u64,
    rejected: u64,
    refused: u64,
    failures: u64,
    failing_since: Option<Instant>,
    behind: u64,
}

impl FlowNumbers {
    pub(crate) fn failed(&mut self, error: AskError) {
        *self.failed.entry(error).or_default() += 1;
    }

    /// There is such an exporter.
    pub(crate) fn exports_to(&mut self, target: Target) {
        self.exports.entry(target).or_default();
    }

    /// A batch was exported, but for `rejected` records.
    pub(crate) fn exported(&mut self, target: Target, records: u64, rejected: u64) {
        let numbers = self.exports.entry(target).or_default();
        (numbers.exported, numbers.rejected) = (numbers.exported + records, numbers.rejected + rejected);
    }

    /// Takes how many changes in the store are still to be exported.
    pub(crate) fn export_behind(&mut self, target: Target, behind: u64) {
        self.exports.entry(target).or_default().behind = behind;
    }

    /// Notes since when attempts have failed (`None`: the last one did not), and how many records are given up.
    pub(crate) fn export_failing(&mut self, target: Target, since: Option<Instant>, refused: u64) {
        let numbers = self.exports.entry(target).or_default();
        numbers.failing_since = since;
        (numbers.failures, numbers.refused) =
            (numbers.failures + u64::from(since.is_some()), numbers.refused + refused);
    }

    pub(super) fn write_to(&self, out: &mut String, now: Duration) {
        let Self { counts, fill, .. } = self;
        one(out, "nebula_cni_flow_store_up", "gauge", "Whether flow records can be kept.", u8::from(self.is_open));
        one(out, "nebula_cni_flow_store_records", "gauge", "Flow records in the store.", fill.records);
        one(out, "nebula_cni_flow_store_bytes", "gauge", "Size of the files of the store.", fill.bytes);
        let oldest = fill.oldest_ms.map(Duration::from_millis);
        let age = oldest.map_or(0, |oldest| now.saturating_sub(oldest).as_secs());
        one(
            out,
            "nebula_cni_flow_store_oldest_seconds",
            "gauge",
            "Since the oldest record in the store was seen.",
            age,
        );
        one(out, "nebula_cni_flow_store_errors_total", "counter", "Failures to use the store.", self.errors);
        one(
            out,
            "nebula_cni_flow_records_written_total",
            "counter",
            "Changes of flows that were written.",
            counts.written,
        );
        let help = "Flow records that are gone: too old; gave way to others in the store; gave way in an instance before it was asked.";
        head(out, "nebula_cni_flow_records_gone_total", "counter", help);
        for (reason, count) in [("age", counts.expired), ("store_full", counts.evicted), ("ring_full", counts.lost)] {
            let _ = writeln!(out, "nebula_cni_flow_records_gone_total{{reason=\"{reason}\"}} {count}");
        }
        let help = "Instances that did not say which flows they recorded, by reason.";
        head(out, "nebula_cni_flow_asks_failed_total", "counter", help);
        for error in AskError::ALL {
            let count = self.failed.get(&error).copied().unwrap_or_default();
            let _ = writeln!(out, "nebula_cni_flow_asks_failed_total{{reason=\"{}\"}} {count}", error.name());
        }
        self.write_traffic(out);
        if !self.exports.is_empty() {
            self.write_exports(out, SystemClock.now());
        }
    }

    fn write_traffic(&self, out: &mut String) {
        let pairs = &self.pairs;
        let help = "Pairs of namespaces with series of their own.";
        one(out, "nebula_cni_flow_pairs", "gauge", help, pairs.len());
        let help = "Changes of flows that count under _other, because there are too many pairs of namespaces.";
        one(out, "nebula_cni_flow_pairs_folded_total", "counter", help, pairs.folded());
        let labels = |line: &Line<'_>| {
            let (source, destination) = (escaped(line.source), escaped(line.destination));
            let direction = line.direction;
            format!("source_namespace=\"{source}\",destination_namespace=\"{destination}\",direction=\"{direction}\"")
        };
        let lines: Vec<(String, Tally)> = pairs.lines().map(|line| (labels(&line), line.tally)).collect();
        let bytes: fn(&Tally) -> [u64; 2] = |tally| tally.bytes;
        for (name, help, of) in [
            (
                "nebula_cni_flow_bytes_total",
                "Bytes of flows that were not refused, by the namespaces of their ends and by who sent them.",
                bytes,
            ),
            (
                "nebula_cni_flow_packets_total",
                "Packets of flows that were not refused, by the namespaces of their ends and by who sent them.",
                |tally| tally.packets,
            ),
        ] {
            head(out, name, "counter", help);
            for (labels, tally) in &lines {
                for (sent_by, count) in ["source", "destination"].into_iter().zip(of(tally)) {
                    let _ = writeln!(out, "{name}{{{labels},sent_by=\"{sent_by}\"}} {count}");
                }
            }
        }
        let help = "Flows by the namespaces of their ends and the verdict with which they were first told.";
        head(out, "nebula_cni_flows_total", "counter", help);
        for (labels, tally) in &lines {
            for (verdict, count) in VERDICTS.into_iter().zip(tally.flows) {
                let _ = writeln!(out, "nebula_cni_flows_total{{{labels},verdict=\"{verdict}\"}} {count}");
            }
        }
        let help = "Packets that were refused, by the namespaces of their ends.";
        head(out, "nebula_cni_flow_refused_packets_total", "counter", help);
        for (labels, tally) in &lines {
            let _ = writeln!(out, "nebula_cni_flow_refused_packets_total{{{labels}}} {}", tally.refused);
        }
    }

    fn write_exports(&self, out: &mut String, now: Instant) {
        let failing = |numbers: &ExportNumbers| {
            numbers.failing_since.map_or(0, |since| now.saturating_duration_since(since).as_secs())
        };
        let exported: &dyn Fn(&ExportNumbers) -> u64 = &|numbers| numbers.exported;
        for (name, kind, help, of) in [
            ("nebula_cni_flow_export_records_total", "counter", "Flow records that were exported.", exported),
            (
                "nebula_cni_flow_export_failures_total",
                "counter",
                "Attempts to export flow records that failed.",
                &|numbers| numbers.failures,
            ),
            (
                "nebula_cni_flow_export_failing_seconds",
                "gauge",
                "For how long no flow records could be exported; 0: they can be.",
                &failing,
            ),
            (
                "nebula_cni_flow_export_behind_records",
                "gauge",
                "Changes in the store that are still to be exported.",
                &|numbers| numbers.behind,
            ),
        ] {
            head(out, name, kind, help);
            for (target, numbers) in &self.exports {
                let _ = writeln!(out, "{name}{{target=\"{}\"}} {}", target.name(), of(numbers));
            }
        }
        let help = "Flow records that were not exported: gone from the store before; rejected out of a batch; refused with a whole batch.";
        head(out, "nebula_cni_flow_export_lost_total", "counter", help);
        for (target, numbers) in &self.exports {
            let gone = self.counts.unexported[*target as usize];
            for (reason, count) in [("gone", gone), ("rejected", numbers.rejected), ("refused", numbers.refused)] {
                let target = target.name();
                let _ = writeln!(
                    out,
                    "nebula_cni_flow_export_lost_total{{target=\"{target}\",reason=\"{reason}\"}} {count}"
                );
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_kept_and_every_reason_is_shown_from_the_start() {
        let (mut numbers, mut out) = (FlowNumbers::default(), String::new());
        numbers.failed(AskError::Late);
        numbers.counts = Counts { written: 9, evicted: 2, expired: 3, lost: 4, unexported: [0, 6] };
        numbers.exported(Target::Otlp, 8, 1);
        numbers.export_failing(Target::Otlp, Some(SystemClock.now()), 5);
        numbers.export_behind(Target::Otlp, 17);
        numbers.fill = Fill { records: 5, bytes: 4096, oldest_ms: Some(40_000) };
        numbers.write_to(&mut out, Duration::from_secs(100));
        for line in [
            "nebula_cni_flow_store_up 0\n",
            "nebula_cni_flow_store_records 5\n",
            "nebula_cni_flow_store_bytes 4096\n",
            "nebula_cni_flow_store_oldest_seconds 60\n",
            "nebula_cni_flow_records_written_total 9\n",
            "nebula_cni_flow_records_gone_total{reason=\"store_full\"} 2\n",
            "nebula_cni_flow_records_gone_total{reason=\"age\"} 3\n",
            "nebula_cni_flow_records_gone_total{reason=\"ring_full\"} 4\n",
            "nebula_cni_flow_asks_failed_total{reason=\"late\"} 1\n",
            "nebula_cni_flow_asks_failed_total{reason=\"gone\"} 0\n",
            "nebula_cni_flow_export_records_total{target=\"otlp\"} 8\n",
            "nebula_cni_flow_export_failures_total{target=\"otlp\"} 1\n",
            "nebula_cni_flow_export_behind_records{target=\"otlp\"} 17\n",
            "nebula_cni_flow_export_lost_total{target=\"otlp\",reason=\"gone\"} 6\n",
            "nebula_cni_flow_export_lost_total{target=\"otlp\",reason=\"rejected\"} 1\n",
            "nebula_cni_flow_export_lost_total{target=\"otlp\",reason=\"refused\"} 5\n",
        ] {
            assert!(out.contains(line), "{line}: {out}");
        }
    }
}
