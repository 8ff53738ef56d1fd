//! Records of flows, as daemons and instances answer them: the one form in which other programs read, keep and show
//! them.

#[cfg(feature = "cli")]
mod arguments;
mod client;
mod filter;
mod shown;
#[cfg(test)]
mod tests;

use std::net::{IpAddr, SocketAddr};

use serde::{Deserialize, Serialize};

#[cfg(feature = "cli")]
pub use arguments::{Conditions, ConditionsOfPods};
pub use client::{MAX_ANSWER, MAX_RECORDS, RECORDS_PATH, read_answer, request};
pub use filter::{BadFilter, Filter};
pub use shown::table;

/// An answer.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct FlowRecords {
    /// In the order of their numbers.
    pub records: Vec<FlowRecord>,
    /// What to ask from the next time.
    pub next: u64,
    /// Records that gave way to others before who asks in turns had them, since the node started.
    pub lost: u64,
    /// Whether there are more than fit into the answer.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub is_cut: bool,
    /// Whether flows are recorded at all (`flows.records`).
    pub is_on: bool,
}

/// What became of one flow, or of refused packets of one kind, up to now. A later record with the same `id` of the same
/// node replaces it. What a record lacks, because a program of another release wrote it, reads as absent or empty.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct FlowRecord {
    /// Rises with each change that is told.
    pub number: u64,
    /// Tells flows with the same addresses and ports apart.
    pub id: u64,
    /// `created`, `updated`, `ended` or `refused`.
    pub event: String,
    /// Why it ended: `idle`, `evicted`, `peer-gone` or `refused`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub end: Option<String>,
    /// `allowed`, `audit` (policies in audit would refuse it) or `refused`.
    pub verdict: String,
    /// Why it was refused: the name of a counter of dropped packets.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Whether the node that wrote the record is the source: `outbound`; or the destination: `inbound`. Its rules and
    /// policies decided.
    pub direction: String,
    /// Number of the protocol.
    pub protocol: u8,
    /// Who opened it.
    pub source: FlowEnd,
    /// To whom.
    pub destination: FlowEnd,
    /// The addresses and ports that the pod of this node uses, if they are translated: a Service's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub original: Option<Original>,
    /// From source to destination: of refused packets, what would have been.
    pub forward: Amount,
    /// From destination to source.
    pub reply: Amount,
    /// Position of the rule of this node that allows it (`firewall.outbound` or `firewall.inbound`), from 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rule: Option<usize>,
    /// What the policies of the network say.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub policy: Option<PolicyDecision>,
    /// `direct` or `relay`; absent if it never had a tunnel.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// Overlay address of the relay, if it is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub relay: Option<IpAddr>,
    /// Whether an ML-KEM exchange is behind the keys of its tunnel; absent if it never had one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub post_quantum: Option<bool>,
    /// When it began, in milliseconds since 1970.
    pub started_ms: u64,
    /// When it was last seen.
    pub last_ms: u64,
}

/// One end of a flow. Name, groups and fingerprint are those of a certificate.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, Hash)]
#[serde(default)]
pub struct FlowEnd {
    /// In the tunnel.
    pub address: Option<IpAddr>,
    /// Absent for protocols without ports, and for the ports that refused packets of one kind came from.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub port: Option<u16>,
    /// Absent if nobody is known there.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Sorted as the certificate has them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub groups: Vec<String>,
    /// In hexadecimal.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fingerprint: Option<String>,
    /// `namespace/name`, where the writer knows it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pod: Option<String>,
}

/// A flow before translation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Original {
    /// Address and port of the source.
    pub source: SocketAddr,
    /// Address and port of the destination.
    pub destination: SocketAddr,
}

/// Packets and their bytes, with the headers of the overlay packets.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Amount {
    /// Packets.
    pub packets: u64,
    /// Bytes.
    pub bytes: u64,
}

/// Which policy decides about a flow, and how.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, Hash)]
#[serde(default)]
pub struct PolicyDecision {
    /// The reason in one word, such as `rule`, `isolated` or `no-policy`.
    pub reason: String,
    /// Its tier.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tier: Option<String>,
    /// Its name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub policy: Option<String>,
    /// Position of its rule, from 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rule: Option<u16>,
    /// Name of its rule.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rule_name: Option<String>,
}

impl FlowRecord {
    /// How long it has lasted, in milliseconds.
    #[must_use]
    pub fn duration_ms(&self) -> u64 {
        self.last_ms.saturating_sub(self.started_ms)
    }

    /// The end that wrote the record.
    #[must_use]
    pub fn own_end(&self) -> &FlowEnd {
        if self.direction == OUTBOUND { &self.source } else { &self.destination }
    }

    /// The end that wrote the record.
    pub fn own_end_mut(&mut self) -> &mut FlowEnd {
        if self.direction == OUTBOUND { &mut self.source } else { &mut self.destination }
    }

    /// The end that the writer speaks to.
    pub fn far_end_mut(&mut self) -> &mut FlowEnd {
        if self.direction == OUTBOUND { &mut self.destination } else { &mut self.source }
    }

    /// All texts in it.
    pub fn texts_mut(&mut self) -> impl Iterator<Item = &mut String> {
        let ends = [&mut self.source, &mut self.destination].into_iter().flat_map(|end| {
            let texts = [&mut end.name, &mut end.fingerprint, &mut end.pod].into_iter().flatten();
            texts.chain(&mut end.groups)
        });
        let policy = self.policy.iter_mut().flat_map(|policy| {
            let texts = [&mut policy.tier, &mut policy.policy, &mut policy.rule_name].into_iter().flatten();
            texts.chain([&mut policy.reason])
        });
        let optional = [&mut self.end, &mut self.reason, &mut self.path].into_iter().flatten();
        let all = optional.chain([&mut self.event, &mut self.verdict, &mut self.direction]);
        all.chain(ends).chain(policy)
    }
}

/// The direction of a flow whose source wrote the record.
const OUTBOUND: &str = "outbound";
