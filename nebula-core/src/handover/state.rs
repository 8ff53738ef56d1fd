//! What a node hands over, as a value.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use nebula_cert::Certificate;

use super::encoding::{DecodeError, MAX_AFFINITIES, MAX_ATTACHED, MAX_FLOWS, MAX_HOPS, MAX_PEERS, MAX_SESSIONS};
use crate::capture::{HandedOverAffinity, HandedOverCourse};
use crate::firewall::HandedOverFlow;
use crate::index::{LocalIndex, RelayIndex};
use crate::tunnel::Opening;

/// What a node hands over to another process: its peers, flows and counters, and the means to open what peers still
/// send in its sessions. There is nothing in it to seal with.
///
/// Its bytes ([`State::encode`], [`State::decode`]) are for another process on the same host, by a way that nobody
/// else can read. Keys are erased when it is dropped.
pub struct State {
    /// Wall-clock time at which it was made, since the Unix epoch.
    pub(crate) made: Duration,
    /// Peers by certificate; of several entries with the same addresses, the last one is in use.
    pub(crate) peers: Vec<Peer>,
    pub(crate) sessions: Vec<Session>,
    pub(crate) hops: Vec<Hop>,
    pub(crate) flows: Vec<Flow>,
    pub(crate) courses: Vec<HandedOverCourse>,
    pub(crate) affinities: Vec<HandedOverAffinity>,
    /// By their stable names.
    pub(crate) counters: BTreeMap<String, u64>,
    /// What the program around the node hands over besides.
    pub(crate) attached: Vec<u8>,
}

/// Who a peer is, and the way to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Peer {
    /// To be verified again by who gets it.
    pub(crate) certificate: Certificate,
    /// Where it proved to be.
    pub(crate) endpoint: Option<SocketAddr>,
    /// Overlay address of the relay through which it is reached, if it is.
    pub(crate) relay: Option<IpAddr>,
    /// Time since there was traffic.
    pub(crate) idle: Duration,
    /// What is known about the size of the path to that endpoint.
    pub(crate) path: Option<MeasuredPath>,
}

/// The sizes that the path to an endpoint carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MeasuredPath {
    /// MTU of the overlay device when it was measured.
    pub(crate) mtu: u16,
    /// The largest packet that was answered.
    pub(crate) confirmed: u16,
    /// The largest packet that passes; `None`: all do.
    pub(crate) limit: Option<u16>,
    /// How long answers take.
    pub(crate) round_trip: Duration,
}

/// A session in which a peer may still send.
#[derive(Debug)]
pub(crate) struct Session {
    /// Position of the peer.
    pub(crate) peer: u32,
    /// The index that the peer writes into its datagrams.
    pub(crate) index: LocalIndex,
    pub(crate) opening: Opening,
    /// How long ago the process stopped sealing in it; not 0 if that was an earlier one than the one that hands over.
    pub(crate) age: Duration,
}

/// An index for datagrams through a relay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Hop {
    /// The index that the relay writes into its datagrams.
    pub(crate) index: RelayIndex,
    /// The session with the relay.
    pub(crate) session: LocalIndex,
}

/// A flow that the firewall knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Flow {
    /// Position of the peer whose certificate it was allowed for.
    pub(crate) peer: u32,
    pub(crate) known: HandedOverFlow,
}

impl State {
    /// Forgets the keys. What was made before the node went on must not open anything: its replay records are old, so
    /// datagrams would be taken twice.
    pub fn forget_keys(&mut self) {
        self.sessions.clear();
        self.hops.clear();
    }

    /// Adds what the program around the node hands over besides, in a form of its own.
    ///
    /// # Errors
    /// Returns an error if it has more than 1 MiB.
    pub fn attach(&mut self, bytes: Vec<u8>) -> Result<(), DecodeError> {
        if bytes.len() > MAX_ATTACHED {
            return Err(DecodeError::TooMany("bytes of the program"));
        }
        self.attached = bytes;
        Ok(())
    }

    /// What the earlier program attached; empty if that was nothing.
    #[must_use]
    pub fn attached(&self) -> &[u8] {
        &self.attached
    }

    /// The state without what a document has no room for: the flows that were idle for longest.
    pub(crate) fn bounded(mut self) -> Self {
        if self.flows.len() > MAX_FLOWS {
            self.flows.sort_by_key(|flow| flow.known.idle);
            self.flows.truncate(MAX_FLOWS);
        }
        if self.courses.len() > MAX_FLOWS {
            self.courses.sort_by_key(|course| course.idle);
            self.courses.truncate(MAX_FLOWS);
        }
        self.sessions.truncate(MAX_SESSIONS);
        self.hops.truncate(MAX_HOPS);
        self.affinities.truncate(MAX_AFFINITIES);
        if self.peers.len() > MAX_PEERS {
            self.peers.truncate(MAX_PEERS);
            let has_peer = |peer: u32| usize::try_from(peer).is_ok_and(|peer| peer < MAX_PEERS);
            self.sessions.retain(|session| has_peer(session.peer));
            self.flows.retain(|flow| has_peer(flow.peer));
        }
        self
    }

    /// Whether there are keys in it.
    #[must_use]
    pub fn has_keys(&self) -> bool {
        !self.sessions.is_empty()
    }

    /// Number of peers, by certificate.
    #[must_use]
    pub fn peers(&self) -> usize {
        self.peers.len()
    }

    /// Number of flows that the firewall knows.
    #[must_use]
    pub fn flows(&self) -> usize {
        self.flows.len()
    }
}

impl std::fmt::Debug for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("State")
            .field("peers", &self.peers.len())
            .field("sessions", &self.sessions.len())
            .field("flows", &self.flows.len())
            .field("courses", &self.courses.len())
            .finish_non_exhaustive()
    }
}
