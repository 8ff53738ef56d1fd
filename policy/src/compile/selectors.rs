//! Selectors of all policies, each once, with the identities that they select.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use super::bits::Bits;
use super::identities::Identities;
use crate::model::{Namespaces, PodSelector, Profile};
use crate::program::Identity;

/// The number of a selector.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct SelectorId(u32);

/// Selectors by number. Equal ones share a number.
#[derive(Debug, Default)]
pub(super) struct Selectors {
    slots: Vec<Option<Slot>>,
    ids: HashMap<Arc<PodSelector>, SelectorId>,
    free: Vec<SelectorId>,
    /// Those of one namespace by its name, so that pods of others are not compared with them.
    by_namespace: HashMap<String, BTreeSet<SelectorId>>,
    of_all_namespaces: BTreeSet<SelectorId>,
}

#[derive(Debug)]
struct Slot {
    selector: Arc<PodSelector>,
    identities: Bits,
    uses: usize,
}

impl Selectors {
    /// The number of a selector, which has one more use.
    pub(super) fn acquire(&mut self, selector: PodSelector, identities: &Identities) -> SelectorId {
        if let Some(id) = self.ids.get(&selector).copied() {
            if let Some(slot) = self.slot_mut(id) {
                slot.uses += 1;
            }
            return id;
        }
        let mut selected = Bits::default();
        let mut compare = |(identity, profile): (Identity, &Profile)| {
            selected.set(identity.number(), selector.selects(profile));
        };
        match &selector.namespaces {
            Namespaces::Named(name) => identities.of_namespace(name).for_each(&mut compare),
            Namespaces::Matching(_) => identities.all().for_each(&mut compare),
        }
        let selector = Arc::new(selector);
        let slot = Slot { selector: selector.clone(), identities: selected, uses: 1 };
        let id = self.free.pop().unwrap_or(SelectorId(self.slots.len() as u32));
        match self.slots.get_mut(id.0 as usize) {
            Some(free) => *free = Some(slot),
            None => self.slots.push(Some(slot)),
        }
        match &selector.namespaces {
            Namespaces::Named(name) => self.by_namespace.entry(name.clone()).or_default().insert(id),
            Namespaces::Matching(_) => self.of_all_namespaces.insert(id),
        };
        self.ids.insert(selector, id);
        id
    }

    /// Takes one use away.
    pub(super) fn release(&mut self, id: SelectorId) {
        let Some(slot) = self.slot_mut(id) else { return };
        slot.uses -= 1;
        if slot.uses > 0 {
            return;
        }
        let Some(slot) = self.slots.get_mut(id.0 as usize).and_then(Option::take) else { return };
        self.ids.remove(&slot.selector);
        self.of_all_namespaces.remove(&id);
        if let Namespaces::Named(name) = &slot.selector.namespaces
            && let Some(ids) = self.by_namespace.get_mut(name)
        {
            ids.remove(&id);
            if ids.is_empty() {
                self.by_namespace.remove(name);
            }
        }
        self.free.push(id);
    }

    /// A number has another profile: returns the selectors that select it and did not, or the other way round.
    pub(super) fn update(&mut self, identity: Identity, before: Option<&Profile>, now: &Profile) -> Vec<SelectorId> {
        let mut concerned = self.of_all_namespaces.clone();
        for profile in before.into_iter().chain([now]) {
            concerned.extend(self.by_namespace.get(profile.namespace()).into_iter().flatten());
        }
        let mut is_changed = |id: &SelectorId| {
            let Some(slot) = self.slot_mut(*id) else { return false };
            let is_selected = slot.selector.selects(now);
            slot.identities.set(identity.number(), is_selected)
        };
        concerned.into_iter().filter(|id| is_changed(id)).collect()
    }

    pub(super) fn selects(&self, id: SelectorId, identity: Identity) -> bool {
        self.slot(id).is_some_and(|slot| slot.identities.contains(identity.number()))
    }

    /// Numbers of the identities that a selector selects.
    pub(super) fn selected(&self, id: SelectorId) -> impl Iterator<Item = u32> {
        self.slot(id).into_iter().flat_map(|slot| slot.identities.iter())
    }

    /// All selectors that select an identity.
    pub(super) fn of_identity(&self, identity: Identity) -> impl Iterator<Item = SelectorId> {
        (0..self.slots.len() as u32).map(SelectorId).filter(move |id| self.selects(*id, identity))
    }

    fn slot(&self, id: SelectorId) -> Option<&Slot> {
        self.slots.get(id.0 as usize)?.as_ref()
    }

    fn slot_mut(&mut self, id: SelectorId) -> Option<&mut Slot> {
        self.slots.get_mut(id.0 as usize)?.as_mut()
    }
}
