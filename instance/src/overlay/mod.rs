//! What both products put around a tunnel: the device's addresses and routes, host names, log lines of events.

pub(crate) mod cause;
pub(crate) mod events;
pub mod link;
