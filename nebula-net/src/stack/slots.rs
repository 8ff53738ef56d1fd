//! Values by number; a number is not valid for a later value at the same place.

/// Number of a connection in a stack.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Id {
    index: u32,
    generation: u32,
}

/// Values of one kind by number.
#[derive(Debug)]
pub(crate) struct Slots<T> {
    slots: Vec<(u32, Option<T>)>,
    free: Vec<u32>,
}

impl<T> Default for Slots<T> {
    fn default() -> Self {
        Self { slots: Vec::new(), free: Vec::new() }
    }
}

impl<T> Slots<T> {
    pub(crate) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    pub(crate) fn insert(&mut self, value: T) -> Id {
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push((0, None));
            self.slots.len() as u32 - 1
        });
        let slot = &mut self.slots[index as usize];
        slot.1 = Some(value);
        Id { index, generation: slot.0 }
    }

    pub(crate) fn get(&self, id: Id) -> Option<&T> {
        self.slots.get(id.index as usize).filter(|slot| slot.0 == id.generation)?.1.as_ref()
    }

    pub(crate) fn get_mut(&mut self, id: Id) -> Option<&mut T> {
        self.slots.get_mut(id.index as usize).filter(|slot| slot.0 == id.generation)?.1.as_mut()
    }

    pub(crate) fn remove(&mut self, id: Id) -> Option<T> {
        let slot = self.slots.get_mut(id.index as usize).filter(|slot| slot.0 == id.generation)?;
        let value = slot.1.take()?;
        slot.0 = slot.0.wrapping_add(1);
        self.free.push(id.index);
        Some(value)
    }

    pub(crate) fn ids(&self) -> impl Iterator<Item = Id> {
        self.slots
            .iter()
            .enumerate()
            .filter(|(_, slot)| slot.1.is_some())
            .map(|(index, slot)| Id { index: index as u32, generation: slot.0 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_not_valid_for_the_next_value() {
        let mut slots = Slots::default();
        let first = slots.insert('a');
        assert_eq!(slots.remove(first), Some('a'));
        let second = slots.insert('b');
        assert_eq!((slots.get(first), slots.get(second), slots.len()), (None, Some(&'b'), 1));
        assert_eq!(slots.remove(first), None);
    }
}
