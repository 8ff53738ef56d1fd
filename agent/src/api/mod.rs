//! The agent's API for kubectl's plugin: HTTPS, reached through the API server's proxy for one Service, behind which
//! are all agents. That proxy neither says who asks nor proves that it is the API server, and others reach the port
//! as well. So each request carries a token, and the API server is asked whose it is (TokenReview) and what they may
//! do (SubjectAccessReview). A request names a node: whichever agent gets it forwards it to the agent of that one.
//!
//! | file | what |
//! | --- | --- |
//! | `server.rs` | connections: TLS, their number, their time |
//! | `token.rs` | the token of a request |
//! | `review.rs` | asks the API server about tokens and permissions |
//! | `recent.rs` | answers that hold for a while |
//! | `quotas.rs` | how often the API server is asked, by whose connection it is |
//! | `denied.rs` | why there is no answer |
//! | `routes.rs` | which path is answered by what, and who may ask |
//! | `forward.rs` | the way to the agent of another node |
//! | `agents.rs` | where that is |
//! | `unverified.rs` | TLS to it |
//! | `answers.rs` | how the node and its pods stand, and upgrades |
//! | `doctor.rs` | what is wrong with the node and its pods |
//! | `flows.rs` | flow records as a stream |
//! | `why.rs` | what the node knows of a flow |
//! | `policies.rs` | what network policies say of a flow, and what pods were seen to do |
//! | `sight.rs` | of which namespaces pods may be shown |

mod agents;
mod answers;
mod denied;
mod doctor;
mod flows;
mod forward;
mod policies;
mod quotas;
mod recent;
mod review;
mod routes;
mod server;
mod sight;
mod token;
mod unverified;
mod why;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use kube::Client;
use nebula_cni_contract::instance_status::Status;
use tokio::sync::Semaphore;

use self::forward::Gateway;
use self::review::Reviewer;
pub use self::server::{ServeError, serve};
pub use self::unverified::connector;
use crate::cluster;
use crate::cluster::throttle::Quota;
use crate::listener;
use crate::node::Node;
use crate::reconcile::plan::Stand;

/// The pods of the last look at the node, each with what its instance said.
pub type Pods = Arc<dyn Fn() -> Vec<(Stand, Option<Arc<Status>>)> + Send + Sync>;

/// What the API answers from.
pub struct Api {
    node: Node,
    /// Name of the node in Kubernetes.
    name: String,
    pods: Pods,
    reviewer: Reviewer,
    gateway: Gateway,
    client: Client,
    /// Of answers for which files or instances are asked.
    working: Semaphore,
    /// Of streams that go on.
    following: Semaphore,
    /// Of answers for which all pods of the cluster are listed.
    listing: Semaphore,
    /// How often they may be.
    lists: Mutex<Quota>,
}

impl Api {
    /// The API of a node. `client` is what asks the API server about tokens, and about the agents of its own namespace.
    #[must_use]
    pub fn new(node: Node, name: String, client: Client, pods: Pods) -> Arc<Self> {
        let (working, following) = (Semaphore::new(WORKING), Semaphore::new(FOLLOWING));
        let gateway = Gateway::new(client.clone());
        let reviewer = Reviewer::new(client.clone());
        let (listing, lists) = (Semaphore::new(1), Mutex::new(Quota::new(LISTS, Duration::from_secs(60))));
        Arc::new(Self { node, name, pods, reviewer, gateway, client, working, following, listing, lists })
    }

    /// Whether all pods of the cluster may be listed again.
    fn take_list(&self, now: Instant) -> bool {
        // No step leaves it in between.
        self.lists.lock().unwrap_or_else(PoisonError::into_inner).take(now)
    }
}

/// Serves the API where the configuration wants one, until the task is cancelled.
pub(crate) async fn keep(node: &Node, name: Option<String>, pods: Pods) {
    let Some(address) = node.config.api else { return };
    let Some(name) = name else {
        tracing::warn!("no API for kubectl: the name of the node is not known (--node or NODE_NAME)");
        return;
    };
    loop {
        let outcome = async {
            let client = cluster::api::open(None).await.map_err(ServeError::Client)?;
            let listener = listener::bind(address).map_err(|source| ServeError::Listen { address, source })?;
            let api = Api::new(node.clone(), name.clone(), client, Arc::clone(&pods));
            serve(api, listener).await
        };
        if let Err(error) = outcome.await {
            tracing::warn!(%error, "no API for kubectl; the agent tries again");
        }
        tokio::time::sleep(RETRY).await;
    }
}

const WORKING: usize = 2;
const FOLLOWING: usize = 16;
/// In a minute, for all callers together.
const LISTS: usize = 12;
const RETRY: Duration = Duration::from_secs(30);
