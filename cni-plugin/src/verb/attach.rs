//! Attachment in place: gives a pod that is already running what ADD would have given it. The node agent asks for this
//! for pods that were started before the installation, or whose attachment was lost. A later DEL of the runtime removes
//! the attachment like any other.

use crate::host::Host;
use crate::reply::{Error, code};
use crate::request::Attach;
use crate::settings::Settings;
use crate::verb::add::{give_tunnel, open_netns, required_prev_result};

/// What became of the pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// It has a tunnel.
    Attached,
    /// It is not enrolled, so nothing was done.
    NotEnrolled,
}

/// Attaches a running pod. The request is that of an ADD; its `prevResult` is the result that the runtime keeps for the
/// pod. The pod keeps its address in Kubernetes, also with the key `renumber`: it cannot change any more.
///
/// # Errors
/// As ADD. Code 110 if the address in the result is not on the pod's interface; such a pod must be recreated.
pub fn run(request: &Attach, host: &Host<'_>) -> Result<Outcome, Error> {
    let settings = Settings { renumber: false, ..Settings::read(&request.config)? };
    let prev_result = required_prev_result(&request.config)?;
    let ifname = &request.key.ifname;
    let address = prev_result.pod_address(ifname)?;
    let netns = open_netns(request, host)?;
    let link = host.namespaces.link(&netns, ifname).map_err(|e| {
        Error::new(code::NETNS, format!("cannot look into the network namespace {}: {e}", request.netns.display()))
    })?;
    if !link.is_some_and(|link| link.addresses.iter().any(|(found, _)| *found == address)) {
        let msg =
            format!("the runtime reports {address} as the pod's address, but {ifname} in the pod does not have it");
        return Err(Error::new(code::ADDRESS, msg).details("the pod cannot be attached in place; delete it"));
    }
    give_tunnel(request, &settings, &prev_result, host, |record| {
        Ok(if record.is_some() { Outcome::Attached } else { Outcome::NotEnrolled })
    })
}
