//! The 16-byte Nebula header.

/// Bytes of a header.
pub const HEADER_LEN: usize = 16;
/// Bytes of an AEAD tag.
pub const TAG_LEN: usize = 16;

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

/// A parsed header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// Type and subtype.
    pub kind: MessageType,
    /// Index the receiver allocated (see the protocol for exceptions).
    pub index: u32,
    /// Message counter.
    pub counter: u64,
}

impl Header {
    /// Reads the first 16 bytes of a datagram.
    ///
    /// # Errors
    /// `Truncated` or `UnknownType`.
    pub fn parse(_datagram: &[u8]) -> Result<Self, crate::DropReason> {
        unimplemented!()
    }
    /// Wire form.
    #[must_use]
    pub fn to_bytes(self) -> [u8; HEADER_LEN] {
        unimplemented!()
    }
}
