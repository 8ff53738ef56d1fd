//! Byte queues that take memory as they fill: one for data to send, one for data that arrived in order.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use super::chunks::{CHUNK, Chunks, Data};

/// Chunks of less grow with what comes, so that small writes and small segments share one.
const SMALL: usize = 4 << 10;

/// Data that the peer has not acknowledged yet, by offset in the stream.
#[derive(Debug)]
pub(crate) struct SendBuffer {
    /// All but the last one are full.
    chunks: VecDeque<Vec<u8>>,
    /// Offset of the first byte in `chunks`.
    base: u64,
    /// Offset of the first byte that is still needed.
    start: u64,
    end: u64,
    pool: Arc<Chunks>,
}

impl SendBuffer {
    /// An empty queue; the first byte to come has this offset.
    pub(crate) fn new(start: u64, pool: Arc<Chunks>) -> Self {
        Self { chunks: VecDeque::new(), base: start, start, end: start, pool }
    }

    /// Offset after the last byte.
    pub(crate) fn end(&self) -> u64 {
        self.end
    }

    pub(crate) fn len(&self) -> usize {
        (self.end - self.start) as usize
    }

    pub(crate) fn push(&mut self, mut bytes: &[u8]) {
        self.end += bytes.len() as u64;
        while !bytes.is_empty() {
            let room = match self.chunks.back() {
                Some(last) if last.len() < CHUNK => CHUNK - last.len(),
                _ => {
                    self.chunks.push_back(if bytes.len() >= CHUNK { self.pool.take() } else { Vec::new() });
                    CHUNK
                }
            };
            let (now, later) = bytes.split_at(room.min(bytes.len()));
            if let Some(last) = self.chunks.back_mut() {
                last.extend_from_slice(now);
            }
            bytes = later;
        }
    }

    /// Frees everything before `offset`.
    pub(crate) fn release(&mut self, offset: u64) {
        self.start = offset.clamp(self.start, self.end);
        while self.start - self.base >= CHUNK as u64 {
            self.chunks.pop_front().into_iter().for_each(|chunk| self.pool.give(chunk));
            self.base += CHUNK as u64;
        }
        if self.start == self.end {
            (self.chunks, self.base) = (VecDeque::new(), self.end);
        }
    }

    /// Appends the bytes of `range`, which must be in the queue, to `out`.
    pub(crate) fn copy(&self, range: Range<u64>, out: &mut Vec<u8>) {
        debug_assert!(self.start <= range.start && range.end <= self.end, "{range:?} is not in the queue");
        let (mut at, end) = ((range.start - self.base) as usize, (range.end - self.base) as usize);
        while at < end {
            let Some(chunk) = self.chunks.get(at / CHUNK) else { return };
            let from = at % CHUNK;
            let to = chunk.len().min(from + end - at);
            out.extend_from_slice(&chunk[from..to]);
            at += to - from;
        }
    }
}

/// Data in order that the program has not read yet.
#[derive(Debug)]
pub(crate) struct ReceiveBuffer {
    chunks: VecDeque<Vec<u8>>,
    /// Bytes of the first chunk that were read.
    read: usize,
    len: usize,
    /// Bytes of memory that the chunks take.
    memory: usize,
    pool: Arc<Chunks>,
}

/// What a chunk takes beside its bytes.
const CHUNK_COST: usize = 64;

fn cost(chunk: &Vec<u8>) -> usize {
    chunk.capacity() + CHUNK_COST
}

impl ReceiveBuffer {
    pub(crate) fn new(pool: Arc<Chunks>) -> Self {
        Self { chunks: VecDeque::new(), read: 0, len: 0, memory: 0, pool }
    }

    /// Forgets everything.
    pub(crate) fn clear(&mut self) {
        *self = Self::new(Arc::clone(&self.pool));
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Bytes of memory that the data takes.
    pub(crate) fn memory(&self) -> usize {
        self.memory
    }

    /// Counts the memory again.
    pub(crate) fn measure(&self) -> usize {
        self.chunks.iter().map(cost).sum()
    }

    /// Appends bytes that `following` more come after at once, for which there is room then without moving these.
    pub(crate) fn push(&mut self, bytes: &[u8], following: usize) {
        self.len += bytes.len();
        match self.chunks.back_mut() {
            Some(last) if last.capacity() - last.len() >= bytes.len() => last.extend_from_slice(bytes),
            Some(last) if last.len() + bytes.len() <= SMALL => {
                self.memory -= cost(last);
                last.extend_from_slice(bytes);
                self.memory += cost(last);
            }
            _ if !bytes.is_empty() => {
                // No chunk for a rest: its memory is charged to the peer.
                let all = bytes.len() + following;
                let mut chunk = if bytes.len() <= CHUNK && all >= CHUNK {
                    self.pool.take()
                } else {
                    Vec::with_capacity(all.min(CHUNK.max(bytes.len())))
                };
                chunk.extend_from_slice(bytes);
                self.push_chunk(chunk);
            }
            _ => {}
        }
    }

    fn push_chunk(&mut self, chunk: Vec<u8>) {
        self.memory += cost(&chunk);
        self.chunks.push_back(chunk);
    }

    /// Like [`ReceiveBuffer::push`], without a copy where that saves memory traffic.
    pub(crate) fn push_owned(&mut self, bytes: Vec<u8>) {
        if bytes.len() < SMALL {
            return self.push(&bytes, 0);
        }
        self.len += bytes.len();
        self.push_chunk(bytes);
    }

    /// Takes whole chunks, `max` bytes at most. Nothing if the first one has more.
    pub(crate) fn take(&mut self, max: usize) -> (Data, usize) {
        let (skip, mut len, mut chunks) = (self.read, 0, VecDeque::new());
        if self.len <= max {
            (chunks, len, self.memory) = (std::mem::take(&mut self.chunks), self.len, 0);
        }
        while let Some(first) = self.chunks.pop_front() {
            let count = first.len() - if chunks.is_empty() { skip } else { 0 };
            if len + count > max {
                self.chunks.push_front(first);
                break;
            }
            (len, self.memory) = (len + count, self.memory - cost(&first));
            chunks.push_back(first);
        }
        if !chunks.is_empty() {
            self.read = 0;
        }
        self.len -= len;
        (Data { chunks, skip, pool: Arc::clone(&self.pool) }, len)
    }

    /// Moves bytes into `out`; returns how many.
    pub(crate) fn read(&mut self, out: &mut [u8]) -> usize {
        let mut done = 0;
        while done < out.len()
            && let Some(first) = self.chunks.front()
        {
            let count = (first.len() - self.read).min(out.len() - done);
            out[done..done + count].copy_from_slice(&first[self.read..self.read + count]);
            done += count;
            self.read += count;
            if self.read == first.len() {
                self.memory -= cost(first);
                self.chunks.pop_front().into_iter().for_each(|chunk| self.pool.give(chunk));
                self.read = 0;
            }
        }
        self.len -= done;
        if self.chunks.is_empty() {
            self.chunks = VecDeque::new();
        }
        done
    }

    /// Copies bytes into `out`, and leaves them there; returns how many.
    pub(crate) fn peek(&self, out: &mut [u8]) -> usize {
        let (mut done, mut read) = (0, self.read);
        for chunk in &self.chunks {
            let unread = &chunk[read..];
            let count = unread.len().min(out.len() - done);
            out[done..done + count].copy_from_slice(&unread[..count]);
            (done, read) = (done + count, 0);
        }
        done
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pattern(range: Range<u64>) -> Vec<u8> {
        range.map(|at| (at % 251) as u8).collect()
    }

    #[test]
    fn any_range_that_was_not_released_can_be_copied() {
        let mut buffer = SendBuffer::new(1, Arc::default());
        for (from, to) in [(1, 10), (10, 100_000), (100_000, 100_001), (100_001, 200_000)] {
            buffer.push(&pattern(from..to));
        }
        buffer.release(70_000);
        assert_eq!(buffer.len(), 130_000);
        for range in [70_000..70_001, 70_000..200_000, 98_303..98_306, 199_999..200_000] {
            let mut out = Vec::new();
            buffer.copy(range.clone(), &mut out);
            assert_eq!(out, pattern(range));
        }
        buffer.release(200_000);
        assert!(buffer.chunks.is_empty());
        buffer.push(b"x");
        let mut out = Vec::new();
        buffer.copy(200_000..200_001, &mut out);
        assert_eq!(out, b"x");
    }

    #[test]
    fn what_was_pushed_is_read_in_order() {
        let mut buffer = ReceiveBuffer::new(Arc::default());
        buffer.push(&pattern(0..10), 0);
        buffer.push_owned(pattern(10..70_000));
        buffer.push(&pattern(70_000..70_003), 0);
        let mut all = Vec::new();
        let mut out = [0; 999];
        while buffer.len() > 0 {
            let mut ahead = [0; 999];
            let seen = buffer.peek(&mut ahead);
            let count = buffer.read(&mut out);
            assert_eq!(ahead[..seen], out[..count]);
            all.extend_from_slice(&out[..count]);
            assert!(buffer.memory() == buffer.measure() && buffer.memory() >= buffer.len());
        }
        assert_eq!(buffer.memory(), 0);
        assert_eq!(all, pattern(0..70_003));
        assert_eq!(buffer.read(&mut out), 0);
    }

    #[test]
    fn single_bytes_share_memory() {
        let mut buffer = ReceiveBuffer::new(Arc::default());
        (0..1000).for_each(|_| buffer.push(b"x", 0));
        assert_eq!(buffer.chunks.len(), 1);
    }
}
