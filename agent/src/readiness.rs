//! What the agent knows about its node, one standing per part. The node is ready only while every required part is
//! good.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde::{Deserialize, Serialize};
use tokio::sync::watch;

/// One thing that must be right before pods of this node are protected, in the order in which the agent works.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Part {
    /// The programs on the node are the agent's own.
    Programs,
    /// Token and TLS roots are where instances look for them.
    Credentials,
    /// The installed plugin made and removed a tunnel.
    SelfTest,
    /// The chain file is there and current.
    Chain,
    /// The runtime has loaded a chain with our plugin last.
    Runtime,
    /// The CA answers.
    Ca,
    /// The first reconciliation of this agent is done.
    Reconciled,
    /// The cluster table is there and current, if pods are captured.
    Table,
    /// Network policies are enforced as they are written. Not required: a policy that somebody wrote badly must not
    /// take out the nodes of all.
    Policies,
    /// Flow records are kept, if they are to be. Not required: pods are protected without.
    Flows,
    /// Flow records are exported, if they are to be. Not required, for the same reason.
    FlowExport,
    /// The Kubernetes API answers. Not required: without it nothing is reported there, but pods are protected.
    Kubernetes,
    /// A lighthouse answers datagrams of this node. Not required: pods whose peers are known go on, and a lighthouse
    /// that is down must not take out every node.
    Underlay,
    /// Instances on other nodes answer datagrams of this node. Not required, for the same reasons as `Underlay`.
    Nodes,
    /// This node's gateway answers, if there is one. Not required: it starts after the agent, and the node's own pods
    /// go on without.
    Gateway,
}

impl Part {
    /// All parts, in order.
    pub const ALL: [Self; 15] = [
        Self::Programs,
        Self::Credentials,
        Self::SelfTest,
        Self::Chain,
        Self::Runtime,
        Self::Ca,
        Self::Reconciled,
        Self::Table,
        Self::Policies,
        Self::Flows,
        Self::FlowExport,
        Self::Kubernetes,
        Self::Underlay,
        Self::Nodes,
        Self::Gateway,
    ];

    /// Whether the node is not ready without it.
    #[must_use]
    pub fn is_required(self) -> bool {
        !matches!(
            self,
            Self::Policies
                | Self::Flows
                | Self::FlowExport
                | Self::Kubernetes
                | Self::Underlay
                | Self::Nodes
                | Self::Gateway
        )
    }

    /// The name in `/readyz`, in tables and as a metric's label.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Programs => "programs",
            Self::Credentials => "credentials",
            Self::SelfTest => "self-test",
            Self::Chain => "chain",
            Self::Runtime => "runtime",
            Self::Ca => "ca",
            Self::Reconciled => "reconciled",
            Self::Table => "table",
            Self::Policies => "policies",
            Self::Flows => "flows",
            Self::FlowExport => "flow-export",
            Self::Kubernetes => "kubernetes",
            Self::Underlay => "underlay",
            Self::Nodes => "nodes",
            Self::Gateway => "gateway",
        }
    }
}

/// How one part stands.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Standing {
    /// Whether it is as it must be.
    pub ok: bool,
    /// What is so, or what is wrong.
    pub reason: String,
    /// What the operator can do; empty if nothing.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub advice: String,
}

impl Standing {
    /// As it must be.
    #[must_use]
    pub fn good(reason: impl Into<String>) -> Self {
        Self { ok: true, reason: reason.into(), advice: String::new() }
    }

    /// Not yet, or no longer.
    #[must_use]
    pub fn bad(reason: impl Into<String>) -> Self {
        Self { ok: false, reason: reason.into(), advice: String::new() }
    }

    /// Says what to do about it.
    #[must_use]
    pub fn advice(mut self, advice: impl Into<String>) -> Self {
        self.advice = advice.into();
        self
    }
}

/// How all parts stand.
pub type Standings = BTreeMap<Part, Standing>;

/// The board that all parts of the agent write to; cheap to clone.
#[derive(Debug, Clone)]
pub struct Readiness(watch::Sender<Standings>);

impl Default for Readiness {
    fn default() -> Self {
        let waiting = |part| (part, Standing::bad("has not been looked at yet"));
        Self(watch::Sender::new(Part::ALL.into_iter().map(waiting).collect()))
    }
}

impl Readiness {
    /// Notes how a part stands. Changes are logged and wake those who watch; repetitions are not.
    pub fn set(&self, part: Part, standing: Standing) {
        self.0.send_if_modified(|standings| {
            if standings.get(&part) == Some(&standing) {
                return false;
            }
            let Standing { ok, reason, advice } = &standing;
            if *ok {
                tracing::info!(part = part.name(), %reason, "good");
            } else {
                tracing::warn!(part = part.name(), %reason, %advice, "not ready");
            }
            standings.insert(part, standing);
            true
        });
    }

    /// How all parts stand now.
    #[must_use]
    pub fn now(&self) -> Standings {
        self.0.borrow().clone()
    }

    /// How one part stands now.
    #[must_use]
    pub fn is_good(&self, part: Part) -> bool {
        self.0.borrow().get(&part).is_some_and(|standing| standing.ok)
    }

    /// Follows all changes: for the taint, events and metrics.
    #[must_use]
    pub fn watch(&self) -> watch::Receiver<Standings> {
        self.0.subscribe()
    }
}

/// Whether pods may be put on the node, else why not: one line per part.
///
/// # Errors
/// Returns the reasons.
pub fn verdict(standings: &Standings) -> Result<(), String> {
    let mut reasons = String::new();
    for (part, standing) in standings.iter().filter(|(part, standing)| part.is_required() && !standing.ok) {
        let _ = write!(reasons, "{}: {}", part.name(), standing.reason);
        if !standing.advice.is_empty() {
            let _ = write!(reasons, "; {}", standing.advice);
        }
        reasons.push('\n');
    }
    if reasons.is_empty() { Ok(()) } else { Err(reasons) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_is_ready_once_every_required_part_is_good_and_no_longer() {
        let readiness = Readiness::default();
        for part in Part::ALL.into_iter().filter(|part| part.is_required()) {
            assert!(verdict(&readiness.now()).is_err(), "before {part:?}");
            readiness.set(part, Standing::good("yes"));
        }
        assert_eq!(verdict(&readiness.now()), Ok(()), "the Kubernetes API is not required");
        readiness.set(Part::Ca, Standing::bad("no answer for 5 min").advice("look at its log"));
        assert_eq!(verdict(&readiness.now()), Err("ca: no answer for 5 min; look at its log\n".to_owned()));
    }

    #[test]
    fn only_changes_wake_those_who_watch() {
        let readiness = Readiness::default();
        let mut watch = readiness.watch();
        readiness.set(Part::Chain, Standing::good("there"));
        assert!(watch.has_changed().unwrap());
        watch.mark_unchanged();
        readiness.set(Part::Chain, Standing::good("there"));
        assert!(!watch.has_changed().unwrap());
    }
}
