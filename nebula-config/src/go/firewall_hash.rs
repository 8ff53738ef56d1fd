//! The hashes by which Go Nebula identifies sets of rules (`firewallHashes`, `firewall.rules.hash`).

use std::fmt::Write as _;

use aws_lc_rs::digest::{SHA256, digest};
use nebula_core::firewall::{Cidr, Policy, PortRange, Protocol, Rule};

/// A rule's protocol, first and last port as Go Nebula prints them.
pub fn numbers(rule: &Rule) -> (u8, i32, i32) {
    let (first, last) = match rule.port {
        PortRange::Any => (0, 0),
        PortRange::Fragment => (-1, -1),
        PortRange::Range(first, last) => (i32::from(first), i32::from(last)),
    };
    let protocol = match rule.protocol {
        Protocol::Any => 0,
        Protocol::Icmp => 1,
        Protocol::Tcp => 6,
        Protocol::Udp => 17,
    };
    (protocol, first, last)
}

/// The text that Go Nebula prints for it; empty for `None`.
pub fn cidr(cidr: Option<Cidr>) -> String {
    match cidr {
        None => String::new(),
        Some(Cidr::Any) => "any".to_owned(),
        Some(Cidr::Prefix(prefix)) => prefix.to_string(),
    }
}

/// 32-bit FNV-1a hash of the rules.
pub fn fnv(policy: &Policy) -> u32 {
    canonical(policy).bytes().fold(0x811c_9dc5, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193))
}

/// Both hashes, as `SHA:<hex>,FNV:<decimal>`.
pub fn both(policy: &Policy) -> String {
    let sha = digest(&SHA256, canonical(policy).as_bytes());
    format!("SHA:{},FNV:{}", nebula_cert::hex::encode(sha.as_ref()), fnv(policy))
}

/// The text that Go Nebula hashes: one line per rule, outbound rules first.
fn canonical(policy: &Policy) -> String {
    let mut text = String::new();
    for (incoming, rules) in [(false, &policy.outbound), (true, &policy.inbound)] {
        for rule in rules {
            let (protocol, first, last) = numbers(rule);
            let _ = writeln!(
                text,
                "incoming: {incoming}, proto: {protocol}, startPort: {first}, endPort: {last}, groups: [{}], host: {}, \
                 ip: {}, localIp: {}, caName: {}, caSha: {}",
                rule.groups.join(" "),
                rule.host.as_deref().unwrap_or_default(),
                cidr(rule.cidr),
                cidr(rule.local_cidr),
                rule.ca_name.as_deref().unwrap_or_default(),
                rule.ca_sha.map(|sha| sha.to_string()).unwrap_or_default(),
            );
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use crate::{Settings, parse};

    #[test]
    fn hashes_are_those_go_1_11_logs_for_the_same_rules() {
        let tree = parse(
            "firewall:
  outbound: [{port: any, proto: any, host: any}]
  inbound:
  - {port: 80-90, proto: tcp, groups: [a, b], cidr: 10.42.0.0/16, local_cidr: 10.42.0.7/32, ca_name: ca}
  - {proto: icmp, host: any, port: any}
  - {port: fragment, proto: udp, group: any, ca_sha: c99d4e650533b92061b09918e838a5a0a6aaee21eed1d12fd937682865936c72}",
        )
        .unwrap();
        let policy = Settings::read_without_pki(&tree).unwrap().firewall;
        let logged = "SHA:5a65e833444cb069758751a32ec08d1d18ec0ab559ad42f22ef6ee45c8df012f,FNV:2876882212";
        assert_eq!(super::both(&policy), logged);
    }
}
