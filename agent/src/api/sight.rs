//! Of which namespaces the one who asks may see the pods: who may see those of one learns nothing of others.

use std::collections::BTreeSet;

use nebula_cni_contract::agent_api::Lacking;

use super::denied::Denied;
use super::review::Asked;
use super::routes::{Permit, Shared};

/// What may be shown.
pub(super) struct Sight {
    shows_all: bool,
    shown: BTreeSet<String>,
    /// The permissions that are missing for the rest.
    pub(super) lacking: Vec<Lacking>,
    /// Further namespaces that are not shown, as nobody was asked about them.
    pub(super) not_asked: usize,
}

impl Sight {
    /// Asks the API server about namespaces. `permit` is the permission for pods that was looked at already.
    pub(super) async fn of(
        shared: &Shared,
        permit: &Permit,
        namespaces: impl IntoIterator<Item = String>,
    ) -> Result<Self, Denied> {
        let own = permit.asked.namespace.clone();
        let shows_all = own.is_none();
        let shown = own.into_iter().chain([String::new()]).collect();
        let mut sight = Self { shows_all, shown, lacking: Vec::new(), not_asked: 0 };
        let wanted: BTreeSet<String> = namespaces.into_iter().filter(|namespace| !sight.has(namespace)).collect();
        // One question for those who may see everything.
        if wanted.len() > FEW {
            let everywhere = Asked { namespace: None, ..permit.asked.clone() };
            match shared.may_also(permit, everywhere).await {
                Ok(()) => sight.shows_all = true,
                Err(Denied::Forbidden(_)) => {}
                Err(other) => return Err(other),
            }
        }
        if sight.shows_all {
            return Ok(sight);
        }
        sight.not_asked = wanted.len().saturating_sub(MOST_NAMESPACES);
        for namespace in wanted.into_iter().take(MOST_NAMESPACES) {
            let asked = Asked { namespace: Some(namespace.clone()), ..permit.asked.clone() };
            match shared.may_also(permit, asked).await {
                Ok(()) => drop(sight.shown.insert(namespace)),
                Err(Denied::Forbidden(permission)) => sight.lacking.push(permission),
                Err(other) => return Err(other),
            }
        }
        Ok(sight)
    }

    /// Whether pods of this namespace may be shown.
    pub(super) fn has(&self, namespace: &str) -> bool {
        self.shows_all || self.shown.contains(namespace)
    }
}

const FEW: usize = 2;
/// Agents ask the API server 360 times a minute for all their users together.
const MOST_NAMESPACES: usize = 64;
