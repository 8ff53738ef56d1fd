//! Suggested policies as text for `kubectl apply`. Whoever makes pods chooses their labels, so every string is quoted,
//! and comments are one line each.

use std::fmt::Write as _;

use k8s_openapi::jiff::Timestamp;
use nebula_cert::visible;
use nebula_cni_contract::seen::Seen;

use super::Suggestion;
use super::suggested::{Count, End, NAME_OF_NAMESPACE, Rule, Selector, Suggested};

impl Suggestion {
    /// As a file for `kubectl apply`.
    #[must_use]
    pub fn text(&self, seen: &Seen) -> String {
        text(seen, self)
    }
}

fn text(seen: &Seen, Suggestion { policies, without }: &Suggestion) -> String {
    let mut out = String::new();
    let mut comment = |text: &str| {
        let _ = writeln!(out, "# {}", visible(text));
    };
    comment(&format!(
        "Suggested from the flows in tunnels that {} pod(s) of {} were seen with.",
        seen.pods, seen.namespace
    ));
    comment("What goes in clear was not seen: pods without a certificate, nodes, the API server, addresses outside.");
    comment("The cluster's DNS is allowed whether it was seen or not.");
    comment(
        "Add the annotation nebula-cni/audit: \"true\" and look at the would_deny counters before you enforce them.",
    );
    if seen.lost > 0 {
        comment(&format!(
            "INCOMPLETE: instances have forgotten {} flow(s), having met more peers than they have room for.",
            seen.lost
        ));
    }
    for pod in &seen.silent {
        comment(&format!("INCOMPLETE: {pod}"));
    }
    if *without > 0 {
        comment(&format!(
            "INCOMPLETE: {without} set(s) of pods have more labels than a selector can name, and get no policy."
        ));
    }
    if policies.is_empty() {
        comment("No flow was seen.");
    }
    for policy in policies {
        write_policy(&mut out, policy);
    }
    out
}

fn write_policy(out: &mut String, policy: &Suggested) {
    let (name, namespace) = (quoted(&policy.name), quoted(&policy.namespace));
    let _ = write!(
        out,
        "---\napiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata:\n  name: {name}\n  namespace: {namespace}\n"
    );
    for text in &policy.left_out {
        let _ = writeln!(out, "# not allowed by this policy: {}", visible(text));
    }
    for namespace in &policy.wider {
        let namespace = visible(namespace);
        let _ = writeln!(
            out,
            "# wider than what was seen: all pods of {namespace}, as their labels may not be seen (get pods.nebula-cni there)"
        );
    }
    out.push_str("spec:\n  podSelector:");
    write_selector(out, &policy.subject, 4);
    out.push_str("  policyTypes: [Ingress, Egress]\n");
    for (key, peers, rules) in [("ingress", "from", &policy.rules[0]), ("egress", "to", &policy.rules[1])] {
        if rules.is_empty() {
            let _ = writeln!(out, "  {key}: []");
            continue;
        }
        let _ = writeln!(out, "  {key}:");
        rules.iter().for_each(|rule| write_rule(out, peers, rule));
    }
}

fn write_rule(out: &mut String, peers: &str, rule: &Rule) {
    let _ = writeln!(out, "    - {peers}:");
    match &rule.end {
        End::Address(address) => {
            let _ = writeln!(out, "        - ipBlock: {{cidr: {}}}", quoted(&ipnet::IpNet::from(*address).to_string()));
        }
        End::Pods { namespace, selector } => {
            out.push_str("        - podSelector:");
            write_selector(out, selector, 12);
            if let Some(namespace) = namespace {
                let namespace = quoted(namespace);
                let _ =
                    writeln!(out, "          namespaceSelector: {{matchLabels: {{{NAME_OF_NAMESPACE}: {namespace}}}}}");
            }
        }
    }
    out.push_str("      ports:\n");
    for ((protocol, port), count) in &rule.ports {
        let _ = writeln!(out, "        - {{protocol: {protocol}, port: {port}}}  # {}", counted(*count));
    }
}

fn write_selector(out: &mut String, selector: &Selector, indent: usize) {
    if selector.labels.is_empty() && selector.absent.is_empty() {
        return out.push_str(" {}\n");
    }
    out.push('\n');
    if !selector.labels.is_empty() {
        let _ = writeln!(out, "{:indent$}matchLabels:", "");
        for (key, value) in &selector.labels {
            let _ = writeln!(out, "{:indent$}  {}: {}", "", quoted(key), quoted(value));
        }
    }
    if !selector.absent.is_empty() {
        let _ = writeln!(out, "{:indent$}matchExpressions:", "");
        for key in &selector.absent {
            let _ = writeln!(out, "{:indent$}  - {{key: {}, operator: DoesNotExist}}", "", quoted(key));
        }
    }
}

fn counted(count: Count) -> String {
    match i64::try_from(count.last).ok().and_then(|last| Timestamp::from_second(last).ok()) {
        Some(last) if count.flows > 0 => format!("{} flow(s), the last one at {last}", count.flows),
        _ if count.flows > 0 => format!("{} flow(s)", count.flows),
        _ => "DNS".to_owned(),
    }
}

/// In double quotes, with everything escaped that is not plain ASCII.
fn quoted(text: &str) -> String {
    let mut quoted = String::with_capacity(text.len() + 2);
    quoted.push('"');
    for c in text.chars() {
        match c {
            '"' | '\\' => quoted.extend(['\\', c]),
            ' '..='~' => quoted.push(c),
            _ => {
                let _ = write!(quoted, "\\U{:08x}", u32::from(c));
            }
        }
    }
    quoted.push('"');
    quoted
}
