//! What the core reports, as the log lines operators of Go Nebula know.

use std::sync::mpsc::Receiver;

use nebula_core::{Event, TunnelDownReason};

use crate::metrics::Handshakes;

/// Logs everything that happens until the driver ends.
pub(crate) fn log(events: &Receiver<Event>, handshakes: &Handshakes) {
    for event in events {
        match &event {
            Event::TunnelUp { initiator: true, took, .. } => handshakes.completed(*took),
            Event::HandshakeTimedOut { .. } => handshakes.timed_out(),
            _ => {}
        }
        log_one(&event);
    }
}

fn log_one(event: &Event) {
    match event {
        Event::TunnelUp { peer, name, endpoint, relay, local_index, initiator, took } => {
            let stage = if *initiator { "map[stage:2 style:ix_psk0]" } else { "map[stage:1 style:ix_psk0]" };
            let index = local_index.0;
            let duration = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
            let from = if relay.is_some() { format!("{endpoint} (relayed)") } else { endpoint.to_string() };
            tracing::info!(vpnAddrs = ?peer, %from, certName = name, localIndex = index, handshake = stage,
                durationNs = duration, "Handshake message received");
        }
        Event::TunnelDown { peer, local_index, reason } => {
            let index = local_index.0;
            match reason {
                TunnelDownReason::ClosedByPeer => {
                    tracing::info!(vpnAddrs = ?peer, localIndex = index, "Close tunnel received, tearing down.");
                }
                TunnelDownReason::Dead => {
                    let check = "map[method:active state:dead]";
                    tracing::info!(vpnAddrs = ?peer, localIndex = index, tunnelCheck = check, "Tunnel status");
                }
                TunnelDownReason::CertificateInvalid => tracing::info!(vpnAddrs = ?peer, localIndex = index,
                    "Remote certificate is no longer valid, tearing down the tunnel"),
                other => tracing::info!(vpnAddrs = ?peer, localIndex = index, reason = ?other, "Tunnel closed"),
            }
        }
        Event::HandshakeTimedOut { peer, after } => {
            let duration = u64::try_from(after.as_nanos()).unwrap_or(u64::MAX);
            tracing::info!(vpnAddrs = ?[peer], durationNs = duration, "Handshake timed out");
        }
        Event::HandshakeRefused { from, reason } => {
            tracing::error!(%from, error = reason, "Failed to process handshake packet");
        }
        Event::Roamed { peer, endpoint } => {
            tracing::info!(vpnAddrs = ?peer, newAddr = %endpoint, "Host roamed to new udp ip/port.");
        }
        other => tracing::debug!(event = ?other, "Event"),
    }
}
