//! What is wrong on this node and with its pods, why, and what to do: conclusions from what the agent and the instances
//! of pods know. Pure: time is an argument, and nothing is asked for here.
//!
//! | file | what |
//! | --- | --- |
//! | `node.rs` | parts of the node, and upgrades |
//! | `pod.rs` | how a pod stands, and what its instance says |
//! | `peers.rs` | peers that an instance calls in vain, and callers that it refuses |

mod node;
mod peers;
mod pod;

pub(crate) use node::of_node;
pub(crate) use pod::of_pods;

/// Appends a reason where there is one.
fn with_reason(text: &str, why: &str) -> String {
    if why.is_empty() { text.to_owned() } else { format!("{text}: {why}") }
}
