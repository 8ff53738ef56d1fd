//! The daemon's answers, as the documents that they are.

use nebula_cni_contract::flow_records::FlowRecords;
use nebula_instance::host::documents::{
    Certificates, Closed, Facts, Gateways, Identity, Known, Level, Peers, Status, Trace, Tunnels, Upgraded,
};
use serde_json::Value;

use crate::arguments::Command;
use crate::doctor::{self, Finding};

/// The answer to a command.
#[derive(Debug)]
pub(crate) enum Answer {
    Status(Box<Status>),
    Doctor(Box<Facts>),
    Why(Box<Facts>),
    Peers(Peers),
    Gateways(Gateways),
    Whois(Identity),
    Tunnel(Tunnels),
    Close(Closed),
    Query(Known),
    Reload,
    Upgrade(Upgraded),
    Cert(Certificates),
    LogLevel(Level),
    Trace(Box<Trace>),
    Flows(FlowRecords),
}

impl Answer {
    /// Reads the document that answers a command.
    ///
    /// # Errors
    /// Returns an error if the document is none of an answer to the command.
    pub(crate) fn read(command: &Command, document: Value) -> Result<Self, serde_json::Error> {
        use serde_json::from_value as read;
        Ok(match command {
            Command::Status => Self::Status(read(document)?),
            Command::Doctor => Self::Doctor(read(document)?),
            Command::Why { .. } => Self::Why(read(document)?),
            Command::Peers => Self::Peers(read(document)?),
            Command::Gateways => Self::Gateways(read(document)?),
            Command::Whois { .. } => Self::Whois(read(document)?),
            Command::Tunnel { .. } => Self::Tunnel(read(document)?),
            Command::Close { .. } => Self::Close(read(document)?),
            Command::Query { .. } => Self::Query(read(document)?),
            Command::Upgrade { .. } => Self::Upgrade(read(document)?),
            Command::Cert => Self::Cert(read(document)?),
            Command::LogLevel { .. } => Self::LogLevel(read(document)?),
            Command::Trace { .. } => Self::Trace(read(document)?),
            Command::Flows { .. } => Self::Flows(read(document)?),
            // Of the last two there is no answer.
            Command::Reload | Command::KeepFlows { .. } | Command::Completion { .. } => Self::Reload,
        })
    }

    /// What it shows to be wrong, for the commands that look for it.
    pub(crate) fn findings(&self) -> Vec<Finding> {
        match self {
            Self::Status(status) => doctor::of_status(status),
            Self::Doctor(facts) => doctor::examine(facts),
            Self::Why(facts) => doctor::explain(facts),
            _ => Vec::new(),
        }
    }

    /// Whether a script should hear of it by the exit code.
    pub(crate) fn is_bad_news(&self, findings: &[Finding]) -> bool {
        match self {
            Self::Trace(trace) => {
                let arrives = ["passes", "leaves on the primary network", "comes back to this host"];
                !arrives.contains(&trace.outcome.as_str())
            }
            Self::Why(facts) => doctor::is_bad(findings) || facts.peers.first().is_none_or(|peer| !peer.connected),
            Self::Upgrade(upgraded) => upgraded.rolled_back.is_some(),
            _ => doctor::is_bad(findings),
        }
    }
}
