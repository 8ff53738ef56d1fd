//! `nebula-cni-agent policy suggest`: network policies that allow what the pods of a namespace were seen to do.
//!
//! | file | what |
//! | --- | --- |
//! | `seen.rs` | the flows, as a document |
//! | `suggested.rs` | makes policies of them |
//! | `yaml.rs` | writes these down |

mod seen;
mod suggested;
mod yaml;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::File;
use std::io::{self, Read as _};
use std::net::IpAddr;
use std::path::Path;

use axum::http::Method;
use k8s_openapi::api::core::v1::Pod as ApiPod;
use kube::Client;
use nebula_cni_contract::instance_status::{self, SeenFlow};
use nebula_cni_contract::launch::Pod;
use serde_json::Value;

pub use self::seen::{Flow, Peer, Seen, StableLabels, stable};
pub use self::suggested::Suggested;
pub use self::yaml::text;
use crate::cluster::api::{self, ApiError};
use crate::host_root::HostRoot;
use crate::pod_status::{self, PodStatusError};
use crate::table::member::incarnation;

/// Reads what this program printed on another node; `-` is the standard input. Blocks.
///
/// # Errors
/// Returns the system's error.
pub fn read_answer(path: &Path) -> io::Result<String> {
    match path.as_os_str() == "-" {
        true => io::read_to_string(io::stdin().take(MAX_ANSWER)),
        false => io::read_to_string(File::open(path)?.take(MAX_ANSWER)),
    }
}

/// Why there is no suggestion.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SuggestError {
    /// No name of a namespace.
    #[error("{0:?} is no name of a namespace")]
    Namespace(String),
    /// A time that cannot be read.
    #[error("{0:?} is no time: expected a number with s, m, h or d, such as 24h")]
    Since(String),
    /// The records of pods cannot be read.
    #[error(transparent)]
    Records(#[from] PodStatusError),
    /// The API server does not say who the pods are.
    #[error("cannot ask whose addresses they are: {0}")]
    Api(#[from] ApiError),
    /// A document of another node cannot be used.
    #[error("{0}: it is not what \"policy suggest --json\" prints for this namespace: {1}")]
    Document(String, String),
}

/// Seconds of a time such as `24h`.
///
/// # Errors
/// Refuses everything else.
pub fn seconds(text: &str) -> Result<u64, SuggestError> {
    let wrong = || SuggestError::Since(text.to_owned());
    let unit = match text.chars().last() {
        Some('s') => 1,
        Some('m') => 60,
        Some('h') => 3600,
        Some('d') => 86_400,
        _ => return Err(wrong()),
    };
    let number: u64 = text.get(..text.len() - 1).and_then(|number| number.parse().ok()).ok_or_else(wrong)?;
    number.checked_mul(unit).ok_or_else(wrong)
}

impl Seen {
    /// Asks the instances of the pods of this node that are in the namespace, and the API server who their peers are.
    /// `dns` is the Service of the cluster's DNS.
    ///
    /// # Errors
    /// Returns an error if the records cannot be read, or the API server does not answer.
    pub async fn of_node(
        (host, state_dir): (&HostRoot, &Path),
        client: &Client,
        namespace: &str,
        dns: &str,
    ) -> Result<Self, SuggestError> {
        if !api::is_name(namespace) {
            return Err(SuggestError::Namespace(namespace.to_owned()));
        }
        let (records, _) = pod_status::records(host, state_dir)?;
        let own =
            records.into_iter().map(|(_, record)| record).filter(|record| record.target.pod.namespace == namespace);
        let asked = own.map(|record| {
            let said = instance_status::seen_flows(&host.resolve(&record.status_socket));
            (record.target.pod, said.map(|said| (said.flows, said.lost)))
        });
        let asked: Vec<Asked> = asked.collect();
        let cluster = Cluster::list(client).await?;
        let dns = pods_of_service(client, dns).await?;
        Ok(cluster.seen(namespace, asked, dns))
    }

    /// Reads what was printed on another node.
    ///
    /// # Errors
    /// Refuses what is not such a document, and one of another namespace.
    pub fn read(text: &str, name: &str, namespace: &str) -> Result<Self, SuggestError> {
        let wrong = |why: String| SuggestError::Document(name.to_owned(), why);
        let mut document: Value = serde_json::from_str(text).map_err(|error| wrong(error.to_string()))?;
        let seen: Self = serde_json::from_value(document["seen"].take()).map_err(|error| wrong(error.to_string()))?;
        if seen.namespace != namespace {
            return Err(wrong(format!("it is of the namespace {:?}", seen.namespace)));
        }
        Ok(seen)
    }
}

/// Labels of the pod, whether it began the flows, the peer, protocol and port.
type Kind = (StableLabels, bool, Peer, u8, u16);

/// A pod, and what its instance said.
type Asked = (Pod, io::Result<(Vec<SeenFlow>, u64)>);

/// The pods of the cluster.
#[derive(Debug, Default)]
struct Cluster {
    /// By namespace and name.
    pods: BTreeMap<(String, String), StableLabels>,
    /// By address, with the incarnation.
    holders: HashMap<(IpAddr, u64), (String, String)>,
}

impl Cluster {
    async fn list(client: &Client) -> Result<Self, ApiError> {
        let mut cluster = Self::default();
        let mut after = String::new();
        for _ in 0..MAX_PAGES {
            let list = api::ask(client, Method::GET, &format!("/api/v1/pods?limit={PAGE}{after}"), None).await?;
            for pod in list["items"].as_array().into_iter().flatten() {
                if let Ok(pod) = serde_json::from_value::<ApiPod>(pod.clone()) {
                    cluster.add(pod);
                }
            }
            match list["metadata"]["continue"].as_str().filter(|token| !token.is_empty()) {
                Some(token) => after = format!("&continue={}", encoded(token)),
                None => return Ok(cluster),
            }
        }
        Ok(cluster)
    }

    fn add(&mut self, pod: ApiPod) {
        let (metadata, spec, status) = (pod.metadata, pod.spec.unwrap_or_default(), pod.status.unwrap_or_default());
        let (Some(namespace), Some(name), Some(uid)) = (metadata.namespace, metadata.name, metadata.uid) else {
            return;
        };
        // Those have the address of their node.
        if spec.host_network == Some(true) {
            return;
        }
        let key = (namespace, name);
        let mirrored = metadata.annotations.as_ref().and_then(|all| all.get("kubernetes.io/config.mirror"));
        for id in [Some(&uid), mirrored].into_iter().flatten() {
            let addresses = status.pod_ips.iter().flatten().filter_map(|ip| ip.ip.parse::<IpAddr>().ok());
            for address in addresses {
                self.holders.insert((address.to_canonical(), incarnation(id)), key.clone());
            }
        }
        self.pods.insert(key, stable(&metadata.labels.unwrap_or_default()));
    }

    /// Puts names to what instances said.
    fn seen(&self, namespace: &str, asked: Vec<Asked>, dns: Option<Peer>) -> Seen {
        let mut seen = Seen { namespace: namespace.to_owned(), pods: asked.len(), dns, ..Seen::default() };
        let mut flows: BTreeMap<Kind, (u64, u64)> = BTreeMap::new();
        for (pod, said) in asked {
            let Some(labels) = self.pods.get(&(pod.namespace.clone(), pod.name.clone())) else {
                seen.silent.push(format!("{}/{}: the API server has no such pod", pod.namespace, pod.name));
                continue;
            };
            let (of_pod, lost) = match said {
                Ok(said) => said,
                Err(error) => {
                    seen.silent.push(format!("{}/{}: {error}", pod.namespace, pod.name));
                    continue;
                }
            };
            seen.lost = seen.lost.saturating_add(lost);
            for flow in of_pod {
                let peer = self.peer(flow.peer, flow.incarnation);
                let kind = (labels.clone(), flow.direction == "egress", peer, flow.protocol, flow.port);
                let (count, last) = flows.entry(kind).or_default();
                (*count, *last) = (count.saturating_add(flow.flows), (*last).max(flow.last));
            }
        }
        seen.flows = flows
            .into_iter()
            .map(|((labels, is_egress, peer, protocol, port), (flows, last))| Flow {
                labels,
                is_egress,
                peer,
                protocol,
                port,
                flows,
                last,
            })
            .collect();
        seen.known = self.known(&seen);
        seen
    }

    fn peer(&self, address: IpAddr, incarnation: u64) -> Peer {
        if incarnation == 0 {
            return Peer::Address(address);
        }
        let key = self.holders.get(&(address, incarnation));
        match key.and_then(|key| Some((key, self.pods.get(key)?))) {
            Some(((namespace, _), labels)) => Peer::Pod { namespace: namespace.clone(), labels: labels.clone() },
            None => Peer::Gone(address),
        }
    }

    /// All sets of labels in the namespaces that are named.
    fn known(&self, seen: &Seen) -> BTreeMap<String, BTreeSet<StableLabels>> {
        let peers = seen.flows.iter().map(|flow| &flow.peer).chain(&seen.dns);
        let of_peers = peers.filter_map(|peer| match peer {
            Peer::Pod { namespace, .. } => Some(namespace),
            Peer::Address(_) | Peer::Gone(_) => None,
        });
        let named: BTreeSet<&String> = of_peers.chain([&seen.namespace]).collect();
        let mut known: BTreeMap<String, BTreeSet<StableLabels>> = BTreeMap::new();
        for ((namespace, _), labels) in self.pods.iter().filter(|((namespace, _), _)| named.contains(namespace)) {
            known.entry(namespace.clone()).or_default().insert(labels.clone());
        }
        known
    }
}

/// The pods behind the Service of the cluster's DNS, or its address if it selects none.
async fn pods_of_service(client: &Client, name: &str) -> Result<Option<Peer>, ApiError> {
    let Some((namespace, name)) =
        name.split_once('/').filter(|(space, name)| api::is_name(space) && api::is_name(name))
    else {
        return Ok(None);
    };
    let services = format!("/api/v1/namespaces/{namespace}/services");
    let Some(service) = api::named(client, &services, name).await? else { return Ok(None) };
    let selector = serde_json::from_value::<StableLabels>(service["spec"]["selector"].clone()).unwrap_or_default();
    if !selector.is_empty() {
        return Ok(Some(Peer::Pod { namespace: namespace.to_owned(), labels: selector }));
    }
    Ok(service["spec"]["clusterIP"].as_str().and_then(|address| address.parse().ok()).map(Peer::Address))
}

/// For a query.
fn encoded(text: &str) -> String {
    let byte = |byte: u8| match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => char::from(byte).to_string(),
        _ => format!("%{byte:02X}"),
    };
    text.bytes().map(byte).collect()
}

const PAGE: usize = 500;
/// Half a million pods.
const MAX_PAGES: usize = 1000;
const MAX_ANSWER: u64 = 64 << 20;

#[cfg(test)]
mod tests;
