//! The cluster table: which addresses of the cluster are enrolled pods, which are known not to be, and which endpoints
//! each Service has. One writer per node builds it with [`Builder`]. It creates the file beside
//! [`crate::launch::CLUSTER_TABLE`] and renames it, so that a reader sees one version or the next, never half of one;
//! instances map it read-only and look new flows up with [`Table`]. [`mod@format`] describes the bytes.
//!
//! Nothing here does any IO. A table only decides where packets go; the certificate of the peer proves who answers.

mod builder;
pub mod contents;
mod file;
pub mod format;
mod hash_table;
mod table;
#[cfg(test)]
mod tests;

use std::net::{IpAddr, Ipv6Addr};

pub use builder::{Builder, EndpointList, EndpointState, Mixed, ServiceEndpoint, ServicePort};
pub use format::{Error, Layout, version_of};
pub use table::{End, Endpoint, Found, Labels, Service, Table};

/// Longest file that a reader maps, and so the longest that a writer makes. 10,000 Services with 50,000 endpoints
/// take a twentieth of it.
pub const MAX_BYTES: u64 = 64 << 20;

/// An address as a table holds it: IPv4 addresses are those mapped into IPv6.
fn key_of(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(address) => address.to_ipv6_mapped().to_bits(),
        IpAddr::V6(address) => address.to_bits(),
    }
}

fn address_of(key: u128) -> IpAddr {
    Ipv6Addr::from_bits(key).to_canonical()
}
