//! The only module that may read clocks or open things: threads, tun device, UDP sockets (Linux).

mod driver;
mod tun;
mod udp;

pub use driver::{Driver, Error, Handle, Options};
pub use tun::Tun;
pub use udp::{SocketOptions, UdpSocket};
