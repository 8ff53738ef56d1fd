//! The instances of this node, by the plugin's records: what an instance says of itself does not count.

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use nebula_cni_contract::launch::Pod;

use crate::config::STATE_DIR;
use crate::host_root::HostRoot;
use crate::pod_status;

/// An attachment of a pod, whose instance keeps a ring of records.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attached {
    /// Network, container and interface: its name.
    pub attachment: String,
    /// The pod.
    pub pod: Pod,
    /// Where its instance answers, as the agent sees it.
    pub socket: PathBuf,
}

/// The attachments of this node, read again when a folder of records has changed.
#[derive(Debug, Default)]
pub(super) struct Attachments {
    all: Vec<Attached>,
    /// When each folder had last changed.
    folders: Vec<(PathBuf, Option<SystemTime>)>,
}

impl Attachments {
    /// Looks for changes, and returns whether there were any. Blocks.
    pub(super) fn look(&mut self, host: &HostRoot) -> bool {
        let folders = folders(&host.resolve(Path::new(STATE_DIR)));
        if folders == self.folders {
            return false;
        }
        let Ok((records, _)) = pod_status::records(host, Path::new(STATE_DIR)) else { return false };
        let attached = |(network, record): (String, Box<nebula_cni_plugin::attachment::record::Record>)| {
            let key = record.key();
            Attached {
                attachment: format!("{network}/{}-{}", key.container_id, key.ifname),
                socket: host.resolve(&record.status_socket),
                pod: record.target.pod,
            }
        };
        self.all = records.into_iter().map(attached).collect();
        // One that changes while it is read has another time than before.
        self.folders = folders;
        true
    }

    #[cfg(test)]
    pub(super) fn of(all: Vec<Attached>) -> Self {
        Self { all, folders: Vec::new() }
    }

    pub(super) fn all(&self) -> &[Attached] {
        &self.all
    }

    /// Their names.
    pub(super) fn names(&self) -> HashSet<String> {
        self.all.iter().map(|attached| attached.attachment.clone()).collect()
    }
}

fn folders(state: &Path) -> Vec<(PathBuf, Option<SystemTime>)> {
    let entries = fs::read_dir(state).into_iter().flatten().flatten();
    let folder = |entry: fs::DirEntry| {
        let is_folder = entry.file_type().is_ok_and(|kind| kind.is_dir());
        is_folder.then(|| (entry.path(), entry.metadata().and_then(|folder| folder.modified()).ok()))
    };
    let mut folders: Vec<_> = entries.filter_map(folder).collect();
    folders.sort();
    folders
}
