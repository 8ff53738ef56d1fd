//! A rule of the firewall as the configuration has it.

use nebula_core::firewall::{Cidr, PortRange, Protocol, Rule};

/// In YAML's flow form.
pub(super) fn rule_text(rule: &Rule) -> String {
    let port = match rule.port {
        PortRange::Any => "any".to_owned(),
        PortRange::Fragment => "fragment".to_owned(),
        PortRange::Range(first, last) if first == last => first.to_string(),
        PortRange::Range(first, last) => format!("{first}-{last}"),
    };
    let protocol = match rule.protocol {
        Protocol::Any => "any",
        Protocol::Tcp => "tcp",
        Protocol::Udp => "udp",
        Protocol::Icmp => "icmp",
    };
    let cidr = |cidr: Cidr| match cidr {
        Cidr::Any => "any".to_owned(),
        Cidr::Prefix(prefix) => prefix.to_string(),
    };
    let groups = (!rule.groups.is_empty()).then(|| format!("[{}]", rule.groups.join(", ")));
    let fields = [
        ("port", Some(port)),
        ("proto", Some(protocol.to_owned())),
        ("host", rule.host.clone()),
        ("groups", groups),
        ("cidr", rule.cidr.map(cidr)),
        ("local_cidr", rule.local_cidr.map(cidr)),
        ("ca_name", rule.ca_name.clone()),
        ("ca_sha", rule.ca_sha.map(|sha| sha.to_string())),
    ];
    let fields = fields.into_iter().filter_map(|(name, value)| Some(format!("{name}: {}", value?)));
    format!("{{{}}}", fields.collect::<Vec<_>>().join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_a_rule_says_is_written() {
        let rule = Rule {
            protocol: Protocol::Tcp,
            port: PortRange::Range(80, 443),
            groups: vec!["web".to_owned(), "prod".to_owned()],
            cidr: Some(Cidr::Prefix("10.0.0.0/8".parse().unwrap())),
            ..Rule::default()
        };
        assert_eq!(rule_text(&rule), "{port: 80-443, proto: tcp, groups: [web, prod], cidr: 10.0.0.0/8}");
        assert_eq!(rule_text(&Rule::any()), "{port: any, proto: any, host: any}");
    }
}
