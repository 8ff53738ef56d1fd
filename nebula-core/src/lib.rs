//! The Nebula overlay network as a library: handshakes, lighthouse, firewall and the packet path.
//!
//! Two planes, as in a router. The control plane ([`Node`]) is single-owner and decides; the forwarding plane
//! ([`Forwarder`]) moves packets on any number of threads. Both are sans-IO: time, randomness and bytes are passed in
//! as arguments, and actions are returned as values. The feature `io` adds the Linux driver (threads, tun device, UDP
//! sockets); the feature `simulator` adds a network of many nodes on one virtual clock.
//!
//! # With the driver
//!
//! Join a network with a tun device (needs CAP_NET_ADMIN; the device has no address yet: give it the certificate's):
//!
//! ```no_run
//! # #[cfg(feature = "io")]
//! fn join() -> Result<(), Box<dyn std::error::Error>> {
//!     use nebula_cert::{CaPool, Identity};
//!     use nebula_core::Config;
//!     use nebula_core::firewall::Rule;
//!     use nebula_core::io::{Driver, Options, SocketOptions, Tun, UdpSocket};
//!
//!     let identity = Identity::read("host.crt", "host.key")?;
//!     let mut config = Config::new(identity, CaPool::from_pem(&std::fs::read("ca.crt")?)?);
//!     config.lighthouse.hosts = vec!["10.42.0.1".parse()?];
//!     config.static_hosts.insert("10.42.0.1".parse()?, vec!["203.0.113.7:4242".parse()?]);
//!     config.firewall.outbound.push(Rule::any());
//!     let sockets = UdpSocket::bind("0.0.0.0:4242".parse()?, 1, &SocketOptions::default())?;
//!     let driver = Driver::start(config, Some(Tun::create("nebula0", 1, true)?), sockets, Options::default())?;
//!     let _handle = driver.handle(); // replaces identity or rules, lists tunnels, reads counters, stops
//!     Ok(driver.run()?)
//! }
//! ```
//!
//! # By hand
//!
//! Without the driver, the program moves packets and datagrams itself. [`Forwarder::outbound`] and
//! [`Forwarder::inbound`] do the work of a data thread, each thread with a [`Lane`] of its own; what a lane cannot
//! finish is handed to the node. After every call to the node:
//!
//! ```
//! use std::net::SocketAddr;
//! use std::time::Instant;
//!
//! use nebula_core::{Lane, Node};
//!
//! /// Hands the punts of a lane to the node and sends its answers. Returns when the node must be called again at the latest.
//! fn turn(node: &mut Node, lane: &mut Lane, now: Instant, send: impl Fn(SocketAddr, &[u8])) -> Option<Instant> {
//!     for punt in lane.take_punts() {
//!         node.handle_punt(now, punt);
//!     }
//!     node.handle_timeout(now);
//!     while let Some(transmit) = node.poll_transmit() {
//!         send(transmit.to, &transmit.datagram);
//!     }
//!     while let Some(event) = node.poll_event() {
//!         println!("{event:?}");
//!     }
//!     node.poll_timeout()
//! }
//! ```
//!
//! # Examples
//!
//! In `nebula-core/examples`, each run by `cargo run --example NAME`:
//!
//! - `pki`: a CA and the identity of a host, made in the program and written as PEM files.
//! - `lighthouse`: a lighthouse on the driver, without a tun device and without privileges.
//! - `two_nodes`: two nodes by hand, without sockets, threads or a clock.
//! - `network` (feature `simulator`): a laptop behind a NAT finds a server through a lighthouse.

#![warn(missing_docs)]

pub mod config;
pub mod counters;
pub mod diagnosis;
pub mod firewall;
pub mod forward;
mod handshake;
mod hole_punch;
mod index;
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

pub use config::{Config, Part};
pub use counters::DropReason;
pub use forward::{Forwarder, Lane};
pub use node::{
    FlowTrace, Node, Outcome, PendingStatus, RelayState, RelayStatus, TableSizes, TunnelStatus, WallClock, Whereabouts,
};
pub use output::{Event, Origin, PacketOwned, PeerCertificate, Punt, Transmit, TunnelDownReason, Verdict};
