//! Parsers for everything that comes off the wire. They never panic, and never allocate by a length they read.

pub(crate) mod challenge;
pub mod header;
pub(crate) mod icmp;
pub mod ip;
pub mod messages;
pub(crate) mod offload;
pub mod path_probe;
pub(crate) mod size_probe;
pub mod test_body;
