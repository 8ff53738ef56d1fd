//! The memory of byte queues, in pieces of one size that are used again.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Bytes in one chunk: a super-packet fills three and a rest.
pub(crate) const CHUNK: usize = 16 << 10;
/// Free chunks that are kept: 1 MiB.
const SPARE: usize = 64;

/// Free chunks, shared by all connections of a node. Allocators return memory of this size to the kernel, so without
/// the pool fast streams would fault in every page of every chunk again.
#[derive(Debug, Default)]
pub struct Chunks(Mutex<Vec<Vec<u8>>>);

impl Chunks {
    /// An empty chunk.
    pub(crate) fn take(&self) -> Vec<u8> {
        let spare = self.spare().pop();
        spare.unwrap_or_else(|| Vec::with_capacity(CHUNK))
    }

    /// Keeps a chunk for later, if it is one and few are kept.
    pub(crate) fn give(&self, mut chunk: Vec<u8>) {
        if chunk.capacity() != CHUNK {
            return;
        }
        let mut spare = self.spare();
        if spare.len() < SPARE {
            chunk.clear();
            spare.push(chunk);
        }
    }

    /// Frees what is kept.
    pub fn release(&self) {
        *self.spare() = Vec::new();
    }

    fn spare(&self) -> MutexGuard<'_, Vec<Vec<u8>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Data that was taken out of a connection, to be copied while others use the node.
#[derive(Debug)]
pub struct Data {
    pub(super) chunks: VecDeque<Vec<u8>>,
    /// Bytes of the first chunk that were read before.
    pub(super) skip: usize,
    pub(super) pool: Arc<Chunks>,
}

impl Data {
    /// Copies all into `out`, which has to be long enough; returns how much.
    pub fn copy_to(self, out: &mut [u8]) -> usize {
        let (mut skip, mut done) = (self.skip, 0);
        for chunk in self.chunks {
            let bytes = &chunk[std::mem::take(&mut skip)..];
            out[done..done + bytes.len()].copy_from_slice(bytes);
            done += bytes.len();
            self.pool.give(chunk);
        }
        done
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chunk_comes_again_empty_and_no_more_are_kept_than_said() {
        let chunks = Chunks::default();
        let mut first = chunks.take();
        first.extend_from_slice(b"hello");
        let place = first.as_ptr();
        chunks.give(first);
        let again = chunks.take();
        assert!(again.is_empty() && again.as_ptr() == place && again.capacity() == CHUNK);
        (0..2 * SPARE).for_each(|_| chunks.give(Vec::with_capacity(CHUNK)));
        chunks.give(Vec::with_capacity(CHUNK / 2));
        assert_eq!(chunks.spare().len(), SPARE);
        chunks.release();
        assert_eq!(chunks.spare().capacity(), 0);
    }
}
