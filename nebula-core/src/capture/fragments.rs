//! The courses of packets in fragments: only the first fragment has ports, and the others follow it.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use super::{Course, NoCourse};
use crate::sync::Mutex;
use crate::wire::ip::{FlowKey, Packet, fragment_number};

/// Maximum number of packets remembered, and for how long: hosts give up after half a minute.
const MAX_PACKETS: usize = 128;
const KEEP_FOR: Duration = Duration::from_secs(30);

/// Packets whose first fragment was seen, newest last. Shared by all lanes; only fragments come here.
#[derive(Debug, Default)]
pub(crate) struct Fragments(Mutex<VecDeque<(Identity, Outcome, Instant)>>);

/// What became of the first fragment.
pub(crate) type Outcome = Result<Course, NoCourse>;

/// What the fragments of one packet have in common.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Identity {
    local: IpAddr,
    remote: IpAddr,
    number: u32,
    outbound: bool,
}

impl Identity {
    /// `None` if this is no fragment.
    pub(crate) fn of(packet: &[u8], parsed: &Packet, outbound: bool) -> Option<Self> {
        let FlowKey { local, remote, .. } = parsed.flow;
        if !parsed.fragmented {
            return None;
        }
        let number = fragment_number(packet)?;
        Some(Self { local, remote, number, outbound })
    }
}

impl Fragments {
    /// Remembers what became of a first fragment.
    pub(crate) fn note(&self, identity: Identity, outcome: Outcome, now: Instant) {
        let mut recent = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        recent.retain(|(known, _, since)| *known != identity && now < *since + KEEP_FOR);
        if recent.len() >= MAX_PACKETS {
            recent.pop_front();
        }
        recent.push_back((identity, outcome, now));
    }

    /// What becomes of a later fragment.
    pub(crate) fn course(&self, identity: &Identity, now: Instant) -> Option<Outcome> {
        let recent = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let known = recent.iter().rev().find(|(known, _, since)| known == identity && now < *since + KEEP_FOR);
        known.map(|(_, outcome, _)| *outcome)
    }
}
