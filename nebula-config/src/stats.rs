//! `stats.*`: how metrics are exported.

use std::time::Duration;

use super::section::Section;
use super::{HostTarget, Refused};

/// Metrics of a running node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stats {
    /// Where the metrics go.
    pub sink: Sink,
    /// Sending interval.
    pub interval: Duration,
}

/// Where metrics go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Sink {
    /// Scraped by Prometheus.
    Prometheus {
        /// Address to listen on, as written: `host:port`; without a host it means every address.
        listen: String,
        /// The only path that is served.
        path: String,
        /// First part of every name, if any.
        namespace: String,
        /// Second part of every name, if any.
        subsystem: String,
        /// How many peers have series of their own.
        max_peers: usize,
    },
    /// Sent to Graphite over TCP.
    Graphite {
        /// Server.
        host: HostTarget,
        /// First part of every name.
        prefix: String,
    },
}

impl Stats {
    /// `None` if no type is set.
    pub(super) fn read(section: &Section<'_>) -> Result<Option<Self>, Refused> {
        let text = |path: &str| section.string(path).unwrap_or_default();
        let kind = text("stats.type");
        if matches!(kind.as_str(), "" | "none") {
            return Ok(None);
        }
        let interval = section.get("stats.interval").and_then(super::Value::duration);
        let interval = interval.filter(|interval| !interval.negative && !interval.magnitude.is_zero());
        let interval = interval.map(|interval| interval.magnitude).ok_or_else(|| {
            let given = text("stats.interval");
            refuse("stats.interval", format!("stats.interval was an invalid duration: {given} (such as 10s)"))
        })?;
        let required = |path: &str, what: &str| {
            Some(text(path)).filter(|text| !text.is_empty()).ok_or_else(|| refuse(path, format!("{path} {what}")))
        };
        let sink = match kind.as_str() {
            "prometheus" => {
                let listen = required("stats.listen", "should not be empty")?;
                if listen.rsplit_once(':').is_none_or(|(_, port)| port.parse::<u16>().is_err()) {
                    section
                        .warn("stats.listen", format!("stats.listen: {listen:?} is no address and port to listen on"));
                }
                let path = required("stats.path", "should not be empty")?;
                let (namespace, subsystem) = (text("stats.namespace"), text("stats.subsystem"));
                let max_peers = section.int("stats.max_peers", 0..=65_535).unwrap_or(DEFAULT_MAX_PEERS);
                let max_peers = usize::try_from(max_peers).unwrap_or_default();
                Sink::Prometheus { listen, path, namespace, subsystem, max_peers }
            }
            "graphite" => {
                let protocol = section.string("stats.protocol").unwrap_or_else(|| "tcp".to_owned());
                if !matches!(protocol.as_str(), "tcp" | "tcp4" | "tcp6") {
                    let cause = format!("error while setting up graphite sink: unknown network {protocol}; it is tcp");
                    return Err(refuse("stats.protocol", cause));
                }
                let host = required("stats.host", "can not be empty")?;
                let host = host.parse().map_err(|cause| {
                    refuse("stats.host", format!("error while setting up graphite sink: stats.host: {cause}"))
                })?;
                Sink::Graphite { host, prefix: section.string("stats.prefix").unwrap_or_else(|| "nebula".to_owned()) }
            }
            other => return Err(refuse("stats.type", format!("stats.type was not understood: {other}"))),
        };
        Ok(Some(Self { sink, interval }))
    }
}

// Each peer adds six lines to the page, and as many series to the database for as long as it keeps data.
const DEFAULT_MAX_PEERS: i64 = 256;

fn refuse(key: &str, cause: String) -> Refused {
    Refused::new("Failed to start stats emitter", cause).at(key)
}
