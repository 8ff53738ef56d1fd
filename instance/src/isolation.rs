//! What an isolated pod may reach and be reached from: the overlay, the node's probes, DNS and listed ranges, nothing else.
//! The rules belong to the pod's network namespace: they outlive this process, and end with the namespace.

use std::net::IpAddr;

use ipnet::IpNet;
use nebula_cni_plugin::launch::{Isolate, LaunchSpec, Underlay};
use nix::libc;

use crate::daemon::chain;
use crate::errno;
use crate::netns::Namespace;
use crate::nftables::{Hook, Match, Table};
use crate::pod_tunnel::Error;

/// Isolates the pod in `namespace`, if that is wanted. `port` is that of the tunnel's socket.
pub(crate) fn isolate(spec: &LaunchSpec, namespace: &Namespace, port: u16) -> Result<(), Error> {
    let Some(isolate) = &spec.isolate else { return Ok(()) };
    let own = match spec.underlay {
        Underlay::Host => None,
        Underlay::Pod => Some(OwnTraffic { port, ca: ca_address(&spec.ca.url) }),
    };
    let refused = |cause: String| Error::SetUp { what: "cannot isolate the pod".to_owned(), cause };
    let table = table(isolate, &spec.device, own.as_ref());
    let installed = namespace.run("isolation", || table.install()).map_err(|error| refused(chain(&error)))?;
    installed.map_err(|error| refused(format!("nf_tables: {}", errno::text(&error))))
}

/// What the instance itself sends through the pod's namespace.
struct OwnTraffic {
    port: u16,
    /// A CA service that has a name is one of the listed ranges, or not reached.
    ca: Option<(IpAddr, u16)>,
}

fn table(isolate: &Isolate, device: &str, own: Option<&OwnTraffic>) -> Table {
    let ours = |by: fn(String) -> Match| vec![vec![by("lo".to_owned())], vec![by(device.to_owned())]];
    let common = || [vec![Match::Known], vec![Match::Discovery]];

    let mut outgoing = ours(Match::By);
    outgoing.extend(common());
    outgoing.extend(isolate.ranges.iter().map(|range| vec![Match::Destination(*range)]));
    for protocol in [UDP, TCP] {
        let question = [Match::Protocol(protocol), Match::DestinationPort(DNS)];
        if isolate.dns.is_empty() {
            outgoing.push(question.to_vec());
        }
        for server in &isolate.dns {
            outgoing.push([&[Match::Destination(IpNet::from(*server))][..], &question].concat());
        }
    }
    // What passes through, as from containers inside the pod, gets no further than what the pod sends itself.
    let passing = outgoing.clone();

    let mut incoming = ours(Match::From);
    incoming.extend(common());
    incoming.extend(isolate.ranges.iter().map(|range| vec![Match::Source(*range)]));
    incoming.extend(isolate.probes.iter().map(|node| vec![Match::Source(IpNet::from(*node))]));

    if let Some(own) = own {
        outgoing.push(vec![Match::Protocol(UDP), Match::SourcePort(own.port)]);
        incoming.push(vec![Match::Protocol(UDP), Match::DestinationPort(own.port)]);
        if let Some((address, port)) = own.ca {
            let to_ca = Match::Destination(IpNet::from(address));
            outgoing.push(vec![to_ca, Match::Protocol(TCP), Match::DestinationPort(port)]);
        }
    }
    Table::new(TABLE).chain(Hook::Input, incoming).chain(Hook::Forward, passing).chain(Hook::Output, outgoing)
}

/// Of `https://ADDRESS:PORT`; `None` if it has a name.
fn ca_address(url: &str) -> Option<(IpAddr, u16)> {
    let authority = url.strip_prefix("https://")?.split('/').next()?;
    if let Ok(address) = authority.parse::<std::net::SocketAddr>() {
        return Some((address.ip(), address.port()));
    }
    let address = authority.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(authority);
    Some((address.parse().ok()?, 443))
}

const TABLE: &str = "nebula-cni";
const DNS: u16 = 53;
const UDP: u8 = libc::IPPROTO_UDP as u8;
const TCP: u8 = libc::IPPROTO_TCP as u8;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_address_of_the_ca_is_read_from_its_url_unless_it_is_a_name() {
        for (url, expected) in [
            ("https://192.0.2.1:8443", Some(("192.0.2.1", 8443))),
            ("https://[fd00::1]:8443/", Some(("fd00::1", 8443))),
            ("https://[fd00::1]", Some(("fd00::1", 443))),
            ("https://192.0.2.1/x", Some(("192.0.2.1", 443))),
            ("https://ca.example:8443", None),
        ] {
            assert_eq!(ca_address(url), expected.map(|(address, port)| (address.parse().unwrap(), port)), "{url}");
        }
    }
}
