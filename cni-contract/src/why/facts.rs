//! What is known of a flow and of its ends. The API server and the agents of both nodes each know a part of it.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use crate::instance_status::Status;

/// All that is known. What a node cannot know is absent; [`Facts::add`] puts two of these documents together.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Facts {
    /// When they were gathered, in seconds since 1970.
    pub at: i64,
    /// Pod that sends.
    pub source: Workload,
    /// What it sends to.
    pub target: Target,
    /// Number of the IP protocol.
    pub protocol: u8,
    /// Port that it sends to; 0 for an ICMP message.
    pub port: u16,
    /// What the source's node knows of the source.
    pub source_end: Option<PodEnd>,
    /// What the destination's node knows of the pod that is sent to.
    pub destination_end: Option<PodEnd>,
    /// What the source's node knows of the way to the destination.
    pub way: Option<Way>,
}

/// A pod, as the API server has it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Workload {
    /// Namespace.
    pub namespace: String,
    /// Name.
    pub name: String,
    /// Whether there is such a pod.
    pub is_found: bool,
    /// `Pending`, `Running`, `Succeeded`, `Failed` or `Unknown`.
    pub phase: String,
    /// Its node; empty before it has one.
    pub node: String,
    /// Its addresses.
    pub addresses: Vec<IpAddr>,
    /// Whether it has the network of its node.
    pub is_on_host_network: bool,
    /// Whether it is ready.
    pub is_ready: bool,
}

/// What is sent to.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Target {
    /// Not known yet.
    #[default]
    Unknown,
    /// Neither a pod nor a Service has this name.
    Nothing {
        /// Namespace.
        namespace: String,
        /// Name.
        name: String,
    },
    /// A pod.
    Pod(Workload),
    /// A Service.
    Service(Service),
    /// An address that is neither of the two.
    Address(IpAddr),
    /// Something in a namespace that the one who asks may not look at.
    Hidden,
}

/// A Service, as the API server has it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Service {
    /// Namespace.
    pub namespace: String,
    /// Name.
    pub name: String,
    /// Its addresses; none if it is headless.
    pub addresses: Vec<IpAddr>,
    /// The name that an `ExternalName` Service stands for.
    pub external_name: Option<String>,
    /// Whether it selects pods.
    pub has_selector: bool,
    /// Its ports as `PORT/protocol`.
    pub ports: Vec<String>,
    /// Port of the endpoints behind the port that is asked for; `None` if the Service does not have that one.
    pub target_port: Option<u16>,
    /// Endpoints that are ready.
    pub ready: u32,
    /// Endpoints that are not.
    pub not_ready: u32,
    /// The endpoint that the answer is about: the first one that is ready.
    pub endpoint: Option<Workload>,
}

/// What the node of a pod knows of it.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct PodEnd {
    /// The node.
    pub node: String,
    /// Its tunnel.
    pub tunnel: PodTunnel,
    /// What its program for network policies says about this flow.
    pub policy: PolicySays,
    /// Who listens in the pod at the port; `None` if that could not be seen.
    pub listener: Option<Listener>,
}

/// The tunnel of a pod.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum PodTunnel {
    /// The node does not say.
    #[default]
    Unknown,
    /// It is not to have one.
    NotMeant,
    /// It is to have one, and has none.
    Missing,
    /// Its instance does not answer.
    Silent {
        /// Why.
        problem: String,
    },
    /// Its instance says this.
    Answers(Box<Status>),
}

/// What a program for network policies says.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum PolicySays {
    /// There is no program to be asked.
    #[default]
    Nothing,
    /// It allows the flow.
    Allows {
        /// By what, as a sentence.
        text: String,
        /// What would refuse it if no policy were in audit.
        would_deny: Option<String>,
    },
    /// It refuses the flow.
    Refuses {
        /// By what, as a sentence.
        text: String,
    },
}

/// Who listens at a port of a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Listener {
    /// Nobody.
    Nobody,
    /// A socket that is bound to a loopback address only.
    LoopbackOnly,
    /// A socket of the other family only.
    OtherFamily,
    /// A socket that the pod's peers reach.
    Reachable,
}

/// What the source's node knows of the way.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Way {
    /// Version of its cluster table; `None`: it has none.
    pub table: Option<u64>,
    /// What the table says of the address that is sent to.
    pub sent_to: InTable,
    /// What it says of the pod behind it.
    pub pod: InTable,
}

/// What a cluster table says of an address.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum InTable {
    /// Nothing: captured packets to it are dropped.
    #[default]
    Unknown,
    /// It is enrolled, so packets take a tunnel.
    Enrolled,
    /// It is known not to be enrolled, so packets leave in clear.
    Clear,
    /// A port of a Service with endpoints.
    Service,
    /// A Service without an endpoint for that port.
    NoEndpoint,
}

impl Facts {
    /// Adds what another node knows of the same flow. Facts that are there stay.
    pub fn add(&mut self, other: Self) {
        for (own, other) in
            [(&mut self.source_end, other.source_end), (&mut self.destination_end, other.destination_end)]
        {
            let is_known = own.as_ref().is_some_and(|end| end.tunnel != PodTunnel::Unknown);
            if !is_known && other.is_some() {
                *own = other;
            }
        }
        self.way = self.way.take().or(other.way);
    }

    /// Leaves out what is in namespaces that the one who asks may not look at. What a packet of the source meets on its
    /// node stays, unless the target was asked for by its name: whether there is such a name is not for everybody.
    pub fn hide(&mut self, is_by_name: bool, may_look: impl Fn(&str) -> bool) {
        if self.target.is_shown(may_look) {
            return;
        }
        (self.target, self.destination_end) = (Target::Hidden, None);
        if is_by_name {
            self.way = None;
            if let Some(end) = &mut self.source_end {
                end.policy = PolicySays::Nothing;
            }
        }
    }

    /// The pod that receives, if it is known: the target itself, or the endpoint behind a Service.
    #[must_use]
    pub fn destination(&self) -> Option<&Workload> {
        self.target.destination()
    }

    /// Port of the pod that receives.
    #[must_use]
    pub fn destination_port(&self) -> u16 {
        self.target.port_for(self.port)
    }

    /// Whether both documents are about the same flow.
    #[must_use]
    pub fn is_about(&self, other: &Self) -> bool {
        let key =
            |facts: &Self| (facts.source.namespace.clone(), facts.source.name.clone(), facts.protocol, facts.port);
        key(self) == key(other)
            && self.destination().map(Workload::full_name) == other.destination().map(Workload::full_name)
    }
}

impl Target {
    /// The pod that receives, if it is known: the target itself, or the endpoint behind a Service.
    #[must_use]
    pub fn destination(&self) -> Option<&Workload> {
        match self {
            Self::Pod(pod) => Some(pod),
            Self::Service(service) => service.endpoint.as_ref(),
            Self::Unknown | Self::Nothing { .. } | Self::Address(_) | Self::Hidden => None,
        }
    }

    /// Port of the pod that receives what is sent to this port.
    #[must_use]
    pub fn port_for(&self, port: u16) -> u16 {
        match self {
            Self::Service(service) => service.target_port.unwrap_or(port),
            _ => port,
        }
    }

    /// The namespaces of which it says something.
    #[must_use]
    pub fn namespaces(&self) -> Vec<&str> {
        match self {
            Self::Pod(Workload { namespace, .. }) | Self::Nothing { namespace, .. } => vec![namespace.as_str()],
            Self::Service(Service { namespace, endpoint, .. }) => {
                [Some(namespace), endpoint.as_ref().map(|pod| &pod.namespace)]
                    .into_iter()
                    .flatten()
                    .map(String::as_str)
                    .collect()
            }
            Self::Unknown | Self::Address(_) | Self::Hidden => Vec::new(),
        }
    }

    /// Whether the one who asks may look at all of these.
    pub(crate) fn is_shown(&self, may_look: impl Fn(&str) -> bool) -> bool {
        self.namespaces().into_iter().all(may_look)
    }
}

impl Workload {
    /// Whether it has not ended: the address of one that has may be another one's.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        !matches!(self.phase.as_str(), "Succeeded" | "Failed")
    }

    /// `NAMESPACE/NAME`, or the address if that is all that is known.
    #[must_use]
    pub fn full_name(&self) -> String {
        match self.namespace.as_str() {
            // Only an address is known.
            "" => self.name.clone(),
            namespace => format!("{namespace}/{}", self.name),
        }
    }
}
