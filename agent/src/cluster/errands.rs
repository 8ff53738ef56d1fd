//! The way from the parts of the agent that work on the node to the one that speaks with the API server: a bounded queue,
//! so that an API server that hangs holds up nothing.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use nebula_cni_plugin::clock::Clock;
use nebula_cni_plugin::enrolment::labels::{Answer, LabelSource, Question};
use nebula_cni_plugin::launch::Pod;
use tokio::sync::{Notify, mpsc};

use super::notice::Notice;

/// One thing to do at the API server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Errand {
    /// Report this.
    Tell(Notice),
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

/// Hands out errands; cheap to clone.
#[derive(Clone)]
pub struct Errands {
    queue: Option<mpsc::Sender<Errand>>,
    labels: Arc<dyn LabelSource + Send + Sync>,
    changed: Arc<Notify>,
}

impl Errands {
    /// Without an API server: nothing is told to anybody, and labels are unknown.
    #[must_use]
    pub fn none() -> Self {
        Self { queue: None, labels: Arc::new(NoLabels), changed: Arc::default() }
    }

    /// With somebody who runs the errands that come out of the other end. `labels` knows the pods of the node, and
    /// `changed` is notified when one of them changes.
    #[must_use]
    pub fn new(labels: Arc<dyn LabelSource + Send + Sync>, changed: Arc<Notify>) -> (Self, mpsc::Receiver<Errand>) {
        let (queue, errands) = mpsc::channel(MAX_WAITING);
        (Self { queue: Some(queue), labels, changed }, errands)
    }

    /// Reports something. Repetitions are left out later.
    pub fn tell(&self, notice: Notice) {
        self.hand_out(Errand::Tell(notice));
    }

    /// Asks for an eviction.
    pub fn evict(&self, pod: &Pod) {
        self.hand_out(Errand::Evict(pod.clone()));
    }

    /// Sets or removes the label of unprotected pods.
    pub fn label(&self, pod: &Pod, is_unprotected: bool) {
        self.hand_out(Errand::Label { pod: pod.clone(), is_unprotected });
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

    fn hand_out(&self, errand: Errand) {
        let Some(queue) = &self.queue else { return };
        // What does not fit is told again after the next look, if it is still so.
        if queue.try_send(errand).is_err() {
            tracing::debug!("the API server is slow: a report is left out");
        }
    }
}

impl fmt::Debug for Errands {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Errands").field("queue", &self.queue).finish_non_exhaustive()
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
