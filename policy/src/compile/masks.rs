//! Sets of rows, each once, and intervals of numbers with the rows that they match.

use std::collections::HashMap;

use super::ranges::Interval;
use crate::model::MAX_PROGRAM_LEN;
use crate::program::NONE;

/// Words of 64 rows.
pub(super) type Mask = Vec<u64>;

/// Adds a row to a mask.
pub(super) fn insert(mask: &mut Mask, row: u32) {
    if let Some(word) = mask.get_mut(row as usize / 64) {
        *word |= 1 << (row % 64);
    }
}

/// The masks of a program, by number.
#[derive(Debug)]
pub(super) struct Masks {
    words: usize,
    numbers: HashMap<Mask, u32>,
    list: Vec<Mask>,
}

impl Masks {
    /// For masks with this number of rows.
    pub(super) fn new(rows: usize) -> Self {
        Self { words: rows.div_ceil(64), numbers: HashMap::new(), list: Vec::new() }
    }

    pub(super) fn empty(&self) -> Mask {
        vec![0; self.words]
    }

    /// The number of a mask; the empty one has none.
    pub(super) fn number(&mut self, mask: &Mask) -> u32 {
        if mask.iter().all(|word| *word == 0) {
            return NONE;
        }
        if let Some(number) = self.numbers.get(mask) {
            return *number;
        }
        let number = self.list.len() as u32;
        self.numbers.insert(mask.clone(), number);
        self.list.push(mask.clone());
        number
    }

    /// Whether the masks alone are more than a program may be, so there is no need to go on.
    pub(super) fn are_too_large(&self) -> bool {
        self.list.len() * self.words * 8 > MAX_PROGRAM_LEN
    }

    pub(super) fn list(&self) -> &[Mask] {
        &self.list
    }

    /// The starts of the intervals in which the same rows match, with those rows; before the first one, none do. The
    /// intervals of one row are in order, do not overlap and do not touch.
    pub(super) fn sweep<'a>(&mut self, rows: impl Iterator<Item = (u32, &'a [Interval])>) -> Vec<(u128, u32)> {
        let mut changes = Vec::new();
        for (row, intervals) in rows {
            for (first, last) in intervals {
                changes.push((*first, row));
                changes.extend(last.checked_add(1).map(|next| (next, row)));
            }
        }
        changes.sort_unstable();
        let (mut current, mut starts) = (self.empty(), Vec::new());
        for changes in changes.chunk_by(|(at, _), (next, _)| at == next) {
            for (_, row) in changes {
                if let Some(word) = current.get_mut(*row as usize / 64) {
                    *word ^= 1 << (row % 64);
                }
            }
            if self.are_too_large() {
                break;
            }
            let number = self.number(&current);
            let before = starts.last().map_or(NONE, |(_, number)| *number);
            if let Some((at, _)) = changes.first().filter(|_| number != before) {
                starts.push((*at, number));
            }
        }
        starts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals_with_the_same_rows_have_the_same_mask() {
        let mut masks = Masks::new(2);
        let (a, b) = ([(0, 9), (20, u128::MAX)], [(5, 24)]);
        let starts = masks.sweep([(0, &a[..]), (1, &b[..])].into_iter());
        assert_eq!(starts, [(0, 0), (5, 1), (10, 2), (20, 1), (25, 0)]);
        assert_eq!(masks.list(), [vec![1], vec![3], vec![2]]);
    }

    #[test]
    fn a_number_beyond_the_key_space_ends_an_interval() {
        let mut masks = Masks::new(1);
        let all = [(0, 255)];
        assert_eq!(masks.sweep([(0, &all[..])].into_iter()), [(0, 0), (256, NONE)]);
    }
}
