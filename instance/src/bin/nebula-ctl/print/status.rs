//! The answer to `status`.

use nebula_enrolment::renewal_health::RenewalState;
use nebula_instance::host::documents::{OfferedRelay, Status};

use super::{expiry, fields, list, milliseconds, optional, or_dash, percent, span, table};

pub(super) fn status(answer: &Status) -> String {
    let lighthouses = answer.lighthouses.iter().map(|lighthouse| {
        let state = if lighthouse.connected { "connected" } else { "not connected" };
        format!("{} ({state})", lighthouse.address)
    });
    let roles = [(answer.am_lighthouse, "lighthouse"), (answer.am_relay, "relay")];
    let roles = roles.into_iter().filter(|(has, _)| *has).map(|(_, role)| role);
    let missing = answer.unmet.missing_listeners.iter().map(|it| format!("{} ({})", it.section, it.error));
    let text = fields(&[
        ("name", optional(answer.name.as_ref())),
        ("overlay", list(&answer.networks)),
        ("groups", list(answer.groups.as_deref().unwrap_or_default())),
        ("device", or_dash(&answer.device)),
        ("underlay", or_dash(&answer.udp)),
        ("roles", or_dash(&roles.collect::<Vec<_>>().join(", "))),
        ("lighthouses", or_dash(&lighthouses.collect::<Vec<_>>().join(", "))),
        ("peers", format!("{} ({} handshaking)", answer.peers, answer.handshaking)),
        ("tunnels", answer.tunnels.to_string()),
        ("flows", flows(answer)),
        ("certificate", optional(answer.certificate_seconds_left.map(expiry))),
        ("renewal", optional(answer.unmet.enrolment.as_ref().map(renewal))),
        ("configuration", or_dash(&answer.config)),
        ("last reload", last_reload(answer)),
        ("at next start", list(&answer.unmet.at_next_start)),
        ("not listening", or_dash(&missing.collect::<Vec<_>>().join(", "))),
        ("log level", or_dash(&answer.log_level)),
        ("version", format!("{} (pid {})", answer.version, answer.pid)),
        ("uptime", span(answer.uptime_seconds)),
    ]);
    if answer.relays.is_empty() { text } else { text + "\n" + &relays(&answer.relays) }
}

fn last_reload(answer: &Status) -> String {
    match &answer.last_reload {
        None => "none since the start".to_owned(),
        Some(last) => match &last.error {
            None => "in force".to_owned(),
            // Of several findings, each is a line.
            Some(error) => format!("REFUSED: {}", error.replace("\\n", "; ")),
        },
    }
}

fn flows(answer: &Status) -> String {
    let flows = answer.flows;
    if answer.unmet.full_flow_table.is_some() {
        format!("{flows} (FULL: new ones are refused)")
    } else {
        flows.to_string()
    }
}

fn renewal(renewal: &RenewalState) -> String {
    match renewal.failing_seconds {
        None => "by itself".to_owned(),
        Some(seconds) => {
            let span = span(seconds.try_into().unwrap_or(i64::MAX));
            format!("FAILS for {span}: {}", optional(renewal.error.as_ref()))
        }
    }
}

/// The relays that lighthouses offered, and why each is chosen or not.
pub(super) fn relays(relays: &[OfferedRelay]) -> String {
    let rows = relays.iter().map(|relay| {
        let why = match &relay.trouble_text {
            _ if relay.chosen => format!("chosen: {}", optional(relay.reason.as_ref())),
            _ if relay.tried => "being tried".to_owned(),
            Some(trouble) => format!("not chosen: {trouble}"),
            None if relay.round_trip_ms.is_none() => "not tried yet".to_owned(),
            None => "not chosen: no better than those that are".to_owned(),
        };
        [or_dash(&relay.relay), milliseconds(relay.round_trip_ms), percent(relay.loss_percent), why]
    });
    table(["RELAY", "ROUND TRIP", "LOSS", ""], rows)
}
