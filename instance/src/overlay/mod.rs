//! What both products need around a tunnel: the device's addresses and routes, and log lines of events.

pub(crate) mod cause;
mod denied;
pub mod events;
pub(crate) mod lan;
pub mod link;
