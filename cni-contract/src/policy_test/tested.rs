//! What the agents of both nodes say of a flow together: the answer of `kubectl nebula policy test`.

use std::fmt::Write as _;

use serde::{Deserialize, Serialize};

use super::answer::{IN_CLEAR, Outcome, Said};
use crate::why::{Target, Workload};

/// What is known. What an agent cannot know is absent; [`Tested::add`] puts two of these documents together.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Tested {
    /// Who sends. Without a namespace only its address is known; one that is not found then is no pod.
    pub source: Workload,
    /// What it sends to.
    pub target: Target,
    /// Number of the IP protocol.
    pub protocol: u8,
    /// Port that it sends to; 0 for an ICMP message.
    pub port: u16,
    /// Whether both ends are enrolled. What goes in clear meets none of these programs.
    pub in_tunnel: Option<bool>,
    /// What the source's node says.
    pub egress: Option<OfNode>,
    /// What the destination's node says.
    pub ingress: Option<OfNode>,
}

/// What the node of a pod says of it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct OfNode {
    /// The node.
    pub node: String,
    /// Version of the table with the program; `None`: it has no table.
    pub version: Option<u64>,
    /// What the program says; `None`: the node has none of this pod.
    pub said: Option<Said>,
}

/// What is known, with what follows: the answer as JSON.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Document {
    /// What comes out.
    pub outcome: Outcome,
    /// What is known.
    pub tested: Tested,
}

/// What is known of one end.
enum Judged<'a> {
    /// Its program says this.
    By(&'a OfNode, &'a Said),
    /// No policy can select it.
    ByNobody(&'static str),
    /// It is not known what its program says.
    Unknown(String),
}

impl Document {
    /// With what follows.
    #[must_use]
    pub fn of(tested: Tested) -> Self {
        Self { outcome: tested.outcome(), tested }
    }
}

impl Tested {
    /// Adds what another node says of the same flow. What is there stays.
    pub fn add(&mut self, other: Self) {
        for (own, other) in [(&mut self.egress, other.egress), (&mut self.ingress, other.ingress)] {
            let is_known = own.as_ref().is_some_and(|of| of.said.is_some());
            if !is_known && other.is_some() {
                *own = other;
            }
        }
        self.in_tunnel = self.in_tunnel.or(other.in_tunnel);
    }

    /// Whether both documents are about the same flow.
    #[must_use]
    pub fn is_about(&self, other: &Self) -> bool {
        let key =
            |of: &Self| (of.source.full_name(), of.protocol, of.port, of.target.destination().map(Workload::full_name));
        key(self) == key(other)
    }

    /// Leaves out what is in namespaces that the one who asks may not look at. What a packet to an address meets at the
    /// source stays, but not what one to a name meets: whether there is such a name is not for everybody.
    pub fn hide(&mut self, is_by_name: bool, may_look: impl Fn(&str) -> bool) {
        if self.target.is_shown(may_look) {
            return;
        }
        (self.target, self.ingress) = (Target::Hidden, None);
        if is_by_name {
            (self.egress, self.in_tunnel) = (None, None);
        }
    }

    /// What comes out at both ends.
    #[must_use]
    pub fn outcome(&self) -> Outcome {
        let allows = |judged: Judged<'_>| match judged {
            Judged::By(_, said) => Some(said.decision.allowed),
            Judged::ByNobody(_) => Some(true),
            Judged::Unknown(_) => None,
        };
        Outcome::of([allows(self.at_source()), allows(self.at_destination())])
    }

    /// For people; the ends as they were asked for. All texts are printed as they are.
    #[must_use]
    pub fn text(&self, from: &str, to: &str) -> String {
        let mut text = format!("{from} -> {to}: {}\n", self.outcome().word());
        let named = |pod: Option<&Workload>, asked: &str| pod.map_or_else(|| asked.to_owned(), Workload::full_name);
        let ends = [
            ("egress", named(Some(&self.source), from), self.at_source()),
            ("ingress", named(self.target.destination(), to), self.at_destination()),
        ];
        for (direction, end, judged) in ends {
            let what = format!("{direction} of {end}");
            match judged {
                Judged::By(of, said) => {
                    let version = of.version.map(|version| format!(", table version {version}")).unwrap_or_default();
                    said.write(&mut text, &format!("{what} (node {}{version})", of.node));
                }
                Judged::ByNobody(why) => drop(writeln!(text, "  {what}: allowed: {why}")),
                Judged::Unknown(why) => drop(writeln!(text, "  {what}: {why}")),
            }
        }
        if self.in_tunnel == Some(false) {
            text.push_str(IN_CLEAR);
        }
        text
    }

    fn at_source(&self) -> Judged<'_> {
        if self.target == Target::Hidden && self.egress.is_none() {
            return Judged::Unknown("not shown, as the destination is not".to_owned());
        }
        at(&self.source, self.egress.as_ref())
    }

    fn at_destination(&self) -> Judged<'_> {
        let unknown = |why: &str| Judged::Unknown(why.to_owned());
        match &self.target {
            Target::Pod(pod) => at(pod, self.ingress.as_ref()),
            Target::Service(service) => match &service.endpoint {
                Some(pod) => at(pod, self.ingress.as_ref()),
                None => unknown(
                    "the Service has no endpoint for this port that is ready and has an address of the source's family",
                ),
            },
            Target::Address(_) => Judged::ByNobody(NO_POD),
            Target::Nothing { .. } => unknown("there is neither a pod nor a Service of this name"),
            Target::Hidden => unknown("not shown"),
            Target::Unknown => unknown("not known"),
        }
    }
}

fn at<'a>(pod: &Workload, of: Option<&'a OfNode>) -> Judged<'a> {
    if let Some((of, said)) = of.and_then(|of| Some((of, of.said.as_ref()?))) {
        return Judged::By(of, said);
    }
    let is_named = !pod.namespace.is_empty();
    Judged::Unknown(match of {
        _ if !pod.is_found && is_named => "there is no such pod".to_owned(),
        _ if !pod.is_found => return Judged::ByNobody(NO_POD),
        _ if pod.is_on_host_network => return Judged::ByNobody("it has the network of its node"),
        _ if pod.addresses.is_empty() => "the pod has no address yet".to_owned(),
        Some(of) => format!("node {} has no program of it: is the pod enrolled and captured?", of.node),
        None if pod.node.is_empty() => "it is enrolled, and no pod is known by this address".to_owned(),
        None => format!("node {} has not said", pod.node),
    })
}

const NO_POD: &str = "no pod has this address";
