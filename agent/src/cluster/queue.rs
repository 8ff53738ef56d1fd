//! The way from the parts of the agent that work on the node to the one that speaks with the API server: a bounded
//! queue, so that an API server that hangs holds up nothing.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use nebula_cni_contract::clock::Clock;
use nebula_cni_contract::labels::{Answer, LabelSource, Question};
use nebula_cni_contract::launch::Pod;
use tokio::sync::{Notify, mpsc};

use super::notice::Notice;

/// One thing to do at the API server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ApiTask {
    /// Report this.
    Report(Notice),
    /// Evict this pod, if that is allowed.
    Evict(Pod),
    /// Set or remove the label of unprotected pods.
    Label {
        /// The pod.
        pod: Pod,
        /// Whether it is unprotected.
        is_unprotected: bool,
    },
}

/// Queues tasks for the API server; cheap to clone.
#[derive(Clone)]
pub struct ApiQueue {
    queue: Option<mpsc::Sender<ApiTask>>,
    labels: Arc<dyn LabelSource + Send + Sync>,
    changed: Arc<Notify>,
}

impl ApiQueue {
    /// Without an API server: nothing is reported, and labels are unknown.
    #[must_use]
    pub fn none() -> Self {
        Self { queue: None, labels: Arc::new(NoLabels), changed: Arc::default() }
    }

    /// Also returns the end from which a worker takes the tasks. `labels` knows the pods of the node, and
    /// `changed` is notified when one of them changes.
    #[must_use]
    pub fn new(labels: Arc<dyn LabelSource + Send + Sync>, changed: Arc<Notify>) -> (Self, mpsc::Receiver<ApiTask>) {
        let (queue, tasks) = mpsc::channel(MAX_WAITING);
        (Self { queue: Some(queue), labels, changed }, tasks)
    }

    /// Reports something. Repetitions are left out later.
    pub fn report(&self, notice: Notice) {
        self.enqueue(ApiTask::Report(notice));
    }

    /// Asks for an eviction.
    pub fn evict(&self, pod: &Pod) {
        self.enqueue(ApiTask::Evict(pod.clone()));
    }

    /// Sets or removes the label of unprotected pods.
    pub fn label(&self, pod: &Pod, is_unprotected: bool) {
        self.enqueue(ApiTask::Label { pod: pod.clone(), is_unprotected });
    }

    /// Labels of the node's pods and of namespaces.
    #[must_use]
    pub fn labels(&self) -> Arc<dyn LabelSource + Send + Sync> {
        Arc::clone(&self.labels)
    }

    /// Waits until a pod of the node changes; forever without an API server.
    pub async fn pods_changed(&self) {
        self.changed.notified().await;
    }

    fn enqueue(&self, task: ApiTask) {
        let Some(queue) = &self.queue else { return };
        // A notice that does not fit is reported after a later look, if it still holds.
        if queue.try_send(task).is_err() {
            tracing::debug!("the API server is slow: a report is left out");
        }
    }
}

impl fmt::Debug for ApiQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ApiQueue").field("queue", &self.queue).finish_non_exhaustive()
    }
}

/// Without an API server nobody knows labels.
#[derive(Debug)]
struct NoLabels;

impl LabelSource for NoLabels {
    fn ask(&self, _: &Path, _: &Question, _: &dyn Clock) -> Answer {
        Answer::Undecided("the agent has no API server to ask for labels".to_owned())
    }
}

const MAX_WAITING: usize = 1024;
