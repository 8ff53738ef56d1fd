//! A bounded map that keeps what was touched last.

use std::time::Instant;

/// The most recently touched entries. So few that a linear search is enough.
#[derive(Debug)]
pub(super) struct Recent<K, V>(Vec<(K, Instant, V)>);

impl<K, V> Default for Recent<K, V> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<K: PartialEq, V> Recent<K, V> {
    /// The entry of `key`, created if needed; the least recently touched one is evicted to make room.
    pub(super) fn entry(&mut self, now: Instant, key: K, most: usize, new: impl FnOnce() -> V) -> &mut V {
        let found = self.0.iter().position(|(other, _, _)| *other == key);
        let at = found.unwrap_or_else(|| {
            let oldest = self.0.iter().enumerate().min_by_key(|(_, (_, touched, _))| *touched).map(|(at, _)| at);
            if let Some(oldest) = oldest.filter(|_| self.0.len() >= most) {
                self.0.swap_remove(oldest);
            }
            self.0.push((key, now, new()));
            self.0.len() - 1
        });
        let (_, touched, value) = &mut self.0[at];
        *touched = now;
        value
    }

    pub(super) fn get(&self, key: &K) -> Option<&V> {
        self.0.iter().find(|(other, _, _)| other == key).map(|(_, _, value)| value)
    }

    pub(super) fn get_mut(&mut self, key: &K) -> Option<&mut V> {
        self.0.iter_mut().find(|(other, _, _)| other == key).map(|(_, _, value)| value)
    }

    pub(super) fn remove(&mut self, key: &K) {
        self.0.retain(|(other, _, _)| other != key);
        if self.0.is_empty() {
            self.0 = Vec::new();
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn values(&self) -> impl Iterator<Item = &V> {
        self.0.iter().map(|(_, _, value)| value)
    }

    #[cfg(test)]
    pub(super) fn capacity(&self) -> usize {
        self.0.capacity()
    }
}
