//! Who sends a request, as far as the network knows.

use std::net::IpAddr;

/// Address of whoever is at the other end of a connection.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Caller(pub(crate) IpAddr);
