//! Holders of certificates, as the CA's directory lists them.

use std::net::IpAddr;

use sha2::{Digest, Sha256};

/// The first 16 bytes of the SHA-256 of a pod's UID.
pub type PodId = u128;

/// Addresses of a pod, at most one of each family.
pub type Addresses = [Option<IpAddr>; 2];

/// A holder of a certificate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Member {
    /// Addresses of its certificate.
    pub addresses: Addresses,
    /// Another number for each pod.
    pub incarnation: u64,
    /// Where its instance begins to look for a free port: [`nebula_cni_contract::launch::port_number`] of its UID.
    pub port_number: u32,
    /// It is a host that enrolled with a token, and no pod.
    pub is_host: bool,
}

/// The first address of each family.
pub(crate) fn addresses(all: impl IntoIterator<Item = IpAddr>) -> Addresses {
    let mut addresses = [None; 2];
    for address in all {
        addresses[usize::from(address.is_ipv6())].get_or_insert(address);
    }
    addresses
}

/// By which a pod is known here.
pub(super) fn id(uid: &str) -> PodId {
    let digest = Sha256::digest(uid.as_bytes());
    digest.iter().take(16).fold(0, |id, byte| id << 8 | u128::from(*byte))
}

/// The incarnation of the pod with this UID: the first eight bytes of the UID's SHA-256, and never 0.
#[must_use]
pub fn incarnation(uid: &str) -> u64 {
    ((id(uid) >> 64) as u64).max(1)
}
