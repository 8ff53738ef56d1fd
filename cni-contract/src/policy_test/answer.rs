//! What the programs of one node say of a flow.

use std::fmt::{self, Write as _};
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

/// What both ends say.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
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
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Said {
    /// Whether the flow passes.
    #[serde(flatten)]
    pub decision: Explained,
    /// What would refuse it if no policy were evaluated for audit only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub would_deny: Option<Explained>,
}

/// A decision with names.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Explained {
    /// Whether the flow is allowed.
    pub allowed: bool,
    /// A stable word.
    pub reason: String,
    /// Where the policy is evaluated.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tier: Option<String>,
    /// `NAMESPACE/NAME`, or `NAME` of a ClusterNetworkPolicy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub policy: Option<String>,
    /// Place of the rule in its list, from 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rule: Option<u16>,
    /// Its name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rule_name: Option<String>,
    /// The same as a sentence, by the program's release.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub text: String,
}

/// What comes out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Outcome {
    /// Both ends allow it.
    Allowed,
    /// One of them refuses it.
    Refused,
    /// Of one of them nobody knows, and the other allows it.
    Undecided,
}

impl Outcome {
    /// What follows from what the ends say; `None`: one does not say.
    #[must_use]
    pub fn of(ends: [Option<bool>; 2]) -> Self {
        match ends {
            [Some(false), _] | [_, Some(false)] => Self::Refused,
            [Some(true), Some(true)] => Self::Allowed,
            _ => Self::Undecided,
        }
    }

    /// Exit code of the agent's command.
    #[must_use]
    pub const fn code(self) -> u8 {
        match self {
            Self::Allowed => 0,
            Self::Refused => 3,
            Self::Undecided => 4,
        }
    }

    /// As one word; stable.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Allowed => "allowed",
            Self::Refused => "refused",
            Self::Undecided => "undecided",
        }
    }
}

impl Answer {
    /// What comes out at both ends.
    #[must_use]
    pub fn outcome(&self) -> Outcome {
        Outcome::of([&self.egress, &self.ingress].map(|said| said.as_ref().map(|said| said.decision.allowed)))
    }

    /// Without the sentences, as the agent's command prints it for programs.
    #[must_use]
    pub fn without_sentences(mut self) -> Self {
        for said in [&mut self.egress, &mut self.ingress].into_iter().flatten() {
            said.decision.text.clear();
            said.would_deny.iter_mut().for_each(|would| would.text.clear());
        }
        self
    }

    /// For people; the ends as they were asked for. All texts are printed as they are.
    #[must_use]
    pub fn text(&self, from: &dyn fmt::Display, to: &dyn fmt::Display) -> String {
        let port = match self.protocol {
            6 => format!("tcp/{}", self.port),
            17 => format!("udp/{}", self.port),
            132 => format!("sctp/{}", self.port),
            number => format!("protocol {number}"),
        };
        let outcome = self.outcome().word();
        let mut text = format!("{from} -> {to} {port}: {outcome} (table version {})\n", self.version);
        for (direction, end, said) in [("egress", from, &self.egress), ("ingress", to, &self.ingress)] {
            match said {
                Some(said) => said.write(&mut text, &format!("{direction} of {end}")),
                None => {
                    let why = "this node has no program of it; ask the agent of its node";
                    let _ = writeln!(text, "  {direction} of {end}: {why}");
                }
            }
        }
        if !self.in_tunnel {
            text.push_str(IN_CLEAR);
        }
        text
    }
}

impl Said {
    /// A line, and one below it for policies in audit.
    pub(super) fn write(&self, text: &mut String, what: &str) {
        let _ = writeln!(text, "  {what}: {}", self.decision.text);
        if let Some(would) = &self.would_deny {
            let _ = writeln!(text, "    audit: would be {}", would.text);
        }
    }
}

pub(super) const IN_CLEAR: &str =
    "  One of them is not enrolled: what they send each other is in clear, where these programs do not act.\n";
