//! Loom's types, and stand-ins for arc-swap and papaya. Each operation of those is atomic here, as they promise; models
//! check what is built on that promise.

use std::collections::BTreeMap;
use std::ops::Deref;
use std::sync::Arc;

pub(crate) use loom::sync::{Condvar, Mutex, MutexGuard, atomic};

/// `arc_swap::ArcSwapOption`.
#[derive(Debug)]
pub(crate) struct ArcSwapOption<T>(Mutex<Option<Arc<T>>>);

/// `arc_swap::Guard`.
#[derive(Debug)]
pub(crate) struct Loaded<T>(Option<Arc<T>>);

impl<T> ArcSwapOption<T> {
    pub(crate) fn new(value: Option<Arc<T>>) -> Self {
        Self(Mutex::new(value))
    }

    pub(crate) fn empty() -> Self {
        Self::new(None)
    }

    pub(crate) fn load_full(&self) -> Option<Arc<T>> {
        self.0.lock().unwrap().clone()
    }

    pub(crate) fn load(&self) -> Loaded<T> {
        Loaded(self.load_full())
    }

    pub(crate) fn store(&self, value: Option<Arc<T>>) {
        *self.0.lock().unwrap() = value;
    }
}

impl<T> Deref for Loaded<T> {
    type Target = Option<Arc<T>>;

    fn deref(&self) -> &Option<Arc<T>> {
        &self.0
    }
}

/// `papaya::HashMap`.
#[derive(Debug)]
pub(crate) struct HashMap<K, V>(Mutex<BTreeMap<K, V>>);

/// `papaya::HashMapRef`.
#[derive(Debug)]
pub(crate) struct Pinned<'a, K, V>(&'a HashMap<K, V>);

impl<K: Ord, V: Clone> Default for HashMap<K, V> {
    fn default() -> Self {
        Self::new()
    }
}

impl<K: Ord, V: Clone> HashMap<K, V> {
    pub(crate) fn new() -> Self {
        Self(Mutex::new(BTreeMap::new()))
    }

    pub(crate) fn len(&self) -> usize {
        self.0.lock().unwrap().len()
    }

    pub(crate) fn pin(&self) -> Pinned<'_, K, V> {
        Pinned(self)
    }
}

impl<K: Ord, V: Clone> Pinned<'_, K, V> {
    /// Returns the value, because a reference could not outlive the lock of this stand-in.
    pub(crate) fn get(&self, key: &K) -> Option<Box<V>> {
        self.0.0.lock().unwrap().get(key).cloned().map(Box::new)
    }

    pub(crate) fn insert(&self, key: K, value: V) -> Option<V> {
        self.0.0.lock().unwrap().insert(key, value)
    }

    pub(crate) fn remove(&self, key: &K) -> Option<V> {
        self.0.0.lock().unwrap().remove(key)
    }

    /// What is in the map now.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (Box<K>, Box<V>)>
    where
        K: Clone,
    {
        let map = self.0.0.lock().unwrap();
        let all: Vec<_> = map.iter().map(|(key, value)| (Box::new(key.clone()), Box::new(value.clone()))).collect();
        all.into_iter()
    }

    pub(crate) fn remove_if(&self, key: &K, condition: impl FnOnce(&K, &V) -> bool) -> Result<Option<V>, ()> {
        let mut map = self.0.0.lock().unwrap();
        match map.get(key) {
            None => Ok(None),
            Some(value) if condition(key, value) => Ok(map.remove(key)),
            Some(_) => Err(()),
        }
    }
}
