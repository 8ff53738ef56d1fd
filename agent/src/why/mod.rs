//! `nebula-cni-agent why`: why a pod does not reach another one, by what the API server and this node know.
//!
//! | file | what |
//! | --- | --- |
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
#[cfg(test)]
mod tests;

use std::path::Path;

use kube::Client;
use nebula_cni_contract::clock::{Clock, SystemClock};
use nebula_cni_contract::why::{BadQuestion, Facts, Question};

pub(crate) use self::objects::resolve;
use crate::cluster::api::ApiError;
use crate::config::{ConfigError, STATE_DIR};
use crate::host_root::HostRoot;
use crate::pod_status::{self, PodStatusError};

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WhyError {
    /// The command line has something else.
    #[error(transparent)]
    Malformed(#[from] BadQuestion),
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

/// What the API server and this node know of a flow, and whether the API server was asked. Where it does not answer,
/// the node must know both ends. Blocks.
///
/// # Errors
/// See [`WhyError`].
pub(crate) fn of_node(
    runtime: &tokio::runtime::Handle,
    client: Result<Client, ApiError>,
    (host, node): (&HostRoot, &str),
    question: &Question,
) -> Result<(Facts, bool), WhyError> {
    let (records, _) = pod_status::records(host, Path::new(STATE_DIR))?;
    let here = ends::Here { host, node, records: &records };
    let resolved = client.map_err(WhyError::from);
    let resolved = resolved.and_then(|client| runtime.block_on(resolve(&client, question)));
    let (source, target, was_asked) = match resolved {
        Ok((source, target)) => (source, target, true),
        Err(error @ WhyError::Api(_)) => {
            let known = here.resolve(question).ok_or_else(|| WhyError::NotHere(Box::new(error)))?;
            (known.0, known.1, false)
        }
        Err(other) => return Err(other),
    };
    let Question { protocol, port, .. } = *question;
    let mut facts = Facts { at: SystemClock.unix_seconds(), source, target, protocol, port, ..Facts::default() };
    here.add_to(&mut facts);
    Ok((facts, was_asked))
}
