//! The Nebula overlay network as a library: handshakes, lighthouse, firewall and the packet path.
//!
//! Two planes, as in a router. The control plane ([`Node`]) is single-owner and decides; the forwarding plane
//! ([`Forwarder`]) moves packets on any number of threads. Both are sans-IO: time, randomness and bytes come in as
//! arguments, and what to do comes out as values. The feature `io` adds the Linux driver (threads, tun device, UDP
//! sockets); the feature `simulator` adds a network of many nodes on one virtual clock.

pub mod config;
pub mod counters;
pub mod firewall;
pub mod forward;
mod handshake;
mod hole_punch;
#[cfg(feature = "io")]
pub mod io;
pub mod lighthouse;
#[cfg(all(test, loom))]
mod models;
mod node;
mod output;
pub mod relay;
#[cfg(feature = "simulator")]
pub mod simulator;
mod sync;
pub mod tunnel;
pub mod wire;

pub use config::Config;
pub use forward::{Forwarder, Lane};
pub use node::{
    FlowTrace, Node, Outcome, PendingStatus, RelayState, RelayStatus, Source, TableSizes, TunnelStatus, WallClock,
    Whereabouts,
};
pub use output::{DropReason, Event, Origin, PacketOwned, PeerCertificate, Punt, Transmit, TunnelDownReason, Verdict};
