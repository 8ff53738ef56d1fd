//! The rules under test. `BEHIND` stands for the network behind the node, `OWN` for its address, `FIRST` for the
//! fingerprint of the CA that signed the first peer.

/// A set of rules, used for both inbound and outbound.
pub(crate) struct Rule {
    pub(crate) text: &'static str,
    /// The first release that supports it.
    since: Since,
}

#[derive(PartialEq, PartialOrd)]
enum Since {
    V1_6,
    V1_9,
    V1_11,
}

use Since::{V1_6, V1_9, V1_11};

impl Rule {
    /// Whether the release in a Debian suite supports it.
    pub(crate) fn known_to(&self, suite: &str) -> bool {
        let release = match suite {
            "bookworm" => V1_6,
            "trixie" => V1_9,
            _ => V1_11,
        };
        self.since <= release
    }
}

const fn old(text: &'static str) -> Rule {
    Rule { text, since: V1_6 }
}

const fn since_1_9(text: &'static str) -> Rule {
    Rule { text, since: V1_9 }
}

const fn new(text: &'static str) -> Rule {
    Rule { text, since: V1_11 }
}

pub(crate) const RULES: &[Rule] = &[
    old("[]"),
    // Protocols.
    old("[{port: any, proto: any, host: any}]"),
    old("[{port: any, proto: tcp, host: any}]"),
    old("[{port: any, proto: udp, host: any}]"),
    old("[{port: any, proto: icmp, host: any}]"),
    // Ports.
    old("[{port: 80, proto: tcp, host: any}]"),
    old("[{port: 80, proto: any, host: any}]"),
    old("[{port: 0, proto: udp, host: any}]"),
    old("[{port: 80-443, proto: tcp, host: any}]"),
    old("[{port: 54-8079, proto: any, host: any}]"),
    old("[{port: 0-80, proto: tcp, host: any}]"),
    old("[{port: 8080-8085, proto: any, host: any}]"),
    old("[{port: fragment, proto: any, host: any}]"),
    // Groups.
    old("[{port: any, proto: any, group: web}]"),
    old("[{port: any, proto: any, group: ops}]"),
    old("[{port: any, proto: any, group: nobody}]"),
    old("[{port: any, proto: any, group: any}]"),
    old("[{port: any, proto: any, groups: [web, ops]}]"),
    old("[{port: any, proto: any, groups: [web, nobody]}]"),
    old("[{port: any, proto: any, groups: [web]}]"),
    old("[{port: 443, proto: tcp, groups: [ops, web]}]"),
    // Names.
    old("[{port: any, proto: any, host: alpha}]"),
    old("[{port: any, proto: any, host: beta}]"),
    old("[{port: any, proto: any, host: Alpha}]"),
    // Addresses of the peer.
    old("[{port: any, proto: any, cidr: 10.77.1.0/24}]"),
    old("[{port: any, proto: any, cidr: 10.77.2.0/24}]"),
    old("[{port: 80, proto: tcp, cidr: 0.0.0.0/0}]"),
    new("[{port: any, proto: any, cidr: \"fd77::1:0/112\"}]"),
    new("[{port: any, proto: any, cidr: \"::/0\"}]"),
    new("[{port: any, proto: icmp, cidr: any}]"),
    // CA of the peer.
    old("[{port: any, proto: any, host: any, ca_name: first}]"),
    old("[{port: any, proto: any, host: any, ca_name: second}]"),
    old("[{port: any, proto: any, host: any, ca_sha: FIRST}]"),
    old("[{port: any, proto: any, group: web, ca_name: second}]"),
    old("[{port: any, proto: any, host: any, ca_name: second, ca_sha: FIRST}]"),
    old("[{port: any, proto: any, group: ops, ca_name: second}]"),
    // One match is enough.
    old("[{port: any, proto: any, host: beta, group: ops}]"),
    old("[{port: any, proto: any, cidr: 10.77.2.0/24, groups: [ops, web]}]"),
    old("[{port: any, proto: any, host: alpha, cidr: 10.77.2.0/24}]"),
    // Addresses of this side.
    since_1_9("[{port: any, proto: any, host: any, local_cidr: BEHIND}]"),
    since_1_9("[{port: any, proto: any, host: any, local_cidr: OWN/32}]"),
    since_1_9("[{port: 80, proto: tcp, group: web, local_cidr: 0.0.0.0/0}]"),
    since_1_9("[{port: any, proto: icmp, host: any, local_cidr: BEHIND}, {port: 80, proto: tcp, host: any}]"),
    new("[{port: any, proto: any, host: alpha, local_cidr: any}]"),
    // Several rules.
    old("[{port: 80, proto: tcp, group: ops}, {port: 53, proto: udp, cidr: 10.77.2.0/24}]"),
    old(
        "[{port: 8085, proto: udp, host: beta}, {port: any, proto: icmp, host: alpha}, {port: 443, proto: tcp, host: any}]",
    ),
];
