//! The only module that may read clocks or open things: threads, tun device, UDP sockets (Linux).
//!
//! Data threads run to completion on the batch they read and wait only when there is nothing to read; one control thread
//! owns the [`crate::Node`]. [`Driver`] starts and ends them all.

mod barriers;
mod clock;
mod control_thread;
mod delivery;
mod doze;
mod driver;
mod duty;
mod idle;
mod inbound_thread;
mod interfaces;
mod mailbox;
mod outbound;
mod outbound_thread;
mod poll;
mod priority;
mod region;
mod shared;
mod socket_control;
mod tun;
mod udp;
mod udp_receive;
mod udp_send;
mod vnet_header;
mod wake;
mod warmth;

pub use barriers::register_barriers;
pub use driver::{Driver, Error, Handle, Idle, Options};
pub use socket_control::{SocketControl, SocketMemory};
pub use tun::{Tun, TunOffloads};
pub use udp::{SocketOptions, UdpSocket};
