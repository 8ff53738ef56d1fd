//! Byte queues that take memory as they fill: one for data to send, one for data that arrived in order.

use std::collections::VecDeque;
use std::ops::Range;

/// Bytes in one piece of memory. A queue takes one piece more than it needs at most.
const CHUNK: usize = 32 << 10;

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
}

impl SendBuffer {
    /// An empty queue; the first byte to come has this offset.
    pub(crate) fn new(start: u64) -> Self {
        Self { chunks: VecDeque::new(), base: start, start, end: start }
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
                    self.chunks.push_back(Vec::new());
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
        if self.start == self.end {
            (self.chunks, self.base) = (VecDeque::new(), self.end);
        }
        while self.start - self.base >= CHUNK as u64 {
            self.chunks.pop_front();
            self.base += CHUNK as u64;
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
#[derive(Debug, Default)]
pub(crate) struct ReceiveBuffer {
    chunks: VecDeque<Vec<u8>>,
    /// Bytes of the first chunk that were read.
    read: usize,
    len: usize,
    /// Bytes of memory that the chunks take.
    memory: usize,
}

/// What a chunk takes beside its bytes.
const CHUNK_COST: usize = 64;

fn cost(chunk: &Vec<u8>) -> usize {
    chunk.capacity() + CHUNK_COST
}

impl ReceiveBuffer {
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

    pub(crate) fn push(&mut self, bytes: &[u8]) {
        self.len += bytes.len();
        match self.chunks.back_mut() {
            Some(last) if last.len() + bytes.len() <= CHUNK => {
                self.memory -= cost(last);
                last.extend_from_slice(bytes);
                self.memory += cost(last);
            }
            _ if !bytes.is_empty() => self.push_chunk(bytes.to_vec()),
            _ => {}
        }
    }

    fn push_chunk(&mut self, chunk: Vec<u8>) {
        self.memory += cost(&chunk);
        self.chunks.push_back(chunk);
    }

    /// Like [`ReceiveBuffer::push`], without a copy where that saves memory traffic.
    pub(crate) fn push_owned(&mut self, bytes: Vec<u8>) {
        if bytes.len() < CHUNK / 8 {
            return self.push(&bytes);
        }
        self.len += bytes.len();
        self.push_chunk(bytes);
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
                self.chunks.pop_front();
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
        let mut buffer = SendBuffer::new(1);
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
        let mut buffer = ReceiveBuffer::default();
        buffer.push(&pattern(0..10));
        buffer.push_owned(pattern(10..70_000));
        buffer.push(&pattern(70_000..70_003));
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
        let mut buffer = ReceiveBuffer::default();
        (0..1000).for_each(|_| buffer.push(b"x"));
        assert_eq!(buffer.chunks.len(), 1);
    }
}
