//! What an isolated pod may reach and be reached from: the overlay, the node's probes, DNS and listed ranges, nothing
//! else. The rules belong to the pod's network namespace: they outlive this process and end with the namespace. They
//! give the pod's own programs an early answer; a raw socket bypasses them, so the node's end of the pod's link has
//! rules of its own (the plugin's `link::guard`).

use std::net::IpAddr;

use ipnet::IpNet;
use nebula_cni_contract::launch::{Isolate, LaunchSpec, Underlay, ca_address};
use nebula_cni_contract::netlink::nftables::{Family, Hook, Match, Rule, Table};
use nebula_linux::errno;
use nebula_linux::netns::Namespace;
use nix::libc;

use crate::pod::error::Error;

/// Isolates the pod in `namespace` if its launch spec asks for it. `port` is the UDP port of the tunnel.
pub(crate) fn isolate(spec: &LaunchSpec, namespace: &Namespace, port: u16) -> Result<(), Error> {
    let Some(isolate) = &spec.isolate else { return Ok(()) };
    let own = match spec.underlay {
        Underlay::Host => None,
        Underlay::Pod => Some(OwnTraffic { port, ca: ca_address(&spec.ca.url) }),
    };
    let what = "cannot isolate the pod";
    let table = table(isolate, &spec.target.device, own.as_ref());
    let installed = namespace.run("isolation", || table.install()).map_err(|error| Error::set_up(what, error))?;
    installed.map_err(|error| Error::set_up(what, format!("nf_tables: {}", errno::text(&error))))
}

/// What the instance itself sends through the pod's namespace.
struct OwnTraffic {
    port: u16,
    /// Address and port of the CA service; `None` if its URL has a host name, whose address then must be in a listed
    /// range.
    ca: Option<(IpAddr, u16)>,
}

fn table(isolate: &Isolate, device: &str, own: Option<&OwnTraffic>) -> Table {
    let ours = |by: fn(String) -> Match| vec![vec![by("lo".to_owned())], vec![by(device.to_owned())]];
    let common = || [vec![Match::Known], vec![Match::Discovery]];

    let mut outgoing = ours(Match::By);
    outgoing.extend(common());
    outgoing.extend(isolate.ranges.iter().map(|range| vec![Match::Destination(*range)]));
    for protocol in [UDP, TCP] {
        let question = [Match::Protocol(protocol), Match::DestinationPort(DNS_PORT)];
        if isolate.dns.is_empty() {
            outgoing.push(question.to_vec());
        }
        for server in &isolate.dns {
            outgoing.push([&[Match::Destination(IpNet::from(*server))][..], &question].concat());
        }
    }
    // Forwarded traffic, such as that of containers inside the pod, reaches no more than the pod's own.
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
    let rules = |accepted: Vec<Vec<Match>>| accepted.into_iter().map(Rule::accept).collect();
    Table::new(Family::Inet, TABLE_NAME)
        .chain(Hook::Input, rules(incoming))
        .chain(Hook::Forward, rules(passing))
        .chain(Hook::Output, rules(outgoing))
}

const TABLE_NAME: &str = "nebula-cni";
const DNS_PORT: u16 = 53;
const UDP: u8 = libc::IPPROTO_UDP as u8;
const TCP: u8 = libc::IPPROTO_TCP as u8;
