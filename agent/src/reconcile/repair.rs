//! Carries out one repair with the plugin's own program.

use std::sync::Arc;
use std::time::Duration;

use nebula_cni_plugin::reply::code;
use nebula_cni_plugin::request::Key;
use nebula_cni_plugin::verb::refresh::Refreshed;
use serde_json::Value;

use super::entry::{Entry, PodFacts};
use super::observe::Network;
use super::plan::{Action, Repair};
use super::prev_result;
use super::program::{Plugin, ProgramError};
use crate::runtime::Client;

/// Everything a repair needs.
#[derive(Debug, Clone)]
pub struct Tools {
    /// The installed plugin.
    pub plugin: Plugin,
    /// Our entry in the chain.
    pub entry: Arc<Entry>,
    /// The runtime.
    pub runtime: Client,
}

/// What came of a repair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// The difference is gone.
    Done,
    /// The plugin decided that the pod is not enrolled.
    NotEnrolled,
    /// The pod ended meanwhile; what was made for it is removed again.
    PodEnded,
}

/// Why a repair failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RepairError {
    /// The runtime keeps no result for the pod, so its address is unknown.
    #[error("the runtime keeps no CNI result for it, so it must be recreated: delete it")]
    NoResult,
    /// The plugin failed or refused.
    #[error(transparent)]
    Plugin(#[from] ProgramError),
    /// The repair itself crashed.
    #[error("the repair was interrupted: {0}")]
    Interrupted(String),
}

impl RepairError {
    /// Whether the CA service refused a certificate.
    #[must_use]
    pub fn is_refused_identity(&self) -> bool {
        matches!(self, Self::Plugin(ProgramError::Refused { code: code::IDENTITY_DENIED, .. }))
    }
}

impl Tools {
    /// Carries out a repair. `network` is that of its sandbox, if it has one.
    ///
    /// # Errors
    /// Nothing has changed, except that a half-made attachment may wait for the next try.
    pub async fn carry_out(&self, repair: &Repair, network: Option<Arc<Network>>) -> Result<Outcome, RepairError> {
        match &repair.action {
            Action::Attach { sandbox } => self.attach(repair, sandbox, network, &["attach"]).await,
            Action::Reattach { key } if network.is_none() => self.detach(key).await.map(|()| Outcome::PodEnded),
            // The plugin replaces the attachment itself: with a DEL before, an isolated pod would be open meanwhile.
            Action::Reattach { key } => self.attach(repair, &key.container_id, network, &["attach", "--afresh"]).await,
            Action::Detach { key } => self.detach(key).await.map(|()| Outcome::Done),
            Action::Mend { .. } => self.mend().await.map(|()| Outcome::Done),
            Action::Present { key } => self.present(key).await.map(|()| Outcome::Done),
        }
    }

    /// Restarts all instances that are dead and due.
    ///
    /// # Errors
    /// Names those that could not be restarted.
    pub async fn mend(&self) -> Result<(), RepairError> {
        let state_dir = self.entry.state_dir.display().to_string();
        self.run(move |plugin| plugin.run(&["reconcile", &state_dir], None, TIMEOUT)).await.map(drop)
    }

    /// Hands the settings of the entry to the instances of running pods.
    ///
    /// # Errors
    /// None was told.
    pub async fn refresh(&self) -> Result<Refreshed, RepairError> {
        let call = self.entry.refresh();
        let said = self.run(move |plugin| plugin.run(&["refresh"], Some(&call), TIMEOUT)).await?;
        serde_json::from_str(&said).map_err(|error| {
            // One of another release says what it can do.
            RepairError::Interrupted(format!("the plugin's answer is not understood: {error}"))
        })
    }

    /// Shows an instance its pod's token.
    async fn present(&self, key: &Key) -> Result<(), RepairError> {
        let state_dir = self.entry.state_dir.display().to_string();
        let Key { network, container_id, ifname } = key.clone();
        let run = move |plugin: &Plugin| {
            plugin.run(&["present", &state_dir, &network, &container_id, &ifname], None, TIMEOUT)
        };
        self.run(run).await.map(drop)
    }

    async fn attach(
        &self,
        repair: &Repair,
        sandbox: &str,
        network: Option<Arc<Network>>,
        arguments: &'static [&'static str],
    ) -> Result<Outcome, RepairError> {
        let Some(network) = network else { return Ok(Outcome::PodEnded) };
        let Some(netns) = network.netns.as_ref().and_then(|path| path.to_str()) else { return Ok(Outcome::PodEnded) };
        let found = prev_result::find(&self.plugin.host, &self.entry.network, sandbox, &network.cni_result);
        let result = found.ok_or(RepairError::NoResult)?;
        let facts = PodFacts {
            container_id: sandbox,
            namespace: &repair.pod.namespace,
            name: &repair.pod.name,
            uid: &repair.pod.uid,
            annotations: &network.annotations,
        };
        let call = self.entry.attach(&facts, netns, &result);
        let said = self.run(move |plugin| plugin.run(arguments, Some(&call), TIMEOUT)).await?;
        let said: Value = serde_json::from_str(&said).unwrap_or_default();
        if said["attached"] != true {
            return Ok(Outcome::NotEnrolled);
        }
        // The runtime may have called DEL just before, and will not call it again.
        match self.runtime.sandboxes().await {
            Ok(listed) if !listed.iter().any(|listed| listed.id == sandbox && listed.is_ready) => {}
            // A runtime that is away proves nothing.
            _ => return Ok(Outcome::Done),
        }
        let key = Key {
            network: self.entry.network.clone(),
            container_id: sandbox.to_owned(),
            ifname: super::entry::IFNAME.to_owned(),
        };
        self.detach(&key).await.map(|()| Outcome::PodEnded)
    }

    async fn detach(&self, key: &Key) -> Result<(), RepairError> {
        let call = self.entry.detach(key);
        self.run(move |plugin| plugin.run(&[], Some(&call), TIMEOUT)).await.map(drop)
    }

    async fn run(
        &self,
        work: impl FnOnce(&Plugin) -> Result<String, ProgramError> + Send + 'static,
    ) -> Result<String, RepairError> {
        let plugin = self.plugin.clone();
        let done = tokio::task::spawn_blocking(move || work(&plugin)).await;
        Ok(done.map_err(|error| RepairError::Interrupted(error.to_string()))??)
    }
}

// Longer than the plugin queues and works, so that it ends by itself and undoes what it began.
const TIMEOUT: Duration = Duration::from_secs(180);
