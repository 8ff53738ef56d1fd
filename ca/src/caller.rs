//! The sender of a request, as far as the network knows it.

use std::net::IpAddr;

/// Remote address of a connection.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Caller(pub(crate) IpAddr);
