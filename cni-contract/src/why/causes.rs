//! Why a flow does not pass: each cause has a word for programs, and says what to do.

use serde::{Deserialize, Serialize};

/// One of the two ends of a flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum End {
    /// The pod that sends.
    Source,
    /// The pod that receives.
    Destination,
}

/// The links of the chain between two pods. What both ends need comes before what a packet meets on its way: without
/// it, that fails, too.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Link {
    /// The pod that sends is there and runs.
    Source,
    /// What it sends to has an address.
    Name,
    /// The Service has that port.
    Service,
    /// The Service has endpoints that are ready.
    Endpoints,
    /// The sender's tunnel and its certificate.
    SourceTunnel,
    /// The receiver's tunnel and its certificate.
    DestinationTunnel,
    /// What the sender's node knows of the destination.
    Table,
    /// Rules and network policies of the sender.
    Egress,
    /// The tunnel between both.
    Tunnel,
    /// Rules and network policies of the receiver.
    Ingress,
    /// A socket that listens.
    Listener,
}

/// What may be wrong with the tunnel of a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum AtEnd {
    /// It should have one, and has none.
    TunnelMissing,
    /// Its instance does not answer.
    InstanceSilent,
    /// Its init container has not shown the pod's token.
    InitOverdue,
    /// The CA refuses it a certificate.
    CertificateDenied,
    /// The CA was not reached.
    CaNotReached,
    /// Its certificate is not valid yet: a clock is wrong.
    CertificateNotYetValid,
    /// Its certificate has expired.
    CertificateExpired,
    /// Its instance lets nothing pass, for another reason.
    Closed,
    /// Its instance has no usable cluster table.
    TableMissing,
    /// Its instance has no program for its network policies.
    PoliciesMissing,
}

/// Why a flow does not pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub enum Cause {
    /// There is no such pod.
    SourceUnknown,
    /// The pod does not run.
    SourceNotRunning,
    /// Neither pod nor Service has this name.
    TargetUnknown,
    /// The pod that is sent to does not run.
    TargetNotRunning,
    /// Both have no address of one family.
    NoCommonFamily,
    /// The Service stands for a name elsewhere.
    ExternalName,
    /// The Service does not have the port.
    ServiceWithoutPort,
    /// The Service selects no pods and has no endpoints of its own.
    ServiceWithoutSelector,
    /// The Service's selector matches no pod.
    NoPodSelected,
    /// Pods are selected, and none is ready.
    NoEndpointReady,
    /// Something about the tunnel of one end.
    At(End, AtEnd),
    /// The cluster table of the source's node does not have the destination.
    TableWithoutDestination,
    /// The table says that the destination is not enrolled, and it is.
    TableSaysClear,
    /// The table has no endpoint of a Service that has some.
    TableWithoutEndpoint,
    /// A network policy of the source refuses the flow.
    EgressPolicy,
    /// Nebula's rules of the source refuse it.
    EgressRule,
    /// Nobody knows where the destination's instance is.
    PeerUnknown,
    /// The system does not send to the destination's node.
    CannotSend,
    /// The destination does not answer.
    PeerSilent,
    /// It answers what cannot be opened: another cipher or curve.
    OtherCipher,
    /// The source refuses the destination's certificate.
    PeerRefused,
    /// The destination refuses the source's certificate.
    RefusedByPeer,
    /// A network policy of the destination refuses the flow.
    IngressPolicy,
    /// Nebula's rules of the destination refuse it.
    IngressRule,
    /// Nobody listens.
    NobodyListens,
    /// It listens on loopback only.
    ListensOnLoopback,
    /// It listens for the other family only.
    ListensOnOtherFamily,
}

impl Cause {
    /// The link that is broken.
    #[must_use]
    pub fn link(self) -> Link {
        match self {
            Self::SourceUnknown | Self::SourceNotRunning => Link::Source,
            Self::TargetUnknown | Self::TargetNotRunning | Self::NoCommonFamily | Self::ExternalName => Link::Name,
            Self::ServiceWithoutPort => Link::Service,
            Self::ServiceWithoutSelector | Self::NoPodSelected | Self::NoEndpointReady => Link::Endpoints,
            Self::At(End::Source, _) => Link::SourceTunnel,
            Self::TableWithoutDestination | Self::TableSaysClear | Self::TableWithoutEndpoint => Link::Table,
            Self::EgressPolicy | Self::EgressRule => Link::Egress,
            Self::PeerUnknown
            | Self::CannotSend
            | Self::PeerSilent
            | Self::OtherCipher
            | Self::PeerRefused
            | Self::RefusedByPeer => Link::Tunnel,
            Self::At(End::Destination, _) => Link::DestinationTunnel,
            Self::IngressPolicy | Self::IngressRule => Link::Ingress,
            Self::NobodyListens | Self::ListensOnLoopback | Self::ListensOnOtherFamily => Link::Listener,
        }
    }

    /// What to do.
    #[must_use]
    pub fn remedy(self) -> &'static str {
        match self {
            Self::SourceUnknown => "look for its name: kubectl get pods -A",
            Self::SourceNotRunning | Self::TargetNotRunning => "see why it does not run: kubectl describe pod",
            Self::TargetUnknown => "look for the name: kubectl get pods,services -A",
            Self::NoCommonFamily => {
                "give both an address of one family, or ask for a name that has one (ipFamilyPolicy)"
            }
            Self::ExternalName => "ask about the name that it stands for; it leads out of the cluster's Services",
            Self::ServiceWithoutPort => "send to one of the Service's ports, or add this one to it",
            Self::ServiceWithoutSelector => "give the Service a selector, or EndpointSlices of its own",
            Self::NoPodSelected => "compare the Service's selector with the labels of the pods",
            Self::NoEndpointReady => "see why the pods are not ready: kubectl describe pod (readiness probe)",
            Self::At(_, at) => at.remedy(),
            Self::TableWithoutDestination | Self::TableWithoutEndpoint => {
                "see whether the agent of the source's node reaches the API server: nebula-cni-agent status there"
            }
            Self::TableSaysClear => {
                "wait for the next cluster table (a second); then see nebula-cni-agent status there"
            }
            Self::EgressPolicy | Self::IngressPolicy => {
                "allow the flow in that policy or in another one; `nebula-cni-agent policy test` tries it without packets"
            }
            Self::EgressRule => "allow it in Nebula's outbound rules of the source (network.firewall)",
            Self::IngressRule => "allow it in Nebula's inbound rules of the destination (network.firewall)",
            Self::PeerUnknown => {
                "see whether the destination's instance reaches a lighthouse: nebula-cni-agent status there"
            }
            Self::CannotSend => "mend the route from the source's node to the destination's",
            Self::PeerSilent => "let UDP pass between both nodes, in both directions, at the ports of the instances",
            Self::OtherCipher => "give all hosts of the network the same cipher and curve",
            Self::PeerRefused | Self::RefusedByPeer => {
                "see which CA signed both certificates, and that both trust it: nebula-cni-agent pods NAMESPACE/NAME"
            }
            Self::NobodyListens => "start the program that is to listen, or send to the port at which it does",
            Self::ListensOnLoopback => "let the program listen at 0.0.0.0 or [::], not at loopback",
            Self::ListensOnOtherFamily => "let the program listen for both families, or use the other address",
        }
    }

    /// The word for programs.
    #[must_use]
    pub fn word(self) -> String {
        let camel_case = match self {
            Self::At(end, at) => format!("{end:?}{at:?}"),
            other => format!("{other:?}"),
        };
        let mut word = String::new();
        for letter in camel_case.chars() {
            if letter.is_ascii_uppercase() && !word.is_empty() {
                word.push('-');
            }
            word.push(letter.to_ascii_lowercase());
        }
        word
    }
}

impl AtEnd {
    fn remedy(self) -> &'static str {
        match self {
            Self::TunnelMissing => {
                "delete the pod, so that it is made again; nebula-cni-agent status says why it has none"
            }
            Self::InstanceSilent => {
                "it is started again within seconds; if not, see the agent's log and nebula-cni-agent status on that node"
            }
            Self::InitOverdue => "see the log of the pod's init container nebula-cni-init, and that it comes first",
            Self::CertificateDenied => {
                "change the CA's policy, or the pod as the policy wants it; the reason is the CA's"
            }
            Self::CaNotReached => "see whether the CA service runs and its address is reached from that node",
            Self::CertificateNotYetValid => "set the clock of that node (chronyc tracking)",
            Self::CertificateExpired => "see why it was not renewed: the last error of the instance, and the CA's log",
            Self::Closed => "the instance says why; nebula-cni-agent pods NAMESPACE/NAME on that node has all of it",
            Self::TableMissing | Self::PoliciesMissing => {
                "see whether the agent of that node runs and reaches the API server: nebula-cni-agent status there"
            }
        }
    }
}

impl Link {
    /// All of them, in order.
    pub const ALL: [Self; 11] = [
        Self::Source,
        Self::Name,
        Self::Service,
        Self::Endpoints,
        Self::SourceTunnel,
        Self::DestinationTunnel,
        Self::Table,
        Self::Egress,
        Self::Tunnel,
        Self::Ingress,
        Self::Listener,
    ];

    /// What it is called.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Source => "source",
            Self::Name => "name",
            Self::Service => "service",
            Self::Endpoints => "endpoints",
            Self::SourceTunnel => "source's tunnel",
            Self::Table => "cluster table",
            Self::Egress => "egress",
            Self::Tunnel => "way between both",
            Self::DestinationTunnel => "destination's tunnel",
            Self::Ingress => "ingress",
            Self::Listener => "listener",
        }
    }
}
