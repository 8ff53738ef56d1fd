//! The 16-byte Nebula header.
//!
//! ```text
//!  0                   1                   2                   3
//! |version|  type |    subtype    |           reserved            |
//! |                        receiver's index                       |
//! |                        message counter                        |
//! |                                                               |
//! ```
//! Big-endian throughout. The reserved bits are not checked, but they are authenticated: additional data is the header
//! as received, never a re-encoded one. They are sent as zero, except to a peer that runs this program, in a datagram
//! with several TCP segments in one packet: there they are the payload length of each segment but the last.

use crate::counters::DropReason;

/// Length of a header.
pub const HEADER_LEN: usize = 16;
/// Length of an AEAD tag.
pub const TAG_LEN: usize = 16;

const VERSION: u8 = 1;

/// Type and subtype of a datagram.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MessageType {
    /// 0/0: Noise IX.
    Handshake,
    /// 1/0: an overlay packet.
    Data,
    /// 1/1: a datagram inside a relay's tunnel.
    Relay,
    /// 2/0: the sender does not know the index.
    RecvError,
    /// 3/0.
    Lighthouse,
    /// 4/0.
    TestRequest,
    /// 4/1.
    TestReply,
    /// 5/0.
    CloseTunnel,
    /// 6/0: relay control.
    Control,
}

impl MessageType {
    /// Type and subtype as on the wire.
    #[must_use]
    pub const fn numbers(self) -> (u8, u8) {
        match self {
            Self::Handshake => (0, 0),
            Self::Data => (1, 0),
            Self::Relay => (1, 1),
            Self::RecvError => (2, 0),
            Self::Lighthouse => (3, 0),
            Self::TestRequest => (4, 0),
            Self::TestReply => (4, 1),
            Self::CloseTunnel => (5, 0),
            Self::Control => (6, 0),
        }
    }

    const fn from_numbers(kind: u8, subtype: u8) -> Option<Self> {
        match (kind, subtype) {
            (0, 0) => Some(Self::Handshake),
            (1, 0) => Some(Self::Data),
            (1, 1) => Some(Self::Relay),
            (2, 0) => Some(Self::RecvError),
            (3, 0) => Some(Self::Lighthouse),
            (4, 0) => Some(Self::TestRequest),
            (4, 1) => Some(Self::TestReply),
            (5, 0) => Some(Self::CloseTunnel),
            (6, 0) => Some(Self::Control),
            _ => None,
        }
    }
}

/// A parsed header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// Type and subtype.
    pub kind: MessageType,
    /// Index that the receiver allocated (see the protocol for exceptions).
    pub index: u32,
    /// Message counter.
    pub counter: u64,
}

impl Header {
    /// Reads the first 16 bytes of a datagram.
    ///
    /// # Errors
    /// Returns [`DropReason::Truncated`] for fewer than 16 bytes, and [`DropReason::UnknownType`] for an unknown
    /// version, type or subtype.
    pub fn parse(datagram: &[u8]) -> Result<Self, DropReason> {
        let Some(header) = datagram.first_chunk::<HEADER_LEN>() else { return Err(DropReason::Truncated) };
        let [first, subtype, _, _, i0, i1, i2, i3, counter @ ..] = *header;
        if first >> 4 != VERSION {
            return Err(DropReason::UnknownType);
        }
        let kind = MessageType::from_numbers(first & 0x0f, subtype).ok_or(DropReason::UnknownType)?;
        Ok(Self { kind, index: u32::from_be_bytes([i0, i1, i2, i3]), counter: u64::from_be_bytes(counter) })
    }

    /// Payload length of each TCP segment but the last in the packet of a datagram, which is as long as a header at
    /// least; 0 if the packet is a single one.
    #[must_use]
    pub fn segment_size(datagram: &[u8]) -> u16 {
        u16::from_be_bytes([datagram[2], datagram[3]])
    }

    /// Wire form for a packet of several TCP segments; see [`Header::segment_size`].
    #[must_use]
    pub fn to_bytes_of_segments(self, size: u16) -> [u8; HEADER_LEN] {
        let mut bytes = self.to_bytes();
        bytes[2..4].copy_from_slice(&size.to_be_bytes());
        bytes
    }

    /// Wire form.
    #[must_use]
    pub fn to_bytes(self) -> [u8; HEADER_LEN] {
        let (kind, subtype) = self.kind.numbers();
        let mut bytes = [0; HEADER_LEN];
        bytes[0] = VERSION << 4 | kind;
        bytes[1] = subtype;
        bytes[4..8].copy_from_slice(&self.index.to_be_bytes());
        bytes[8..].copy_from_slice(&self.counter.to_be_bytes());
        bytes
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn only_the_listed_types_and_subtypes_are_accepted() {
        let mut accepted = Vec::new();
        for first in 0..=255 {
            for subtype in 0..=255 {
                let mut bytes = [0; HEADER_LEN];
                (bytes[0], bytes[1]) = (first, subtype);
                match Header::parse(&bytes) {
                    Ok(header) => {
                        assert_eq!(header.to_bytes(), bytes);
                        accepted.push((first, subtype));
                    }
                    Err(reason) => assert_eq!(reason, DropReason::UnknownType),
                }
            }
        }
        let listed =
            [(0x10, 0), (0x11, 0), (0x11, 1), (0x12, 0), (0x13, 0), (0x14, 0), (0x14, 1), (0x15, 0), (0x16, 0)];
        assert_eq!(accepted, listed);
    }

    #[test]
    fn reserved_bits_are_not_looked_at() {
        let mut bytes = Header { kind: MessageType::Data, index: 7, counter: 9 }.to_bytes();
        (bytes[2], bytes[3]) = (0xff, 0xff);
        assert_eq!(Header::parse(&bytes), Ok(Header { kind: MessageType::Data, index: 7, counter: 9 }));
    }

    #[test]
    fn fifteen_bytes_are_not_a_header() {
        assert_eq!(Header::parse(&[0x10; 15]), Err(DropReason::Truncated));
        assert_eq!(Header::parse(&[]), Err(DropReason::Truncated));
    }

    #[test]
    fn index_and_counter_are_big_endian() {
        let header = Header { kind: MessageType::TestRequest, index: 0x1122_3344, counter: 3 };
        assert_eq!(header.to_bytes(), [0x14, 0, 0, 0, 0x11, 0x22, 0x33, 0x44, 0, 0, 0, 0, 0, 0, 0, 3]);
    }

    #[test]
    fn the_size_of_segments_is_in_the_reserved_bits() {
        let header = Header { kind: MessageType::Data, index: 1, counter: 3 };
        assert_eq!(header.to_bytes_of_segments(0), header.to_bytes());
        let bytes = header.to_bytes_of_segments(1248);
        assert_eq!((Header::segment_size(&bytes), Header::parse(&bytes)), (1248, Ok(header)));
        assert_eq!(bytes[2..4], [0x04, 0xe0]);
    }

    proptest! {
        #[test]
        fn any_bytes_parse_or_are_refused(bytes in proptest::collection::vec(any::<u8>(), 0..40)) {
            if let Ok(header) = Header::parse(&bytes) {
                prop_assert_eq!(Header::parse(&header.to_bytes()), Ok(header));
            }
        }
    }
}
