//! What a node makes of the facts: the table's file, the sets of its rules, and its choices for Services.

use nebula_cni_policy::flat::Peers;
use tokio::sync::watch;
use tokio::time::Instant;

use super::clear_policies::ClearPolicies;
use super::clear_sets::ClearSets;
use super::departed::Departed;
use super::enforced::Enforced;
use super::facts::Facts;
use super::service_choices::ServiceChoices;
use super::writer::{WriteError, Writer};
use crate::metrics::Written;
use crate::underlay::nodes::Ports;

/// All that follows from the facts on one node.
#[derive(Debug, Default)]
pub(super) struct Outputs {
    /// Name of the node.
    pub(super) node: String,
    pub(super) writer: Writer,
    pub(super) ports: watch::Sender<Ports>,
    pub(super) departed: Departed,
    pub(super) clear_sets: ClearSets,
    pub(super) clear_policies: ClearPolicies,
    pub(super) service_choices: ServiceChoices,
    pub(super) enforced: Enforced,
    /// Numbers of entries by kind.
    pub(super) counts: Vec<(&'static str, usize)>,
}

impl Outputs {
    /// Brings the table and the kernel's rules up to date. After changed labels, does only the work that depends on
    /// labels. Blocks.
    ///
    /// # Errors
    /// Returns why the table could not be written.
    pub(super) fn write(&mut self, facts: &mut Facts, now: Instant) -> Result<Written, WriteError> {
        let written = match self.relabel(facts)? {
            Some(written) => written,
            None => self.rewrite(facts, now)?,
        };
        facts.pods.are_written();
        Ok(written)
    }

    fn rewrite(&mut self, facts: &Facts, now: Instant) -> Result<Written, WriteError> {
        let mut judgement = facts.judge(&self.node);
        self.departed.withhold(&mut judgement, now);
        if let Some(settings) = &facts.settings.policies {
            let judged = self.clear_policies.judged();
            if judged.is_empty() {
                judgement.bystanders.clear();
            }
            judgement.policy = self.enforced.records(settings, facts, &judgement, &self.node);
            // Until policies are known, pods keep what an earlier agent wrote.
            if facts.missing_for_policies().is_empty() {
                // Without a pod that is judged in clear nobody asks whom it meets.
                let peers = if judged.is_empty() { Peers::default() } else { facts.peers_in_clear(&judgement) };
                self.clear_policies.replace(&judged, &judgement.policy.programs, peers);
                self.enforced.closed_in_clear(self.clear_policies.too_much());
            }
        }
        // First, so that what has become enrolled is closed before anybody sends to it through its tunnel.
        self.clear_sets.replace(&judgement.clear);
        self.ports.send_replace(judgement.ports_elsewhere());
        self.counts = facts.counts(&judgement).to_vec();
        let (written, choices) = self.writer.write(facts, &judgement, &self.node)?;
        self.enforced.published();
        if let Some(choices) = choices {
            self.service_choices.replace(judgement.of_this_node, choices);
        }
        Ok(written)
    }

    /// Looks whether the kernel has what was written last.
    pub(super) fn look(&mut self, facts: &Facts, is_complete: bool) {
        if is_complete && self.clear_sets.are_outdated() {
            let mut judgement = facts.judge(&self.node);
            self.departed.withhold(&mut judgement, Instant::now());
            self.clear_sets.replace(&judgement.clear);
        }
        if self.writer.is_of_this_agent() {
            self.service_choices.look();
        }
    }
}
