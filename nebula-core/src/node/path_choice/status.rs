//! The list of a tunnel's paths, for operators.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use super::measured::Measured;
use super::{PathVerdict, Way};
use crate::node::Node;
use crate::node::tunnels::Live;

/// One path to a peer, as this node measured it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct PathStatus {
    /// Endpoint of the peer, if the path is direct.
    pub endpoint: Option<SocketAddr>,
    /// Otherwise the relay, by its first overlay address.
    pub relay: Option<IpAddr>,
    /// Median of the last round trips; `None` if the path never answered or does not any more.
    pub round_trip: Option<Duration>,
    /// Share of the last probes that were lost, in percent; `None` if there was none.
    pub loss: Option<u32>,
    /// This node sends by it.
    pub in_use: bool,
    /// Whether it is used, and if not, why not.
    pub verdict: PathVerdict,
}

impl Node {
    /// The paths of a tunnel that is measured, then those that are known and not measured.
    pub(in crate::node) fn path_statuses(&self, live: &Live) -> Vec<PathStatus> {
        let Some(choice) = &live.choice else { return Vec::new() };
        let mut paths: Vec<_> =
            choice.verdicts(self.now).map(|(measured, verdict)| self.path_status(measured, verdict)).collect();
        if !choice.current().is_direct() {
            return paths;
        }
        let peer = &live.tunnel.peer_addresses;
        let usable: Vec<_> =
            peer.iter().flat_map(|address| self.config.endpoints_of(*address, &self.lighthouse)).collect();
        for endpoint in peer.iter().flat_map(|address| self.config.named_endpoints_of(*address, &self.lighthouse)) {
            if paths.len() >= MAX_LISTED {
                break;
            }
            if paths.iter().all(|path| path.endpoint != Some(endpoint)) {
                let may_be_there = usable.contains(&endpoint) && self.config.may_be_at(peer, endpoint);
                let verdict = if may_be_there { PathVerdict::BeyondLimit } else { PathVerdict::Excluded };
                let endpoint = Some(endpoint);
                paths.push(PathStatus { endpoint, relay: None, round_trip: None, loss: None, in_use: false, verdict });
            }
        }
        paths
    }

    fn path_status(&self, measured: &Measured, verdict: PathVerdict) -> PathStatus {
        let (endpoint, relay) = match measured.way() {
            Way::Direct(endpoint) => (Some(endpoint), None),
            Way::Relayed(hop) => {
                let relay = self.forwarder.tunnels().by_index(hop.tunnel);
                (None, relay.and_then(|relay| relay.peer_addresses.first().copied()))
            }
        };
        let in_use = verdict == PathVerdict::InUse;
        PathStatus { endpoint, relay, round_trip: measured.round_trip(), loss: measured.loss(), in_use, verdict }
    }
}

/// More paths to one peer are not listed.
const MAX_LISTED: usize = 128;
