//! Threads, punt queue, deadlines, commands: the event loop around `Node` and `Forwarder`.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::mpsc::Receiver;

use nebula_cert::{CaPool, Identity};

use super::{Tun, UdpSocket};
use crate::{Config, Event, TunnelStatus, firewall};

/// Why the driver could not start or had to stop.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A system call failed.
    #[error("{what}")]
    Io {
        /// What was tried.
        what: &'static str,
        /// The system's answer.
        #[source]
        source: std::io::Error,
    },
}

/// Settings of the driver itself.
#[derive(Debug, Clone)]
pub struct Options {
    /// Read interface addresses and advertise them to lighthouses.
    pub advertise_interfaces: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self { advertise_interfaces: true }
    }
}

/// Runs one node until it is stopped.
#[derive(Debug)]
pub struct Driver {}

/// Speaks to a running driver. Cheap to clone; usable from any thread.
#[derive(Debug, Clone)]
pub struct Handle {}

impl Driver {
    /// Starts the threads. The control thread runs in the caller's network namespace.
    ///
    /// # Errors
    /// A thread or descriptor could not be made.
    pub fn start(
        _config: Config,
        _tun: Option<Tun>,
        _sockets: Vec<UdpSocket>,
        _options: Options,
    ) -> Result<Self, Error> {
        unimplemented!()
    }
    /// A handle.
    #[must_use]
    pub fn handle(&self) -> Handle {
        unimplemented!()
    }
    /// What happens from now on; bounded, the oldest unread events are lost first. One reader.
    #[must_use]
    pub fn events(&mut self) -> Receiver<Event> {
        unimplemented!()
    }
    /// Waits until [`Handle::stop`] or a fatal error; closes every tunnel before it returns.
    ///
    /// # Errors
    /// A device or socket failed for good.
    pub fn run(self) -> Result<(), Error> {
        unimplemented!()
    }
}

impl Handle {
    /// Closes all tunnels and ends the driver.
    pub fn stop(&self) {
        unimplemented!()
    }
    /// See [`crate::Node::set_identity`].
    pub fn set_identity(&self, _identity: Identity) {
        unimplemented!()
    }
    /// See [`crate::Node::set_trust`].
    pub fn set_trust(&self, _trust: CaPool) {
        unimplemented!()
    }
    /// See [`crate::Node::set_firewall`].
    pub fn set_firewall(&self, _policy: firewall::Policy) {
        unimplemented!()
    }
    /// See [`crate::Node::set_static_hosts`].
    pub fn set_static_hosts(&self, _hosts: BTreeMap<IpAddr, Vec<SocketAddr>>) {
        unimplemented!()
    }
    /// Live tunnels; empty if the driver has ended.
    #[must_use]
    pub fn tunnels(&self) -> Vec<TunnelStatus> {
        unimplemented!()
    }
    /// Sum of all lanes' counters by name, for metrics.
    #[must_use]
    pub fn counters(&self) -> BTreeMap<&'static str, u64> {
        unimplemented!()
    }
}
