//! Drives the built plugin as a runtime does: environment and stdin in, stdout and exit code out.

#![allow(clippy::unwrap_used, reason = "in the helpers of tests too, a panic is the report")]

mod add;
mod bad_input;
mod capture;
mod check;
#[allow(dead_code, reason = "the tests of the programs use more of it")]
mod container;
mod control_groups;
mod del;
mod fake_instance;
mod gc_and_status;
mod harness;
mod killed;
mod primaries;
mod primary;
mod reconcile;
mod second_interface;
mod service_manager;
mod systemd;
mod version;
