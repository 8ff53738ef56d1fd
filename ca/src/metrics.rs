//! Metrics of the service, in the text format of Prometheus.

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    sync::{Mutex, PoisonError},
};

/// Decisions by call, kind of proof and outcome. All three come from fixed lists.
#[derive(Debug, Default)]
pub(crate) struct Metrics(Mutex<BTreeMap<(&'static str, &'static str, &'static str), u64>>);

/// State at the time of the request.
#[derive(Debug, Default)]
pub(crate) struct Gauges {
    pub(crate) valid: usize,
    pub(crate) blocked: usize,
    pub(crate) ca_expires: i64,
    pub(crate) waiting: usize,
    pub(crate) ready: bool,
    pub(crate) lighthouses: usize,
    pub(crate) members: usize,
}

impl Metrics {
    /// Counts one decision.
    pub(crate) fn count(&self, call: &'static str, proof: &'static str, outcome: &'static str) {
        // Counters stay usable after a panic elsewhere.
        *self.0.lock().unwrap_or_else(PoisonError::into_inner).entry((call, proof, outcome)).or_default() += 1;
    }

    /// Formats all metrics.
    pub(crate) fn text(&self, gauges: &Gauges) -> String {
        let mut text = String::new();
        let counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        text.push_str("# HELP nebula_ca_decisions_total Requests by call, kind of proof and outcome.\n");
        text.push_str("# TYPE nebula_ca_decisions_total counter\n");
        for ((call, proof, outcome), count) in counts.iter() {
            // Writing to a String cannot fail.
            let _ = writeln!(
                text,
                "nebula_ca_decisions_total{{call=\"{call}\",proof=\"{proof}\",outcome=\"{outcome}\"}} {count}"
            );
        }
        let mut gauge = |name: &str, help: &str, value: i64| {
            let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} gauge\n{name} {value}");
        };
        let number = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
        gauge(
            "nebula_ca_certificates_valid",
            "Certificates that are neither expired nor blocked.",
            number(gauges.valid),
        );
        gauge("nebula_ca_certificates_blocked", "Length of the blocklist.", number(gauges.blocked));
        gauge("nebula_ca_expiry_timestamp_seconds", "When the signing CA expires.", gauges.ca_expires);
        gauge(
            "nebula_ca_trust_waiting",
            "Callers that wait for a change of the trust or the directory.",
            number(gauges.waiting),
        );
        gauge("nebula_ca_directory_members", "Holders of certificates in the directory.", number(gauges.members));
        gauge("nebula_ca_lighthouses", "Lighthouses that are announced.", number(gauges.lighthouses));
        gauge("nebula_ca_ready", "Whether certificates can be issued.", i64::from(gauges.ready));
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decisions_are_counted_by_call_proof_and_outcome() {
        let metrics = Metrics::default();
        metrics.count("certificate", "node", "issued");
        metrics.count("certificate", "node", "issued");
        metrics.count("release", "pod", "wrong_audience");
        let text = metrics.text(&Gauges { valid: 3, ready: true, ..Gauges::default() });
        assert!(text.contains("nebula_ca_decisions_total{call=\"certificate\",proof=\"node\",outcome=\"issued\"} 2\n"));
        assert!(text.contains("{call=\"release\",proof=\"pod\",outcome=\"wrong_audience\"} 1\n"));
        assert!(text.contains("\nnebula_ca_certificates_valid 3\n") && text.contains("\nnebula_ca_ready 1\n"));
        let kinds = text.lines().filter(|line| line.starts_with("# TYPE")).count();
        assert_eq!(kinds, text.lines().filter(|line| line.starts_with("# HELP")).count());
    }
}
