//! The answers about peers, their tunnels and where they are.

use nebula_instance::host::documents::{Gateways, Known, Path, Peers, Tunnel, TunnelOfPeer, Tunnels};

use super::{bytes, expiry, fields, list, milliseconds, optional, or_dash, percent, span, table};

pub(super) fn peers(answer: &Peers) -> String {
    let rows = answer.peers.iter().map(|peer| {
        [
            or_dash(&peer.name),
            list(&peer.addresses),
            way(peer),
            optional(peer.mtu),
            peer.messages_sent.to_string(),
            peer.messages_received.to_string(),
            bytes(peer.bytes_sent),
            bytes(peer.bytes_received),
            format!("v{}", peer.certificate_version),
            if peer.post_quantum { "yes" } else { "no" }.to_owned(),
        ]
    });
    let head =
        ["NAME", "ADDRESSES", "ENDPOINT", "MTU", "SENT", "RECEIVED", "BYTES OUT", "BYTES IN", "CERT", "POST-QUANTUM"];
    let mut text = table(head, rows);
    if answer.more > 0 {
        text += &format!("and {} more\n", answer.more);
    }
    if !answer.handshaking.is_empty() {
        text += &format!("handshaking with {}\n", list(&answer.handshaking));
    }
    text
}

pub(super) fn gateways(answer: &Gateways) -> String {
    let rows = answer.gateways.iter().map(|gateway| {
        [
            or_dash(&gateway.network),
            or_dash(&gateway.gateway),
            gateway.priority.to_string(),
            gateway.weight.to_string(),
            or_dash(&gateway.state),
            optional(gateway.state_seconds.map(|seconds| span(seconds.try_into().unwrap_or(i64::MAX)))),
            optional(gateway.flows),
        ]
    });
    let text = table(["NETWORK", "GATEWAY", "PRIORITY", "WEIGHT", "STATE", "FOR", "FLOWS"], rows);
    text + &match answer.moved_flows {
        0 => String::new(),
        moved => format!("{moved} flow(s) stay where they moved while their own gateway was dead\n"),
    }
}

pub(super) fn way(tunnel: &Tunnel) -> String {
    place(tunnel.endpoint.as_ref(), tunnel.relay.as_ref())
}

fn place(endpoint: Option<&String>, relay: Option<&String>) -> String {
    match (endpoint, relay) {
        (None, Some(relay)) => format!("relay {relay}"),
        (endpoint, _) => optional(endpoint),
    }
}

pub(super) fn tunnels(answer: &Tunnels) -> String {
    let mut text = String::new();
    for with in &answer.tunnels {
        text += &tunnel(with);
        text.push('\n');
        if !with.tunnel.paths.is_empty() {
            text += &paths(&with.tunnel.paths);
            text.push('\n');
        }
    }
    text + &known(&answer.known)
}

fn tunnel(TunnelOfPeer { tunnel, certificate }: &TunnelOfPeer) -> String {
    let role = if tunnel.initiator { "initiator" } else { "responder" };
    let handshake = match tunnel.handshake_ms {
        Some(took) => format!("{role}, took {took:.1} ms"),
        None => role.to_owned(),
    };
    let post_quantum = match tunnel.post_quantum {
        true => "yes: keys by ML-KEM-768, too",
        false => "no: the peer does not offer it, or pki.post_quantum is off here",
    };
    let details = certificate.as_ref().map(|certificate| &certificate.details);
    let of_certificate = |items: Option<&Vec<String>>| list(items.map(Vec::as_slice).unwrap_or_default());
    fields(&[
        ("name", or_dash(&tunnel.name)),
        ("addresses", list(&tunnel.addresses)),
        ("endpoint", way(tunnel)),
        ("MTU", optional(tunnel.mtu)),
        ("state", if tunnel.primary { "in use" } else { "spare" }.to_owned()),
        ("indexes", format!("{} here, {} there", tunnel.local_index, tunnel.remote_index)),
        ("messages", format!("{} sent, {} received", tunnel.messages_sent, tunnel.messages_received)),
        ("handshake", handshake),
        ("post-quantum", post_quantum.to_owned()),
        ("groups", of_certificate(details.and_then(|details| details.groups.as_ref()))),
        ("behind it", of_certificate(details.and_then(|details| details.unsafe_networks.as_ref()))),
        ("certificate", optional(certificate.as_ref().map(|certificate| expiry(certificate.seconds_left)))),
        ("fingerprint", optional(certificate.as_ref().map(|certificate| &certificate.fingerprint))),
    ])
}

/// The paths of a tunnel, and why each is used or not.
pub(super) fn paths(paths: &[Path]) -> String {
    let rows = paths.iter().map(|path| {
        let reason = optional(path.reason.as_ref());
        let reason = if path.in_use { format!("in use: {reason}") } else { reason };
        let at = match &path.relay {
            Some(_) => place(None, path.relay.as_ref()),
            None => optional(path.endpoint.as_ref()),
        };
        [at, milliseconds(path.round_trip_ms), percent(path.loss_percent), reason]
    });
    table(["PATH", "ROUND TRIP", "LOSS", "REASON"], rows)
}

pub(super) fn known(answer: &Known) -> String {
    let mut text = fields(&[
        ("peer", or_dash(&answer.peer)),
        ("endpoints", list(&answer.endpoints)),
        ("relays", list(&answer.relays)),
        ("handshaking", if answer.handshaking { "yes" } else { "no" }.to_owned()),
    ]);
    let rows = answer.lighthouses.iter().map(|lighthouse| {
        let said = if lighthouse.answered {
            list(lighthouse.endpoints.as_deref().unwrap_or_default())
        } else if lighthouse.alive {
            "alive, and does not know it".to_owned()
        } else if lighthouse.connected {
            "no answer".to_owned()
        } else {
            "no tunnel with it".to_owned()
        };
        [or_dash(&lighthouse.lighthouse), said, list(lighthouse.relays.as_deref().unwrap_or_default())]
    });
    if !answer.lighthouses.is_empty() {
        text += &table(["LIGHTHOUSE", "ENDPOINTS", "RELAYS"], rows);
    }
    if let Some(reported) = &answer.reported {
        text += &table(["REPORTED HERE", "RELAYS"], [[list(&reported.endpoints), list(&reported.relays)]]);
    }
    text
}
