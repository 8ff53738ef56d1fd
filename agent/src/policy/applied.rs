//! The policies that concern pods of this node, as the compiler has them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use nebula_cni_policy::compile::{Cluster, PolicyKey, TooMany};
use nebula_cni_policy::model::{ClusterNetworkPolicy, Direction, NetworkPolicy, Problem};

use super::mentions::{Mentioned, Mentions};
use super::report::{Kind, NotEnforced};
use super::said::{Budgeted, Said, Stated};

/// Policies that are in the compiler.
#[derive(Debug, Default)]
pub(super) struct Applied {
    policies: BTreeMap<PolicyKey, Entry<NetworkPolicy>>,
    cluster_policies: BTreeMap<PolicyKey, Entry<ClusterNetworkPolicy>>,
    pub(super) mentions: Mentions,
}

/// A policy.
#[derive(Debug)]
struct Entry<P> {
    /// The version in the compiler.
    policy: Option<Arc<P>>,
    mentioned: Mentioned,
    /// What of this version is not enforced as it is written.
    problems: Vec<Problem>,
    /// Why the version that was said last is not that one.
    trouble: Option<(Kind, Arc<str>)>,
}

impl<P> Default for Entry<P> {
    fn default() -> Self {
        Self { policy: None, mentioned: Mentioned::default(), problems: Vec::new(), trouble: None }
    }
}

/// What both kinds of policies have in common.
trait Appliable: PartialEq + Sized {
    fn mentioned(&self) -> Mentioned;

    fn apply(&self, cluster: &mut Cluster) -> Result<Vec<Problem>, TooMany>;

    /// The policy in the place of one that is beyond the budget of its namespace.
    fn stub(key: &PolicyKey) -> Option<Self>;
}

impl Appliable for NetworkPolicy {
    fn mentioned(&self) -> Mentioned {
        Mentioned::by_policy(self)
    }

    fn apply(&self, cluster: &mut Cluster) -> Result<Vec<Problem>, TooMany> {
        Ok(cluster.set_policy(self))
    }

    fn stub(key: &PolicyKey) -> Option<Self> {
        let PolicyKey::NetworkPolicy { namespace, name } = key else { return None };
        Some(Self { types: Direction::ALL.to_vec(), ..Self::new(namespace, name) })
    }
}

impl Appliable for ClusterNetworkPolicy {
    fn mentioned(&self) -> Mentioned {
        Mentioned::by_cluster_policy(self)
    }

    fn apply(&self, cluster: &mut Cluster) -> Result<Vec<Problem>, TooMany> {
        cluster.set_cluster_policy(self)
    }

    fn stub(_: &PolicyKey) -> Option<Self> {
        None
    }
}

impl Applied {
    /// Takes over what was said. A NetworkPolicy selects pods of its namespace only, so those of others are left out.
    pub(super) fn sync(&mut self, said: &Said, own_namespaces: &BTreeSet<&str>, cluster: &mut Cluster) {
        let key = |namespace: &str, name: &str| {
            let is_own = own_namespaces.contains(namespace);
            is_own.then(|| PolicyKey::NetworkPolicy { namespace: namespace.to_owned(), name: name.to_owned() })
        };
        sync(&mut self.policies, &said.policies, key, cluster, &mut self.mentions);
        let key = |_: &str, name: &str| {
            (!own_namespaces.is_empty()).then(|| PolicyKey::ClusterNetworkPolicy { name: name.to_owned() })
        };
        sync(&mut self.cluster_policies, &said.cluster_policies, key, cluster, &mut self.mentions);
    }

    /// How many of each kind are in the compiler.
    pub(super) fn counts(&self) -> [usize; 2] {
        let policies = self.policies.values().filter(|entry| entry.policy.is_some()).count();
        [policies, self.cluster_policies.values().filter(|entry| entry.policy.is_some()).count()]
    }

    /// What is not enforced as it is written, or the first of it: who writes policies chooses how many are wrong.
    pub(super) fn not_enforced(&self) -> Vec<NotEnforced> {
        let of = |key: &PolicyKey, problems: &[Problem], trouble: Option<&(Kind, Arc<str>)>| {
            let title = match key {
                PolicyKey::NetworkPolicy { namespace, name } => format!("NetworkPolicy {namespace}/{name}"),
                PolicyKey::ClusterNetworkPolicy { name } => format!("ClusterNetworkPolicy {name}"),
            };
            let problems = problems.iter().map(|problem| (Kind::of(problem), problem.to_string()));
            let trouble = trouble.map(|(kind, why)| (*kind, why.to_string()));
            let all: Vec<_> = problems.chain(trouble).collect();
            all.into_iter().map(move |(kind, why)| NotEnforced { policy: title.clone(), kind, why })
        };
        let own = self.policies.iter().flat_map(|(key, entry)| of(key, &entry.problems, entry.trouble.as_ref()));
        let wide =
            self.cluster_policies.iter().flat_map(|(key, entry)| of(key, &entry.problems, entry.trouble.as_ref()));
        own.chain(wide).take(MAX_NOT_ENFORCED).collect()
    }
}

fn sync<P: Appliable>(
    entries: &mut BTreeMap<PolicyKey, Entry<P>>,
    said: &Budgeted<P>,
    key: impl Fn(&str, &str) -> Option<PolicyKey>,
    cluster: &mut Cluster,
    mentions: &mut Mentions,
) {
    // In order: of those beyond a bound it is always the same ones.
    let wanted: BTreeMap<PolicyKey, &Stated<P>> = said
        .iter()
        .filter_map(|(name, stated)| name.split_once('/').and_then(|(space, name)| Some((key(space, name)?, stated))))
        .collect();
    entries.retain(|key, entry| {
        let is_wanted = wanted.contains_key(key);
        if !is_wanted {
            cluster.remove_policy(key);
            mentions.remove(&entry.mentioned);
        }
        is_wanted
    });
    for (key, stated) in wanted {
        let entry = entries.entry(key.clone()).or_default();
        let (policy, trouble) = match stated {
            Stated::Read(policy) => (Some(Arc::clone(policy)), None),
            Stated::Unreadable(why) => (None, Some((Kind::Unreadable, Arc::clone(why)))),
            Stated::BeyondBudget => (P::stub(&key).map(Arc::new), Some((Kind::TooMuch, Arc::from(BEYOND_BUDGET)))),
        };
        entry.trouble = trouble;
        let Some(policy) = policy else { continue };
        if entry.policy.as_ref().is_some_and(|before| Arc::ptr_eq(before, &policy) || **before == *policy) {
            continue;
        }
        match policy.apply(cluster) {
            Ok(mut problems) => {
                problems.truncate(MAX_PROBLEMS);
                problems.shrink_to_fit();
                let before = std::mem::replace(&mut entry.mentioned, policy.mentioned());
                mentions.add(&entry.mentioned);
                mentions.remove(&before);
                (entry.problems, entry.policy) = (problems, Some(policy));
            }
            Err(error) => entry.trouble = Some((Kind::TooMuch, error.to_string().into())),
        }
    }
}

/// Of each policy.
const MAX_PROBLEMS: usize = 4;
const MAX_NOT_ENFORCED: usize = 256;
const BEYOND_BUDGET: &str =
    "the policies of its namespace are too many or too large together: it isolates all pods of the namespace";

#[cfg(test)]
mod tests {
    use nebula_cni_policy::model::{Peer, Rule};

    use super::super::said::Weighed;
    use super::*;
    use crate::table::kept::Keep as _;

    #[test]
    fn what_is_told_of_wrong_policies_is_bounded() {
        let (mut said, mut applied, mut cluster) = (Said::default(), Applied::default(), Cluster::new());
        let ingress = vec![Rule { peers: vec![Peer::Unreadable], ports: vec![] }; 2 * MAX_PROBLEMS];
        for n in 0..MAX_NOT_ENFORCED {
            let policy = NetworkPolicy { ingress: ingress.clone(), ..NetworkPolicy::new("shop", n.to_string()) };
            said.policies.put(format!("shop/{n}").into(), Some(Weighed::read(policy)));
        }
        applied.sync(&said, &["shop"].into(), &mut cluster);
        assert_eq!(applied.counts(), [MAX_NOT_ENFORCED, 0]);
        let told = applied.not_enforced();
        assert_eq!(told.len(), MAX_NOT_ENFORCED);
        assert_eq!(told.iter().filter(|one| one.policy == told[0].policy).count(), MAX_PROBLEMS);
        applied.sync(&said, &["pay"].into(), &mut cluster);
        assert!(applied.counts() == [0, 0] && applied.not_enforced().is_empty());
    }
}
