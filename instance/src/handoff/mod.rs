//! The instance's side of the hand-off of a pod's token; the protocol is that of the launch contract's crate.

pub mod server;

pub use nebula_cni_plugin::handoff::*;
