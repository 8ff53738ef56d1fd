//! Network policies on this node: what the API server says of policies, labels and ports becomes one program for each
//! own pod and direction, and one number for the labels of each enrolled pod of the cluster. Both go into the cluster
//! table, with one version, so nobody ever reads a program beside numbers that it does not mean.
//!
//! | file | what |
//! | --- | --- |
//! | `watches.rs` | follows policies and namespaces; pods and nodes come with the table's own watches |
//! | `said.rs` | policies as they were said last, within a budget for each namespace |
//! | `described.rs` | labels and named ports of a pod, each set once in memory |
//! | `mentions.rs` | which labels and port names any policy asks for: others do not make two pods differ |
//! | `numbers.rs` | the number of each enrolled pod's labels |
//! | `applied.rs` | the policies that concern this node, in the compiler |
//! | `enforcer.rs` | puts these together: numbers and programs for the next table |
//! | `carried.rs` | those of the table that an earlier agent wrote, until everything has been listed once |
//! | `report.rs` | what is not enforced as it is written |
//! | `conditions.rs` | says in the status of ClusterNetworkPolicies whether they are enforced |
//! | `asking.rs` | pods whose instances judge by programs, and those that do not |
//! | `asked.rs` | `nebula-cni-agent policy test`, and what kubectl's plugin asks for it |
//! | `suggest` | what pods were seen to do, for `policy suggest` of both |

pub(crate) mod applied;
pub mod asked;
pub(crate) mod asking;
pub(crate) mod carried;
pub(crate) mod conditions;
pub(crate) mod described;
pub(crate) mod enforcer;
mod mentions;
mod numbers;
pub mod report;
pub(crate) mod said;
pub mod suggest;
pub(crate) mod watches;

use std::net::IpAddr;
use std::sync::Arc;

pub(crate) use described::Described;
use nebula_cni_policy::program::Who;

use crate::table::member::Addresses;

/// A pod of this node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct OwnPod {
    /// Its addresses; at least one.
    pub(crate) addresses: Addresses,
    /// That of its certificate; 0 if it has none.
    pub(crate) incarnation: u64,
    pub(crate) described: Arc<Described>,
}

/// Who has an enrolled address.
#[derive(Debug, Clone)]
pub(crate) struct Holder {
    pub(crate) address: IpAddr,
    pub(crate) incarnation: u64,
    /// `None`: it is no pod, or one with the network of its node.
    pub(crate) described: Option<Arc<Described>>,
}

/// A pod of which only labels or named ports changed.
#[derive(Debug, Clone)]
pub(crate) struct Relabelled {
    /// Its enrolled addresses.
    pub(crate) enrolled: Vec<IpAddr>,
    pub(crate) described: Arc<Described>,
    /// The pod as it is shown, if it is of this node.
    pub(crate) own: Option<OwnPod>,
}

/// A pod without a certificate.
#[derive(Debug, Clone)]
pub(crate) struct Bystander {
    pub(crate) address: IpAddr,
    pub(crate) described: Option<Arc<Described>>,
}

/// What the next table says for policies.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Records {
    /// By enrolled address; `None`: it is no pod. Addresses whose number is not known are missing.
    pub(crate) identities: Vec<(IpAddr, Option<u32>)>,
    /// By address of an own pod, for ingress and egress.
    pub(crate) programs: Vec<(IpAddr, [Vec<u8>; 2])>,
    /// Not in the table: who the pods without a certificate are.
    pub(crate) bystanders: Vec<(IpAddr, Who)>,
}
