//! Tests of the programs with real sockets, devices, kernels and runtimes: one folder per product, one test binary.

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    clippy::print_stdout,
    reason = "these tests watch real processes on a real clock, and end at the first surprise"
)]

#[path = "../../cni-plugin/tests/plugin/container.rs"]
mod container;
#[path = "../../ca/tests/service/fake_cluster.rs"]
#[allow(dead_code, reason = "the tests of the CA use more of it")]
mod fake_cluster;
#[path = "../../cni-plugin/tests/plugin/service_manager.rs"]
mod service_manager;
mod world;

mod agent;
mod cluster;
mod enrolment;
mod environments;
mod hosts;
mod observed;
mod packaging;
mod pods;
mod proxy;

use world::{fake_ca, loopback};
