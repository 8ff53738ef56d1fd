//! TCP headers on the wire: fields and options (RFC 9293 section 3.1, RFC 7323, RFC 2018).

/// Length of a header without options.
pub const MIN_HEADER: usize = 20;
/// Length of the longest header.
pub const MAX_HEADER: usize = 60;
/// Length of the timestamps option with the two no-operations that align it.
pub(crate) const TIMESTAMPS_LEN: usize = 12;
/// Most SACK blocks that fit beside nothing else.
const MAX_SACK_BLOCKS: usize = 4;
/// RFC 7323 section 2.3: a larger shift counts as this one.
const MAX_SHIFT: u8 = 14;

/// Control bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Flags(pub u8);

impl Flags {
    /// No more data from the sender.
    pub const FIN: Self = Self(0x01);
    /// Synchronise sequence numbers.
    pub const SYN: Self = Self(0x02);
    /// Reset the connection.
    pub const RST: Self = Self(0x04);
    /// Push.
    pub const PSH: Self = Self(0x08);
    /// The acknowledgement number is valid.
    pub const ACK: Self = Self(0x10);

    /// Whether all bits of `other` are set.
    #[must_use]
    pub fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// The bits of both.
    #[must_use]
    pub fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// The options that this implementation knows. Unknown ones are skipped, malformed ones ignored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Options {
    /// Maximum segment size, in a SYN.
    pub mss: Option<u16>,
    /// Window scale, in a SYN; at most 14.
    pub window_scale: Option<u8>,
    /// Whether selective acknowledgements may be sent, in a SYN.
    pub sack_permitted: bool,
    /// TSval and TSecr.
    pub timestamps: Option<(u32, u32)>,
    /// Blocks that were received out of order, newest first: first sequence number, and the one after the last.
    pub sack: SackBlocks,
}

/// Up to four SACK blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SackBlocks {
    blocks: [(u32, u32); MAX_SACK_BLOCKS],
    count: u8,
}

impl SackBlocks {
    /// Adds a block if there is room.
    pub fn push(&mut self, first: u32, end: u32) {
        if let Some(slot) = self.blocks.get_mut(usize::from(self.count)) {
            *slot = (first, end);
            self.count += 1;
        }
    }

    /// The blocks in their order.
    #[must_use]
    pub fn as_slice(&self) -> &[(u32, u32)] {
        &self.blocks[..usize::from(self.count)]
    }
}

/// A TCP header.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Header {
    /// Source port.
    pub source: u16,
    /// Destination port.
    pub destination: u16,
    /// Sequence number of the first byte (or of the SYN).
    pub sequence: u32,
    /// Next sequence number that the sender expects, if [`Flags::ACK`] is set.
    pub acknowledgement: u32,
    /// Control bits.
    pub flags: Flags,
    /// Receive window, not yet scaled.
    pub window: u16,
    /// Options.
    pub options: Options,
}

impl Header {
    /// Reads a header. Returns it with its length; `None` if it is truncated or its length field is wrong.
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Option<(Self, usize)> {
        let fixed = bytes.first_chunk::<MIN_HEADER>()?;
        let len = usize::from(fixed[12] >> 4) * 4;
        let options = bytes.get(MIN_HEADER..len)?;
        let word = |at: usize| u16::from_be_bytes([fixed[at], fixed[at + 1]]);
        let long = |at: usize| u32::from_be_bytes([fixed[at], fixed[at + 1], fixed[at + 2], fixed[at + 3]]);
        let header = Self {
            source: word(0),
            destination: word(2),
            sequence: long(4),
            acknowledgement: long(8),
            flags: Flags(fixed[13]),
            window: word(14),
            options: Options::parse(options),
        };
        Some((header, len))
    }

    /// Appends the header to `out`, with an empty checksum field.
    pub fn emit(&self, out: &mut Vec<u8>) {
        let start = out.len();
        out.extend_from_slice(&self.source.to_be_bytes());
        out.extend_from_slice(&self.destination.to_be_bytes());
        out.extend_from_slice(&self.sequence.to_be_bytes());
        out.extend_from_slice(&self.acknowledgement.to_be_bytes());
        out.extend_from_slice(&[0, self.flags.0]);
        out.extend_from_slice(&self.window.to_be_bytes());
        out.extend_from_slice(&[0; 4]);
        self.options.emit(out, start + MAX_HEADER);
        while !(out.len() - start).is_multiple_of(4) {
            out.push(END);
        }
        out[start + 12] = ((out.len() - start) as u8 / 4) << 4;
    }
}

const END: u8 = 0;
const NO_OPERATION: u8 = 1;
const MSS: u8 = 2;
const WINDOW_SCALE: u8 = 3;
const SACK_PERMITTED: u8 = 4;
const SACK: u8 = 5;
const TIMESTAMPS: u8 = 8;

impl Options {
    fn parse(mut bytes: &[u8]) -> Self {
        let mut options = Self::default();
        while let [kind, rest @ ..] = bytes {
            match *kind {
                END => break,
                NO_OPERATION => bytes = rest,
                _ => {
                    let Some(len) = rest.first().map(|len| usize::from(*len)) else { break };
                    let Some(body) = bytes.get(2..len) else { break };
                    options.read(*kind, body);
                    bytes = &bytes[len..];
                }
            }
        }
        options
    }

    fn read(&mut self, kind: u8, body: &[u8]) {
        match (kind, body) {
            (MSS, [high, low]) => self.mss = Some(u16::from_be_bytes([*high, *low])),
            (WINDOW_SCALE, [shift]) => self.window_scale = Some((*shift).min(MAX_SHIFT)),
            (SACK_PERMITTED, []) => self.sack_permitted = true,
            (SACK, body) => {
                let (blocks, rest) = body.as_chunks::<8>();
                if rest.is_empty() {
                    blocks.iter().for_each(|block| {
                        let (first, end) = pair(*block);
                        self.sack.push(first, end);
                    });
                }
            }
            (TIMESTAMPS, body) => self.timestamps = body.try_into().ok().map(pair),
            _ => {}
        }
    }

    /// SACK blocks are left out where they would exceed `limit`.
    fn emit(&self, out: &mut Vec<u8>, limit: usize) {
        if let Some(mss) = self.mss {
            out.extend_from_slice(&[MSS, 4]);
            out.extend_from_slice(&mss.to_be_bytes());
        }
        if let Some(shift) = self.window_scale {
            out.extend_from_slice(&[NO_OPERATION, WINDOW_SCALE, 3, shift]);
        }
        if self.sack_permitted {
            out.extend_from_slice(&[NO_OPERATION, NO_OPERATION, SACK_PERMITTED, 2]);
        }
        if let Some((value, echo)) = self.timestamps {
            out.extend_from_slice(&[NO_OPERATION, NO_OPERATION, TIMESTAMPS, 10]);
            out.extend_from_slice(&value.to_be_bytes());
            out.extend_from_slice(&echo.to_be_bytes());
        }
        let room = limit.saturating_sub(out.len() + 4) / 8;
        let blocks = self.sack.as_slice();
        let blocks = &blocks[..blocks.len().min(room)];
        if !blocks.is_empty() {
            out.extend_from_slice(&[NO_OPERATION, NO_OPERATION, SACK, 2 + 8 * blocks.len() as u8]);
            for (first, end) in blocks {
                out.extend_from_slice(&first.to_be_bytes());
                out.extend_from_slice(&end.to_be_bytes());
            }
        }
    }
}

fn pair(bytes: [u8; 8]) -> (u32, u32) {
    let [a, b, c, d, e, f, g, h] = bytes;
    (u32::from_be_bytes([a, b, c, d]), u32::from_be_bytes([e, f, g, h]))
}

/// The sequence numbers of one direction, as offsets that do not wrap: the SYN is at 0, the first byte of data at 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Space {
    pub(crate) initial: u32,
}

impl Space {
    /// Sequence number at an offset.
    pub(crate) fn sequence(self, offset: u64) -> u32 {
        self.initial.wrapping_add(offset as u32)
    }

    /// The offset nearest to `near` with this sequence number; `None` if that would lie before the SYN.
    pub(crate) fn offset(self, near: u64, sequence: u32) -> Option<u64> {
        let distance = sequence.wrapping_sub(self.sequence(near)) as i32;
        near.checked_add_signed(distance.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_with_all_options_of_a_syn_reads_as_it_was_written() {
        let options = Options {
            mss: Some(1240),
            window_scale: Some(7),
            sack_permitted: true,
            timestamps: Some((1, 0xffff_0000)),
            sack: SackBlocks::default(),
        };
        let header = Header { source: 1, destination: 2, sequence: 3, flags: Flags::SYN, options, ..Header::default() };
        let mut bytes = Vec::new();
        header.emit(&mut bytes);
        assert_eq!(Header::parse(&bytes), Some((header, bytes.len())));
    }

    #[test]
    fn sack_blocks_that_do_not_fit_are_left_out() {
        let mut options = Options { timestamps: Some((1, 2)), ..Options::default() };
        (0..6).for_each(|at| options.sack.push(at * 10, at * 10 + 5));
        let mut bytes = Vec::new();
        Header { options, flags: Flags::ACK, ..Header::default() }.emit(&mut bytes);
        let (read, len) = Header::parse(&bytes).unwrap();
        assert_eq!((len, read.options.sack.as_slice()), (60, &[(0, 5), (10, 15), (20, 25)][..]));
    }

    #[test]
    fn options_of_a_wrong_length_end_the_list() {
        for tail in [[2, 0, 0, 0], [2, 1, 0, 0], [2, 5, 0, 0], [1, 1, 1, 8]] {
            let mut bytes = [0; 24];
            bytes[12] = 6 << 4;
            bytes[20..].copy_from_slice(&tail);
            let (header, _) = Header::parse(&bytes).unwrap();
            assert_eq!(header.options, Options::default());
        }
        assert_eq!(Header::parse(&[0x40; 19]), None);
        assert_eq!(Header::parse(&[0x40; 20]), None, "shorter than its fixed part");
        assert_eq!(Header::parse(&[0xf0; 40]), None, "longer than its bytes");
    }

    #[test]
    fn offsets_do_not_wrap_with_sequence_numbers() {
        let space = Space { initial: u32::MAX - 1 };
        assert_eq!(space.sequence(5), 3);
        assert_eq!(space.offset(1, 3), Some(5));
        assert_eq!(space.offset(1 << 32, space.sequence((1 << 32) + 7)), Some((1 << 32) + 7));
        assert_eq!(space.offset(0, u32::MAX - 9), None);
    }
}
