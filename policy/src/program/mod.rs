//! Programs: what the policies say about one pod in one direction, as bytes that are judged in place.
//!
//! This module needs the core library only and never allocates. A program comes from another process (the agent) by a
//! file, so nothing in it is trusted: each access is checked, and a record that is outside makes the verdict a denial
//! ([`Reason::Malformed`]). Times do not depend on the bytes either: each lookup is a binary search, and a program has
//! at most [`MAX_ROWS`] rows.

mod explained;
mod format;
mod judge;
mod layout;
mod names;
mod verdict;

pub use explained::Explained;
pub use format::{Error, MAJOR, MAX_ROWS, MINOR};
#[cfg(feature = "compile")]
pub(crate) use format::{
    FLAG_AUDITED, FLAG_CLOSED, FLAG_ENFORCED, HEADER_LEN, MAGIC, MIN_SECTIONS, NONE, POLICY_AUDITED, POLICY_ISOLATES,
    SECTION_LEN, SECTIONS, SectionKind, action, octets, port_key,
};
pub use layout::{Layout, Program};
pub use names::{PolicyName, PolicyNames};
pub use verdict::{Decision, Identity, Peer, Reason, Tier, Verdict, Who};

/// IP protocol numbers whose packets have ports that rules can name.
pub mod protocol {
    /// TCP.
    pub const TCP: u8 = 6;
    /// UDP.
    pub const UDP: u8 = 17;
    /// SCTP.
    pub const SCTP: u8 = 132;
}

/// Which flows a program judges, seen from its pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Direction {
    /// Flows that somebody opens to the pod.
    Ingress,
    /// Flows that the pod opens.
    Egress,
}

impl Direction {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Ingress, Self::Egress];

    /// Its name; stable.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ingress => "ingress",
            Self::Egress => "egress",
        }
    }
}
