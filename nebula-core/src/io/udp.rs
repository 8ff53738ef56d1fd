//! UDP sockets: GSO and GRO, sendmmsg and recvmmsg, and the fallback ladder.

use std::net::SocketAddr;

/// Settings of the underlay sockets.
#[derive(Debug, Clone)]
pub struct SocketOptions {
    /// Receive buffer in bytes (forced); 0: system default.
    pub read_buffer: usize,
    /// Send buffer in bytes (forced); 0: system default.
    pub write_buffer: usize,
    /// UDP GSO and GRO.
    pub offloads: bool,
}

impl Default for SocketOptions {
    fn default() -> Self {
        Self { read_buffer: 8 << 20, write_buffer: 8 << 20, offloads: true }
    }
}

/// One underlay socket in the network namespace of the thread that bound it.
#[derive(Debug)]
pub struct UdpSocket {}

impl UdpSocket {
    /// Binds one socket (or `count` sharing the port).
    ///
    /// # Errors
    /// Address in use, no permission.
    pub fn bind(_address: SocketAddr, _count: usize, _options: &SocketOptions) -> std::io::Result<Vec<Self>> {
        unimplemented!()
    }
    /// Bound address.
    ///
    /// # Errors
    /// From the system.
    pub fn local_addr(&self) -> std::io::Result<SocketAddr> {
        unimplemented!()
    }
}
