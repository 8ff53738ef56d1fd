//! The numbers of pods' labels, as far as policies ask for them.

use std::collections::HashMap;
use std::sync::Arc;

use nebula_cni_policy::compile::Cluster;
use nebula_cni_policy::model::Profile;
use nebula_cni_policy::program::Identity;

use super::described::{Described, Packed};
use super::mentions::Mentions;
use crate::table::kept::Name;
use crate::table::seeded::Map;

/// Labels by namespace; `None` if they are too many.
pub(super) type Namespaces = HashMap<Name, Option<Arc<Packed>>>;

/// Numbers by set of labels and ports.
#[derive(Debug, Default)]
pub(super) struct Numbers {
    /// By the place in memory, which the first part keeps: all pods are looked up for each table, and to hash their
    /// labels each time would take longer than all the rest.
    known: Map<usize, (Arc<Described>, Known)>,
    round: u64,
}

/// A number, and what it was given by.
#[derive(Debug, Default)]
struct Known {
    /// The labels of the namespace, and the version of what is mentioned.
    namespace: Option<Arc<Packed>>,
    mentions: u64,
    identity: Option<Identity>,
    /// When some pod had it last.
    round: u64,
}

impl Numbers {
    /// Gives a number to each of these, and takes back those of others.
    pub(super) fn sync<'a>(
        &mut self,
        all: impl Iterator<Item = &'a Arc<Described>>,
        cluster: &mut Cluster,
        namespaces: &Namespaces,
        mentions: &Mentions,
    ) {
        self.round += 1;
        // A pod gets its new number before the old one is taken back.
        let mut released = Vec::new();
        for described in all {
            let entry = self.known.entry(place(described));
            let (_, known) = entry.or_insert_with(|| (Arc::clone(described), Known::default()));
            if known.round == self.round {
                continue;
            }
            known.round = self.round;
            released.extend(known.renew(described, cluster, namespaces, mentions));
        }
        let round = self.round;
        self.known.retain(|_, (_, known)| {
            let is_there = known.round == round;
            if !is_there {
                released.extend(known.identity);
            }
            is_there
        });
        released.into_iter().for_each(|identity| cluster.release(identity));
    }

    /// Gives a number to one more, until the next [`Numbers::sync`] without it; `None` for the reasons of
    /// [`Numbers::of`].
    pub(super) fn add(
        &mut self,
        described: &Arc<Described>,
        cluster: &mut Cluster,
        namespaces: &Namespaces,
        mentions: &Mentions,
    ) -> Option<Identity> {
        let entry = self.known.entry(place(described));
        let (_, known) = entry.or_insert_with(|| (Arc::clone(described), Known::default()));
        known.round = self.round;
        let released = known.renew(described, cluster, namespaces, mentions);
        let identity = known.identity;
        released.into_iter().for_each(|identity| cluster.release(identity));
        identity
    }

    /// The number of one that was in the last [`Numbers::sync`]; `None` if the labels of its namespace are not known,
    /// or it has too many labels, or there are too many numbers.
    pub(super) fn of(&self, described: &Arc<Described>) -> Option<Identity> {
        self.known.get(&place(described)).and_then(|(_, known)| known.identity)
    }

    /// How many have none.
    pub(super) fn without(&self) -> usize {
        self.known.values().filter(|(_, known)| known.identity.is_none()).count()
    }
}

impl Known {
    /// Gives it its number; returns the one before, if it has another one now.
    fn renew(
        &mut self,
        described: &Described,
        cluster: &mut Cluster,
        namespaces: &Namespaces,
        mentions: &Mentions,
    ) -> Option<Identity> {
        let namespace = namespaces.get(&*described.namespace).and_then(Option::as_ref);
        let is_same = match (&self.namespace, namespace) {
            (Some(before), Some(now)) => Arc::ptr_eq(before, now),
            _ => false,
        };
        if is_same && self.mentions == mentions.version() && self.identity.is_some() {
            return None;
        }
        let profile = namespace.and_then(|namespace| profile(described, namespace, mentions));
        (self.namespace, self.mentions) = (namespace.cloned(), mentions.version());
        let before = self.identity.and_then(|identity| cluster.identities().profile(identity));
        if profile.is_some() && profile.as_ref() == before {
            return None;
        }
        let before = self.identity.take();
        self.identity = profile.and_then(|profile| cluster.identify(profile).ok());
        before
    }
}

fn place(described: &Arc<Described>) -> usize {
    Arc::as_ptr(described).addr()
}

fn profile(described: &Described, namespace: &Packed, mentions: &Mentions) -> Option<Profile> {
    let labels = described.labels.as_ref()?.only(|key| mentions.has_label(key));
    let of_namespace = namespace.only(|key| mentions.has_namespace_label(key));
    let ports = described.ports.iter().filter(|port| mentions.has_port(&port.name)).cloned().collect();
    Profile::new(&*described.namespace, of_namespace, labels, ports).ok()
}

#[cfg(test)]
mod tests {
    use nebula_cni_policy::model::{NetworkPolicy, Selector};

    use super::super::described::Descriptions;
    use super::super::mentions::Mentioned;
    use super::*;

    fn described(all: &mut Descriptions, app: &str, other: &str) -> Arc<Described> {
        let labels = [("app".to_owned(), app.to_owned()), ("other".to_owned(), other.to_owned())].into();
        all.share(Described::new("shop", Some(&labels), [], []))
    }

    fn namespaces(labels: &[(&str, &str)]) -> Namespaces {
        let labels = labels.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        [("shop".into(), Packed::of(&labels).map(Arc::new))].into()
    }

    #[test]
    fn only_labels_that_some_policy_asks_for_make_pods_differ() {
        let (mut numbers, mut cluster, mut mentions) = (Numbers::default(), Cluster::new(), Mentions::default());
        let mut all = Descriptions::default();
        let pods = [("a", "1"), ("a", "2"), ("b", "1")].map(|(app, other)| described(&mut all, app, other));
        let shop = namespaces(&[("team", "x")]);
        let mut sync = |numbers: &mut Numbers, mentions: &Mentions| {
            numbers.sync(pods.iter(), &mut cluster, &shop, mentions);
            (pods.each_ref().map(|pod| numbers.of(pod).unwrap()), cluster.identities().len())
        };
        let (first, count) = sync(&mut numbers, &mentions);
        assert!(first[0] == first[1] && first[0] == first[2] && count == 1);
        let subject = Selector::labels([("app", "a")]);
        mentions.add(&Mentioned::by_policy(&NetworkPolicy { subject, ..NetworkPolicy::new("shop", "p") }));
        let (second, count) = sync(&mut numbers, &mentions);
        assert!(second[0] == second[1] && second[0] != second[2] && count == 2);
        assert_eq!(sync(&mut numbers, &mentions).0, second, "nothing is different");
    }

    #[test]
    fn a_pod_without_known_labels_of_its_namespace_has_no_number_and_one_that_left_gives_it_back() {
        let (mut numbers, mut cluster, mentions) = (Numbers::default(), Cluster::new(), Mentions::default());
        let pod = described(&mut Descriptions::default(), "a", "1");
        numbers.sync([&pod].into_iter(), &mut cluster, &Namespaces::new(), &mentions);
        assert_eq!((numbers.of(&pod), numbers.without()), (None, 1));
        numbers.sync([&pod, &pod].into_iter(), &mut cluster, &namespaces(&[]), &mentions);
        assert!(numbers.of(&pod).is_some() && numbers.without() == 0 && cluster.identities().len() == 1);
        numbers.sync([].into_iter(), &mut cluster, &namespaces(&[]), &mentions);
        assert!(numbers.of(&pod).is_none() && cluster.identities().is_empty());
    }
}
