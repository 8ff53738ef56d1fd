//! Which of a Service's endpoints a flow gets.

use std::net::SocketAddr;

use super::rendezvous::scramble;
use super::{Directory, Endpoint, Found, Service, Target};
use crate::wire::ip::FlowKey;

/// Maximum number of endpoints tried for one flow.
const MAX_TRIED: u32 = 8;

/// What a flow to a Service gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Chosen {
    /// An enrolled endpoint, with its position.
    Endpoint(u32, Endpoint),
    /// One that is not enrolled. Which one, the primary network chooses.
    Clear,
}

impl Chosen {
    /// The endpoint that the primary network chose for a flow. `None` if nothing is known about it.
    pub(super) fn before(
        directory: &dyn Directory,
        service: &Service,
        flow: &FlowKey,
        endpoint: SocketAddr,
    ) -> Option<Self> {
        let (address, port) = (endpoint.ip(), endpoint.port());
        match directory.find(&Target { address, port, protocol: flow.protocol }) {
            Found::Peer { incarnation } => {
                let endpoint = Endpoint { address, port, incarnation };
                let n = (0..service.ready).find(|n| directory.endpoint(service, *n) == Some(endpoint));
                Some(Self::Endpoint(n.unwrap_or_default(), endpoint))
            }
            Found::Clear => Some(Self::Clear),
            Found::Service(_) | Found::Unknown | Found::Refused => None,
        }
    }

    /// Chooses among the endpoints by the flow alone, so that an instance that starts again finds the endpoints of
    /// its pod's connections. With affinity, all flows of this pod to the Service count as one. `None` if there is
    /// none to choose.
    pub(super) fn of(directory: &dyn Directory, service: &Service, flow: &FlowKey) -> Option<Self> {
        if service.ready == 0 {
            return (service.clear > 0).then_some(Self::Clear);
        }
        let local_port = if service.affinity.is_some() { 0 } else { flow.local_port };
        let first = directory.choose(service, scramble(&FlowKey { local_port, ..*flow }))?;
        if first >= service.ready {
            return Some(Self::Clear);
        }
        let same_family = |endpoint: &Endpoint| endpoint.address.is_ipv4() == flow.remote.is_ipv4();
        let nth = |n: u32| Some(Self::Endpoint(n, directory.endpoint(service, n).filter(same_family)?));
        // A directory that names an endpoint it does not have is broken, but one bad entry need not break the Service.
        (0..service.ready.min(MAX_TRIED)).find_map(|further| nth(first.wrapping_add(further) % service.ready))
    }
}
