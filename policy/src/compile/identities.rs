//! Numbers for profiles of pods.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use crate::model::{MAX_IDENTITIES, Profile};
use crate::program::Identity;

/// There is no number left. The pod has no identity ([`crate::program::Who::Unnumbered`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the cluster has more than {MAX_IDENTITIES} sets of labels, those included that pods had until recently")]
pub struct Full;

/// Gives each profile a number. Pods with equal profiles share it.
///
/// A number whose last pod is gone is retired: it keeps its profile, and a pod with that profile gets it again. For
/// another profile it is used again only after [`Identities::recycle`] was told that nobody has a table any more from
/// the time in which the number had a pod.
#[derive(Debug, Default)]
pub struct Identities {
    /// The first one is that of identity 1.
    slots: Vec<Slot>,
    by_profile: HashMap<Arc<Profile>, Identity>,
    /// These two have the profiles of all numbers, free ones as well.
    by_port: BTreeMap<String, BTreeSet<Identity>>,
    by_namespace: HashMap<String, BTreeSet<Identity>>,
    retired: BTreeSet<(u64, Identity)>,
    free: BTreeSet<Identity>,
    epoch: u64,
}

#[derive(Debug)]
struct Slot {
    profile: Arc<Profile>,
    pods: u32,
    retired_at: u64,
}

/// What [`Identities::assign`] did.
#[derive(Debug, Clone)]
pub(super) enum Assigned {
    /// The profile had this number already.
    Known(Identity),
    /// The profile has this number from now on; the number had another profile before, or none.
    New(Identity, Option<Arc<Profile>>),
}

impl Identities {
    pub(super) fn assign(&mut self, profile: Profile) -> Result<Assigned, Full> {
        if let Some(identity) = self.by_profile.get(&profile).copied() {
            if let Some(slot) = slot_mut(&mut self.slots, identity) {
                if slot.pods == 0 {
                    self.retired.remove(&(slot.retired_at, identity));
                }
                slot.pods = slot.pods.saturating_add(1);
            }
            return Ok(Assigned::Known(identity));
        }
        let profile = Arc::new(profile);
        let slot = Slot { profile: profile.clone(), pods: 1, retired_at: 0 };
        let (identity, before) = match self.free.pop_first() {
            Some(identity) => {
                let before = slot_mut(&mut self.slots, identity).map(|old| std::mem::replace(old, slot).profile);
                (identity, before)
            }
            None => {
                let number = u32::try_from(self.slots.len() + 1).ok().and_then(Identity::new);
                let identity = number.filter(|_| self.slots.len() < MAX_IDENTITIES).ok_or(Full)?;
                self.slots.push(slot);
                (identity, None)
            }
        };
        if let Some(before) = &before {
            self.index(before, identity, false);
        }
        self.index(&profile, identity, true);
        self.by_profile.insert(profile, identity);
        Ok(Assigned::New(identity, before))
    }

    pub(super) fn release(&mut self, identity: Identity) {
        let epoch = self.epoch;
        let Some(slot) = slot_mut(&mut self.slots, identity).filter(|slot| slot.pods > 0) else { return };
        slot.pods -= 1;
        if slot.pods == 0 {
            slot.retired_at = epoch;
            self.retired.insert((epoch, identity));
        }
    }

    /// Ends an epoch, and returns the number of the next one. Called when tables with the identities of pods are
    /// published.
    pub fn advance(&mut self) -> u64 {
        self.epoch += 1;
        self.epoch
    }

    /// Makes the numbers free that were retired before `epoch` began. Called when every reader has a table that was
    /// published in `epoch` or later, and no message that mentions an older one is on its way.
    pub fn recycle(&mut self, epoch: u64) {
        while let Some(&(retired_at, identity)) = self.retired.first().filter(|(retired_at, _)| *retired_at < epoch) {
            self.retired.remove(&(retired_at, identity));
            if let Some(slot) = slot_mut(&mut self.slots, identity) {
                self.by_profile.remove(&slot.profile);
            }
            self.free.insert(identity);
        }
    }

    /// The profile that a number has, or had if it is free.
    #[must_use]
    pub fn profile(&self, identity: Identity) -> Option<&Profile> {
        self.slots.get(place(identity)).map(|slot| &*slot.profile)
    }

    /// How many numbers have pods.
    #[must_use]
    pub fn len(&self) -> usize {
        self.slots.len() - self.free.len() - self.retired.len()
    }

    /// Whether no number has a pod.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub(super) fn all(&self) -> impl Iterator<Item = (Identity, &Profile)> {
        let identities = (1..).filter_map(Identity::new);
        identities.zip(&self.slots).map(|(identity, slot)| (identity, &*slot.profile))
    }

    pub(super) fn of_namespace(&self, namespace: &str) -> impl Iterator<Item = (Identity, &Profile)> {
        let identities = self.by_namespace.get(namespace).into_iter().flatten();
        identities.filter_map(|identity| Some((*identity, self.profile(*identity)?)))
    }

    /// Those whose profile has a port with this name.
    pub(super) fn with_port(&self, name: &str) -> impl Iterator<Item = Identity> {
        self.by_port.get(name).into_iter().flatten().copied()
    }

    fn index(&mut self, profile: &Profile, identity: Identity, is_in: bool) {
        if is_in {
            self.by_namespace.entry(profile.namespace().to_owned()).or_default().insert(identity);
            for port in profile.ports() {
                self.by_port.entry(port.name.clone()).or_default().insert(identity);
            }
            return;
        }
        if let Some(identities) = self.by_namespace.get_mut(profile.namespace()) {
            identities.remove(&identity);
            if identities.is_empty() {
                self.by_namespace.remove(profile.namespace());
            }
        }
        for port in profile.ports() {
            let Some(identities) = self.by_port.get_mut(&port.name) else { continue };
            identities.remove(&identity);
            if identities.is_empty() {
                self.by_port.remove(&port.name);
            }
        }
    }
}

const fn place(identity: Identity) -> usize {
    identity.number() as usize - 1
}

fn slot_mut(slots: &mut [Slot], identity: Identity) -> Option<&mut Slot> {
    slots.get_mut(place(identity))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Labels, NamedPort, Protocol};

    fn profile(app: &str) -> Profile {
        Profile::new("shop", Labels::new(), Labels::from([("app".into(), app.into())]), vec![]).unwrap()
    }

    fn number(identities: &mut Identities, app: &str) -> u32 {
        match identities.assign(profile(app)).unwrap() {
            Assigned::Known(identity) | Assigned::New(identity, _) => identity.number(),
        }
    }

    #[test]
    fn equal_profiles_share_a_number() {
        let mut identities = Identities::default();
        assert_eq!(["a", "b", "a"].map(|app| number(&mut identities, app)), [1, 2, 1]);
        assert_eq!(identities.len(), 2);
    }

    #[test]
    fn a_number_is_not_used_again_while_a_table_may_mention_it() {
        let mut identities = Identities::default();
        let a = Identity::new(number(&mut identities, "a")).unwrap();
        let published = identities.advance();
        identities.release(a);
        identities.recycle(published);
        assert_eq!(number(&mut identities, "b"), 2, "tables of this epoch may mention it");
        let published = identities.advance();
        identities.recycle(published);
        assert_eq!(number(&mut identities, "c"), 1);
        assert_eq!(identities.profile(a), Some(&profile("c")));
        assert_eq!(identities.of_namespace("shop").count(), 2);
    }

    #[test]
    fn a_number_that_is_used_again_is_found_by_its_new_profile_only() {
        let mut identities = Identities::default();
        let of = |namespace: &str, name: &str| {
            let port = NamedPort { name: name.into(), protocol: Protocol::Tcp, port: 80 };
            Profile::new(namespace, Labels::new(), Labels::new(), vec![port]).unwrap()
        };
        assert!(matches!(identities.assign(of("shop", "http")), Ok(Assigned::New(_, None))));
        identities.release(Identity::new(1).unwrap());
        let published = identities.advance();
        identities.recycle(published);
        let again = identities.assign(of("pay", "sql")).unwrap();
        assert!(matches!(again, Assigned::New(_, Some(before)) if *before == of("shop", "http")));
        let count = |namespace, name| (identities.of_namespace(namespace).count(), identities.with_port(name).count());
        assert_eq!((count("shop", "http"), count("pay", "sql")), ((0, 0), (1, 1)));
    }

    #[test]
    fn a_profile_that_comes_back_has_its_number_again() {
        let mut identities = Identities::default();
        let a = Identity::new(number(&mut identities, "a")).unwrap();
        identities.release(a);
        assert!(identities.is_empty());
        assert_eq!(number(&mut identities, "a"), 1);
        let published = identities.advance();
        identities.recycle(published);
        assert_eq!(number(&mut identities, "b"), 2, "it has a pod again");
        identities.release(a);
        identities.release(a);
        assert_eq!(identities.len(), 1, "a pod is gone only once");
    }
}
