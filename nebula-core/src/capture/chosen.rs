//! Which of a Service's endpoints a flow gets.

use super::rendezvous::scramble;
use super::{Directory, Endpoint, Service};
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
    /// Chooses among the endpoints by the flow alone, so that an instance that starts again finds the endpoints of its
    /// pod's connections. With affinity, all flows of this pod to the Service count as one. `None` if there is none to choose.
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
