//! What all parts of the agent share.

use std::collections::BTreeSet;
use std::sync::Arc;

use nebula_cni_contract::agent_api::TrustedCa;
use tokio::sync::watch;

use crate::config::Config;
use crate::readiness::Readiness;
use crate::retirement::Retirement;

/// What all parts of the agent share; cheap to clone.
#[derive(Debug, Clone)]
pub struct Node {
    /// The operator's configuration.
    pub config: Arc<Config>,
    /// How the node stands.
    pub readiness: Readiness,
    /// Whether the agent may still put things back.
    pub retirement: Retirement,
    /// Pods whose network policies nothing enforces.
    pub unenforced: Unenforced,
    /// The CAs that the network trusts, as the CA said last.
    pub cas: watch::Sender<Vec<TrustedCa>>,
}

impl Node {
    /// A node about which nothing is known yet.
    #[must_use]
    pub fn new(config: Config) -> Self {
        let retirement = Retirement::new(config.host_root.clone());
        let (readiness, unenforced) = (Readiness::default(), Unenforced::default());
        Self { config: Arc::new(config), readiness, retirement, unenforced, cas: watch::Sender::default() }
    }
}

/// Pods of this node that network policies select and that nothing protects in their tunnels, from the keeper of the
/// table to the reports at the API server. Cheap to clone. Pods are known by the
/// [incarnation](crate::table::member::incarnation) of their certificates.
#[derive(Debug, Clone)]
pub struct Unenforced(watch::Sender<BTreeSet<u64>>);

impl Default for Unenforced {
    fn default() -> Self {
        Self(watch::Sender::new(BTreeSet::new()))
    }
}

impl Unenforced {
    /// These are all.
    pub fn set(&self, pods: BTreeSet<u64>) {
        self.0.send_if_modified(|before| {
            let is_news = *before != pods;
            *before = pods;
            is_news
        });
    }

    /// All of them now.
    #[must_use]
    pub fn now(&self) -> BTreeSet<u64> {
        self.0.borrow().clone()
    }

    /// Follows all changes.
    #[must_use]
    pub fn watch(&self) -> watch::Receiver<BTreeSet<u64>> {
        self.0.subscribe()
    }
}
