//! `nebula-cni-agent policy test`: what the programs of this node say about a flow, by name, without sending a packet.

use std::io;
use std::net::IpAddr;
use std::path::Path;

use kube::Client;
use nebula_cni_contract::cluster_table::{Labels, Layout, MAX_BYTES, Table};
use nebula_cni_contract::launch::CLUSTER_TABLE;
use nebula_cni_contract::policy_test::{Answer, BadEnd, End, Explained, OfNode, Said, Tested};
use nebula_cni_contract::why::{Question, Target, Workload};
use nebula_cni_policy::program::{self, Decision, Identity, Peer, Program, Reason, Tier, Who};

use crate::cluster::api::{self, ApiError};
use crate::durable;
use crate::host_root::HostRoot;

/// Why there is no verdict.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AskError {
    /// The command line has something else.
    #[error(transparent)]
    Malformed(#[from] BadEnd),
    /// The API server does not say where a pod is.
    #[error("cannot ask where {0} is: {1}; its address can be given instead")]
    Api(String, ApiError),
    /// There is no table.
    #[error("cannot read the cluster table of this node: {0}; is the agent running, with pods captured?")]
    Table(#[source] io::Error),
    /// The pod is not there, or has no address.
    #[error("there is no pod {0} with an address of its own")]
    NoPod(String),
}

/// The address of an end. Asks the API server about a pod; `client` is called for that only.
///
/// # Errors
/// Returns an error if the server does not answer, or has no such pod.
pub async fn address(end: &End, client: impl AsyncFnOnce() -> Result<Client, ApiError>) -> Result<IpAddr, AskError> {
    let (name, namespace) = match end {
        End::Address(address) => return Ok(*address),
        End::Pod { name, namespace } => (name, namespace),
    };
    let failed = |error| AskError::Api(end.to_string(), error);
    let client = client().await.map_err(failed)?;
    let pod = api::named(&client, &format!("/api/v1/namespaces/{namespace}/pods"), name).await.map_err(failed)?;
    let pod = pod.filter(|pod| pod["spec"]["hostNetwork"] != true);
    let address = pod.and_then(|pod| pod["status"]["podIP"].as_str()?.parse::<IpAddr>().ok());
    address.map(|address| address.to_canonical()).ok_or_else(|| AskError::NoPod(end.to_string()))
}

/// What the programs in the table of this node say.
///
/// # Errors
/// Returns an error if there is no table.
pub fn answer(host: &HostRoot, from: IpAddr, to: IpAddr, protocol: u8, port: u16) -> Result<Answer, AskError> {
    with_table(host, |table| judge(table, from, to, protocol, port))
}

fn with_table<T>(host: &HostRoot, then: impl FnOnce(&Table<'_>) -> T) -> Result<T, AskError> {
    let bytes = durable::read_bounded(&host.resolve(Path::new(CLUSTER_TABLE)), MAX_BYTES).map_err(AskError::Table)?;
    let unusable = || AskError::Table(io::Error::new(io::ErrorKind::InvalidData, "it is of another release"));
    let layout = Layout::read(&bytes).map_err(|_| unusable())?;
    Ok(then(&layout.table(&bytes)))
}

/// What the programs of a table say.
#[must_use]
pub(crate) fn judge(table: &Table<'_>, from: IpAddr, to: IpAddr, protocol: u8, port: u16) -> Answer {
    let said = |own: IpAddr, other: IpAddr, place: usize| {
        let bytes = *table.programs(own)?.get(place)?;
        let program = Program::read(bytes).ok()?;
        let peer = Peer { who: who(table, other), address: Some(other) };
        let verdict = program.judge(&peer, protocol, port);
        let explain = |decision: Decision| explained(program.explain(decision));
        Some(Said { decision: explain(verdict.enforced), would_deny: verdict.would_deny().map(explain) })
    };
    Answer {
        version: table.version(),
        in_tunnel: is_enrolled(table, from) && is_enrolled(table, to),
        egress: said(from, to, 1),
        ingress: said(to, from, 0),
        from,
        to,
        protocol,
        port,
    }
}

/// What this node says of the flow between two ends that the API server has named, at whichever end is on it. Blocks.
pub(crate) fn tested(
    (host, node): (&HostRoot, &str),
    (mut source, mut target): (Workload, Target),
    question: &Question,
) -> Tested {
    let judged = with_table(host, |table| {
        // Somebody enrolled, whom the API server does not know by this address.
        if source.namespace.is_empty() && source.addresses.iter().any(|address| is_enrolled(table, *address)) {
            source.is_found = true;
        }
        if let Target::Address(address) = target
            && is_enrolled(table, address)
        {
            let (name, addresses) = (address.to_string(), vec![address]);
            target = Target::Pod(Workload { name, addresses, is_found: true, ..Workload::default() });
        }
        let (from, to) = pair(&source, &target)?;
        Some(judge(table, from, to, question.protocol, target.port_for(question.port)))
    });
    let answer = judged.as_ref().ok().and_then(Option::as_ref);
    let of_node = |pod: Option<&Workload>, said: Option<&Said>| {
        let is_here = pod.is_some_and(|pod| pod.node == node) || said.is_some();
        let version = answer.map(|answer| answer.version);
        is_here.then(|| OfNode { node: node.to_owned(), version, said: said.cloned() })
    };
    let egress = of_node(Some(&source), answer.and_then(|answer| answer.egress.as_ref()));
    let ingress = of_node(target.destination(), answer.and_then(|answer| answer.ingress.as_ref()));
    let in_tunnel = answer.map(|answer| answer.in_tunnel);
    Tested { source, target, protocol: question.protocol, port: question.port, in_tunnel, egress, ingress }
}

/// Addresses of one family.
fn pair(source: &Workload, target: &Target) -> Option<(IpAddr, IpAddr)> {
    let outside = if let Target::Address(address) = target { Some(*address) } else { None };
    let to: Vec<IpAddr> =
        target.destination().into_iter().flat_map(|pod| pod.addresses.iter().copied()).chain(outside).collect();
    let mut pairs = source.addresses.iter().flat_map(|from| to.iter().map(move |to| (*from, *to)));
    pairs.find(|(from, to)| from.is_ipv4() == to.is_ipv4())
}

fn is_enrolled(table: &Table<'_>, address: IpAddr) -> bool {
    table.incarnation(address).is_some()
}

fn explained(explained: program::Explained<'_>) -> Explained {
    let program::Explained { decision, policy, rule } = explained;
    Explained {
        allowed: decision.is_allowed,
        reason: decision.reason.word().to_owned(),
        tier: decision.reason.tier().map(|tier: Tier| tier.name().to_owned()),
        policy: policy.map(str::to_owned),
        rule: match decision.reason {
            Reason::Rule { rule, .. } => Some(rule),
            _ => None,
        },
        rule_name: rule.map(str::to_owned),
        text: explained.to_string(),
    }
}

/// As an instance sees the other end.
fn who(table: &Table<'_>, address: IpAddr) -> Who {
    match table.labels(address) {
        Labels::Set(number) => Identity::new(number).map_or(Who::Unnumbered, Who::Pod),
        Labels::NoPod => Who::Outside,
        // An enrolled pod has an incarnation; what has none comes in clear.
        Labels::Unknown if table.incarnation(address).unwrap_or_default() == 0 => Who::Outside,
        Labels::Unknown => Who::Unnumbered,
    }
}
