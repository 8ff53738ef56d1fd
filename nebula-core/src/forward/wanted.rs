//! Peers a lane asked the control plane to connect to, beside the packets that wait for one.

use std::net::IpAddr;
use std::time::{Duration, Instant};

/// Remembers a few, so that a flow whose gateway is away asks once a second and not with every packet.
#[derive(Debug, Default)]
pub(super) struct Wanted(Vec<(IpAddr, Instant)>);

impl Wanted {
    /// Whether it is time to ask for `peer`; then it counts as asked for.
    pub(super) fn ask(&mut self, peer: IpAddr, now: Instant) -> bool {
        self.0.retain(|(_, asked)| now < *asked + AGAIN);
        let is_new = self.0.len() < MOST && self.0.iter().all(|(other, _)| *other != peer);
        if is_new {
            self.0.push((peer, now));
        }
        is_new
    }
}

const AGAIN: Duration = Duration::from_secs(1);
const MOST: usize = 32;
