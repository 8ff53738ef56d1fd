//! CHECK: verifies that the attachment is still what ADD made. A lighthouse or CA that is temporarily unreachable is
//! not a failure.

use std::net::IpAddr;
use std::path::Path;

use nebula_cni_contract::clock::Deadline;
use nebula_cni_contract::instance_status::{InstanceState, Status, parse_network};
use nebula_cni_contract::netns::{Link, Netns};

use crate::attachment::files::Files;
use crate::attachment::foreign;
use crate::attachment::record::{Found, Record, State};
use crate::host::Host;
use crate::link::capture::PodCapture;
use crate::link::guard::Guard;
use crate::primary::network;
use crate::primary::settings::Primary;
use crate::reply::{Error, code};
use crate::request::Attach;
use crate::settings::Settings;
use crate::settings::capturing::COVER_HELP;
use crate::verb::add::{enrolled, has_sibling, open_netns, required_prev_result};

/// Checks record, namespace, instance, certificate, host route, rules of isolation and capture, and device.
///
/// # Errors
/// Returns the first problem found.
pub fn run(request: &Attach, host: &Host<'_>) -> Result<(), Error> {
    required_prev_result(&request.config)?;
    if let Some(primary) = Primary::read(&request.config)? {
        network::check(request, &primary, host)?;
        if !primary.has_tunnels {
            return Ok(());
        }
    }
    let settings = Settings::read(&request.config)?;
    let deadline = Deadline::after(host.clock, settings.timeout);
    let files = Files::new(&settings.state_dir, &request.key);
    let found = Record::load(&files.record())
        .map_err(|e| Error::new(code::IO, format!("cannot read {}: {e}", files.record().display())))?;
    let record = match found {
        Found::Record(record) if record.key() == request.key && record.state == State::Running => record,
        Found::Nothing
            if enrolled(request, &settings, host, deadline)?.is_none() || has_sibling(request, &settings, host)? =>
        {
            return Ok(());
        }
        Found::Record(_) | Found::Nothing => {
            let msg = format!("container {} has no tunnel on this node", request.key.container_id);
            return Err(Error::new(code::UNKNOWN_CONTAINER, msg).details(NO_RECORD_HELP));
        }
        Found::Foreign(why) => return Err(foreign::refusal(&files.record(), &why)),
        Found::Garbage(why) => {
            return Err(Error::new(code::IO, format!("the record {} is damaged: {why}", files.record().display())));
        }
    };
    let netns = open_netns(request, host)?;
    check_attachment(&record, &settings.state_dir, &netns, host).map_err(|e| Error {
        msg: format!("pod {}/{}: {}", record.target.pod.namespace, record.target.pod.name, e.msg),
        ..e
    })
}

fn check_attachment(record: &Record, state_dir: &Path, netns: &Netns, host: &Host<'_>) -> Result<(), Error> {
    if netns.id != record.target.netns_id {
        return Err(Error::new(code::NETNS, "the network namespace is not the one the tunnel was made in"));
    }
    let files = Files::new(state_dir, &record.key());
    if !host.supervisor(record.supervisor).is_alive(&files, record.process, host.clock) {
        let why = host.supervisor(record.supervisor).why_ended(&files, host.clock);
        let details = why.into_iter().chain([RESTART_HELP.to_owned()]).collect::<Vec<_>>().join("; ");
        return Err(Error::new(code::INSTANCE_UNREACHABLE, "the instance does not run any more").details(details));
    }
    let status = Status::ask(&record.status_socket).map_err(|e| {
        Error::new(code::INSTANCE_UNREACHABLE, format!("the instance does not answer: {e}")).details(RESTART_HELP)
    })?;
    // Only processes of the direct supervisor are recorded. systemd may restart a unit with a new process.
    let mut recorded = record.processes().into_iter().flatten().peekable();
    let is_another = recorded.peek().is_some() && status.pid.is_some_and(|pid| recorded.all(|one| one.pid != pid));
    if is_another || status.uid.is_some_and(|uid| uid != record.target.pod.uid) {
        return Err(
            Error::new(code::INSTANCE_UNREACHABLE, "another instance answers in its place").details(RESTART_HELP)
        );
    }
    if status.certificate.is_some_and(|certificate| certificate.not_after <= host.clock.unix_seconds()) {
        return Err(Error::new(code::CERTIFICATE_EXPIRED, "the certificate has expired")
            .details("see why it was not renewed: the instance's log and the CA service"));
    }
    if status.init_overdue {
        return Err(Error::new(code::INIT_OVERDUE, "no init container has shown the pod's token, so the pod is closed")
            .details(
                "see whether the pod has nebula-cni-init as its first init container and how that ended; then recreate the pod",
            ));
    }
    if record.host_route.is_some_and(|route| !host.routes.is_used(&route)) {
        return Err(Error::new(code::HOST_ROUTE, "the node's route to the pod's overlay address is gone")
            .details("the kubelet's probes of this pod fail until the pod is recreated"));
    }
    if let Some(guard) = &record.guard {
        check_guard(guard, host)?;
    }
    if let Some(capture) = &record.capture {
        check_capture(capture, record, netns, host)?;
    }
    let device = &record.target.device;
    let link = host
        .namespaces
        .link(netns, device)
        .map_err(|e| Error::new(code::NETNS, format!("cannot look into the network namespace: {e}")))?
        .ok_or_else(|| Error::new(code::DEVICE, format!("device {device} is gone")))?;
    // Without a certificate there is no address yet, and the device may be down on purpose, to keep the data path
    // closed.
    // With capture the address is on the pod's own interface.
    let addresses = if record.capture.is_some() { &[][..] } else { &status.overlay };
    if status.state == InstanceState::Waiting { Ok(()) } else { check_link(&link, device, addresses) }
}

fn check_capture(capture: &PodCapture, record: &Record, netns: &Netns, host: &Host<'_>) -> Result<(), Error> {
    let bad = |why: String| Error::new(code::CAPTURE, format!("the pod's traffic is not captured any more: {why}"));
    let link = &capture.guard.link;
    if !host.links.is_there(link, capture.guard.index).map_err(bad)? {
        return Err(bad(format!("its link {link} is gone")));
    }
    let missing =
        host.captures.missing(netns, capture).map_err(|e| bad(format!("what is there cannot be read: {e}")))?;
    if !missing.is_empty() {
        return Err(bad(format!("missing: {}", missing.join("; "))).details(CAPTURE_HELP));
    }
    let target = &record.target;
    let link = host.links.of_pod(netns, &target.ifname, target.pod_address).map_err(bad)?;
    match capture.guard.uncovered(&link.addresses).first() {
        None => Ok(()),
        Some(address) => {
            let msg =
                format!("the pod's address {address} is in none of \"capture.ranges\": nothing passes from or to it");
            Err(Error::new(code::CAPTURE, msg).details(COVER_HELP))
        }
    }
}

fn check_guard(guard: &Guard, host: &Host<'_>) -> Result<(), Error> {
    let bad = |why: String| Error::new(code::ISOLATION, format!("the pod is not isolated any more: {why}"));
    if !host.links.is_there(&guard.link, guard.index).map_err(bad)? {
        return Err(bad(format!("its link {} is gone", guard.link)));
    }
    match host.guards.is_in_force(guard) {
        Ok(true) => Ok(()),
        Ok(false) => Err(bad(format!("rules of its link {} are gone", guard.link)).details(GUARD_HELP)),
        Err(e) => Err(bad(format!("rules of its link {} cannot be read: {e}", guard.link))),
    }
}

fn check_link(link: &Link, device: &str, overlay: &[String]) -> Result<(), Error> {
    if !link.up {
        return Err(Error::new(code::DEVICE, format!("device {device} is down")));
    }
    let can_have = |network: &(IpAddr, u8)| network.0.is_ipv4() || !link.is_without_v6;
    let is_missing = |network: &&String| {
        parse_network(network).is_none_or(|network| can_have(&network) && !link.addresses.contains(&network))
    };
    let missing = overlay.iter().find(is_missing);
    match missing {
        Some(network) => Err(Error::new(code::DEVICE, format!("device {device} has lost its address {network}"))),
        None => Ok(()),
    }
}

const NO_RECORD_HELP: &str = "there is no record of it in \"stateDir\"; if that folder was emptied, the node agent attaches the pod \
                              again, or delete the pod";
const GUARD_HELP: &str = "\"nebula-cni-plugin reconcile\" and the next ADD of any pod make them again";
const CAPTURE_HELP: &str = "\"nebula-cni-plugin reconcile\" and the node agent make it again";
const RESTART_HELP: &str = "it is started again within a moment; if this repeats, see its log, or delete the pod";

#[cfg(test)]
mod tests {
    use super::*;

    fn link(up: bool, addresses: &[&str]) -> Link {
        let addresses = addresses.iter().map(|a| parse_network(a).unwrap()).collect();
        Link { up, addresses, is_without_v6: false }
    }

    #[test]
    fn a_device_must_be_up_with_all_its_addresses_and_may_have_more() {
        let overlay = ["10.42.0.7/16".to_owned()];
        assert!(check_link(&link(true, &["10.42.0.7/16", "fe80::1/64"]), "n", &overlay).is_ok());
        assert_eq!(check_link(&link(false, &["10.42.0.7/16"]), "n", &overlay).unwrap_err().code, 111);
        assert_eq!(check_link(&link(true, &["10.42.0.7/24"]), "n", &overlay).unwrap_err().code, 111);
        assert_eq!(check_link(&link(true, &[]), "n", &overlay).unwrap_err().code, 111);
        assert!(check_link(&link(true, &[]), "n", &["garbage".to_owned()]).is_err());
    }

    #[test]
    fn a_pod_without_ipv6_has_only_its_ipv4_address() {
        let overlay = ["10.42.0.7/16".to_owned(), "fd42::7/64".to_owned()];
        let with_v6 = link(true, &["10.42.0.7/16"]);
        assert!(check_link(&with_v6, "n", &overlay).unwrap_err().msg.contains("fd42::7/64"));
        let without = |addresses| Link { is_without_v6: true, ..link(true, addresses) };
        assert!(check_link(&without(&["10.42.0.7/16"]), "n", &overlay).is_ok());
        assert!(check_link(&without(&[]), "n", &overlay).unwrap_err().msg.contains("10.42.0.7/16"));
    }
}
