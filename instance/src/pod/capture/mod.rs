//! Capture of a pod's traffic to other pods and to Services, whatever address its programs use
//! ([`nebula_cni_contract::launch::Capture`]): the routes to the device, the sockets for what is passed through to the
//! primary network, and the cluster table, which says what an address is and which network policies the pod has.

mod bypass;
mod connections;
mod directory;
mod node_choice;
mod policy;
mod routes;
mod seen_flows;
mod table_file;
mod verdicts;

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

pub(crate) use directory::ClusterDirectory;
use ipnet::IpNet;
use nebula_cni_contract::launch::{self, LaunchSpec};
use nebula_core::Config;
use nebula_core::capture::OpenedBefore;
use nebula_core::firewall::NetworkPolicy;
use nebula_core::io::{Bypass, Options};
use nebula_linux::folder_watch::FolderWatch;
use nebula_linux::netns::Namespace;
use policy::PodPolicy;
pub(crate) use routes::routes;
use table_file::TableFile;
pub(crate) use verdicts::VerdictCounters;

use crate::pod::error::Error;

/// What an instance knows about its pod's cluster, and from where.
pub(crate) struct Capture {
    spec: Arc<launch::Capture>,
    file: TableFile,
    directory: Arc<ClusterDirectory>,
    verdicts: Arc<VerdictCounters>,
}

/// The cluster table as the status document reports it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TableReport {
    /// Version of the table in use; `None`: there is no table.
    pub version: Option<u64>,
    /// When it was written (since the Unix epoch).
    pub written: Option<Duration>,
    /// Enrolled pods, addresses known not to be enrolled, ports of Services, and endpoints in it.
    pub counts: [u32; 4],
    /// Why there is no table, or not the one that was written last.
    pub problem: Option<String>,
    /// Why the pod is closed although there is one.
    pub closed: Option<&'static str>,
}

impl Capture {
    /// Opens the folder of the table and reads the table if there is one. Later nothing outside that folder can be
    /// opened. `overlay` are the networks that are reached through tunnels.
    pub(crate) fn open(spec: &launch::Capture, overlay: &[IpNet]) -> Self {
        let spec = Arc::new(spec.clone());
        let directory = Arc::new(ClusterDirectory::unknown(Arc::clone(&spec), overlay.into()));
        let mut capture = Self { file: TableFile::new(&spec.table), directory, spec, verdicts: Arc::default() };
        capture.refresh();
        if let TableReport { version: None, problem, .. } = capture.report() {
            tracing::warn!(table = %capture.spec.table.display(), error = problem,
                "No cluster table: all captured traffic waits and is dropped until the node agent has written one");
        }
        capture
    }

    /// Watches the table's folder, at the expense of `user`. `None`: it must be looked at from time to time.
    pub(crate) fn watch(&self, user: Option<u32>) -> Option<FolderWatch> {
        let watch = FolderWatch::new(self.file.folder(), user);
        watch
            .inspect_err(|error| tracing::warn!(%error, "The cluster table is looked at every {LOOK_INTERVAL:?} instead of being watched"))
            .ok()
    }

    /// What the table says now.
    pub(crate) fn directory(&self) -> Arc<ClusterDirectory> {
        Arc::clone(&self.directory)
    }

    /// What network policies said about the pod's flows.
    pub(crate) fn verdicts(&self) -> Arc<VerdictCounters> {
        Arc::clone(&self.verdicts)
    }

    /// Uses the table that is there now, if it is a newer one; `None` if not.
    pub(crate) fn refresh(&mut self) -> Option<Arc<ClusterDirectory>> {
        let table = self.file.read_newer(self.directory.table_version())?;
        tracing::debug!(version = table.version(), counts = ?table.counts(), "Cluster table");
        self.directory = Arc::new(self.directory.with(table));
        Some(self.directory())
    }

    pub(crate) fn report(&self) -> TableReport {
        let (problem, closed) = (self.file.problem().map(str::to_owned), self.directory.why_closed());
        match self.directory.table() {
            Some(table) => TableReport {
                version: Some(table.version()),
                written: table.written(),
                counts: table.counts(),
                problem,
                closed,
            },
            None => TableReport { problem, ..TableReport::default() },
        }
    }

    /// What is wrong with a certificate for `networks`, if the pod's own addresses are not what it is for.
    pub(crate) fn contradiction(&self, networks: &[IpNet]) -> Option<String> {
        let own = &self.spec.sources;
        let other: Vec<IpAddr> = networks.iter().map(IpNet::addr).filter(|address| !own.contains(address)).collect();
        (!other.is_empty()).then(|| {
            format!(
                "the certificate is for {other:?}, and capture needs one for the pod's own address {own:?}: set \
                 \"address\": \"same\" in the policy of the CA"
            )
        })
    }
}

/// What a starting node gets, and needs only once.
#[derive(Debug)]
pub(crate) struct Equipment {
    /// The sockets for what it passes through.
    bypass: Bypass,
    /// The pod's connections from before.
    opened_before: Vec<OpenedBefore>,
}

impl Equipment {
    /// Collects it in the pod's namespace and the node's, which is that of the calling thread; the connections if
    /// `with_connections`. Needs CAP_NET_RAW and CAP_NET_ADMIN.
    pub(crate) fn collect(spec: &LaunchSpec, namespace: &Namespace, with_connections: bool) -> Result<Self, Error> {
        let captured = spec.capture.iter().flat_map(|capture| capture.services.iter().chain(&capture.ranges).copied());
        let node_ports = spec.capture.as_ref().and_then(|capture| capture.node_ports);
        let opened_before = if with_connections {
            node_choice::of(connections::to(namespace, &captured.collect::<Vec<_>>(), node_ports))
        } else {
            Vec::new()
        };
        Ok(Self { bypass: bypass::open(spec, namespace)?, opened_before })
    }

    /// Gives it to a starting node, with its directory and the counters of its policies.
    pub(crate) fn hand_over(
        self,
        config: &mut Config,
        options: &mut Options,
        (directory, verdicts): (Arc<ClusterDirectory>, Arc<VerdictCounters>),
    ) {
        replace(config, directory, verdicts);
        (options.bypass, options.opened_before) = (self.bypass, self.opened_before);
    }
}

/// Switches a running node to another directory, and to the policies in it.
pub(crate) fn replace(config: &mut Config, directory: Arc<ClusterDirectory>, verdicts: Arc<VerdictCounters>) {
    let policy = || Arc::new(PodPolicy::of(Arc::clone(&directory), verdicts)) as Arc<dyn NetworkPolicy>;
    config.network_policy = directory.is_under_policy().then(policy);
    config.capture = Some(directory);
}

/// How often to look for another table where its folder cannot be watched.
pub(crate) const LOOK_INTERVAL: Duration = Duration::from_millis(500);
