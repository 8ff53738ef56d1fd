//! Objects of the cluster, by name. Those of one namespace take no more memory than its budget: whoever has rights in
//! one namespace can make as many as they like, and each agent of the cluster follows all of them.

use std::collections::{BTreeSet, HashMap};
use std::hash::{BuildHasher, Hash};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

/// Namespace and name of an object, as `NAMESPACE/NAME`.
pub type Name = Box<str>;

/// Objects with their budgets.
#[derive(Debug, PartialEq)]
pub struct Kept<V> {
    objects: HashMap<Name, V>,
    /// Bytes by namespace.
    used: HashMap<Box<str>, usize>,
    crowded: BTreeSet<Box<str>>,
    /// Bytes that the objects of one namespace may take.
    budget: usize,
}

/// A part of the facts that a watch keeps.
pub(crate) trait Keep: Default + PartialEq {
    type Key;
    type Value;

    /// Puts `value` under `key`, or removes what is there; returns whether that changed anything.
    fn put(&mut self, key: Self::Key, value: Option<Self::Value>) -> bool;
}

impl<K: Hash + Eq, V: PartialEq, S: BuildHasher + Default> Keep for HashMap<K, V, S> {
    type Key = K;
    type Value = V;

    fn put(&mut self, key: K, value: Option<V>) -> bool {
        match value {
            None => self.remove(&key).is_some(),
            Some(value) if self.get(&key) == Some(&value) => false,
            Some(value) => {
                self.insert(key, value);
                true
            }
        }
    }
}

/// How much memory something takes.
pub trait Weighed {
    /// About so many bytes.
    fn weight(&self) -> usize;
}

impl<V> Default for Kept<V> {
    fn default() -> Self {
        Self { objects: HashMap::new(), used: HashMap::new(), crowded: BTreeSet::new(), budget: BUDGET }
    }
}

impl<V> Kept<V> {
    /// The objects.
    pub fn iter(&self) -> impl Iterator<Item = (&Name, &V)> {
        self.objects.iter()
    }

    /// Number of objects.
    #[must_use]
    pub fn count(&self) -> usize {
        self.objects.len()
    }

    /// Namespaces that have more objects than were kept, since all were listed last.
    #[must_use]
    pub fn crowded(&self) -> &BTreeSet<Box<str>> {
        &self.crowded
    }
}

impl<V: Weighed> Kept<V> {
    /// Gives each namespace this budget, while nothing is kept.
    pub(super) fn limit(&mut self, budget: usize) {
        self.budget = budget;
    }

    /// Whether the objects of each namespace take what is noted, and no more than the budget.
    pub(super) fn is_within_budget(&self) -> bool {
        let mut used: HashMap<Box<str>, usize> = HashMap::new();
        for (name, value) in &self.objects {
            *used.entry(namespace(name).into()).or_default() += weight(name, Some(value));
        }
        used == self.used && used.values().all(|used| *used <= self.budget)
    }
}

impl<V: Weighed + PartialEq> Keep for Kept<V> {
    type Key = Name;
    type Value = V;

    fn put(&mut self, name: Name, value: Option<V>) -> bool {
        let before = self.objects.get(&name);
        if before == value.as_ref() {
            return false;
        }
        let namespace = namespace(&name);
        let (old, new) = (weight(&name, before), weight(&name, value.as_ref()));
        let used = self.used.get(namespace).copied().unwrap_or_default().saturating_sub(old);
        // Its former state would be wrong by now.
        let value = value.filter(|_| {
            used + new <= self.budget || {
                self.crowded.insert(namespace.into());
                false
            }
        });
        match used + weight(&name, value.as_ref()) {
            0 => drop(self.used.remove(namespace)),
            used => drop(self.used.insert(namespace.into(), used)),
        }
        let Some(value) = value else { return self.objects.remove(&name).is_some() };
        self.objects.insert(name, value);
        true
    }
}

/// The namespace of an object.
pub(crate) fn namespace(name: &str) -> &str {
    name.split_once('/').map_or("", |(namespace, _)| namespace)
}

fn weight(name: &Name, value: Option<&impl Weighed>) -> usize {
    value.map_or(0, |value| ENTRY + name.len() + value.weight())
}

/// When the API server made an object, in seconds since 1970; 0 if it does not say.
pub(super) fn created(metadata: &ObjectMeta) -> i64 {
    metadata.creation_timestamp.as_ref().map_or(0, |time| time.0.as_second())
}

/// For the entry of a map.
const ENTRY: usize = 64;
/// In bytes. Ten thousand Services, or fifty thousand endpoints, take a third of it.
const BUDGET: usize = 16 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    impl Weighed for usize {
        fn weight(&self) -> usize {
            *self
        }
    }

    #[test]
    fn a_namespace_beyond_its_budget_loses_its_own_objects_and_nothing_of_others() {
        let mut kept = Kept::<usize>::default();
        assert!(kept.put("shop/web".into(), Some(1_000)) && !kept.put("shop/web".into(), Some(1_000)));
        for n in 0..100 {
            kept.put(format!("evil/{n}").into(), Some(BUDGET / 50));
        }
        assert_eq!(kept.crowded().iter().map(|name| &**name).collect::<Vec<_>>(), ["evil"]);
        assert_eq!(kept.count(), 1 + 49);
        assert!(kept.put("shop/db".into(), Some(1_000)));
        // One that grows too large is forgotten; there is room again for others.
        assert!(kept.put("evil/0".into(), Some(BUDGET)));
        assert!(!kept.put("evil/0".into(), None), "it is gone already");
        assert!(kept.put("evil/99".into(), Some(BUDGET / 50)));
        for n in 0..100 {
            kept.put(format!("evil/{n}").into(), None);
        }
        assert_eq!((kept.count(), kept.used.len()), (2, 1));
    }
}
