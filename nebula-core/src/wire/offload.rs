//! Offload descriptions of super-packets (TSO and USO).

/// How an overlay (super-)packet must be segmented and its checksum completed, as a virtio-net header describes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Offload {
    /// Segment size to cut it into; `None` for a single packet.
    pub segment: Option<Segment>,
    /// The transport checksum holds only the pseudo-header sum: (start of the transport header, offset of the checksum
    /// in it).
    pub checksum: Option<(u16, u16)>,
}

/// Segmentation of a super-packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// TCP or UDP.
    pub kind: SegmentKind,
    /// Payload bytes of every segment but the last.
    pub size: u16,
}

/// Transport of a super-packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SegmentKind {
    /// TSO.
    Tcp,
    /// USO.
    Udp,
}
