#![doc = include_str!("../README.md")]
#![warn(missing_docs)]

mod net;
pub mod proxy_header;
pub mod stack;
pub mod tcp;
#[cfg(feature = "tower")]
pub mod tower;

pub use tcp::Keepalive;

pub use net::{
    BlockingListener, BlockingNet, BlockingStream, Builder, Datagram, Net, StartError, TcpListener, TcpStream,
    UdpSocket, Unreached,
};
