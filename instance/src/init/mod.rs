//! The init container's flow: what it says, its own end (`nebula-cni-init`) and the instance's end.

pub mod desk;
pub mod handoff;
pub mod program;
