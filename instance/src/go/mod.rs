//! What exists because Go Nebula does it so: flags, addresses, and the hash of the firewall's rules.

pub(crate) mod firewall_hash;
pub mod flags;
pub(crate) mod netip;
