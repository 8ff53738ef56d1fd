//! The built `nebula-ca` as its users meet it: the command line, and HTTPS on loopback.

mod bad_input;
mod commands;
mod crash;
mod node_proof;
mod running;
mod tokens;
