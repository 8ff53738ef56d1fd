//! Replaces the running daemon by another program while connections go on: `nebula ctl upgrade`.
//!
//! The daemon checks the new program ([`program`]), starts it, and offers what it has ([`attempt`]); the new process
//! reads the configuration, checks that device and sockets fit, and takes over ([`crate::handover`]).

pub(crate) mod attempt;
pub(crate) mod program;
