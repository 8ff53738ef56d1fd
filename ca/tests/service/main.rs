//! Tests of the built `nebula-ca` through its command line and over HTTPS on loopback.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on must fail where it stands")]
#![allow(clippy::disallowed_methods, reason = "these tests wait for processes")]

mod backup;
mod bad_input;
mod commands;
mod crash;
mod directory;
mod exhaustion;
#[cfg(feature = "kubernetes")]
mod fake_cluster;
mod full_disk;
mod hardware_key;
#[cfg(feature = "kubernetes")]
mod kubernetes;
mod lifecycle;
#[cfg(feature = "kubernetes")]
mod lighthouses;
#[cfg(feature = "kubernetes")]
mod node_credential;
mod node_proof;
mod page;
#[cfg(feature = "postgres")]
mod postgres_replicas;
#[cfg(feature = "postgres")]
#[allow(dead_code, reason = "the tests of the library use more of it")]
mod postgres_server;
#[cfg(feature = "postgres")]
mod postgres_tls;
#[cfg(feature = "kubernetes")]
mod revocation;
mod running;
mod tokens;
