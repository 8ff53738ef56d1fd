//! `nebula-cni-agent policy test`: what the programs of this node say about a flow, by name, without sending a packet.

use std::fmt::{self, Write as _};
use std::io;
use std::net::IpAddr;
use std::path::Path;

use kube::Client;
use nebula_cert::visible;
use nebula_cni_contract::cluster_table::{Labels, Layout, MAX_BYTES, Table};
use nebula_cni_contract::launch::CLUSTER_TABLE;
use nebula_cni_policy::program::{self, Decision, Identity, Peer, Program, Reason, Tier, Who};
use serde::Serialize;

use crate::cluster::api::{self, ApiError};
use crate::durable;
use crate::host_root::HostRoot;

/// One end of a flow, as it is written on the command line: an address, or `POD.NAMESPACE`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum End {
    /// An address.
    Address(IpAddr),
    /// A pod.
    Pod {
        /// Its name.
        name: String,
        /// Its namespace.
        namespace: String,
    },
}

/// A flow, as it is written on the command line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Destination {
    /// Where it leads.
    pub end: End,
    /// Number of the IP protocol.
    pub protocol: u8,
    /// Destination port; 0 for a protocol without ports.
    pub port: u16,
}

/// Why there is no verdict.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AskError {
    /// The command line has something else.
    #[error(
        "{0:?} is no end of a flow: expected an address or POD.NAMESPACE, with :PORT or :PORT/PROTOCOL after the second one"
    )]
    Malformed(String),
    /// The API server does not say where a pod is.
    #[error("cannot ask where {0} is: {1}; its address can be given instead")]
    Api(String, ApiError),
    /// There is no table.
    #[error("cannot read the cluster table of this node: {0}; is the agent running, with pods captured?")]
    Table(#[source] io::Error),
    /// The pod is not there, or has no address.
    #[error("there is no pod {0} with an address of its own")]
    NoPod(String),
}

/// What both ends say.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Answer {
    /// Version of the table with the programs.
    pub version: u64,
    /// Source.
    pub from: IpAddr,
    /// Destination.
    pub to: IpAddr,
    /// Number of the IP protocol.
    pub protocol: u8,
    /// Destination port.
    pub port: u16,
    /// Whether both are enrolled. What goes in clear meets none of these programs.
    pub in_tunnel: bool,
    /// What the source's program says; `None` if this node has none of it.
    pub egress: Option<Said>,
    /// What the destination's program says.
    pub ingress: Option<Said>,
}

/// What one program says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Said {
    /// Whether the flow passes.
    #[serde(flatten)]
    pub decision: Explained,
    /// What would refuse it if no policy were evaluated for audit only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub would_deny: Option<Explained>,
}

/// A decision with names.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Explained {
    /// Whether the flow is allowed.
    pub allowed: bool,
    /// A stable word.
    pub reason: &'static str,
    /// Where the policy is evaluated.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tier: Option<&'static str>,
    /// `NAMESPACE/NAME`, or `NAME` of a ClusterNetworkPolicy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub policy: Option<String>,
    /// Place of the rule in its list, from 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rule: Option<u16>,
    /// Its name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rule_name: Option<String>,
    /// The same as a sentence.
    #[serde(skip)]
    pub text: String,
}

/// What comes out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// Both ends allow it.
    Allowed,
    /// One of them refuses it.
    Refused,
    /// Of one of them this node has no program, and the other allows it.
    Undecided,
}

impl Outcome {
    /// Exit code of the command.
    #[must_use]
    pub const fn code(self) -> u8 {
        match self {
            Self::Allowed => 0,
            Self::Refused => 3,
            Self::Undecided => 4,
        }
    }
}

impl End {
    /// Reads an address or `POD.NAMESPACE`.
    ///
    /// # Errors
    /// Refuses everything else.
    pub fn parse(text: &str) -> Result<Self, AskError> {
        let bare = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(text);
        if let Ok(address) = bare.parse::<IpAddr>() {
            return Ok(Self::Address(address.to_canonical()));
        }
        let malformed = || AskError::Malformed(text.to_owned());
        // A namespace has no dot; the name of a pod may.
        let (name, namespace) = text.rsplit_once('.').ok_or_else(malformed)?;
        let is_pod = api::is_name(name) && api::is_name(namespace);
        is_pod.then(|| Self::Pod { name: name.to_owned(), namespace: namespace.to_owned() }).ok_or_else(malformed)
    }

    /// Its address. Asks the API server about a pod; `client` is called for that only.
    ///
    /// # Errors
    /// Returns an error if the server does not answer, or has no such pod.
    pub async fn address(&self, client: impl AsyncFnOnce() -> Result<Client, ApiError>) -> Result<IpAddr, AskError> {
        let (name, namespace) = match self {
            Self::Address(address) => return Ok(*address),
            Self::Pod { name, namespace } => (name, namespace),
        };
        let failed = |error| AskError::Api(self.to_string(), error);
        let client = client().await.map_err(failed)?;
        let pod = api::named(&client, &format!("/api/v1/namespaces/{namespace}/pods"), name).await.map_err(failed)?;
        let pod = pod.filter(|pod| pod["spec"]["hostNetwork"] != true);
        let address = pod.and_then(|pod| pod["status"]["podIP"].as_str()?.parse::<IpAddr>().ok());
        address.map(|address| address.to_canonical()).ok_or_else(|| AskError::NoPod(self.to_string()))
    }
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address(address) => address.fmt(f),
            Self::Pod { name, namespace } => write!(f, "{name}.{namespace}"),
        }
    }
}

impl Destination {
    /// Reads `END[:PORT[/PROTOCOL]]`. Without a port it is an ICMP message, which only rules without ports allow.
    ///
    /// # Errors
    /// Refuses everything else.
    pub fn parse(text: &str) -> Result<Self, AskError> {
        let malformed = || AskError::Malformed(text.to_owned());
        if let Ok(end) = End::parse(text) {
            let protocol = match end {
                End::Address(IpAddr::V6(_)) => ICMPV6,
                End::Address(IpAddr::V4(_)) | End::Pod { .. } => ICMP,
            };
            return Ok(Self { end, protocol, port: 0 });
        }
        let (end, port) = text.rsplit_once(':').ok_or_else(malformed)?;
        let (port, protocol) = port.split_once('/').unwrap_or((port, "tcp"));
        let protocol = match protocol.to_ascii_lowercase().as_str() {
            "tcp" => 6,
            "udp" => 17,
            "sctp" => 132,
            _ => return Err(malformed()),
        };
        let port = port.parse::<u16>().ok().filter(|port| *port > 0).ok_or_else(malformed)?;
        Ok(Self { end: End::parse(end)?, protocol, port })
    }
}

impl Answer {
    /// By the programs in the table of this node.
    ///
    /// # Errors
    /// Returns an error if there is no table.
    pub fn read(host: &HostRoot, from: IpAddr, to: IpAddr, protocol: u8, port: u16) -> Result<Self, AskError> {
        let bytes =
            durable::read_bounded(&host.resolve(Path::new(CLUSTER_TABLE)), MAX_BYTES).map_err(AskError::Table)?;
        let unusable = || AskError::Table(io::Error::new(io::ErrorKind::InvalidData, "it is of another release"));
        let layout = Layout::read(&bytes).map_err(|_| unusable())?;
        Ok(Self::of(&layout.table(&bytes), from, to, protocol, port))
    }

    /// By the programs of a table.
    #[must_use]
    pub fn of(table: &Table<'_>, from: IpAddr, to: IpAddr, protocol: u8, port: u16) -> Self {
        let is_enrolled = |address| table.incarnation(address).is_some();
        let said = |own: IpAddr, other: IpAddr, place: usize| {
            let bytes = *table.programs(own)?.get(place)?;
            let program = Program::read(bytes).ok()?;
            let peer = Peer { who: who(table, other), address: Some(other) };
            let verdict = program.judge(&peer, protocol, port);
            let explain = |decision: Decision| Explained::from(program.explain(decision));
            Some(Said { decision: explain(verdict.enforced), would_deny: verdict.would_deny().map(explain) })
        };
        Self {
            version: table.version(),
            in_tunnel: is_enrolled(from) && is_enrolled(to),
            egress: said(from, to, 1),
            ingress: said(to, from, 0),
            from,
            to,
            protocol,
            port,
        }
    }

    /// What comes out at both ends.
    #[must_use]
    pub fn outcome(&self) -> Outcome {
        let ends = [&self.egress, &self.ingress].map(|said| said.as_ref().map(|said| said.decision.allowed));
        match ends {
            [Some(false), _] | [_, Some(false)] => Outcome::Refused,
            [Some(true), Some(true)] => Outcome::Allowed,
            _ => Outcome::Undecided,
        }
    }

    /// For people; the names of the ends as they were asked for.
    #[must_use]
    pub fn text(&self, from: &End, to: &End) -> String {
        let outcome = match self.outcome() {
            Outcome::Allowed => "allowed",
            Outcome::Refused => "refused",
            Outcome::Undecided => "undecided",
        };
        let port = match self.protocol {
            6 => format!("tcp/{}", self.port),
            17 => format!("udp/{}", self.port),
            132 => format!("sctp/{}", self.port),
            number => format!("protocol {number}"),
        };
        let mut text = format!("{from} -> {to} {port}: {outcome} (table version {})\n", self.version);
        for (direction, end, said) in [("egress", from, &self.egress), ("ingress", to, &self.ingress)] {
            let _ = match said {
                Some(said) => writeln!(text, "  {direction} of {end}: {}", visible(&said.decision.to_string())),
                None => {
                    writeln!(text, "  {direction} of {end}: this node has no program of it; ask the agent of its node")
                }
            };
            if let Some(would) = said.as_ref().and_then(|said| said.would_deny.as_ref()) {
                let _ = writeln!(text, "    audit: would be {}", visible(&would.to_string()));
            }
        }
        if !self.in_tunnel {
            text.push_str("  One of them is not enrolled: what they send each other is in clear, where these programs do not act.\n");
        }
        text
    }
}

impl From<program::Explained<'_>> for Explained {
    fn from(explained: program::Explained<'_>) -> Self {
        let program::Explained { decision, policy, rule } = explained;
        Self {
            allowed: decision.is_allowed,
            reason: decision.reason.word(),
            tier: decision.reason.tier().map(Tier::name),
            policy: policy.map(str::to_owned),
            rule: match decision.reason {
                Reason::Rule { rule, .. } => Some(rule),
                _ => None,
            },
            rule_name: rule.map(str::to_owned),
            text: explained.to_string(),
        }
    }
}

impl fmt::Display for Explained {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// As an instance sees the other end.
fn who(table: &Table<'_>, address: IpAddr) -> Who {
    match table.labels(address) {
        Labels::Set(number) => Identity::new(number).map_or(Who::Unnumbered, Who::Pod),
        Labels::NoPod => Who::Outside,
        // An enrolled pod has an incarnation; what has none comes in clear.
        Labels::Unknown if table.incarnation(address).unwrap_or_default() == 0 => Who::Outside,
        Labels::Unknown => Who::Unnumbered,
    }
}

const ICMP: u8 = 1;
const ICMPV6: u8 = 58;

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(name: &str, namespace: &str) -> End {
        End::Pod { name: name.to_owned(), namespace: namespace.to_owned() }
    }

    #[test]
    fn ends_are_addresses_or_pods_with_a_port_and_a_protocol() {
        let read = |text: &str| Destination::parse(text).map(|to| (to.end, to.protocol, to.port)).unwrap();
        let four = End::Address("10.0.0.1".parse().unwrap());
        let six = End::Address("fd00::1".parse().unwrap());
        assert_eq!(read("10.0.0.1"), (four.clone(), ICMP, 0));
        assert_eq!(read("10.0.0.1:53/UDP"), (four, 17, 53));
        assert_eq!(read("fd00::1"), (six.clone(), ICMPV6, 0));
        assert_eq!(read("[fd00::1]:443"), (six, 6, 443));
        assert_eq!(read("web.shop:80/sctp"), (pod("web", "shop"), 132, 80));
        assert_eq!(read("web.v2.shop"), (pod("web.v2", "shop"), ICMP, 0));
        for wrong in
            ["", "web", "web.shop:0", "web.shop:80/quic", "web.shop:80:80", "../x.shop", "web.sh op", "web.shop:"]
        {
            assert!(Destination::parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_refusal_of_one_end_counts_and_an_unknown_end_does_not() {
        let said = |allowed| {
            let decision = Decision { is_allowed: allowed, reason: Reason::NoPolicy };
            let explained = program::Explained { decision, policy: None, rule: None };
            Some(Said { decision: explained.into(), would_deny: None })
        };
        let address = IpAddr::from([10, 0, 0, 1]);
        let answer = |egress, ingress| Answer {
            version: 1,
            from: address,
            to: address,
            protocol: 6,
            port: 80,
            in_tunnel: true,
            egress,
            ingress,
        };
        let cases = [
            (said(true), said(true), Outcome::Allowed, 0),
            (said(true), said(false), Outcome::Refused, 3),
            (said(false), None, Outcome::Refused, 3),
            (said(true), None, Outcome::Undecided, 4),
            (None, None, Outcome::Undecided, 4),
        ];
        for (egress, ingress, outcome, code) in cases {
            let answer = answer(egress, ingress);
            assert_eq!((answer.outcome(), answer.outcome().code()), (outcome, code), "{answer:?}");
        }
        let text = answer(said(false), None).text(&pod("web", "shop"), &pod("db", "pay"));
        assert!(text.starts_with("web.shop -> db.pay tcp/80: refused (table version 1)\n"), "{text}");
        assert!(text.contains("ingress of db.pay: this node has no program of it"), "{text}");
    }
}
