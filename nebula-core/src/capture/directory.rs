//! What the cluster says about a destination: the seam between the forwarding plane and the cluster table.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use super::rendezvous::{clear_tags, rendezvous, tag};
use crate::wire::ip::FlowKey;

/// What a flow is addressed to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Target {
    /// Destination address.
    pub address: IpAddr,
    /// Destination port; 0 for protocols without ports.
    pub port: u16,
    /// IP protocol number.
    pub protocol: u8,
}

impl From<&FlowKey> for Target {
    /// The remote end of a flow. The identifier of an ICMP echo is not a port.
    fn from(flow: &FlowKey) -> Self {
        let port = if has_ports(flow.protocol) { flow.remote_port } else { 0 };
        Self { address: flow.remote, port, protocol: flow.protocol }
    }
}

/// Whether the transport header of a protocol begins with a source and a destination port that can be translated.
pub(super) fn has_ports(protocol: u8) -> bool {
    use crate::wire::ip::protocol::{SCTP, TCP, UDP};
    matches!(protocol, SCTP | TCP | UDP)
}

/// What is known about a [`Target`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Found {
    /// An enrolled pod: sealed to it as it is.
    Peer {
        /// Changes when another pod takes over the address.
        incarnation: u64,
    },
    /// A Service with endpoints to choose from.
    Service(Service),
    /// Known not to be enrolled: leaves on the primary network.
    Clear,
    /// Nothing is known: held until the next version of the directory, then dropped.
    Unknown,
    /// Nobody may or can answer: a Service without an endpoint to choose, or a destination that policy excludes.
    /// Answered like a closed port.
    Refused,
}

/// A Service, valid for the version of the directory that returned it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Service {
    /// Identifies the Service within one version of the directory.
    pub id: u32,
    /// Number of enrolled endpoints to choose from.
    pub ready: u32,
    /// Number of endpoints to choose from that are not enrolled: flows to those leave on the primary network, to the
    /// Service's address. Greater than 0 if the other number is not.
    pub clear: u32,
    /// Session affinity by client: the same endpoint until this long has passed without a new flow.
    pub affinity: Option<Duration>,
}

/// An enrolled endpoint of a [`Service`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Endpoint {
    /// Address of the pod.
    pub address: IpAddr,
    /// Port of the pod, which may differ from the Service's.
    pub port: u16,
    /// Incarnation of the pod, as in [`Found::Peer`].
    pub incarnation: u64,
}

/// One version of the cluster's Services and pods. Looked up for new flows, and once for each known flow when the
/// version changes; never for each packet.
pub trait Directory: fmt::Debug + Send + Sync {
    /// Rises with every change.
    fn version(&self) -> u64;
    /// What is known about a destination.
    fn find(&self, target: &Target) -> Found;
    /// The `n`th enrolled endpoint to choose from, for `n` below [`Service::ready`].
    fn endpoint(&self, service: &Service, n: u32) -> Option<Endpoint>;
    /// The endpoint to choose for a flow with this hash, as a number for [`Directory::endpoint`], or from
    /// [`Service::ready`] on for one that is not enrolled: by [`rendezvous`], so that it depends on the flow and the
    /// endpoints only.
    fn choose(&self, service: &Service, hash: u64) -> Option<u32> {
        let tag_of = |n| self.endpoint(service, n).map_or(0, |endpoint| tag(endpoint.address, endpoint.port));
        rendezvous(hash, (0..service.ready).map(tag_of).chain(clear_tags(service.clear)))
    }
    /// Whether an endpoint is ready or terminating: flows to it go on.
    fn serves(&self, service: &Service, endpoint: &Endpoint) -> bool;
    /// Incarnation of the enrolled pod with this address; `None` if there is none.
    fn incarnation(&self, address: IpAddr) -> Option<u64>;
    /// Where the peer with this overlay address probably is, best first. It is tried after everything that lighthouses
    /// and the configuration say; the peer's certificate proves whether it is there.
    fn likely_endpoints(&self, peer: IpAddr) -> Vec<SocketAddr> {
        let _ = peer;
        Vec::new()
    }
}
