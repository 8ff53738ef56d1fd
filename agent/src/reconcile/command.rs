//! `nebula-cni-agent keep`: only keeps the pods of a node protected, with a chain that somebody else installed.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use serde_json::Value;
use tokio::sync::watch;

use super::entry::{Entry, EntryError};
use super::keeper::Keeper;
use super::program::Plugin;
use crate::cluster::queue::ApiQueue;
use crate::cluster::{api, worker};
use crate::config::Unprotected;
use crate::host_root::HostRoot;
use crate::listener::{self, MoreMetrics};
use crate::metrics::Metrics;
use crate::node::Unenforced;
use crate::readiness::Readiness;
use crate::released::{self, Releaser};
use crate::retirement::Retirement;
use crate::runtime::Client;

/// Options of the command.
#[derive(Debug, clap::Args)]
pub struct Keep {
    /// Network configuration list with our entry
    #[arg(long, value_name = "FILE")]
    chain: PathBuf,
    /// Socket of the container runtime [default: one of the usual]
    #[arg(long, value_name = "SOCKET")]
    runtime: Option<PathBuf>,
    /// The plugin's program
    #[arg(long, value_name = "FILE", default_value = "/opt/cni/bin/nebula-cni-plugin")]
    plugin: PathBuf,
    /// What to do with enrolled pods that run without a tunnel
    #[arg(long, value_name = "POLICY", value_enum, default_value = "attach")]
    unprotected: Unprotected,
    /// Address for /metrics [default: none]
    #[arg(long, value_name = "ADDRESS")]
    listen: Option<SocketAddr>,
    /// Leave out the metrics of single pods
    #[arg(long)]
    no_pod_metrics: bool,
    /// Credentials for the API server [default: none, then nothing is reported there]
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    /// Name of this node in the API
    #[arg(long, value_name = "NAME", default_value = "")]
    node: String,
}

/// Why the command cannot work.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KeepError {
    /// The chain's file cannot be read.
    #[error("cannot read {path}: {source}")]
    Chain {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// It is not JSON.
    #[error("{path} is not JSON: {source}")]
    Syntax {
        /// Which file.
        path: PathBuf,
        /// Where.
        source: serde_json::Error,
    },
    /// It has no usable entry.
    #[error(transparent)]
    Entry(#[from] EntryError),
    /// There is no runtime.
    #[error(transparent)]
    Runtime(#[from] crate::runtime::RuntimeError),
    /// There are no usable credentials for the API server.
    #[error(transparent)]
    Api(#[from] api::ApiError),
    /// The listener cannot start.
    #[error("cannot listen on {0}: {1}")]
    Listen(SocketAddr, std::io::Error),
}

impl Keep {
    /// Works until it is ended.
    ///
    /// # Errors
    /// Returns an error if it cannot begin.
    pub async fn run(self) -> Result<(), KeepError> {
        let chain = |source| KeepError::Chain { path: self.chain.clone(), source };
        let text = std::fs::File::open(&self.chain).and_then(|file| nebula_cert::text::read(file, 0)).map_err(chain)?;
        let list: Value =
            serde_json::from_str(&text).map_err(|source| KeepError::Syntax { path: self.chain.clone(), source })?;
        // The sender stays for as long as this works.
        let (_chain, entry) = watch::channel(Some(Arc::new(Entry::of_list(&list)?)));
        let (host, readiness) = (HostRoot::default(), Readiness::default());
        let metrics = Arc::new(Metrics::new(!self.no_pod_metrics));
        let api_queue = match &self.kubeconfig {
            Some(file) => {
                let boards = (&readiness, &Unenforced::default());
                worker::start(&api::open(Some(file)).await?, &self.node, &metrics, boards)
            }
            None => {
                tracing::info!("no kubeconfig: nothing is reported to an API server");
                ApiQueue::none()
            }
        };
        if let Some(address) = self.listen {
            let listener = listener::bind(address).map_err(|source| KeepError::Listen(address, source))?;
            let shown = Arc::clone(&metrics);
            let more: MoreMetrics = Arc::new(move || shown.text());
            tokio::spawn(listener::serve(listener, readiness.clone(), more));
        }
        let releaser = Releaser::new(host.clone(), Arc::clone(&metrics), Retirement::new(host.clone()));
        tokio::spawn(released::run(releaser, entry.clone()));
        let runtime = Client::find(self.runtime.as_deref(), &host)?;
        let plugin = Plugin { path: self.plugin, host };
        let policy = self.unprotected;
        // Whoever installs the programs here upgrades the instances.
        let (rollout, required) = (None, None);
        Keeper { plugin, runtime, entry, policy, api_queue, metrics, readiness, rollout, required }.run().await;
        Ok(())
    }
}
