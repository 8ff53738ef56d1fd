//! The answer to `trace`.

use nebula_instance::host::documents::{FirewallVerdict, KernelRoute, Route, Trace};

use super::tunnel::way;
use super::{fields, optional, or_dash};

pub(super) fn trace(answer: &Trace) -> String {
    let mut lines = vec![("direction", or_dash(&answer.direction))];
    if let Some(capture) = &answer.capture {
        let to = capture.becomes.as_ref().map(|ends| format!(": {} -> {}", ends.local, ends.remote));
        lines.push(("capture", capture.found.clone() + &to.unwrap_or_default()));
    }
    if let Some(back) = &answer.back {
        lines.push(("delivered as", format!("{} -> {}", back.remote, back.local)));
    }
    let tunnel = answer.tunnel.as_ref().map(|tunnel| format!("{} at {}", or_dash(&tunnel.name), way(tunnel)));
    let tunnel = tunnel.unwrap_or_else(|| "none".to_owned());
    lines.extend([("route", route(&answer.route)), ("tunnel", tunnel)]);
    lines.extend(answer.firewall.iter().flat_map(firewall));
    lines.extend(answer.kernel_route.iter().filter(|route| !route.to_overlay).map(kernel_route));
    let reason = answer.reason.as_ref().map(|reason| format!(": {reason}")).unwrap_or_default();
    lines.push(("outcome", or_dash(&answer.outcome) + &reason));
    fields(&lines)
}

fn route(route: &Route) -> String {
    match route {
        Route::None { none } => format!("none: {none}"),
        Route::To { peer, unsafe_route: None, .. } => or_dash(peer),
        Route::To { peer, unsafe_route: Some(network), other_gateways } => {
            let others = other_gateways.join(" ");
            let others = if others.is_empty() { others } else { format!(", or {others}") };
            format!("{peer} (unsafe route {network}{others})")
        }
    }
}

fn firewall(firewall: &FirewallVerdict) -> Vec<(&'static str, String)> {
    let conntrack = firewall.conntrack.as_ref().map(|known| {
        let answered = if known.answered { "answered" } else { "not answered" };
        let ended =
            known.ended.as_ref().map(|reason| format!("; no longer allowed ({reason}): dropped until it expires"));
        let ended = ended.unwrap_or_default();
        format!("yes, began {}, {answered}, idle for {} s{ended}", known.began, known.idle_seconds)
    });
    let rule =
        firewall.rule.as_ref().map(|rule| format!("{} #{} {}", rule.list, rule.index, optional(rule.text.as_ref())));
    let nearest = firewall
        .nearest
        .as_ref()
        .map(|near| format!("{} #{} {}; differs in {}", near.list, near.index, near.text, near.differs.join(", ")));
    let mut lines = vec![
        ("addresses", or_dash(&firewall.addresses)),
        ("known flow", conntrack.unwrap_or_else(|| "no".to_owned())),
        ("rule", rule.unwrap_or_else(|| "none".to_owned())),
    ];
    lines.extend(nearest.map(|nearest| ("nearest", nearest)));
    lines.extend(firewall.network_policy.iter().map(|reason| ("network policy", reason.clone())));
    lines
}

fn kernel_route(route: &KernelRoute) -> (&'static str, String) {
    let way = match &route.device {
        Some(device) => format!("by {device}, not into the overlay"),
        None => optional(route.text.as_ref()),
    };
    ("kernel route", way)
}
