//! What operators are told of the relays that lighthouses offer.

use std::net::IpAddr;
use std::time::Duration;

/// Why a relay is chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum RelayReason {
    /// Of those that are not known to be worse, the hash of the host selects it.
    Hash,
    /// Its round trip is shorter by more than 18 % and 1 ms than that of the one before it.
    Faster,
    /// The one before it lost more.
    LessLoss,
    /// No relay answers requests, and this one is there at least.
    LastResort,
}

/// Why a relay was left, or not chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum RelayTrouble {
    /// There is no tunnel to it.
    Unreachable,
    /// It can be reached through other relays only.
    Indirect,
    /// Its certificate has none of the groups.
    NotMember,
    /// It does not answer requests for hops: `relay.am_relay` is not set there.
    Refuses,
    /// It does not answer test requests.
    Silent,
    /// It answers test requests, and drops most of what it is given to carry, as most peers find.
    Drops,
    /// No lighthouse offers it any more.
    Withdrawn,
}

impl std::fmt::Display for RelayReason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Hash => "picked by a hash among equally good relays, to spread the load",
            Self::Faster => "its round trip is shorter",
            Self::LessLoss => "the relay before it lost more",
            Self::LastResort => "it does not answer requests, and no other relay does",
        })
    }
}

impl RelayTrouble {
    /// For programs.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Unreachable => "unreachable",
            Self::Indirect => "indirect",
            Self::NotMember => "not_member",
            Self::Refuses => "refuses",
            Self::Silent => "silent",
            Self::Drops => "drops",
            Self::Withdrawn => "withdrawn",
        }
    }
}

impl std::fmt::Display for RelayTrouble {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Unreachable => "there was no tunnel to it",
            Self::Indirect => "it was reached through another relay only",
            Self::NotMember => "its certificate has none of the groups",
            Self::Refuses => "it does not answer requests for a hop (relay.am_relay there)",
            Self::Silent => "it does not answer test requests",
            Self::Drops => "it answers test requests and drops what it is given to carry",
            Self::Withdrawn => "no lighthouse offers it any more",
        })
    }
}

/// A relay that was offered, as reported to operators.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct OfferedRelay {
    /// Its overlay address.
    pub relay: IpAddr,
    /// Peers are told to use it.
    pub is_chosen: bool,
    /// It is being tried.
    pub is_tried: bool,
    /// Lighthouses whose last offer names it.
    pub offered_by: usize,
    /// Whether it answers requests for hops; `None`: not asked yet.
    pub serves: Option<bool>,
    /// Median of the last round trips.
    pub round_trip: Option<Duration>,
    /// Share of the last probes that were lost, in percent.
    pub loss: Option<u32>,
    /// Why it is chosen.
    pub reason: Option<RelayReason>,
    /// Why it was left or not chosen.
    pub trouble: Option<RelayTrouble>,
}
