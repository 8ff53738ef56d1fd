//! Data that arrived out of order, in pieces that do not overlap.

use std::collections::BTreeMap;
use std::ops::Range;

/// Pieces that are kept.
pub(crate) const MAX_PIECES: usize = 2048;
/// What a piece takes beside its data: its place in the tree, and what the allocator adds.
pub(crate) const PIECE_COST: usize = 96;
/// Adjacent pieces are joined up to this length, so that joining costs no more than receiving.
const LONGEST: usize = 64 << 10;
/// A piece of this length at most is joined to one that arrives before it, which copies it.
const SMALL: usize = 1024;

/// Pieces by their offset in the stream.
#[derive(Debug, Default)]
pub(crate) struct Pieces {
    pieces: BTreeMap<u64, Vec<u8>>,
    /// Bytes of memory that they take.
    memory: usize,
}

fn cost(piece: &Vec<u8>) -> usize {
    piece.capacity() + PIECE_COST
}

fn end(start: u64, piece: &[u8]) -> u64 {
    start + piece.len() as u64
}

impl Pieces {
    pub(crate) fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    /// Bytes of memory that they take.
    pub(crate) fn memory(&self) -> usize {
        self.memory
    }

    /// Offset after the last byte.
    pub(crate) fn end(&self) -> Option<u64> {
        self.pieces.last_key_value().map(|(start, piece)| end(*start, piece))
    }

    /// The first gap at `from` or after it, which may have no end.
    pub(crate) fn gap(&self, mut from: u64) -> Range<u64> {
        if let Some((start, piece)) = self.pieces.range(..=from).next_back() {
            from = from.max(end(*start, piece));
        }
        for (start, piece) in self.pieces.range(from..) {
            if *start > from {
                return from..*start;
            }
            from = end(*start, piece);
        }
        from..u64::MAX
    }

    /// Keeps bytes that lie in a gap; `false` if there are too many pieces.
    pub(crate) fn keep(&mut self, start: u64, bytes: &[u8]) -> bool {
        let is_full = self.pieces.len() >= MAX_PIECES;
        let before = self.pieces.range_mut(..start).next_back();
        let before = before.filter(|(at, piece)| end(**at, piece) == start && piece.len() + bytes.len() <= LONGEST);
        let (at, piece) = match before {
            Some((at, piece)) => {
                self.memory -= cost(piece);
                piece.extend_from_slice(bytes);
                (*at, piece)
            }
            None if is_full => return false,
            None => (start, self.pieces.entry(start).or_insert_with(|| bytes.to_vec())),
        };
        self.memory += cost(piece);
        self.join_next(at);
        true
    }

    /// Joins a small piece to the one at `at` if it follows.
    fn join_next(&mut self, at: u64) {
        let Some(piece) = self.pieces.get(&at) else { return };
        let next = end(at, piece);
        let fits = |next: &Vec<u8>| next.len() <= SMALL && piece.len() + next.len() <= LONGEST;
        if !self.pieces.get(&next).is_some_and(fits) {
            return;
        }
        if let Some(next) = self.pieces.remove(&next)
            && let Some(piece) = self.pieces.get_mut(&at)
        {
            self.memory -= cost(&next) + cost(piece);
            piece.extend_from_slice(&next);
            self.memory += cost(piece);
        }
    }

    /// Takes the first piece if it begins at `next` or before it.
    pub(crate) fn take_until(&mut self, next: u64) -> Option<(u64, Vec<u8>)> {
        let first = self.pieces.first_entry().filter(|first| *first.key() <= next)?;
        let (start, piece) = first.remove_entry();
        self.memory -= cost(&piece);
        Some((start, piece))
    }

    /// Forgets the last pieces until so many bytes of memory are free or there is none. The peer sends them again.
    pub(crate) fn forget(&mut self, bytes: usize) {
        let wanted = self.memory.saturating_sub(bytes);
        while self.memory > wanted
            && let Some((_, piece)) = self.pieces.pop_last()
        {
            self.memory -= cost(&piece);
        }
    }

    /// The contiguous range around `offset`.
    pub(crate) fn range_around(&self, offset: u64) -> Option<Range<u64>> {
        let (start, piece) = self.pieces.range(..=offset).next_back()?;
        let mut range = *start..end(*start, piece);
        if !range.contains(&offset) {
            return None;
        }
        for (start, piece) in self.pieces.range(..range.start).rev() {
            if end(*start, piece) != range.start {
                break;
            }
            range.start = *start;
        }
        for (start, piece) in self.pieces.range(range.end..) {
            if *start != range.end {
                break;
            }
            range.end = end(*start, piece);
        }
        Some(range)
    }

    /// Counts the memory again.
    pub(crate) fn measure(&self) -> usize {
        self.pieces.values().map(cost).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ranges(pieces: &Pieces) -> Vec<Range<u64>> {
        pieces.pieces.iter().map(|(start, piece)| *start..end(*start, piece)).collect()
    }

    #[test]
    fn single_bytes_in_any_order_become_few_pieces() {
        let offsets: [Vec<u64>; 3] = [
            (0..2000).collect(),
            (0..2000).rev().collect(),
            (0..2000).step_by(2).chain((1..2000).step_by(2)).collect(),
        ];
        for offsets in offsets {
            let mut pieces = Pieces::default();
            for offset in offsets {
                assert_eq!(pieces.gap(offset).start, offset);
                assert!(pieces.keep(offset, b"x"));
                assert_eq!(pieces.memory(), pieces.measure());
            }
            assert!(pieces.pieces.len() <= 2, "{:?}", ranges(&pieces));
            assert_eq!((pieces.range_around(777), pieces.gap(0).start), (Some(0..2000), 2000));
            assert!(pieces.memory() < 2 * 2000 + 2 * PIECE_COST, "{}", pieces.memory());
        }
    }

    #[test]
    fn bytes_that_cannot_be_joined_count_with_what_they_take() {
        let mut pieces = Pieces::default();
        let kept = (0..10_000).filter(|at| pieces.keep(2 * at, b"x")).count();
        assert_eq!(kept, MAX_PIECES);
        assert!(pieces.memory() >= MAX_PIECES * (PIECE_COST + 1) && pieces.memory() == pieces.measure());
        pieces.forget(PIECE_COST * 2);
        assert_eq!(pieces.end(), Some(2 * MAX_PIECES as u64 - 5));
        pieces.forget(usize::MAX);
        assert!(pieces.is_empty() && pieces.memory() == 0);
    }

    #[test]
    fn gaps_are_found_between_pieces() {
        let mut pieces = Pieces::default();
        pieces.keep(10, &[0; 2000]);
        pieces.keep(2010, &[0; 2000]);
        pieces.keep(5000, b"x");
        assert_eq!((pieces.gap(0), pieces.gap(10), pieces.gap(4500)), (0..10, 4010..5000, 4500..5000));
        assert_eq!(pieces.gap(5000), 5001..u64::MAX);
        assert_eq!(pieces.take_until(9), None);
        assert_eq!(pieces.take_until(10).map(|(start, piece)| (start, piece.len())), Some((10, 4000)));
    }
}
