//! Where peers seem to have moved, as a lane told the control plane.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use crate::index::LocalIndex;

/// Remembers for a moment what it told. Every datagram comes from elsewhere until the control plane has obeyed, or for as
/// long as it refuses; telling with each would push other punts out of the queue.
#[derive(Debug, Default)]
pub(super) struct Moves(Vec<(LocalIndex, SocketAddr, Instant)>);

impl Moves {
    /// Whether it is time to tell that the peer of `tunnel` is at `place`; then it counts as told.
    pub(super) fn tell(&mut self, tunnel: LocalIndex, place: SocketAddr, now: Instant) -> bool {
        self.0.retain(|(_, _, told)| now < *told + AGAIN);
        let known = self.0.iter().any(|(other, at, _)| (*other, *at) == (tunnel, place));
        let tells = !known && self.0.len() < MOST;
        if tells {
            self.0.push((tunnel, place, now));
        }
        tells
    }
}

/// What was told may have been lost on the way.
const AGAIN: Duration = Duration::from_millis(100);
/// A lane's share of the queue to the control plane in that time.
const MOST: usize = 128;
