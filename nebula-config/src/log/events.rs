//! Logs the core's events in the words that operators of Go Nebula know.

use std::net::{IpAddr, SocketAddr};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Duration;

use nebula_core::{Event, TunnelDownReason};
use serde_json::json;
use tracing::Level;

use crate::log::{self, cause, denied, list};

/// Logs the events of a node that runs without a [`Driver`](nebula_core::io::Driver), until their sender is dropped.
pub fn log_until_closed(events: Receiver<Event>) {
    log(Some(events), |_| {});
}

/// Logs events until the driver ends, and lets `note` count each. Others can cause all of them, so the lines are rate
/// limited.
pub fn log(events: Option<Receiver<Event>>, note: impl Fn(&Event)) {
    let Some(events) = events else { return };
    loop {
        let received = match log::summarize() {
            Some(due) => events.recv_timeout(due),
            None => events.recv().map_err(RecvTimeoutError::from),
        };
        let event = match received {
            Ok(event) => event,
            Err(RecvTimeoutError::Timeout) => continue,
            Err(RecvTimeoutError::Disconnected) => return,
        };
        note(&event);
        if admits(&event) {
            log_one(&event);
        }
    }
}

/// Rate limits by the line's text, the peer and the underlay address, because many peers may be behind one address.
fn admits(event: &Event) -> bool {
    let of = |peer: &[IpAddr], endpoint: Option<SocketAddr>| {
        let endpoint = endpoint.map(|endpoint| format!(" at {}", log::network_of(endpoint.ip())));
        let peer = peer.first().map(ToString::to_string).unwrap_or_default();
        format!("{peer}{}", endpoint.unwrap_or_default())
    };
    let (kind, source) = match event {
        Event::TunnelUp { peer, endpoint, .. } => ("Handshake message received", of(peer, Some(*endpoint))),
        Event::TunnelDown { peer, endpoint, .. } => ("Tunnel closed", of(peer, *endpoint)),
        Event::HandshakeSent { peer, is_repeat: false, .. } => ("Handshake message sent", of(&[*peer], None)),
        Event::HandshakeTimedOut { peer, .. } => ("Handshake timed out", of(&[*peer], None)),
        Event::Roamed { peer, .. } => ("Host roamed to new udp ip/port.", of(peer, None)),
        Event::AddressConflict { address, .. } | Event::AddressElsewhere { address, .. } => {
            return log::admits(Level::WARN, "Two hosts have one overlay address", &of(&[*address], None));
        }
        Event::Gateway { address, before, state, .. } if before.takes_flows() != state.takes_flows() => {
            ("Gateway of unsafe routes", of(&[*address], None))
        }
        Event::FlowDenied(denied) => {
            return log::admits(Level::DEBUG, denied::line(denied), &of(&[denied.flow.remote], None));
        }
        Event::HandshakeRefused { from, .. } => {
            let source = log::network_of(from.ip()).to_string();
            return log::admits(Level::ERROR, "Failed to process handshake packet", &source);
        }
        Event::HandshakeSent { peer, .. } => {
            return log::admits(Level::DEBUG, "Handshake message sent", &of(&[*peer], None));
        }
        Event::HandshakeIgnored { from, .. } => {
            let source = log::network_of(from.ip()).to_string();
            return log::admits(Level::DEBUG, "Handshake message ignored", &source);
        }
        _ => return log::admits(Level::DEBUG, "Event", ""),
    };
    log::admits(Level::INFO, kind, &source)
}

fn log_one(event: &Event) {
    match event {
        Event::TunnelUp { peer, name, endpoint, relay, local_index, remote_index, certificate, initiator, took } => {
            let (vpn, from, stage) = (list(peer), origin(*endpoint, relay.is_some()), stage(2));
            let (version, duration) = (certificate.version.number(), nanos(*took));
            let (fingerprint, issuer) = (certificate.fingerprint, certificate.issuer);
            if *initiator {
                tracing::info!(vpnAddrs = ?vpn, ?from, certName = name, certVersion = version, %fingerprint, %issuer,
                    initiatorIndex = local_index.0, responderIndex = remote_index.0, handshake = ?stage,
                    durationNs = duration, "Handshake message received");
            } else {
                let (initiator, responder) = (remote_index.0, local_index.0);
                tracing::info!(vpnAddrs = ?vpn, ?from, certName = name, certVersion = version, %fingerprint, %issuer,
                    initiatorIndex = initiator, responderIndex = responder, handshake = ?stage,
                    "Handshake message received");
                tracing::info!(vpnAddrs = ?vpn, handshake = ?stage, cached = false, initiatorIndex = initiator,
                    responderIndex = responder, certName = name, certVersion = version, %fingerprint, %issuer, ?from,
                    "Handshake message sent");
            }
        }
        Event::TunnelDown { peer, name, endpoint, local_index, remote_index, reason } => {
            let (vpn, local, remote) = (list(peer), local_index.0, remote_index.0);
            match reason {
                TunnelDownReason::ClosedByPeer => {
                    let from = endpoint.map_or_else(|| log::structured(json!({})), |at| origin(at, false));
                    tracing::info!(vpnAddrs = ?vpn, localIndex = local, remoteIndex = remote, certName = name, ?from,
                        "Close tunnel received, tearing down.");
                }
                TunnelDownReason::Dead => {
                    let check = log::structured(json!({"method": "active", "state": "dead"}));
                    tracing::info!(vpnAddrs = ?vpn, localIndex = local, remoteIndex = remote, certName = name,
                        tunnelCheck = ?check, "Tunnel status");
                }
                TunnelDownReason::CertificateInvalid => tracing::info!(vpnAddrs = ?vpn, localIndex = local,
                    remoteIndex = remote, certName = name,
                    "Remote certificate is no longer valid, tearing down the tunnel"),
                other => tracing::info!(vpnAddrs = ?vpn, localIndex = local, remoteIndex = remote, certName = name,
                    reason = other.name(), "Tunnel closed"),
            }
        }
        Event::HandshakeSent { peer, local_index, endpoints, attempt, is_repeat } => {
            let (vpn, sent, index) = (list(&[*peer]), list(endpoints), local_index.0);
            if *is_repeat {
                tracing::debug!(vpnAddrs = ?vpn, localIndex = index, udpAddrs = ?sent, attempt, handshake = ?stage(1),
                    "Handshake message sent");
            } else {
                tracing::info!(vpnAddrs = ?vpn, localIndex = index, remoteIndex = 0, udpAddrs = ?sent,
                    initiatorIndex = index, handshake = ?stage(1), "Handshake message sent");
            }
        }
        Event::HandshakeTimedOut { peer, local_index, endpoints, after, attempt } => {
            let (vpn, tried, index) = (list(&[*peer]), list(endpoints), local_index.0);
            tracing::info!(vpnAddrs = ?vpn, localIndex = index, remoteIndex = 0, udpAddrs = ?tried,
                initiatorIndex = index, durationNs = nanos(*after), handshake = ?stage(1), cause = cause::of(attempt),
                "Handshake timed out");
        }
        Event::HandshakeIgnored { from, peer, reason } => {
            tracing::debug!(vpnAddrs = ?list(&[*peer]), %from, error = reason, handshake = ?stage(2),
                "Handshake message ignored");
        }
        Event::HandshakeRefused { from, reason } => {
            tracing::error!(%from, error = reason, "Failed to process handshake packet");
        }
        Event::AddressConflict { address, names: [first, other], at, is_own } => {
            tracing::warn!(vpnAddrs = ?list(&[*address]), certName = first, otherName = other, otherAddr = %at, own = is_own,
                "Two hosts have one overlay address, or one was given another name");
        }
        Event::AddressElsewhere { address, lighthouse, at } => {
            tracing::warn!(vpnAddrs = ?list(&[*address]), certName = lighthouse, otherAddr = at.map(tracing::field::display),
                "Two hosts have one overlay address: the lighthouse knows another host with an address of this one");
        }
        Event::Roamed { peer, endpoint } => {
            tracing::info!(vpnAddrs = ?list(peer), newAddr = %endpoint, "Host roamed to new udp ip/port.");
        }
        Event::Gateway { address, before, state, after } if before.takes_flows() != state.takes_flows() => {
            let vpn = list(&[*address]);
            if state.takes_flows() {
                tracing::info!(vpnAddrs = ?vpn, "A gateway of unsafe routes answers reliably and takes new flows again");
            } else {
                tracing::warn!(vpnAddrs = ?vpn, before = before.name(), durationNs = nanos(*after),
                    "A gateway of unsafe routes does not answer; its flows take other gateways");
            }
        }
        Event::EndpointsRefused { by, host, example, refused } => {
            tracing::debug!(certName = by, vpnAddrs = ?list(host), udpAddr = %example, refused, "Refused endpoints");
        }
        Event::Gateway { address, before, state, after } => {
            tracing::debug!(vpnAddrs = ?list(&[*address]), before = before.name(), state = state.name(),
                durationNs = nanos(*after), "A gateway of unsafe routes has another state");
        }
        Event::FlowDenied(denied) => denied::log_one(denied),
        // Each event of today has a line above.
        other => tracing::debug!(event = ?other, "Event"),
    }
}

fn stage(stage: u8) -> log::Structured {
    log::structured(json!({"stage": stage, "style": "ix_psk0"}))
}

fn origin(from: SocketAddr, relayed: bool) -> log::Structured {
    if relayed { log::origin("relay", &format!("{from} (relayed)")) } else { log::origin("direct", &from.to_string()) }
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use std::fmt::Write;
    use std::sync::{Arc, Mutex};

    use nebula_core::{LocalIndex, RemoteIndex};
    use tracing::field::{Field, Visit};
    use tracing::span::{Attributes, Id, Record};
    use tracing::{Metadata, Subscriber};

    use super::*;

    /// Keeps the lines, with the fields as they are given.
    #[derive(Clone, Default)]
    struct Kept(Arc<Mutex<Vec<String>>>);

    struct Fields(String);

    impl Visit for Fields {
        fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
            write!(self.0, "{field}={value:?} ").unwrap();
        }
    }

    impl Subscriber for Kept {
        fn enabled(&self, _: &Metadata<'_>) -> bool {
            true
        }

        fn event(&self, event: &tracing::Event<'_>) {
            let mut fields = Fields(String::new());
            event.record(&mut fields);
            self.0.lock().unwrap().push(fields.0);
        }

        fn new_span(&self, _: &Attributes<'_>) -> Id {
            Id::from_u64(1)
        }
        fn record(&self, _: &Id, _: &Record<'_>) {}
        fn record_follows_from(&self, _: &Id, _: &Id) {}
        fn enter(&self, _: &Id) {}
        fn exit(&self, _: &Id) {}
    }

    #[test]
    fn the_reason_why_a_tunnel_was_closed_is_said_in_words() {
        let kept = Kept::default();
        let reasons = [
            TunnelDownReason::ClosedHere,
            TunnelDownReason::RecvError,
            TunnelDownReason::CounterExhausted,
            TunnelDownReason::Superseded,
            TunnelDownReason::Inactive,
            TunnelDownReason::PeerReplaced,
            TunnelDownReason::NotPostQuantum,
        ];
        let log_all = || {
            for reason in reasons {
                log_one(&Event::TunnelDown {
                    peer: vec![[10, 42, 0, 9].into()],
                    name: "db".to_owned(),
                    endpoint: None,
                    local_index: LocalIndex(1),
                    remote_index: RemoteIndex(2),
                    reason,
                });
            }
        };
        // While there is one subscriber alone, `tracing` asks only the thread that comes to a line first, and keeps
        // the answer: that of another test. So the line is known before, and there are two.
        log_all();
        let _second = tracing::Dispatch::new(kept.clone());
        tracing::subscriber::with_default(kept.clone(), log_all);
        let lines = kept.0.lock().unwrap().clone();
        assert_eq!(lines.len(), reasons.len(), "{lines:?}");
        for (line, reason) in lines.iter().zip(reasons) {
            assert!(line.contains("Tunnel closed") && !line.contains(&format!("{reason:?}")), "{line}");
            assert!(line.contains(reason.name()), "{line}");
        }
    }
}
