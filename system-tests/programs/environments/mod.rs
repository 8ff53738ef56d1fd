//! Programs where something is missing or forbidden that they usually have.

mod first_process;
mod forbidden_calls;
mod static_binaries;
mod without_v6;
