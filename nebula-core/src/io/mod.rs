//! The only module that reads clocks, starts threads, and opens tun devices and UDP sockets (Linux).
//!
//! Data threads run to completion on the batch they read and wait only when there is nothing to read; one control
//! thread owns the [`crate::Node`]. [`Driver`] starts and ends them all.

mod bypass;
mod clock;
mod control;
mod driver;
mod gate;
mod interfaces;
mod kept;
mod poll;
mod region;
mod shared;
mod threads;
mod tun;
mod udp;

pub use bypass::Bypass;
pub use control::Idle;
pub use driver::{Driver, Error, Handle, Options, register_barriers};
pub use interfaces::interface_addresses;
pub use kept::check_kind;
pub use tun::{Tun, TunOffloads};
pub use udp::{SocketControl, SocketMemory, SocketOptions, UdpSocket, ignore_path_errors, without_missing_v6};
