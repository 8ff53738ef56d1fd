//! The instance's side of the hand-off of a pod's token; the protocol is that of the launch contract's crate.

pub(crate) mod server;

pub(crate) use nebula_cni_contract::handoff::*;
