//! Inner IPv4 and IPv6 packets, as far as routing and the firewall need them.

use std::net::IpAddr;

use crate::DropReason;

/// Identity of a flow, from this node's point of view: the same key for both directions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct FlowKey {
    /// This node's side.
    pub local: IpAddr,
    /// The peer's side.
    pub remote: IpAddr,
    /// Own port; 0 for ICMP and non-first fragments.
    pub local_port: u16,
    /// Peer's port; the identifier for ICMP echo; 0 for non-first fragments.
    pub remote_port: u16,
    /// Final IP protocol number.
    pub protocol: u8,
    /// A non-first fragment.
    pub fragment: bool,
}

/// Flow of a packet read from the overlay device (source is local).
///
/// # Errors
/// `BadPacket`.
pub fn outbound_flow(_packet: &[u8]) -> Result<FlowKey, DropReason> {
    unimplemented!()
}
/// Flow of a packet received through a tunnel (destination is local).
///
/// # Errors
/// `BadPacket`.
pub fn inbound_flow(_packet: &[u8]) -> Result<FlowKey, DropReason> {
    unimplemented!()
}
