//! What one look at the node found: the sandboxes of the runtime, the records of the plugin, and what their instances
//! and devices say.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use nebula_cni_contract::instance_status::Status;
use nebula_cni_contract::launch::Pod;
use nebula_cni_contract::netns::NetnsId;
use nebula_cni_plugin::request::Key;

/// Everything at one moment.
#[derive(Debug, Clone, Default)]
pub struct Seen {
    /// Sandboxes of the runtime that have a network of their own.
    pub sandboxes: Vec<Sandbox>,
    /// Records of the plugin.
    pub records: Vec<Attachment>,
    /// Running instances without a record.
    pub orphans: Vec<Key>,
}

/// A sandbox as the runtime reports it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sandbox {
    /// Its id, which is also the container id in the record.
    pub id: String,
    /// The pod.
    pub pod: Pod,
    /// How often the pod's sandbox was recreated.
    pub attempt: u32,
    /// Whether it runs.
    pub is_ready: bool,
    /// Path of its network namespace, as the node names it.
    pub netns: Option<PathBuf>,
    /// The namespace that is there now.
    pub netns_id: Option<NetnsId>,
    /// Whether the operator enrolled the pod. Not decided for one that does not run or has a record, which counts more.
    pub enrolment: Enrolment,
}

/// Whether the operator enrolled a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Enrolment {
    /// It must have a tunnel.
    Enrolled,
    /// It must not.
    NotEnrolled,
    /// The same, because its annotation says so.
    OptedOut,
    /// Nobody can tell now, for this reason.
    Undecided(String),
}

/// A record, and what became of the attachment it describes.
#[derive(Debug, Clone)]
pub struct Attachment {
    /// Which attachment.
    pub key: Key,
    /// Its pod.
    pub pod: Pod,
    /// Whether the attachment was completed.
    pub is_complete: bool,
    /// Whether rules on the node hold its traffic: those of isolation or of capture.
    pub has_rules: bool,
    /// The namespace that it was made in.
    pub netns_id: NetnsId,
    /// Whether that namespace is still at its path.
    pub has_netns: bool,
    /// What the instance says.
    pub instance: Instance,
    /// For how long it has not answered.
    pub silent_for: Duration,
    /// Whether the pod has its device; `None` if that was not looked at.
    pub has_device: Option<bool>,
    /// Restarts of the instance in a row; only those that the plugin made.
    pub restarts: u32,
    /// Whether the instance keeps dying soon after its start, and how long until its next start.
    pub crash_loop: Option<CrashLoop>,
}

impl Attachment {
    /// Whether the instance does not answer.
    #[must_use]
    pub fn is_silent(&self) -> bool {
        matches!(self.instance, Instance::Silent(_))
    }
}

/// An instance that keeps dying.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CrashLoop {
    /// Restarts in a row.
    pub restarts: u32,
    /// Seconds between the last start and the next.
    pub delay: u64,
}

/// What an instance says about itself.
#[derive(Debug, Clone)]
pub enum Instance {
    /// It answered.
    Answers(Arc<Status>),
    /// It did not, for this reason.
    Silent(String),
}
