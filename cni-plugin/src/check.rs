//! CHECK: is the attachment still what ADD made? A lighthouse or CA that is away for a while is no failure.

use std::io::{self, Read};
use std::net::IpAddr;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use serde::Deserialize;

use crate::add::{open_netns, required_prev_result};
use crate::host::{Host, Link, Netns};
use crate::record::{Files, Found, Record, State};
use crate::reply::{Error, code};
use crate::request::Attach;
use crate::settings::Settings;
use crate::supervisor::Process;

/// Checks record, namespace, instance, device and certificate.
///
/// # Errors
/// The first thing that is wrong.
pub fn run(request: &Attach, host: &Host<'_>) -> Result<(), Error> {
    let settings = Settings::read(&request.config)?;
    required_prev_result(&request.config)?;
    let files = Files::new(&settings.state_dir, &request.key);
    let found = Record::load(&files.record())
        .map_err(|e| Error::new(code::IO, format!("cannot read {}: {e}", files.record().display())))?;
    let record = match found {
        Found::Record(record) if record.key() == request.key && record.state == State::Running => record,
        Found::Nothing if settings.enrolment.decide(&request.args, &request.config)?.is_none() => return Ok(()),
        Found::Record(_) | Found::Nothing => {
            let msg = format!("container {} has no tunnel on this node", request.key.container_id);
            return Err(Error::new(code::UNKNOWN_CONTAINER, msg));
        }
        Found::Garbage(why) => {
            return Err(Error::new(code::IO, format!("the record {} is damaged: {why}", files.record().display())));
        }
    };
    let netns = open_netns(request, host)?;
    check_attachment(&record, &settings.state_dir, &netns, host)
        .map_err(|e| Error { msg: format!("pod {}/{}: {}", record.pod.namespace, record.pod.name, e.msg), ..e })
}

fn check_attachment(record: &Record, state_dir: &Path, netns: &Netns, host: &Host<'_>) -> Result<(), Error> {
    if netns.id != record.netns_id {
        return Err(Error::new(code::NETNS, "the network namespace is not the one the tunnel was made in"));
    }
    let files = Files::new(state_dir, &record.key());
    if !host.supervisor(record.supervisor).is_alive(&files, record.process, host.clock) {
        return Err(Error::new(code::INSTANCE_UNREACHABLE, "the instance does not run any more").details(RESTART));
    }
    let status = ask(&record.status_socket).map_err(|e| {
        Error::new(code::INSTANCE_UNREACHABLE, format!("the instance does not answer: {e}")).details(RESTART)
    })?;
    // A unit's process is systemd's business: it may be another one after a restart.
    let another = |process: Process| status.pid.is_some_and(|pid| pid != process.pid);
    if record.process.is_some_and(another) || status.uid.is_some_and(|uid| uid != record.pod.uid) {
        return Err(Error::new(code::INSTANCE_UNREACHABLE, "another instance answers in its place").details(RESTART));
    }
    if status.certificate.is_some_and(|certificate| certificate.not_after <= host.clock.unix_seconds()) {
        return Err(Error::new(code::CERTIFICATE_EXPIRED, "the certificate has expired")
            .details("see why it was not renewed: the instance's log and the CA service"));
    }
    let device = &record.device;
    let link = host
        .namespaces
        .link(netns, device)
        .map_err(|e| Error::new(code::NETNS, format!("cannot look into the network namespace: {e}")))?
        .ok_or_else(|| Error::new(code::DEVICE, format!("device {device} is gone")))?;
    // Without a certificate there is no address yet, and the device may be down: closed on purpose.
    if status.state == "waiting" { Ok(()) } else { check_link(&link, device, &status.overlay) }
}

fn check_link(link: &Link, device: &str, overlay: &[String]) -> Result<(), Error> {
    if !link.up {
        return Err(Error::new(code::DEVICE, format!("device {device} is down")));
    }
    let missing = overlay.iter().find(|network| parse_network(network).is_none_or(|n| !link.addresses.contains(&n)));
    match missing {
        Some(network) => Err(Error::new(code::DEVICE, format!("device {device} has lost its address {network}"))),
        None => Ok(()),
    }
}

fn parse_network(text: &str) -> Option<(IpAddr, u8)> {
    let (address, prefix) = text.split_once('/')?;
    Some((address.parse().ok()?, prefix.parse().ok()?))
}

/// The part of the instance's status document that CHECK needs.
#[derive(Debug, Deserialize)]
struct Status {
    pid: Option<i32>,
    uid: Option<String>,
    #[serde(default)]
    state: String,
    #[serde(default)]
    overlay: Vec<String>,
    certificate: Option<Certificate>,
}

#[derive(Debug, Deserialize)]
struct Certificate {
    not_after: i64,
}

fn ask(socket: &Path) -> io::Result<Status> {
    let stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(ANSWER_WITHIN))?;
    let mut bytes = Vec::new();
    stream.take(MAX_STATUS).read_to_end(&mut bytes)?;
    serde_json::from_slice(&bytes).map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))
}

const ANSWER_WITHIN: Duration = Duration::from_secs(2);
const MAX_STATUS: u64 = 4 << 20;
const RESTART: &str = "it is started again within a moment; if this repeats, see its log, or delete the pod";

#[cfg(test)]
mod tests {
    use super::*;

    fn link(up: bool, addresses: &[&str]) -> Link {
        Link { up, addresses: addresses.iter().map(|a| parse_network(a).unwrap()).collect() }
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
    fn the_agreed_status_document_is_understood() {
        let status: Status = serde_json::from_str(
            r#"{"pod":"a/b","uid":"u","device":"nebula0","overlay":["10.42.0.7/16"],"groups":[],
                "certificate":{"name":"n","fingerprint":"f","not_before":1,"not_after":2},"state":"running",
                "port":4242,"tunnels":[],"counters":{},"pid":123}"#,
        )
        .unwrap();
        assert_eq!((status.pid, status.certificate.unwrap().not_after), (Some(123), 2));
        let waiting: Status = serde_json::from_str(r#"{"state":"waiting","certificate":null}"#).unwrap();
        assert!(waiting.certificate.is_none());
    }
}
