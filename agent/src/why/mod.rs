//! `nebula-cni-agent why`: why a pod does not reach another one, by what the API server and this node know.
//!
//! | file | what |
//! | --- | --- |
//! | `question.rs` | the flow, as it is written on the command line |
//! | `objects.rs` | its pods, Service and endpoints, from the API server |
//! | `ends.rs` | what this node knows of a pod and of the way to another one |
//! | `listener.rs` | who listens in a pod |
//! | `command.rs` | the command |
//!
//! What follows from all of it is in [`nebula_cni_contract::why`].

pub mod command;
mod ends;
mod listener;
mod objects;
mod question;
#[cfg(test)]
mod tests;

pub use question::{Asked, Kind, Question};

use crate::cluster::api::ApiError;
use crate::config::ConfigError;
use crate::pod_status::PodStatusError;

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WhyError {
    /// The command line has something else.
    #[error(
        "{0:?} is no end of a flow: expected NAMESPACE/NAME for a pod, and for what it sends to NAMESPACE/NAME, \
         NAME.NAMESPACE.svc or an address, with :PORT or :PORT/udp after it"
    )]
    Malformed(String),
    /// The configuration says where the node's files are.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The API server does not answer.
    #[error("cannot ask the API server: {0}")]
    Api(#[from] ApiError),
    /// It does not, and this node does not know both ends.
    #[error("{0}; without it the pod that sends must be on this node, and what it sends to a pod of it, or an address")]
    NotHere(#[source] Box<Self>),
    /// An object of the API server cannot be read.
    #[error("cannot read what the API server says of {what}: {source}")]
    Object {
        /// What was asked.
        what: String,
        /// Why.
        source: serde_json::Error,
    },
    /// The records of this node cannot be read.
    #[error(transparent)]
    Records(#[from] PodStatusError),
    /// An answer of another node cannot be used.
    #[error("cannot use {file}: {reason}")]
    Other {
        /// The file.
        file: String,
        /// Why.
        reason: String,
    },
    /// The answer cannot be printed.
    #[error("cannot print the answer: {0}")]
    Print(#[source] std::io::Error),
}
