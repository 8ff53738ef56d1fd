//! The only module that may read clocks or open things: threads, tun device, UDP sockets (Linux).

mod driver;
mod poll;
mod region;
mod tun;
mod udp;
mod udp_receive;
mod udp_send;
mod vnet_header;

pub use driver::{Driver, Error, Handle, Options};
pub use tun::{Tun, TunOffloads};
pub use udp::{SocketOptions, UdpSocket};
