//! How an asker proves who it is: one file per proof (attestation).

pub(crate) mod node;
pub(crate) mod token;
