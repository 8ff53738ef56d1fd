//! The Nebula overlay network as a library: handshakes, lighthouse, firewall and the packet path.
//!
//! There are three ways to run a node:
//!
//! - [`Engine`]: the whole node as one value without IO. The program brings sockets and a clock; see below.
//! - `io::Driver` (feature `io`, Linux): threads, a tun device and UDP sockets.
//! - [`Node`] with one [`Lane`] per thread: what the driver is made of. The control plane ([`Node`]) is single-owner
//!   and decides; the forwarding plane ([`Forwarder`]) moves packets on any number of threads.
//!
//! All but the driver are sans-IO: time, randomness and bytes are passed in as arguments, and actions are returned as
//! values. The feature `simulator` adds a network of many nodes on one virtual clock.
//!
//! # A node on a socket of the program
//!
//! Every call of an [`Engine`] returns all that is to be done then, and [`Engine::poll_timeout`] says when to call it
//! again at the latest. The program writes the IP packets of the overlay itself, or has a TCP stack that does.
//!
//! ```
//! use std::io::Result;
//! use std::net::UdpSocket;
//! use std::time::{Duration, Instant};
//!
//! use nebula_core::forward::Offload;
//! use nebula_core::{Engine, Output};
//!
//! /// Waits for one datagram or the next timeout. Returns the overlay packets for this host.
//! fn turn(engine: &mut Engine, socket: &UdpSocket) -> Result<Vec<Vec<u8>>> {
//!     let due = engine.poll_timeout().map(|due| due.saturating_duration_since(Instant::now()));
//!     // A timeout of zero would mean "none".
//!     socket.set_read_timeout(due.map(|due| due.max(Duration::from_millis(1))))?;
//!     let mut buffer = vec![0; 65_535];
//!     let output = match socket.recv_from(&mut buffer) {
//!         Ok((length, from)) => engine.receive(Instant::now(), from, &mut buffer[..length]),
//!         Err(_) => engine.timeout(Instant::now()),
//!     };
//!     send_out(output, socket)?;
//!     Ok(output.packets().map(|packet| packet.to_vec()).collect())
//! }
//!
//! /// Sends an overlay packet, once there is a tunnel to the peer.
//! fn send(engine: &mut Engine, socket: &UdpSocket, mut packet: Vec<u8>) -> Result<()> {
//!     send_out(engine.send(Instant::now(), &mut packet, Offload::default()), socket)
//! }
//!
//! fn send_out(output: Output<'_>, socket: &UdpSocket) -> Result<()> {
//!     for datagram in output.datagrams() {
//!         socket.send_to(datagram.bytes, datagram.to)?;
//!     }
//!     for event in output.events() {
//!         println!("{event:?}");
//!     }
//!     Ok(())
//! }
//! # use std::time::SystemTime;
//! # use nebula_cert::{CaPool, Curve, Identity, PrivateKey, SigningKey, Template};
//! # use nebula_core::firewall::Rule;
//! # use nebula_core::{Config, Seed, WallClock};
//! # fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
//! # let signing = SigningKey::generate(Curve::Curve25519)?;
//! # let valid = 1_700_000_000..=4_000_000_000;
//! # let template = Template { public_key: signing.public_key(), ..Template::new("CA", valid.clone()) };
//! # let authority = template.self_sign(&signing)?;
//! # let sockets = [UdpSocket::bind("127.0.0.1:0")?, UdpSocket::bind("127.0.0.1:0")?];
//! # let mut engines = Vec::new();
//! # for own in 0..2 {
//! #     let key = PrivateKey::generate(Curve::Curve25519)?;
//! #     let networks = vec![format!("10.42.0.{}/16", own + 1).parse()?];
//! #     let template = Template { networks, public_key: key.public_key(), ..Template::new("host", valid.clone()) };
//! #     let identity = Identity::new(vec![template.sign(&authority, &signing)?], key)?;
//! #     let mut trust = CaPool::new();
//! #     trust.add(authority.clone())?;
//! #     let mut config = Config::new(identity, trust);
//! #     let peer = format!("10.42.0.{}", 2 - own).parse()?;
//! #     config.static_hosts.insert(peer, vec![sockets[1 - own].local_addr()?]);
//! #     config.firewall.outbound.push(Rule::any());
//! #     config.firewall.inbound.push(Rule::any());
//! #     let clock = WallClock::new(Instant::now(), SystemTime::now());
//! #     engines.push(Engine::new(config, clock, Seed::from_os()?)?);
//! # }
//! # let packet = *b"\x45\0\0\x21\0\0\0\0\x40\x11\0\0\x0a\x2a\0\x01\x0a\x2a\0\x02\x03\xe8\x07\xd0\0\x0d\0\0hello";
//! # send(&mut engines[0], &sockets[0], packet.to_vec())?;
//! # let mut got = Vec::new();
//! # for round in 0..100 {
//! #     got.extend(turn(&mut engines[1 - round % 2], &sockets[1 - round % 2])?);
//! #     if !got.is_empty() { break }
//! # }
//! # assert_eq!(got, [packet]);
//! # Ok(())
//! # }
//! ```
//!
//! The engine itself is made of a configuration, which it checks ([`Config::validate`]), the two clocks, and a seed:
//!
//! ```no_run
//! # fn engine() -> Result<nebula_core::Engine, Box<dyn std::error::Error>> {
//! use std::time::{Instant, SystemTime};
//!
//! use nebula_cert::{CaPool, Identity};
//! use nebula_core::firewall::Rule;
//! use nebula_core::{Config, Engine, Seed, WallClock};
//!
//! let identity = Identity::read("host.crt", "host.key")?;
//! let mut config = Config::new(identity, CaPool::from_pem(&std::fs::read("ca.crt")?)?);
//! config.lighthouse.hosts = vec!["10.42.0.1".parse()?];
//! config.static_hosts.insert("10.42.0.1".parse()?, vec!["203.0.113.7:4242".parse()?]);
//! config.firewall.outbound.push(Rule::any());
//! let engine = Engine::new(config, WallClock::new(Instant::now(), SystemTime::now()), Seed::from_os()?)?;
//! # Ok(engine)
//! # }
//! ```
//!
//! # With the driver
//!
//! Join a network with a tun device (needs CAP_NET_ADMIN; the device has no address yet: give it the certificate's).
//! The driver touches nothing of the process but its own threads and descriptors:
//!
//! ```no_run
//! # #[cfg(feature = "io")]
//! fn join(config: nebula_core::Config) -> Result<(), Box<dyn std::error::Error>> {
//!     use nebula_core::io::{Driver, Options, SocketOptions, Tun, UdpSocket};
//!
//!     let sockets = UdpSocket::bind("0.0.0.0:4242".parse()?, 1, &SocketOptions::default())?;
//!     let driver = Driver::start(config, Some(Tun::create("nebula0", 1, true)?), sockets, Options::default())?;
//!     let _handle = driver.handle(); // replaces identity or rules, lists tunnels, reads counters, stops
//!     Ok(driver.run()?)
//! }
//! ```
//!
//! # With threads of the program
//!
//! [`Forwarder::outbound`] and [`Forwarder::inbound`] do the work of a data thread, each thread with a [`Lane`] of
//! its own: send [`Lane::runs`] after either, and deliver [`Lane::deliveries`]. What a lane cannot finish is handed
//! to the node, whose own output is drained after every call:
//!
//! ```
//! use std::net::SocketAddr;
//! use std::time::Instant;
//!
//! use nebula_core::{Lane, Node};
//!
//! /// Hands the punts of a lane to the node and sends its answers. Returns when the node must be called again
//! /// at the latest.
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
//! # Time
//!
//! Everything happens at an [`Instant`](std::time::Instant) of the caller's clock, which never goes backwards; spans
//! are [`Duration`](std::time::Duration)s. The time of day enters by [`WallClock`] alone, and only certificates hold
//! it (`nebula_cert::UnixTime`, whole seconds).
//!
//! # Examples
//!
//! In `nebula-core/examples`, each run by `cargo run --example NAME`:
//!
//! - `pki`: a CA and the identity of a host, made in the program and written as PEM files.
//! - `two_nodes`: two engines without sockets, threads or a clock.
//! - `tokio`: two engines on sockets of an async runtime.
//! - `lighthouse`: a lighthouse on the driver, without a tun device and without privileges.
//! - `descriptor`: the driver with sockets, and optionally a tun device, that were opened elsewhere.
//! - `network` (feature `simulator`): a laptop behind a NAT finds a server through a lighthouse.

#![warn(missing_docs)]

mod buckets;
pub mod capture;
pub mod config;
pub mod counters;
pub mod diagnosis;
mod engine;
pub mod firewall;
pub mod forward;
pub mod handover;
mod handshake;
mod hole_punch;
mod index;
#[cfg(all(feature = "io", not(target_os = "linux")))]
compile_error!("the feature `io` of nebula-core needs Linux; elsewhere, use the crate with default-features = false");
#[cfg(feature = "io")]
pub mod io;
pub mod lighthouse;
#[cfg(all(test, loom))]
mod models;
mod node;
mod output;
pub mod relay;
mod seed;
#[cfg(feature = "simulator")]
pub mod simulator;
mod sync;
mod tunnel;
mod wire;

pub use config::{Config, Part, PostQuantum};
pub use counters::DropReason;
pub use engine::{Batch, Datagram, Engine, Output, Packet};
pub use forward::{Forwarder, Lane};
pub use index::{LocalIndex, RelayIndex, RemoteIndex};
pub use node::{
    FlowTrace, GatewayState, GatewayStatus, Node, OfferedRelay, Outcome, PathReason, PathStatus, PathVerdict,
    PendingStatus, RelayReason, RelayState, RelayStatus, RelayTrouble, TableSizes, TunnelStatus, WallClock,
    Whereabouts,
};
pub use output::{Event, Origin, PacketOwned, PeerCertificate, Punt, Transmit, TunnelDownReason, Verdict};
pub use seed::{NoRandomness, Seed};
pub use wire::header::MessageType;
pub use wire::ip::{FlowKey, protocol};
// Certificates, identities and trust, which the functions here take and return.
pub use nebula_cert;

/// What this repository's own tests, benchmarks and fuzz targets look into. Nothing in it is stable.
#[doc(hidden)]
pub mod internals {
    pub use crate::counters::Counters;
    pub use crate::lighthouse::Server;
    pub use crate::tunnel::cipher::AeadKey;
    pub use crate::tunnel::{ReplayWindow, Session, SessionKeys};
    pub use crate::wire::{header, ip, messages, path_probe, test_body};
}
