//! What all parts of the agent share.

use std::sync::Arc;

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
}

impl Node {
    /// A node about which nothing is known yet.
    #[must_use]
    pub fn new(config: Config) -> Self {
        let retirement = Retirement::new(config.host_root.clone());
        Self { config: Arc::new(config), readiness: Readiness::default(), retirement }
    }
}
