//! Capture: the traffic of a pod under the addresses of its cluster.
//!
//! A [`Directory`] says what an address is: an enrolled pod, a Service, something known not to be enrolled, or nothing
//! known. By it each new flow of the pod gets a course: into a tunnel as it is, into a tunnel with the addresses of a
//! Service's endpoint, past the tunnels, or nowhere. Translated flows are remembered with both their forms, so that the
//! answers get the Service's address back. Firewall and tunnel see the form on the wire only.
//!
//! - `directory`: what is asked, and who answers.
//! - `flows` with `table`, `entry`, `hash` and `affinity`: the decisions, and the flows that they hold for. Shared by
//!   all lanes.
//! - `chosen` with `rendezvous`: which endpoint a flow gets.
//! - `bypassed`: flows to Services that leave on the primary network, and stay there.
//! - `sealed`: flows into tunnels that are not translated, which never leave on the primary network.
//! - `courses`: a lane's cache of decisions.
//! - `fragments`: the decisions for packets in fragments.
//! - `translation`: both forms of a flow, and how packets are rewritten between them; the bytes are written in
//!   `forward`.

mod affinity;
mod bypassed;
mod chosen;
mod courses;
mod directory;
mod entry;
mod flows;
mod fragments;
mod hash;
mod led;
mod rendezvous;
mod sealed;
mod table;
#[cfg(test)]
#[cfg(not(loom))]
mod tests;
mod translation;

use std::sync::Arc;

pub(crate) use courses::{InboundCourses, OutboundCourses, Pass};
pub use directory::{Directory, Endpoint, Found, Service, Target};
pub(crate) use entry::{State as FlowState, tcp};
pub use flows::OpenedBefore;
pub(crate) use flows::{Course, First, HandedOverAffinity, HandedOverCourse, NoCourse, Translations};
pub(crate) use fragments::{Identity, Outcome};
pub(crate) use rendezvous::scramble_address;
pub use rendezvous::{clear_tags, rendezvous};
pub(crate) use translation::{Change, Rewrite, Translation};

/// The directory in force.
#[derive(Debug, Clone)]
pub(crate) struct Current {
    pub(crate) directory: Arc<dyn Directory>,
    /// Its version, read once.
    pub(crate) version: u64,
}

impl Current {
    pub(crate) fn new(directory: Arc<dyn Directory>) -> Self {
        let version = directory.version();
        Self { directory, version }
    }
}
