//! The requests that the control socket accepts.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use nebula_cni_contract::flow_records::Filter;
use nebula_config::LogLevel;
use serde::Deserialize as _;
use serde_json::Value;

use super::flow::Flow;
use super::refusal::Refusal;
use crate::flow_records::Asked;

/// A validated request.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Request {
    Status,
    Peers,
    Gateways,
    Tunnel { peer: String },
    Close { peer: String, quietly: bool },
    Query { peer: String },
    Reload,
    Cert,
    LogLevel(Option<LogLevel>),
    Trace(Flow),
    Flows(Asked),
    Doctor,
    Why { peer: String },
    Whois { address: IpAddr },
    Upgrade(Upgrade),
}

/// Another program is to take over.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Upgrade {
    /// `None`: the file from which the running program was started.
    pub(crate) program: Option<PathBuf>,
    pub(crate) sha256: Option<String>,
    /// Upgrade even if systemd does not supervise the daemon.
    pub(crate) unsupervised: bool,
}

impl Request {
    /// Parses a request.
    ///
    /// # Errors
    /// Returns an error if the command is unknown, or an argument is missing or invalid.
    pub(super) fn read(object: &Value) -> Result<Self, Refusal> {
        let text = |name: &str| object.get(name).and_then(Value::as_str);
        let needed = |name: &'static str| text(name).ok_or(Refusal::Missing(name));
        let peer = || needed("peer").map(str::to_owned);
        match needed("command")? {
            "status" => Ok(Self::Status),
            "peers" => Ok(Self::Peers),
            "gateways" => Ok(Self::Gateways),
            "tunnel" => Ok(Self::Tunnel { peer: peer()? }),
            "close" => Ok(Self::Close { peer: peer()?, quietly: object.get("quietly") == Some(&Value::Bool(true)) }),
            "query" => Ok(Self::Query { peer: peer()? }),
            "reload" => Ok(Self::Reload),
            "cert" => Ok(Self::Cert),
            "log-level" => text("level").map(level).transpose().map(Self::LogLevel),
            "trace" => Flow::read(needed("protocol")?, text("source"), needed("destination")?).map(Self::Trace),
            "flows" => flows(object).map(Self::Flows),
            "doctor" => Ok(Self::Doctor),
            "why" => Ok(Self::Why { peer: peer()? }),
            "upgrade" => Ok(Self::Upgrade(Upgrade {
                program: text("program").map(PathBuf::from),
                sha256: text("sha256").map(str::to_owned),
                unsupervised: object.get("unsupervised") == Some(&Value::Bool(true)),
            })),
            "whois" => Ok(Self::Whois { address: address(needed("address")?)? }),
            other => Err(Refusal::UnknownCommand(other.to_owned())),
        }
    }
}

/// The address of a connection's other end, as programs print it. A dual-stack socket prints IPv4 as IPv6.
fn address(text: &str) -> Result<IpAddr, Refusal> {
    let address = text.parse::<SocketAddr>().map(|end| end.ip()).or_else(|_| text.parse::<IpAddr>());
    address.map(|address| address.to_canonical()).map_err(|_| Refusal::NotAnAddress(text.to_owned()))
}

/// `after` and the conditions of a filter, all of which may be missing.
fn flows(object: &Value) -> Result<Asked, Refusal> {
    let filter: Filter = Filter::deserialize(object).map_err(|error| Refusal::BadFilter(error.to_string()))?;
    if let Some(verdict) = &filter.verdict {
        Filter::verdict(verdict).map_err(|error| Refusal::BadFilter(error.to_string()))?;
    }
    let after = match object.get("after") {
        None | Some(Value::Null) => None,
        Some(after) => Some(after.as_u64().ok_or_else(|| Refusal::BadFilter(format!("after: {after} is no number")))?),
    };
    Ok(Asked { after, filter })
}

fn level(text: &str) -> Result<LogLevel, Refusal> {
    LogLevel::parse(text).ok_or_else(|| Refusal::UnknownLevel(text.to_owned()))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_is_missing_or_unknown_is_named() {
        for (object, error) in [
            (json!({}), "command is missing"),
            (json!({"command": 7}), "command is missing"),
            (json!({"command": "tunnel"}), "peer is missing"),
            (json!({"command": "dance"}), "there is no command dance"),
            (json!({"command": "log-level", "level": "loud"}), "unknown log level loud"),
            (json!({"command": "trace", "protocol": "tcp"}), "destination is missing"),
            (json!({"command": "whois", "address": "web-1"}), "web-1 is no address"),
            (json!({"command": "flows", "port": 70000}), "flows cannot be filtered so: invalid value"),
            (json!({"command": "flows", "verdict": "denied"}), "flows cannot be filtered so: unknown verdict"),
            (json!({"command": "flows", "after": -1}), "flows cannot be filtered so: after: -1 is no number"),
        ] {
            let found = Request::read(&object).unwrap_err().to_string();
            assert!(found.starts_with(error), "{found}");
        }
        let flows = json!({"command": "flows", "after": 7, "port": 443, "later": true});
        let filter = Filter { port: Some(443), ..Filter::default() };
        assert_eq!(Request::read(&flows), Ok(Request::Flows(Asked { after: Some(7), filter })));
        let close = json!({"command": "close", "peer": "a", "quietly": true});
        assert_eq!(Request::read(&close), Ok(Request::Close { peer: "a".to_owned(), quietly: true }));
        for end in ["10.42.0.9", "10.42.0.9:443", "[::ffff:10.42.0.9]:443"] {
            let whois = json!({"command": "whois", "address": end});
            assert_eq!(Request::read(&whois), Ok(Request::Whois { address: [10, 42, 0, 9].into() }), "{end}");
        }
        let level = json!({"command": "log-level", "level": "DEBUG"});
        assert_eq!(Request::read(&level), Ok(Request::LogLevel(Some(LogLevel::Debug))));
    }
}
