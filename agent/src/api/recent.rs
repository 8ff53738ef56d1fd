//! Answers that hold for a while, a bounded number of them. Pure: time is an argument.

use std::collections::HashMap;
use std::hash::Hash;
use std::time::Instant;

/// Answers by what was asked.
#[derive(Debug)]
pub(super) struct Recent<K, V> {
    most: usize,
    kept: HashMap<K, (Instant, V)>,
}

impl<K: Eq + Hash + Clone, V: Clone> Recent<K, V> {
    /// Keeps at most `most` of them.
    pub(super) fn new(most: usize) -> Self {
        Self { most, kept: HashMap::new() }
    }

    /// The answer, if it still holds at `now`.
    pub(super) fn get(&self, key: &K, now: Instant) -> Option<V> {
        self.kept.get(key).filter(|(until, _)| now < *until).map(|(_, value)| value.clone())
    }

    /// Keeps an answer that holds until then. Where there is no room, the one that ends first gives way.
    pub(super) fn put(&mut self, key: K, value: V, until: Instant, now: Instant) {
        if self.kept.len() >= self.most && !self.kept.contains_key(&key) {
            self.kept.retain(|_, (until, _)| now < *until);
            if self.kept.len() >= self.most {
                let first = self.kept.iter().min_by_key(|(_, (until, _))| *until).map(|(key, _)| key.clone());
                first.map(|first| self.kept.remove(&first));
            }
        }
        self.kept.insert(key, (until, value));
    }

    /// Forgets an answer.
    pub(super) fn forget(&mut self, key: &K) {
        self.kept.remove(key);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use nebula_cni_contract::clock::{Clock, SystemClock};

    use super::*;

    #[test]
    fn an_answer_holds_until_its_time_and_the_first_to_end_makes_room() {
        let now = SystemClock.now();
        let at = |seconds| now + Duration::from_secs(seconds);
        let mut recent = Recent::new(2);
        recent.put("a", 1, at(30), now);
        assert_eq!((recent.get(&"a", at(29)), recent.get(&"a", at(30))), (Some(1), None));
        recent.put("b", 2, at(10), now);
        recent.put("c", 3, at(20), at(1));
        assert_eq!(["a", "b", "c"].map(|key| recent.get(&key, at(1))), [Some(1), None, Some(3)]);
        for number in 0..10_000 {
            recent.put(Box::leak(number.to_string().into_boxed_str()), number, at(60), at(2));
        }
        assert_eq!(recent.kept.len(), 2);
        recent.put("d", 4, at(61), at(2));
        recent.forget(&"d");
        assert_eq!(recent.get(&"d", at(2)), None);
    }
}
