//! Why the path of a tunnel is used, and why each other one is not.

use std::time::{Duration, Instant};

use super::measured::Measured;
use super::{Choice, Way};
use crate::wire::path_probe::Answerer;

/// Why a path is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum PathReason {
    /// The handshake came by it first, or the peer uses it.
    Peer,
    /// Its round trip is shorter by more than 18 % and 1 ms.
    Faster,
    /// The path before it lost more.
    LessLoss,
    /// It is in a preferred range.
    Preferred,
    /// The path before it did not answer any more.
    Silence,
    /// Of equally good relays, the hash of the host selects this one.
    Spread,
    /// The relay before it answered probes, and dropped most of what it was given to carry.
    Drops,
}

impl std::fmt::Display for PathReason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Peer => "the handshake or the peer chose it",
            Self::Faster => "its round trip is shorter",
            Self::LessLoss => "the path before it lost more",
            Self::Preferred => "it is in a preferred range",
            Self::Silence => "the path before it did not answer",
            Self::Drops => "the relay before it dropped what it was given to carry",
            Self::Spread => "hosts are distributed over equally good relays",
        })
    }
}

/// Whether a path is used, and if not, why not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum PathVerdict {
    /// This node sends by it.
    InUse,
    /// The peer measures the direct paths and chooses, or it does not measure, and is not probed by other paths.
    LeftToPeer,
    /// There are too few measurements so far.
    Unmeasured,
    /// It does not answer.
    Silent,
    /// It answers, but the path in use is in a preferred range and it is not.
    NotPreferred,
    /// It loses too much, or has lost too much lately.
    Lossy,
    /// It is a relay that answers probes, and dropped most of what it was given to carry lately.
    Drops,
    /// Its round trip is longer, by this.
    Slower(Duration),
    /// It is better, but too little to change, or not for long enough yet.
    NotBetter,
    /// `lighthouse.remote_allow_list` or another rule forbids it, or another host answered there.
    Excluded,
    /// More paths are known than are measured.
    BeyondLimit,
}

impl PathVerdict {
    /// One word for programs.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::InUse => "in_use",
            Self::LeftToPeer => "left_to_peer",
            Self::Unmeasured => "unmeasured",
            Self::Silent => "silent",
            Self::NotPreferred => "not_preferred",
            Self::Lossy => "lossy",
            Self::Drops => "drops",
            Self::Slower(_) => "slower",
            Self::NotBetter => "not_better",
            Self::Excluded => "excluded",
            Self::BeyondLimit => "beyond_limit",
        }
    }
}

impl std::fmt::Display for PathVerdict {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::InUse => f.write_str("in use"),
            Self::LeftToPeer => f.write_str("left to the peer, which chooses"),
            Self::Unmeasured => f.write_str("not measured often enough yet"),
            Self::Silent => f.write_str("does not answer"),
            Self::NotPreferred => f.write_str("not in a preferred range"),
            Self::Lossy => f.write_str("loses too much"),
            Self::Drops => f.write_str("answers probes and drops what it is given to carry"),
            Self::Slower(by) => write!(f, "slower by {:.1} ms", by.as_secs_f64() * 1000.0),
            Self::NotBetter => f.write_str("not better by enough, or not for long enough"),
            Self::Excluded => f.write_str("excluded by an allow list, or another host is there"),
            Self::BeyondLimit => f.write_str("beyond the number of paths that are measured"),
        }
    }
}

impl Choice {
    /// What is known about each path, and why it is used or not.
    pub(in crate::node) fn verdicts(&self, now: Instant) -> impl Iterator<Item = (&Measured, PathVerdict)> {
        let used = self.ways.iter().find(|way| way.way() == self.current);
        let is_left = match self.current {
            Way::Direct(_) => self.peer == Some(Answerer::Echoes) || now < self.led_until,
            Way::Relayed(_) => false,
        };
        self.ways.iter().map(move |way| (way, verdict(way, used, self.current, (is_left, way.is_distrusted(now)))))
    }
}

fn verdict(
    way: &Measured,
    used: Option<&Measured>,
    current: Way,
    (is_left, is_distrusted): (bool, bool),
) -> PathVerdict {
    if way.way() == current {
        return PathVerdict::InUse;
    }
    if is_left {
        return PathVerdict::LeftToPeer;
    }
    if way.is_silent() {
        return PathVerdict::Silent;
    }
    if is_distrusted {
        return PathVerdict::Drops;
    }
    let (Some(merit), true) = (way.merit(), way.is_trusted()) else { return PathVerdict::Unmeasured };
    let Some(used) = used.and_then(Measured::merit) else { return PathVerdict::NotBetter };
    if merit.is_other_range && !used.is_other_range {
        PathVerdict::NotPreferred
    } else if merit.is_lossy && !used.is_lossy {
        PathVerdict::Lossy
    } else if merit > used {
        PathVerdict::Slower(merit.round_trip.saturating_sub(used.round_trip))
    } else {
        PathVerdict::NotBetter
    }
}
