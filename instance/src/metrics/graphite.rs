//! Metrics in Graphite's plaintext protocol, over a new TCP connection for each interval.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{self, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::time::Duration;

use nebula_config::names;
use nebula_config::{HostTarget, NameFamily};
use nebula_linux::clock::unix_now;

use super::{HALF_OPEN, Kind, Metrics, REPAIRS, Reading, TUNNELS};

/// Sends metrics until it is dropped.
#[derive(Debug)]
pub(super) struct Sender {
    // Dropping it ends the thread.
    _stop: SyncSender<()>,
}

impl Sender {
    pub(super) fn start(
        host: HostTarget,
        prefix: String,
        interval: Duration,
        metrics: Arc<Metrics>,
    ) -> io::Result<Self> {
        let (stop, stopped) = sync_channel(0);
        let mut lines = Lines { prefix, interval, before: BTreeMap::new() };
        tracing::info!(interval = ?interval, prefix = lines.prefix, %host, "Starting graphite");
        let body = move || {
            while stopped.recv_timeout(interval) == Err(RecvTimeoutError::Timeout) {
                let now = unix_now();
                let text = lines.make(&metrics.read(now, 0), now);
                if let Err(error) = send(&host, &text) {
                    tracing::error!(%error, "Failed to send stats to graphite");
                }
            }
        };
        std::thread::Builder::new().name("stats".to_owned()).spawn(body)?;
        Ok(Self { _stop: stop })
    }
}

fn send(host: &HostTarget, text: &str) -> io::Result<()> {
    let address = match host {
        HostTarget::Address(address) => *address,
        HostTarget::Name { host, port } => {
            let found = names::look_up(host, NameFamily::Both, SEND_TIMEOUT).map_err(io::Error::other)?;
            let first = found.first().ok_or_else(|| io::Error::other(format!("{host} has no address")))?;
            SocketAddr::new(*first, *port)
        }
    };
    let mut stream = TcpStream::connect_timeout(&address, SEND_TIMEOUT)?;
    stream.set_write_timeout(Some(SEND_TIMEOUT))?;
    stream.write_all(text.as_bytes())
}

const SEND_TIMEOUT: Duration = Duration::from_secs(5);

struct Lines {
    prefix: String,
    interval: Duration,
    /// Counters as last sent, for rates.
    before: BTreeMap<String, f64>,
}

impl Lines {
    fn make(&mut self, reading: &Reading, now: i64) -> String {
        let mut out = String::new();
        for metric in &reading.metrics {
            match metric.kind {
                Kind::Gauge => self.line(&mut out, &metric.name, "value", metric.value, now),
                Kind::Counter => self.counter(&mut out, &metric.name, metric.value, now),
            }
        }
        let summary = &reading.handshakes;
        for (field, value) in [
            ("count", summary.completed as f64),
            ("min", summary.min()),
            ("max", summary.max()),
            ("mean", summary.mean()),
            ("std-dev", summary.variance().sqrt()),
            ("50-percentile", summary.percentile(0.5)),
            ("75-percentile", summary.percentile(0.75)),
            ("95-percentile", summary.percentile(0.95)),
            ("99-percentile", summary.percentile(0.99)),
            ("999-percentile", summary.percentile(0.999)),
        ] {
            self.line(&mut out, "handshakes", field, value, now);
        }
        for (name, value) in &reading.own {
            self.counter(&mut out, name, *value as f64, now);
        }
        self.line(&mut out, HALF_OPEN, "value", reading.half_open as f64, now);
        for (post_quantum, count) in &reading.tunnels {
            let kind = if *post_quantum { "post_quantum" } else { "classical" };
            self.line(&mut out, &format!("{TUNNELS}.{kind}"), "value", *count as f64, now);
        }
        for (direction, reason, value) in &reading.dropped {
            self.counter(&mut out, &format!("dropped.{direction}.{reason}"), *value as f64, now);
        }
        for (what, value) in &reading.repairs {
            self.counter(&mut out, &format!("{REPAIRS}.{what}"), *value as f64, now);
        }
        out
    }

    fn line(&self, out: &mut String, name: &str, field: &str, value: f64, now: i64) {
        let _ = writeln!(out, "{}.{name}.{field} {value} {now}", self.prefix);
    }

    fn counter(&mut self, out: &mut String, name: &str, value: f64, now: i64) {
        let before = self.before.insert(name.to_owned(), value).unwrap_or(0.0);
        self.line(out, name, "count", value, now);
        self.line(out, name, "count_ps", (value - before) / self.interval.as_secs_f64(), now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::{Metric, Repairs, Summary};

    #[test]
    fn counters_have_a_rate_since_the_last_sending_and_gauges_a_value() {
        let mut lines =
            Lines { prefix: "nebula".to_owned(), interval: Duration::from_secs(10), before: BTreeMap::new() };
        let reading = |count: f64| Reading {
            metrics: vec![
                Metric { name: "routines".to_owned(), value: 2.0, kind: Kind::Gauge },
                Metric { name: "messages.rx.recv_error".to_owned(), value: count, kind: Kind::Counter },
            ],
            handshakes: Summary::default(),
            own: Vec::new(),
            half_open: 4,
            tunnels: [(true, 3), (false, 1)],
            dropped: vec![("in", "no_rule", 1)],
            repairs: Repairs::default().read(),
            peers: Vec::new(),
            more_peers: 0,
            gateways: Vec::new(),
            moved_flows: 0,
        };
        lines.make(&reading(20.0), 1000);
        let text = lines.make(&reading(70.0), 1010);
        for line in [
            "nebula.routines.value 2 1010",
            "nebula.messages.rx.recv_error.count 70 1010",
            "nebula.messages.rx.recv_error.count_ps 5 1010",
            "nebula.handshakes.std-dev 0 1010",
            "nebula.half_open_handshakes.value 4 1010",
            "nebula.tunnels.post_quantum.value 3 1010",
            "nebula.dropped.in.no_rule.count_ps 0 1010",
            "nebula.link_repairs.route.count 0 1010",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} not in\n{text}");
        }
    }
}
