//! What follows Go Nebula's own conventions: flags, addresses, and the hash of the firewall rules.

pub mod firewall_hash;
pub mod flags;
pub(crate) mod netip;
