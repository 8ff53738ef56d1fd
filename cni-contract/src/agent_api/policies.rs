//! What an agent knows for the commands about network policies.

use serde::{Deserialize, Serialize};

use super::Lacking;
use crate::policy_test::Tested;
use crate::seen::Seen;

/// What the network policies of the agent's node say of a flow.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PolicyTested {
    /// What is known, without what the one who asks may not see.
    pub tested: Tested,
    /// The permission without which the destination is not shown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lacking: Option<Lacking>,
}

/// What the pods of a namespace were seen to do on the agent's node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PolicySeen {
    /// What was seen, without labels of pods that the one who asks may not see.
    pub seen: Seen,
    /// The permissions without which labels are not shown.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub lacking: Vec<Lacking>,
    /// Further namespaces whose labels are not shown, because an answer asks about no more permissions.
    #[serde(skip_serializing_if = "super::findings::is_zero")]
    pub not_asked: usize,
}
