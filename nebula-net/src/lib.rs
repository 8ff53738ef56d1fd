#![doc = include_str!("../README.md")]
#![warn(missing_docs)]

#[cfg(not(target_os = "linux"))]
compile_error!("nebula-net runs on Linux only: it sends and receives on the underlay by Linux' batches");

mod net;
pub mod proxy_header;
pub mod stack;
pub mod tcp;
#[cfg(feature = "tower")]
pub mod tower;

pub use tcp::Keepalive;

// What the functions here take and return, so that a program needs no other crate of the same version.
pub use nebula_cert::{CaPool, Identity, VerifiedCertificate};
pub use nebula_core::{Config, Event};
pub use {nebula_cert, nebula_core};

pub use net::{
    BlockingListener, BlockingNet, BlockingStream, BlockingUdpSocket, Builder, Datagram, Net, OwnedReadHalf,
    OwnedWriteHalf, ReadHalf, ReuniteError, StartError, TcpListener, TcpStream, UdpSocket, Unreached, WriteHalf,
};
