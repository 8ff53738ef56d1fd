//! Pods of the cluster as the API server shows them, and those of which nothing but labels or named ports changed.

use std::ops::Deref;

use super::kept::Keep;
use super::member::PodId;
use super::seeded::Map;
use super::shown::Shown;

/// The pods of the cluster.
#[derive(Debug, Default, Clone)]
pub(super) struct Pods {
    all: Map<PodId, Shown>,
    /// Pods of which only labels or named ports changed since the last table: one entry for each change, and at most
    /// [`MAX_NOTED`].
    relabelled: Vec<PodId>,
}

impl Pods {
    /// The pods whose labels or named ports changed, if nothing else did in the `changes` since the last table.
    pub(super) fn relabelled(&self, changes: u64) -> Option<&[PodId]> {
        (changes > 0 && changes == self.relabelled.len() as u64).then_some(&self.relabelled[..])
    }

    /// The table says all of it.
    pub(super) fn are_written(&mut self) {
        self.relabelled.clear();
    }
}

impl Deref for Pods {
    type Target = Map<PodId, Shown>;

    fn deref(&self) -> &Self::Target {
        &self.all
    }
}

impl PartialEq for Pods {
    fn eq(&self, other: &Self) -> bool {
        self.all == other.all
    }
}

impl Keep for Pods {
    type Key = PodId;
    type Value = Shown;

    fn put(&mut self, key: PodId, value: Option<Shown>) -> bool {
        let before = self.all.get(&key);
        let is_relabelled = before.zip(value.as_ref()).is_some_and(|(before, now)| is_relabelled(before, now));
        if is_relabelled && self.relabelled.len() < MAX_NOTED {
            self.relabelled.push(key);
        }
        self.all.put(key, value)
    }
}

fn is_relabelled(before: &Shown, now: &Shown) -> bool {
    let have_labels = before.described.is_some() && now.described.is_some();
    let relabelled = || Shown { described: now.described.clone(), ..before.clone() };
    have_labels && before.described != now.described && relabelled() == *now
}

/// After more changes than that, the table is built from everything that is known.
const MAX_NOTED: usize = 64;

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::policy::Described;

    fn shown(app: Option<&str>, node: &str) -> Shown {
        let described = app.map(|app| {
            let labels = [("app".to_owned(), app.to_owned())].into();
            Arc::new(Described::new("shop", Some(&labels), [], []))
        });
        let (is_left_out, counts, is_host_network) = (false, true, false);
        let addresses = [Some([10, 0, 0, 1].into()), None];
        Shown { addresses, node: node.into(), is_left_out, counts, is_host_network, mirrors: None, described }
    }

    #[test]
    fn changes_of_labels_alone_are_told_from_others() {
        let mut pods = Pods::default();
        assert!(pods.put(1, Some(shown(Some("web"), "n1"))));
        assert_eq!(pods.relabelled(1), None, "it is new");
        pods.are_written();
        assert!(pods.put(1, Some(shown(Some("db"), "n1"))) && !pods.put(1, Some(shown(Some("db"), "n1"))));
        assert_eq!(pods.relabelled(1), Some(&[1][..]));
        assert_eq!(pods.relabelled(2), None, "something else changed, too");
        for other in [Some(shown(Some("web"), "n2")), Some(shown(None, "n2")), Some(shown(Some("db"), "n2")), None] {
            pods.are_written();
            assert!(pods.put(1, other.clone()));
            assert_eq!(pods.relabelled(1), None, "{other:?}");
        }
    }

    #[test]
    fn only_so_many_are_noted() {
        let mut pods = Pods::default();
        for change in 0..MAX_NOTED + 2 {
            pods.put(1, Some(shown(Some(&change.to_string()), "n1")));
        }
        assert_eq!(pods.relabelled(MAX_NOTED as u64 + 1), None);
        assert_eq!(pods.relabelled.len(), MAX_NOTED);
    }
}
