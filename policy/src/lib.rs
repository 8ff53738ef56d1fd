//! Kubernetes network policies, judged by who a pod is and not by the address that it has.
//!
//! The agent of a node knows the policies of the cluster and the labels of its pods. It gives each set of labels a
//! small number ([identity](program::Identity)), and compiles a [program] for each pod of its node and each direction.
//! Instances map programs and ask them about new flows. Nothing here does IO.
//!
//! | module | feature | what |
//! | --- | --- | --- |
//! | [`program`] | | reads and judges programs; the core library is enough for it |
//! | `model` | `compile` | policies as values, with their bounds |
//! | `compile` | `compile` | identities, selectors, and programs; which programs a change concerns |
//! | `flat` | `compile` | what a program says of peers that are known by their addresses, as intervals |
//! | `kubernetes` | `kubernetes` | policies as the API server sends them |
//! | `suggest` | `suggest` | policies made of what pods were seen to do |
//!
//! # What policies mean
//!
//! Flows are judged at both ends: by the egress program of the source, and the ingress program of the destination.
//! Answers are not judged, nor are ICMP errors about a flow. For one end, the first line that applies decides:
//!
//! | | |
//! | --- | --- |
//! | the pod itself; its own node | allowed, whatever policies say |
//! | tier Admin | the first matching rule, by priority, name of the policy, place: Accept allows, Deny denies, Pass goes on with the next line |
//! | at least one NetworkPolicy selects the pod for the direction | allowed if any rule of any of them matches, else denied |
//! | tier Baseline | the first matching rule, as in tier Admin |
//! | else | allowed |
//!
//! | rules of | peers | match |
//! | --- | --- | --- |
//! | both | selectors of namespaces and pods | pods, by their identity |
//! | both | ranges (`ipBlock`, `networks`) | whoever has such an address, pods as well |
//! | ClusterNetworkPolicy | `nodes` | addresses of these nodes |
//! | ClusterNetworkPolicy | `domainNames` | nothing; reported as not enforced |
//! | NetworkPolicy, ingress | groups (`nebula-cni/allow-groups`) | whoever is no pod and has one of them in a Nebula certificate; nobody in clear |
//! | both | ports | TCP, UDP and SCTP by the destination port |
//! | both | names of ports | the ports of the destination pod with that name, of all its containers |
//! | both | no ports | every packet, ICMP and other protocols as well |
//!
//! The annotation `nebula-cni/allow-groups: "vms,backup"` of a NetworkPolicy adds one peer to each of its rules for
//! ingress that names peers: whoever carries any of the groups. It is ours, and other implementations do not know it.
//!
//! Pods of the host's network are no pods here: no policy selects them, and as peers they are addresses.
//!
//! # What cannot be read
//!
//! | what | NetworkPolicy | ClusterNetworkPolicy |
//! | --- | --- | --- |
//! | an invalid selector of its pods | isolates what the valid part selects, allows nothing | applies to what that selects: Accept matches nothing, Pass denies |
//! | an invalid or newer peer or port | it matches nothing | its rule: Accept matches nothing, Deny and Pass deny all |
//! | an unknown direction, or action | isolates in both directions | denies what the rule matches |
//! | more than 64 groups | none of them is allowed | |
//! | more rules than the bound | they allow nothing | everything is denied after the last one |
//! | no or an unknown tier, subject or priority | | an error of the conversion; the last version stays |
//! | more for one pod than a program holds | the pod is closed | the pod is closed |
//!
//! A peer whose identity is not known yet is refused if any policy selects the pod for the direction.
//!
//! # Audit
//!
//! A policy with the annotation `nebula-cni/audit: "true"` refuses and allows nothing. A verdict has two decisions:
//! that of all other policies, which is what happens, and that of all policies as if none had the annotation. A flow
//! that the first allows and the second denies [would be denied](program::Verdict::would_deny). Both hold in each
//! direction and tier: an audited NetworkPolicy does not isolate, so tier Baseline still decides for its pods; and
//! the rules after an audited Deny decide about its flows.
//!
//! # Example
//!
//! ```
//! # #[cfg(feature = "compile")]
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use nebula_cni_policy::compile::{Cluster, Subject};
//! use nebula_cni_policy::model::{Direction, Labels, NetworkPolicy, Peer, PodSelector, Profile, Rule};
//! use nebula_cni_policy::program::{self, Program};
//!
//! let mut cluster = Cluster::new();
//! let pod = |namespace: &str, app: &str| {
//!     let labels = Labels::from([("app".into(), app.into())]);
//!     Profile::new(namespace, Labels::new(), labels, vec![])
//! };
//! let (web, db) = (cluster.identify(pod("shop", "web")?)?, cluster.identify(pod("pay", "db")?)?);
//! let own_namespace = Rule { peers: vec![Peer::Pods(PodSelector::namespace("shop"))], ports: vec![] };
//! cluster.set_policy(&NetworkPolicy { ingress: vec![own_namespace], ..NetworkPolicy::new("shop", "own") });
//!
//! let subject = Subject { identity: web, addresses: vec![], node: vec![] };
//! let compiled = cluster.compile(&subject, Direction::Ingress);
//! let program = Program::read(&compiled.bytes)?;
//! assert!(program.judge(&program::Peer::pod(web, None), 6, 80).is_allowed());
//! assert!(!program.judge(&program::Peer::pod(db, None), 6, 80).is_allowed());
//! # Ok(())
//! # }
//! # #[cfg(not(feature = "compile"))]
//! # fn main() {}
//! ```

#[cfg(feature = "compile")]
pub mod compile;
#[cfg(feature = "compile")]
pub mod flat;
#[cfg(feature = "kubernetes")]
pub mod kubernetes;
#[cfg(feature = "compile")]
pub mod model;
pub mod program;
#[cfg(feature = "suggest")]
pub mod suggest;
