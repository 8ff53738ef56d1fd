//! The pods of the cluster, as far as they count for the flows of some.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::net::IpAddr;
use std::sync::Arc;

use axum::http::Method;
use kube::Client;
use nebula_cni_contract::seen::{Flow, Peer, Seen, StableLabels, Tally, bytes_of, stable};
use serde::Deserialize;

use super::{Said, SuggestError, silent};
use crate::cluster::api::{self, ApiError};
use crate::table::member::incarnation;

/// A page of the list of pods: the few fields that count here, so that a list of thousands stays small.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Page {
    metadata: OfPage,
    items: Vec<ApiPod>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct OfPage {
    #[serde(rename = "continue")]
    next: Option<String>,
}

/// A pod, as the API server has it.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct ApiPod {
    metadata: Metadata,
    spec: Spec,
    status: Status,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Metadata {
    namespace: Option<String>,
    name: Option<String>,
    uid: Option<String>,
    labels: Option<BTreeMap<String, String>>,
    annotations: Option<BTreeMap<String, String>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Spec {
    host_network: Option<bool>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Status {
    #[serde(rename = "podIPs")]
    pod_ips: Option<Vec<PodIp>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct PodIp {
    ip: String,
}

/// Namespace and labels of pods: in memory once, however many pods have them.
type Alike = Arc<(String, StableLabels)>;

/// The pods of the cluster.
#[derive(Debug, Default)]
pub(super) struct Cluster {
    /// Whose addresses are wanted, with the incarnations.
    wanted: HashSet<(IpAddr, u64)>,
    /// Those who have them.
    pub(super) holders: HashMap<(IpAddr, u64), Alike>,
    /// The pods that were asked, by name.
    pub(super) own: HashMap<String, Option<Alike>>,
    sets: BTreeSet<Alike>,
    /// Bytes of labels for which there is still room.
    room: usize,
}

impl Cluster {
    /// Lists them.
    pub(super) async fn list(client: &Client, said: &Said, room: usize) -> Result<Self, SuggestError> {
        let mut cluster = Self::of(said, room);
        let mut after = String::new();
        for _ in 0..MAX_PAGES {
            let path = format!("/api/v1/pods?limit={PAGE}{after}");
            let page: Page = api::ask_for(client, Method::GET, &path, None).await?;
            for pod in page.items {
                cluster.add(pod, &said.namespace)?;
            }
            match page.metadata.next.filter(|token| !token.is_empty()) {
                Some(token) => after = format!("&continue={}", encoded(&token)),
                None => return Ok(cluster),
            }
        }
        Ok(cluster)
    }

    /// Without any pod yet.
    pub(super) fn of(said: &Said, room: usize) -> Self {
        let flows = said.pods.iter().filter_map(|(_, said)| said.as_ref().ok()).flat_map(|(flows, _)| flows);
        let wanted = flows.filter(|flow| flow.incarnation != 0).map(|flow| (flow.peer, flow.incarnation));
        let own = said.pods.iter().map(|(pod, _)| (pod.name.clone(), None));
        Self { wanted: wanted.collect(), own: own.collect(), room, ..Self::default() }
    }

    pub(super) fn add(&mut self, pod: ApiPod, own_namespace: &str) -> Result<(), SuggestError> {
        let ApiPod { metadata, spec, status } = pod;
        let (Some(namespace), Some(name), Some(uid)) = (metadata.namespace, metadata.name, metadata.uid) else {
            return Ok(());
        };
        // Those have the address of their node.
        if spec.host_network == Some(true) {
            return Ok(());
        }
        let is_own = namespace == own_namespace;
        let alike = self.share((namespace, stable(&metadata.labels.unwrap_or_default())))?;
        let mirrored = metadata.annotations.as_ref().and_then(|all| all.get("kubernetes.io/config.mirror"));
        for id in [Some(&uid), mirrored].into_iter().flatten() {
            let addresses = status.pod_ips.iter().flatten().filter_map(|ip| ip.ip.parse::<IpAddr>().ok());
            let held = addresses.map(|address| (address.to_canonical(), incarnation(id)));
            for key in held.filter(|key| self.wanted.contains(key)) {
                self.holders.insert(key, Arc::clone(&alike));
            }
        }
        if is_own && let Some(own) = self.own.get_mut(&name) {
            *own = Some(alike);
        }
        Ok(())
    }

    fn share(&mut self, labelled: (String, StableLabels)) -> Result<Alike, SuggestError> {
        if let Some(known) = self.sets.get(&labelled) {
            return Ok(Arc::clone(known));
        }
        let bytes = labelled.0.len() + bytes_of(&labelled.1);
        self.room = self.room.checked_sub(bytes).ok_or(SuggestError::TooMany)?;
        let alike = Arc::new(labelled);
        self.sets.insert(Arc::clone(&alike));
        Ok(alike)
    }

    /// Puts names to what instances said.
    pub(super) fn seen(&self, said: Said, dns: Option<Peer>, room: usize) -> Seen {
        let mut seen = Seen { namespace: said.namespace, pods: said.pods.len(), dns, ..Seen::default() };
        let (mut tally, mut left_out) = (Tally::within(room), 0_u64);
        for (pod, said) in said.pods {
            let Some(alike) = self.own.get(&pod.name).and_then(Option::as_ref) else {
                seen.silent.push(silent(&pod, &"the API server has no such pod"));
                continue;
            };
            let (of_pod, lost) = match said {
                Ok(said) => said,
                Err(error) => {
                    seen.silent.push(silent(&pod, &error));
                    continue;
                }
            };
            seen.lost = seen.lost.saturating_add(lost);
            for flow in of_pod {
                let kind = Flow {
                    labels: alike.1.clone(),
                    is_egress: flow.direction == "egress",
                    peer: self.peer(flow.peer, flow.incarnation),
                    protocol: flow.protocol,
                    port: flow.port,
                    flows: flow.flows,
                    last: flow.last,
                };
                left_out += u64::from(!tally.add(kind));
            }
        }
        if left_out > 0 {
            seen.silent.push(format!("{left_out} kind(s) of flows of this node, for which an answer has no room"));
        }
        seen.flows = tally.flows();
        seen.known = self.known(&seen);
        seen
    }

    fn peer(&self, address: IpAddr, incarnation: u64) -> Peer {
        if incarnation == 0 {
            return Peer::Address(address);
        }
        match self.holders.get(&(address, incarnation)) {
            Some(alike) => Peer::Pod { namespace: alike.0.clone(), labels: alike.1.clone() },
            None => Peer::Gone(address),
        }
    }

    /// All sets of labels in the namespaces that are named.
    fn known(&self, seen: &Seen) -> BTreeMap<String, BTreeSet<StableLabels>> {
        let mut named = seen.other_namespaces();
        named.insert(seen.namespace.clone());
        let mut known: BTreeMap<String, BTreeSet<StableLabels>> = BTreeMap::new();
        for alike in self.sets.iter().filter(|alike| named.contains(&alike.0)) {
            known.entry(alike.0.clone()).or_default().insert(alike.1.clone());
        }
        known
    }
}

/// The pods behind the Service of the cluster's DNS, or its address if it selects none.
pub(super) async fn pods_of_service(client: &Client, name: &str) -> Result<Option<Peer>, ApiError> {
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
pub(super) fn encoded(text: &str) -> String {
    let byte = |byte: u8| match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => char::from(byte).to_string(),
        _ => format!("%{byte:02X}"),
    };
    text.bytes().map(byte).collect()
}

const PAGE: usize = 500;
/// Half a million pods.
const MAX_PAGES: usize = 1000;
