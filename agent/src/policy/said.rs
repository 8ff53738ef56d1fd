//! Policies as the API server said them last. Whoever may write policies in a namespace chooses their number and size,
//! and each agent keeps them: beyond a budget the namespace's further policies isolate all its pods.

use std::collections::HashMap;
use std::sync::Arc;

use kube::api::DynamicObject;
use nebula_cni_policy::kubernetes;
use nebula_cni_policy::model::{ClusterNetworkPolicy, NetworkPolicy};
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::described::Packed;
use crate::table::kept::{Keep, Name, namespace};

/// What the API server says for policies, besides pods and nodes.
#[derive(Debug, Default)]
pub(crate) struct Said {
    /// Labels by namespace; `None` if they are too many or too long.
    pub(crate) namespaces: HashMap<Name, Option<Arc<Packed>>>,
    /// By `NAMESPACE/NAME`.
    pub(crate) policies: Budgeted<NetworkPolicy>,
    /// By `/NAME`.
    pub(crate) cluster_policies: Budgeted<ClusterNetworkPolicy>,
}

/// A policy as it was said last.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Stated<P> {
    /// So it is.
    Read(Arc<P>),
    /// It cannot be read; the last version stays.
    Unreadable(Arc<str>),
    /// The policies of its namespace are too many or too large together.
    BeyondBudget,
}

/// A policy, and how much memory it takes, about.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Weighed<P> {
    pub(crate) stated: Stated<P>,
    weight: usize,
}

impl Weighed<NetworkPolicy> {
    pub(crate) fn policy(object: &DynamicObject) -> Self {
        Self::of::<k8s_openapi::api::networking::v1::NetworkPolicy>(object, |policy| NetworkPolicy::try_from(policy))
    }
}

impl Weighed<ClusterNetworkPolicy> {
    pub(crate) fn cluster_policy(object: &DynamicObject) -> Self {
        let convert = |policy: &kubernetes::ClusterNetworkPolicy| ClusterNetworkPolicy::try_from(policy);
        Self::of::<kubernetes::ClusterNetworkPolicy>(object, convert)
    }
}

impl<P> Weighed<P> {
    #[cfg(test)]
    pub(crate) fn read(policy: P) -> Self {
        Self { stated: Stated::Read(Arc::new(policy)), weight: ENTRY }
    }

    /// Each object is read on its own: one that is of another form must not end the watch of all.
    fn of<T: DeserializeOwned>(
        object: &DynamicObject,
        convert: impl Fn(&T) -> Result<P, kubernetes::Unreadable>,
    ) -> Self {
        let unreadable = |why: String| Stated::Unreadable(why.chars().take(MAX_WHY).collect::<String>().into());
        let mut whole = object.data.clone();
        if let (Some(whole), Ok(metadata)) = (whole.as_object_mut(), serde_json::to_value(&object.metadata)) {
            whole.remove("status");
            whole.insert("metadata".to_owned(), metadata);
        }
        let stated = match serde_json::from_value::<T>(whole) {
            Ok(read) => {
                convert(&read).map_or_else(|why| unreadable(why.to_string()), |read| Stated::Read(Arc::new(read)))
            }
            Err(error) => unreadable(format!("the policy cannot be read: {error}")),
        };
        let groups = object.metadata.annotations.as_ref().and_then(|all| all.get(kubernetes::ALLOW_GROUPS));
        let weight = object.data.get("spec").map_or(0, weight) + groups.map_or(0, String::len);
        Self { stated, weight: ENTRY + weight }
    }
}

/// About what a value takes as a policy.
fn weight(value: &Value) -> usize {
    let inside = match value {
        Value::Null | Value::Bool(_) | Value::Number(_) => 0,
        Value::String(text) => text.len(),
        Value::Array(list) => list.iter().map(weight).sum(),
        Value::Object(map) => map.iter().map(|(key, value)| key.len() + weight(value)).sum(),
    };
    VALUE + inside
}

/// Policies, of which those of one namespace take no more than a budget.
#[derive(Debug, PartialEq)]
pub(crate) struct Budgeted<P> {
    all: HashMap<Name, Weighed<P>>,
    used: HashMap<Box<str>, usize>,
}

impl<P> Default for Budgeted<P> {
    fn default() -> Self {
        Self { all: HashMap::new(), used: HashMap::new() }
    }
}

impl<P> Budgeted<P> {
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&Name, &Stated<P>)> {
        self.all.iter().map(|(name, weighed)| (name, &weighed.stated))
    }
}

impl<P: PartialEq> Keep for Budgeted<P> {
    type Key = Name;
    type Value = Weighed<P>;

    fn put(&mut self, name: Name, value: Option<Weighed<P>>) -> bool {
        let before = self.all.get(&name);
        if before == value.as_ref() {
            return false;
        }
        let space = namespace(&name);
        let used = self.used.get(space).copied().unwrap_or_default();
        let others = used.saturating_sub(before.map_or(0, |before| before.weight));
        let value = value.map(|value| match others + value.weight <= BUDGET {
            true => value,
            false => Weighed { stated: Stated::BeyondBudget, weight: ENTRY },
        });
        match others + value.as_ref().map_or(0, |value| value.weight) {
            0 => drop(self.used.remove(space)),
            used => drop(self.used.insert(space.into(), used)),
        }
        if before == value.as_ref() {
            return false;
        }
        match value {
            Some(value) => self.all.insert(name, value).is_none_or(|_| true),
            None => self.all.remove(&name).is_some(),
        }
    }
}

/// For the name of a policy and its place.
const ENTRY: usize = 256;
/// For one value in it.
const VALUE: usize = 32;
/// Bytes for the policies of a namespace. A thousand usual ones take a third of it.
const BUDGET: usize = 4 << 20;
const MAX_WHY: usize = 300;

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn object(namespace: &str, name: &str, spec: Value) -> DynamicObject {
        serde_json::from_value(json!({"metadata": {"namespace": namespace, "name": name}, "spec": spec})).unwrap()
    }

    fn stated(all: &Budgeted<NetworkPolicy>, name: &str) -> Stated<NetworkPolicy> {
        all.all[name].stated.clone()
    }

    #[test]
    fn a_policy_is_read_and_one_of_another_form_says_why_not() {
        let good = Weighed::policy(&object("shop", "deny", json!({"podSelector": {}})));
        assert_eq!(good.stated, Stated::Read(Arc::new(NetworkPolicy::new("shop", "deny"))));
        let wrong = Weighed::policy(&object("shop", "deny", json!({"podSelector": {}, "ingress": "all"})));
        assert!(matches!(&wrong.stated, Stated::Unreadable(why) if why.contains("ingress") || why.contains("string")));
        let newer = Weighed::cluster_policy(&object("", "a", json!({"tier": "Later", "priority": 1})));
        assert!(matches!(&newer.stated, Stated::Unreadable(why) if why.contains("tier")));
        let subject = json!({"tier": "Admin", "priority": 1, "subject": {"namespaces": {}}});
        assert!(matches!(Weighed::cluster_policy(&object("", "a", subject)).stated, Stated::Read(_)));
    }

    #[test]
    fn a_namespace_with_too_much_is_closed_and_others_are_not() {
        let mut all = Budgeted::default();
        let large =
            || json!({"podSelector": {}, "ingress": [{"from": [{"ipBlock": {"cidr": "1".repeat(BUDGET / 3)}}]}]});
        let small = || Weighed::policy(&object("x", "y", json!({"podSelector": {}})));
        for n in 0..4 {
            assert!(all.put(format!("evil/{n}").into(), Some(Weighed::policy(&object("evil", "n", large())))));
        }
        assert!(all.put("shop/a".into(), Some(small())) && !all.put("shop/a".into(), Some(small())));
        assert!(matches!(stated(&all, "evil/0"), Stated::Read(_)));
        assert_eq!(stated(&all, "evil/3"), Stated::BeyondBudget);
        assert!(matches!(stated(&all, "shop/a"), Stated::Read(_)));
        // With room again it is read when it is said again.
        assert!(all.put("evil/0".into(), None));
        assert!(all.put("evil/3".into(), Some(Weighed::policy(&object("evil", "n", large())))));
        assert!(matches!(stated(&all, "evil/3"), Stated::Read(_)));
        for n in 1..4 {
            assert!(all.put(format!("evil/{n}").into(), None));
        }
        assert_eq!((all.all.len(), all.used.len()), (1, 1));
    }
}
