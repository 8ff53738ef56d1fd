//! Compiles the policies of a cluster into one [program](crate::program) for each pod and direction.

mod assemble;
mod bits;
mod classes;
mod cluster;
mod encode;
mod identities;
mod masks;
mod nodes;
mod policies;
mod ranges;
mod rules;
mod selectors;

use std::net::IpAddr;

pub use assemble::closed;
pub use cluster::{Cluster, TooMany};
pub use identities::{Full, Identities};
pub use policies::PolicyKey;

use crate::program::Identity;

/// A pod that gets programs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Subject {
    /// Its identity.
    pub identity: Identity,
    /// Its addresses, one of each family. It reaches itself at these.
    pub addresses: Vec<IpAddr>,
    /// The addresses of its node, which it reaches and which reach it.
    pub node: Vec<IpAddr>,
}

/// A program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Compiled {
    /// Its bytes; see [`crate::program::Program::read`].
    pub bytes: Vec<u8>,
    /// Whether the policies of the pod are more than a program can hold ([`crate::program::MAX_ROWS`],
    /// [`crate::model::MAX_PROGRAM_LEN`]), so the pod is closed. To be reported.
    pub is_closed: bool,
}
