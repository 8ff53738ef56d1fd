//! The built `nebula-ca` as its users meet it: the command line, and HTTPS on loopback.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on must fail where it stands")]

mod bad_input;
mod commands;
mod crash;
mod hardware_key;
mod node_proof;
mod running;
mod tokens;
