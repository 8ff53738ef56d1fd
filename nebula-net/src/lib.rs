//! TCP and UDP over the Nebula overlay inside a program, without a device or privileges.

#![warn(missing_docs)]

mod net;
pub mod stack;
pub mod tcp;

pub use net::{
    BlockingListener, BlockingNet, BlockingStream, Builder, Net, StartError, TcpListener, TcpStream, UdpSocket,
};
