//! What an agent knows about a flow that does not pass.

use serde::{Deserialize, Serialize};

use super::Lacking;
use crate::why::Facts;

/// What the API server and the agent's node know of a flow.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct WhyFacts {
    /// What is known, without what the one who asks may not see.
    pub facts: Facts,
    /// The permission without which the destination is not shown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lacking: Option<Lacking>,
}
