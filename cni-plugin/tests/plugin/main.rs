//! Drives the built plugin as a runtime does: environment and stdin in, stdout and exit code out.

mod add;
mod bad_input;
mod check;
mod del;
mod fake_instance;
mod gc_and_status;
mod harness;
mod killed;
mod version;
