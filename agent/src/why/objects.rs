//! The pods, the Service and the endpoints of a flow, as the API server has them.

use std::net::IpAddr;

use axum::http::Method;
use k8s_openapi::api::core::v1 as core;
use k8s_openapi::api::discovery::v1 as discovery;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::Client;
use nebula_cni_contract::cluster_table::EndpointState;
use nebula_cni_contract::why::{Asked, Kind, Question, Service, Target, Workload};
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::WhyError;
use crate::cluster::api;
use crate::table::endpoints::{self, Slice};

/// What the API server knows of both ends.
pub(crate) async fn resolve(client: &Client, question: &Question) -> Result<(Workload, Target), WhyError> {
    let Question { namespace, name, target, .. } = question;
    let address = question.source_address();
    let found = match address {
        Some(address) => pod_at(client, address).await?,
        None => pod(client, namespace, name).await?,
    };
    let source = found.unwrap_or_else(|| Workload {
        namespace: namespace.clone(),
        name: name.clone(),
        addresses: address.into_iter().collect(),
        ..Workload::default()
    });
    let target = match target {
        Asked::Address(address) => by_address(client, question, &source, *address).await?,
        Asked::Name { namespace, name, kind } => {
            let service = match kind {
                Some(Kind::Pod) => None,
                Some(Kind::Service) | None => service(client, namespace, name).await?,
            };
            match (service, kind) {
                (Some(found), _) => of_service(client, question, &source, &found).await?,
                (None, Some(Kind::Service)) => nothing(namespace, name),
                (None, _) => pod(client, namespace, name).await?.map_or_else(|| nothing(namespace, name), Target::Pod),
            }
        }
    };
    Ok((source, target))
}

fn nothing(namespace: &str, name: &str) -> Target {
    Target::Nothing { namespace: namespace.to_owned(), name: name.to_owned() }
}

async fn by_address(
    client: &Client,
    question: &Question,
    source: &Workload,
    address: IpAddr,
) -> Result<Target, WhyError> {
    if let Some(pod) = pod_at(client, address).await? {
        return Ok(Target::Pod(pod));
    }
    let services: Vec<core::Service> = list(client, "/api/v1/services?limit=10000").await?;
    match services.iter().find(|service| addresses(service).contains(&address)) {
        Some(service) => of_service(client, question, source, service).await,
        None => Ok(Target::Address(address)),
    }
}

/// The pod that has an address for itself.
async fn pod_at(client: &Client, address: IpAddr) -> Result<Option<Workload>, WhyError> {
    let path = format!("/api/v1/pods?fieldSelector=status.podIP%3D{address}");
    let pods: Vec<core::Pod> = list(client, &path).await?;
    Ok(pods.iter().map(workload).find(|pod| pod.is_alive() && !pod.is_on_host_network))
}

async fn pod(client: &Client, namespace: &str, name: &str) -> Result<Option<Workload>, WhyError> {
    let found: Option<core::Pod> = named(client, &format!("/api/v1/namespaces/{namespace}/pods"), name).await?;
    Ok(found.as_ref().map(workload))
}

async fn service(client: &Client, namespace: &str, name: &str) -> Result<Option<core::Service>, WhyError> {
    named(client, &format!("/api/v1/namespaces/{namespace}/services"), name).await
}

async fn of_service(
    client: &Client,
    question: &Question,
    source: &Workload,
    service: &core::Service,
) -> Result<Target, WhyError> {
    let metadata = &service.metadata;
    let (Some(namespace), Some(name)) = (&metadata.namespace, &metadata.name) else { return Ok(Target::Unknown) };
    let slices = slices(client, namespace, name).await?;
    let (mut found, endpoint) = described(service, &slices, question, source);
    if let Some(address) = endpoint {
        let path = format!("/api/v1/namespaces/{namespace}/pods?fieldSelector=status.podIP%3D{address}");
        let pods: Vec<core::Pod> = list(client, &path).await?;
        found.endpoint = pods.iter().map(workload).find(Workload::is_alive);
    }
    Ok(Target::Service(found))
}

async fn slices(client: &Client, namespace: &str, name: &str) -> Result<Vec<Slice>, WhyError> {
    let label = "kubernetes.io/service-name";
    let path =
        format!("/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices?labelSelector={label}%3D{name}");
    match list::<discovery::EndpointSlice>(client, &path).await {
        Ok(slices) => Ok(slices.iter().flat_map(Slice::of_slice).collect()),
        // A server of before 1.21.
        Err(WhyError::Api(error)) if error.status() == Some(404) => {
            let path = format!("/api/v1/namespaces/{namespace}/endpoints");
            let endpoints: Option<core::Endpoints> = named(client, &path, name).await?;
            Ok(endpoints.iter().flat_map(Slice::of_endpoints).collect())
        }
        Err(error) => Err(error),
    }
}

/// A Service for the flow that is asked about, and its endpoint that the answer is about.
pub(super) fn described(
    service: &core::Service,
    slices: &[Slice],
    question: &Question,
    source: &Workload,
) -> (Service, Option<IpAddr>) {
    let spec = service.spec.clone().unwrap_or_default();
    let ports = spec.ports.unwrap_or_default();
    let protocol = |port: &core::ServicePort| endpoints::protocol(port.protocol.as_deref());
    // A message of ICMP has no port: it goes where the first one leads.
    let is_asked = |port: &&core::ServicePort| {
        question.port == 0 || port.port == i32::from(question.port) && protocol(port) == Some(question.protocol)
    };
    let asked = ports.iter().find(is_asked);
    let has_family = |address: IpAddr| source.addresses.iter().any(|own| own.is_ipv4() == address.is_ipv4());
    let (mut ready, mut not_ready, mut target_port, mut endpoint) = (0, 0, None, None);
    for slice in slices {
        let port = asked.and_then(|asked| slice.port_of(asked.name.as_deref().unwrap_or_default(), protocol(asked)?));
        for (address, state) in slice.addresses() {
            match state {
                EndpointState::Ready => ready += 1,
                EndpointState::NotReady | EndpointState::Terminating => {
                    not_ready += 1;
                    continue;
                }
            }
            if endpoint.is_none() && has_family(address) {
                (endpoint, target_port) = (Some(address), port);
            }
        }
    }
    let number = |port: &core::ServicePort| match &port.target_port {
        Some(IntOrString::Int(number)) => u16::try_from(*number).ok(),
        _ => u16::try_from(port.port).ok(),
    };
    let target_port = asked.and_then(|asked| target_port.or_else(|| number(asked)));
    let name = |port: &core::ServicePort| {
        format!("{}/{}", port.port, port.protocol.as_deref().unwrap_or("TCP").to_ascii_lowercase())
    };
    let described = Service {
        namespace: service.metadata.namespace.clone().unwrap_or_default(),
        name: service.metadata.name.clone().unwrap_or_default(),
        addresses: addresses(service),
        external_name: spec.external_name.filter(|_| spec.type_.as_deref() == Some("ExternalName")),
        has_selector: spec.selector.is_some_and(|selector| !selector.is_empty()),
        ports: ports.iter().map(name).collect(),
        target_port,
        ready,
        not_ready,
        endpoint: None,
    };
    (described, endpoint)
}

/// The cluster addresses of a Service; none if it is headless.
fn addresses(service: &core::Service) -> Vec<IpAddr> {
    let Some(spec) = &service.spec else { return Vec::new() };
    // An older server has the first one only.
    let all = match &spec.cluster_ips {
        Some(both) if !both.is_empty() => both.iter().collect::<Vec<_>>(),
        _ => spec.cluster_ip.iter().collect(),
    };
    all.into_iter().filter_map(|address| address.parse().ok()).collect()
}

pub(super) fn workload(pod: &core::Pod) -> Workload {
    let (spec, status) = (pod.spec.as_ref(), pod.status.as_ref());
    let both = status.and_then(|status| status.pod_ips.as_ref()).into_iter().flatten().map(|ip| &ip.ip);
    let first = status.and_then(|status| status.pod_ip.as_ref());
    let addresses = match both.clone().next() {
        Some(_) => both.filter_map(|ip| ip.parse().ok()).collect(),
        None => first.and_then(|ip| ip.parse().ok()).into_iter().collect(),
    };
    let conditions = status.and_then(|status| status.conditions.as_ref()).into_iter().flatten();
    Workload {
        namespace: pod.metadata.namespace.clone().unwrap_or_default(),
        name: pod.metadata.name.clone().unwrap_or_default(),
        is_found: true,
        phase: status.and_then(|status| status.phase.clone()).unwrap_or_default(),
        node: spec.and_then(|spec| spec.node_name.clone()).unwrap_or_default(),
        addresses,
        is_on_host_network: spec.and_then(|spec| spec.host_network).unwrap_or(false),
        is_ready: conditions.into_iter().any(|condition| condition.type_ == "Ready" && condition.status == "True"),
    }
}

async fn named<T: DeserializeOwned>(client: &Client, collection: &str, name: &str) -> Result<Option<T>, WhyError> {
    let found = api::named(client, collection, name).await?;
    found.map(|object| read(&format!("{collection}/{name}"), object)).transpose()
}

async fn list<T: DeserializeOwned>(client: &Client, path: &str) -> Result<Vec<T>, WhyError> {
    let mut answer = api::ask(client, Method::GET, path, None).await?;
    answer.get_mut("items").map_or_else(|| Ok(Vec::new()), |items| read(path, items.take()))
}

fn read<T: DeserializeOwned>(what: &str, object: Value) -> Result<T, WhyError> {
    serde_json::from_value(object).map_err(|source| WhyError::Object { what: what.to_owned(), source })
}
