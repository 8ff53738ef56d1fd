//! The `nebula` daemon, a drop-in replacement for Go Nebula's.

mod account;
#[cfg(feature = "ssh")]
mod console;
mod control;
pub mod daemon;
mod dns;
pub mod documents;
mod file_watch;
mod housekeeping;
mod left_state;
mod link_repair;
mod listener_slot;
mod reload;
mod rivals;
mod stored;
mod subnets;
pub(crate) mod system_routes;
pub(crate) mod unmet;
pub(crate) mod upgrade;
