//! `nebula-cni-agent policy suggest`: what the pods of a namespace were seen to do on this node. What policies follow
//! from it is in [`nebula_cni_policy::suggest`].
//!
//! | file | what |
//! | --- | --- |
//! | `cluster.rs` | the pods of the cluster, which puts names to addresses |

mod cluster;

use std::fs::File;
use std::io::{self, Read as _};
use std::path::Path;

use kube::Client;
use nebula_cni_contract::instance_status::{self, SeenFlow};
use nebula_cni_contract::launch::Pod;
use nebula_cni_contract::seen::{BadSeen, Seen};

use self::cluster::{Cluster, pods_of_service};
use crate::cluster::api::{self, ApiError};
use crate::host_root::HostRoot;
use crate::pod_status::{self, PodStatusError};

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
    #[error(transparent)]
    Document(#[from] BadSeen),
    /// There is more than an answer may have.
    #[error(
        "the labels of the cluster's pods are too many to be looked at for others: \
         nebula-cni-agent policy suggest on the node has no such bound"
    )]
    TooMany,
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

/// Asks the instances of the pods of this node that are in the namespace, and the API server who their peers are.
/// `dns` is the Service of the cluster's DNS.
///
/// # Errors
/// Returns an error if the records cannot be read, or the API server does not answer.
pub async fn seen_by_node(
    (host, state_dir): (&HostRoot, &Path),
    client: &Client,
    namespace: &str,
    dns: &str,
) -> Result<Seen, SuggestError> {
    let said = Said::ask(host, state_dir, namespace)?;
    said.named(client, dns, usize::MAX).await
}

/// What the instances of the pods of a namespace say on this node: the other ends by their addresses.
#[derive(Debug)]
pub(crate) struct Said {
    namespace: String,
    pods: Vec<Asked>,
}

/// A pod, and what its instance said.
type Asked = (Pod, io::Result<(Vec<SeenFlow>, u64)>);

impl Said {
    /// Asks them. Blocks.
    pub(crate) fn ask(host: &HostRoot, state_dir: &Path, namespace: &str) -> Result<Self, SuggestError> {
        if !api::is_name(namespace) {
            return Err(SuggestError::Namespace(namespace.to_owned()));
        }
        let (mut records, _) = pod_status::records(host, state_dir)?;
        records.retain(|(_, record)| record.target.pod.namespace == namespace);
        let pods = pod_status::ask_all(&records, |(_, record)| {
            let said = instance_status::seen_flows(&host.resolve(&record.status_socket));
            (record.target.pod.clone(), said.map(|said| (said.flows, said.lost)))
        });
        Ok(Self { namespace: namespace.to_owned(), pods })
    }

    /// Whether there is any flow.
    pub(crate) fn has_flows(&self) -> bool {
        self.pods.iter().any(|(_, said)| said.as_ref().is_ok_and(|(flows, _)| !flows.is_empty()))
    }

    /// What is known without names, where there is no flow.
    pub(crate) fn without_names(self) -> Seen {
        let mut seen = Seen { namespace: self.namespace, pods: self.pods.len(), ..Seen::default() };
        for (pod, said) in self.pods {
            match said {
                Ok((_, lost)) => seen.lost = seen.lost.saturating_add(lost),
                Err(error) => seen.silent.push(silent(&pod, &error)),
            }
        }
        seen
    }

    /// Puts names to addresses. Labels and flows take this number of bytes each at most; flows beyond are left out,
    /// which is said.
    pub(crate) async fn named(self, client: &Client, dns: &str, room: usize) -> Result<Seen, SuggestError> {
        let cluster = Cluster::list(client, &self, room).await?;
        let dns = pods_of_service(client, dns).await?;
        Ok(cluster.seen(self, dns, room))
    }
}

fn silent(pod: &Pod, why: &dyn std::fmt::Display) -> String {
    format!("{}/{}: {why}", pod.namespace, pod.name)
}

const MAX_ANSWER: u64 = 64 << 20;

#[cfg(test)]
mod tests;
