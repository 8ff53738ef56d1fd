//! Sets of small numbers.

/// A set of numbers, as bits that grow with the largest one.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Bits(Vec<u64>);

impl Bits {
    pub(super) fn contains(&self, number: u32) -> bool {
        self.0.get(number as usize / 64).is_some_and(|word| word >> (number % 64) & 1 != 0)
    }

    /// Adds or removes a number; returns whether the set changed.
    pub(super) fn set(&mut self, number: u32, is_in: bool) -> bool {
        let place = number as usize / 64;
        if self.contains(number) == is_in {
            return false;
        }
        if place >= self.0.len() {
            self.0.resize(place + 1, 0);
        }
        if let Some(word) = self.0.get_mut(place) {
            *word ^= 1 << (number % 64);
        }
        true
    }

    /// The numbers, in order.
    pub(super) fn iter(&self) -> impl Iterator<Item = u32> {
        self.0.iter().zip(0_u32..).flat_map(|(word, place)| {
            let mut left = *word;
            std::iter::from_fn(move || {
                let bit = (left != 0).then(|| left.trailing_zeros())?;
                left &= left - 1;
                Some(place * 64 + bit)
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_has_what_was_added_and_not_removed() {
        let mut bits = Bits::default();
        for number in [3, 200, 64, 3, 0] {
            bits.set(number, true);
        }
        assert!(!bits.set(3, true) && bits.set(200, false) && !bits.set(200, false) && !bits.set(9999, false));
        assert_eq!(bits.iter().collect::<Vec<_>>(), [0, 3, 64]);
        assert!(bits.contains(64) && !bits.contains(200) && !bits.contains(u32::MAX));
    }
}
