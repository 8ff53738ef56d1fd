//! Parser for inner IPv4 and IPv6 packets, as far as routing and the firewall need them.

use std::hash::{Hash, Hasher};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::counters::DropReason;

/// IP protocol numbers that the firewall distinguishes.
pub mod protocol {
    /// ICMP.
    pub const ICMP: u8 = 1;
    /// TCP.
    pub const TCP: u8 = 6;
    /// UDP.
    pub const UDP: u8 = 17;
    /// ICMPv6.
    pub const ICMPV6: u8 = 58;
    /// SCTP.
    pub const SCTP: u8 = 132;
}

/// Identity of a flow, from this node's point of view: the same key for both directions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(loom, derive(PartialOrd, Ord))]
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
    /// Whether this is a non-first fragment.
    pub fragment: bool,
}

impl Hash for FlowKey {
    /// By whole words: field by field it would be four times as many calls of the hasher.
    fn hash<H: Hasher>(&self, hasher: &mut H) {
        for address in [self.local, self.remote] {
            match address {
                IpAddr::V4(v4) => hasher.write_u32(v4.to_bits()),
                IpAddr::V6(v6) => hasher.write_u128(v6.to_bits()),
            }
        }
        let ports = u64::from(self.local_port) << 32 | u64::from(self.remote_port) << 16;
        hasher.write_u64(ports | u64::from(self.protocol) << 8 | u64::from(self.fragment));
    }
}

/// A packet with valid headers up to its transport header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Packet {
    /// Flow it belongs to.
    pub flow: FlowKey,
    /// Offset of the transport header, or of the fragment header's payload for a non-first fragment. At most the
    /// packet's length.
    pub transport_offset: usize,
    /// Whether this is any fragment, the first one included: fragments are neither cut nor joined.
    pub fragmented: bool,
}

impl Packet {
    /// Reads a packet that comes from the overlay device (source is local).
    ///
    /// # Errors
    /// Returns [`DropReason::BadPacket`] if this is not an IP packet, or a header is truncated or malformed.
    pub fn outbound(packet: &[u8]) -> Result<Self, DropReason> {
        Headers::parse(packet).map(|headers| headers.into_packet(false)).ok_or(DropReason::BadPacket)
    }

    /// Reads a packet that came through a tunnel (destination is local).
    ///
    /// # Errors
    /// Returns [`DropReason::BadPacket`] if this is not an IP packet, or a header is truncated or malformed.
    pub fn inbound(packet: &[u8]) -> Result<Self, DropReason> {
        Headers::parse(packet).map(|headers| headers.into_packet(true)).ok_or(DropReason::BadPacket)
    }
}

/// Flow of a packet read from the overlay device (source is local).
///
/// # Errors
/// Returns [`DropReason::BadPacket`] if this is not an IP packet, or a header is truncated or malformed.
pub fn outbound_flow(packet: &[u8]) -> Result<FlowKey, DropReason> {
    Packet::outbound(packet).map(|packet| packet.flow)
}
/// Flow of a packet received through a tunnel (destination is local).
///
/// # Errors
/// Returns [`DropReason::BadPacket`] if this is not an IP packet, or a header is truncated or malformed.
pub fn inbound_flow(packet: &[u8]) -> Result<FlowKey, DropReason> {
    Packet::inbound(packet).map(|packet| packet.flow)
}

/// Contents of the headers, before it is known which end is local.
struct Headers {
    source: IpAddr,
    destination: IpAddr,
    protocol: u8,
    ports: Ports,
    transport_offset: usize,
    fragmented: bool,
}

enum Ports {
    /// A non-first fragment carries no transport header.
    Fragment,
    /// The same in both directions.
    Identifier(u16),
    Pair {
        source: u16,
        destination: u16,
    },
}

impl Headers {
    fn parse(packet: &[u8]) -> Option<Self> {
        match packet.first()? >> 4 {
            4 => Self::parse_v4(packet),
            6 => Self::parse_v6(packet),
            _ => None,
        }
    }

    fn parse_v4(packet: &[u8]) -> Option<Self> {
        let header = packet.first_chunk::<20>()?;
        let transport_offset = usize::from(header[0] & 0x0f) * 4;
        if transport_offset < header.len() {
            return None;
        }
        let transport = packet.get(transport_offset..)?;
        let fragment_bits = u16::from_be_bytes([header[6], header[7]]);
        let protocol = header[9];
        let ports = if fragment_bits & 0x1fff != 0 {
            Ports::Fragment
        } else if protocol == protocol::ICMP {
            Ports::identifier(transport)?
        } else {
            Ports::pair(transport)?
        };
        Some(Self {
            source: v4(header[12..16].try_into().ok()?),
            destination: v4(header[16..20].try_into().ok()?),
            protocol,
            ports,
            transport_offset,
            fragmented: fragment_bits & 0x3fff != 0,
        })
    }

    fn parse_v6(packet: &[u8]) -> Option<Self> {
        let header = packet.first_chunk::<40>()?;
        let upper = UpperProtocol::find(packet, header[6])?;
        let transport = packet.get(upper.offset..)?;
        let ports = if upper.fragment {
            Ports::Fragment
        } else {
            match upper.protocol {
                protocol::ICMPV6 => {
                    const ECHO_REQUEST: u8 = 128;
                    const ECHO_REPLY: u8 = 129;
                    match *transport.first_chunk::<4>()? {
                        [ECHO_REQUEST | ECHO_REPLY, ..] => Ports::identifier(transport)?,
                        _ => Ports::Identifier(0),
                    }
                }
                protocol::TCP | protocol::UDP | protocol::SCTP => Ports::pair(transport)?,
                _ => Ports::Identifier(0),
            }
        };
        Some(Self {
            source: v6(header[8..24].try_into().ok()?),
            destination: v6(header[24..40].try_into().ok()?),
            protocol: upper.protocol,
            ports,
            transport_offset: upper.offset,
            fragmented: upper.any_fragment,
        })
    }

    fn into_packet(self, inbound: bool) -> Packet {
        let (source_port, destination_port) = match self.ports {
            Ports::Pair { source, destination } => (source, destination),
            // The identifier sits on the remote side whichever way the packet goes.
            Ports::Identifier(identifier) if inbound => (identifier, 0),
            Ports::Identifier(identifier) => (0, identifier),
            Ports::Fragment => (0, 0),
        };
        let (local, remote, local_port, remote_port) = if inbound {
            (self.destination, self.source, destination_port, source_port)
        } else {
            (self.source, self.destination, source_port, destination_port)
        };
        let fragment = matches!(self.ports, Ports::Fragment);
        Packet {
            flow: FlowKey { local, remote, local_port, remote_port, protocol: self.protocol, fragment },
            transport_offset: self.transport_offset,
            fragmented: self.fragmented,
        }
    }
}

impl Ports {
    fn pair(transport: &[u8]) -> Option<Self> {
        let [s0, s1, d0, d1] = *transport.first_chunk::<4>()?;
        Some(Self::Pair { source: u16::from_be_bytes([s0, s1]), destination: u16::from_be_bytes([d0, d1]) })
    }

    fn identifier(transport: &[u8]) -> Option<Self> {
        let [_, _, _, _, i0, i1] = *transport.first_chunk::<6>()?;
        Some(Self::Identifier(u16::from_be_bytes([i0, i1])))
    }
}

/// Whether options or extension headers of a packet, which must have been parsed, name or authenticate its addresses,
/// so that these cannot be changed: source routes, authentication headers.
#[must_use]
pub fn depends_on_addresses(packet: &[u8]) -> bool {
    const LOOSE_SOURCE_ROUTE: u8 = 131;
    const STRICT_SOURCE_ROUTE: u8 = 137;
    match packet {
        [first, ..] if first >> 4 == 4 => {
            let mut options = packet.get(20..usize::from(first & 0x0f) * 4).unwrap_or_default();
            while let [kind, rest @ ..] = options {
                options = match (*kind, rest) {
                    (LOOSE_SOURCE_ROUTE | STRICT_SOURCE_ROUTE, _) => return true,
                    (0, _) => return false,
                    (1, _) => rest,
                    // The length includes kind and length.
                    (_, [length, ..]) => options.get(usize::from((*length).max(2))..).unwrap_or_default(),
                    _ => return false,
                };
            }
            false
        }
        [_, _, _, _, _, _, next, ..] => UpperProtocol::find(packet, *next).is_none_or(|upper| upper.names_addresses),
        _ => true,
    }
}

/// The length of a packet by its own header; `None` if this is no IP packet. It may be more than there are bytes.
#[must_use]
pub fn length(packet: &[u8]) -> Option<usize> {
    match packet {
        [first, _, high, low, ..] if first >> 4 == 4 => Some(u16::from_be_bytes([*high, *low]).into()),
        [first, _, _, _, high, low, ..] if first >> 4 == 6 => Some(40 + usize::from(u16::from_be_bytes([*high, *low]))),
        _ => None,
    }
}

/// The number that all fragments of a packet share; `None` if this is no IP packet, or an IPv6 packet in one piece.
#[must_use]
pub fn fragment_number(packet: &[u8]) -> Option<u32> {
    match packet {
        [first, _, _, _, high, low, ..] if first >> 4 == 4 => Some(u16::from_be_bytes([*high, *low]).into()),
        [_, _, _, _, _, _, next, ..] => UpperProtocol::find(packet, *next)?.number,
        _ => None,
    }
}

fn v4(octets: [u8; 4]) -> IpAddr {
    Ipv4Addr::from(octets).into()
}
fn v6(octets: [u8; 16]) -> IpAddr {
    Ipv6Addr::from(octets).into()
}

/// Where the chain of IPv6 extension headers ends.
struct UpperProtocol {
    protocol: u8,
    offset: usize,
    fragment: bool,
    any_fragment: bool,
    /// Identifier of the packet in the fragment header, if there is one.
    number: Option<u32>,
    /// A header on the way there is a source route that is not at its end, or authenticates addresses.
    names_addresses: bool,
}

impl UpperProtocol {
    /// Walks only the headers that the kernel walks too. Anything else ends the chain: reading an unknown protocol as
    /// an extension header would let a packet choose the ports the firewall sees.
    fn find(packet: &[u8], first: u8) -> Option<Self> {
        const HOP_BY_HOP: u8 = 0;
        const ROUTING: u8 = 43;
        const FRAGMENT: u8 = 44;
        const AUTHENTICATION: u8 = 51;
        const DESTINATION: u8 = 60;
        const MAX_EXTENSIONS: usize = 8;

        let (fragment, any_fragment, names_addresses) = (false, false, false);
        let mut upper = Self { protocol: first, offset: 40, fragment, any_fragment, number: None, names_addresses };
        for _ in 0..=MAX_EXTENSIONS {
            let rest = packet.get(upper.offset..)?;
            let length = match upper.protocol {
                ROUTING => {
                    upper.names_addresses |= *rest.get(3)? != 0;
                    (usize::from(*rest.get(1)?) + 1) * 8
                }
                HOP_BY_HOP | DESTINATION => (usize::from(*rest.get(1)?) + 1) * 8,
                AUTHENTICATION => {
                    upper.names_addresses = true;
                    (usize::from(*rest.get(1)?) + 2) * 4
                }
                FRAGMENT => {
                    let header = rest.first_chunk::<8>()?;
                    upper.any_fragment = true;
                    upper.number = Some(u32::from_be_bytes([header[4], header[5], header[6], header[7]]));
                    upper.fragment = header[2] != 0 || header[3] & 0xf8 != 0;
                    header.len()
                }
                _ => return Some(upper),
            };
            upper.protocol = *rest.first()?;
            upper.offset += length;
            if upper.fragment {
                return Some(upper);
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ipv4(protocol: u8, fragment_bits: u16, options: &[u8], transport: &[u8]) -> Vec<u8> {
        let mut packet = vec![0; 20];
        packet[0] = 0x40 | u8::try_from(5 + options.len() / 4).unwrap();
        packet[6..8].copy_from_slice(&fragment_bits.to_be_bytes());
        packet[9] = protocol;
        packet[12..16].copy_from_slice(&[10, 0, 0, 1]);
        packet[16..20].copy_from_slice(&[10, 0, 0, 2]);
        packet.extend_from_slice(options);
        packet.extend_from_slice(transport);
        packet
    }

    fn ipv6(next: u8, rest: &[u8]) -> Vec<u8> {
        let mut packet = vec![0; 40];
        packet[0] = 0x60;
        packet[6] = next;
        packet[8..24].copy_from_slice(&"fd00::1".parse::<Ipv6Addr>().unwrap().octets());
        packet[24..40].copy_from_slice(&"fd00::2".parse::<Ipv6Addr>().unwrap().octets());
        packet.extend_from_slice(rest);
        packet
    }

    const PORTS: [u8; 4] = [0x30, 0x39, 0x01, 0xbb];

    #[test]
    fn both_directions_of_a_tcp_connection_give_the_same_key() {
        let key = outbound_flow(&ipv4(6, 0, &[], &PORTS)).unwrap();
        assert_eq!(key.local, IpAddr::from([10, 0, 0, 1]));
        assert_eq!((key.local_port, key.remote_port, key.protocol, key.fragment), (12345, 443, 6, false));
        let mut reply = ipv4(6, 0, &[], &[0x01, 0xbb, 0x30, 0x39]);
        reply[12..20].rotate_left(4);
        assert_eq!(inbound_flow(&reply), Ok(key));
    }

    #[test]
    fn ports_are_found_behind_ipv4_options() {
        let packet = Packet::outbound(&ipv4(17, 0, &[1; 40], &PORTS)).unwrap();
        assert_eq!((packet.flow.local_port, packet.flow.remote_port), (12345, 443));
        assert_eq!(packet.transport_offset, 60);
    }

    #[test]
    fn a_header_length_below_five_words_is_refused() {
        for first in 0x40..0x45 {
            let mut packet = ipv4(6, 0, &[], &PORTS);
            packet[0] = first;
            assert_eq!(outbound_flow(&packet), Err(DropReason::BadPacket));
        }
    }

    #[test]
    fn later_fragments_have_no_ports_and_first_fragments_have() {
        let later = Packet::inbound(&ipv4(17, 0x0001, &[], &[])).unwrap();
        assert!(later.flow.fragment && later.fragmented);
        assert_eq!((later.flow.local_port, later.flow.remote_port), (0, 0));
        let first = Packet::inbound(&ipv4(17, 0x2000, &[], &PORTS)).unwrap();
        assert!(!first.flow.fragment && first.fragmented);
        assert_eq!((first.flow.local_port, first.flow.remote_port), (443, 12345));
        assert!(!Packet::inbound(&ipv4(17, 0x4000, &[], &PORTS)).unwrap().fragmented);
    }

    #[test]
    fn the_icmp_identifier_is_the_remote_port_in_both_directions() {
        let echo = ipv4(1, 0, &[], &[8, 0, 0, 0, 0x4e, 0x42, 0, 1]);
        for flow in [outbound_flow(&echo).unwrap(), inbound_flow(&echo).unwrap()] {
            assert_eq!((flow.local_port, flow.remote_port), (0, 0x4e42));
        }
        let echo = ipv6(58, &[129, 0, 0, 0, 0x4e, 0x42]);
        for flow in [outbound_flow(&echo).unwrap(), inbound_flow(&echo).unwrap()] {
            assert_eq!((flow.local_port, flow.remote_port, flow.protocol), (0, 0x4e42, 58));
        }
        let unreachable = outbound_flow(&ipv6(58, &[1, 0, 0, 0, 0x4e, 0x42])).unwrap();
        assert_eq!(unreachable.remote_port, 0);
    }

    #[test]
    fn sctp_has_ports_in_both_families_and_what_has_none_is_one_flow() {
        for packet in [ipv4(132, 0, &[], &PORTS), ipv6(132, &PORTS)] {
            let flow = outbound_flow(&packet).unwrap();
            assert_eq!((flow.local_port, flow.remote_port, flow.protocol), (12345, 443, 132));
        }
        assert_eq!(outbound_flow(&ipv6(50, &PORTS)).unwrap().remote_port, 0);
    }

    #[test]
    fn a_packet_is_as_long_as_its_header_says() {
        assert_eq!(length(&[0x45, 0, 1, 2]), Some(0x102));
        assert_eq!(length(&[0x60, 0, 0, 0, 1, 2]), Some(40 + 0x102));
        assert_eq!([&[][..], &[0x45, 0, 1], &[0x60, 0, 0, 0, 1], &[0x10; 60]].map(length), [None; 4]);
    }

    #[test]
    fn a_cut_transport_header_is_refused() {
        assert!(outbound_flow(&ipv4(6, 0, &[], &PORTS[..3])).is_err());
        assert!(outbound_flow(&ipv4(1, 0, &[], &[8, 0, 0, 0, 1])).is_err());
        assert!(outbound_flow(&ipv6(17, &PORTS[..3])).is_err());
        assert!(outbound_flow(&ipv6(58, &[1, 0, 0])).is_err());
        assert!(outbound_flow(&ipv6(58, &[128, 0, 0, 0, 1])).is_err());
        assert!(outbound_flow(&ipv6(132, &PORTS[..3])).is_err());
    }

    #[test]
    fn ports_are_found_behind_the_known_ipv6_extension_headers() {
        let mut rest = Vec::new();
        rest.extend_from_slice(&[43, 0, 0, 0, 0, 0, 0, 0]); // hop by hop, 8 bytes
        rest.extend_from_slice(&[60, 1]); // routing, 16 bytes
        rest.extend_from_slice(&[0; 14]);
        rest.extend_from_slice(&[51, 0, 0, 0, 0, 0, 0, 0]); // destination, 8 bytes
        rest.extend_from_slice(&[44, 4]); // authentication, 24 bytes
        rest.extend_from_slice(&[0; 22]);
        rest.extend_from_slice(&[17, 0, 0, 1, 0, 0, 0, 0]); // first fragment
        rest.extend_from_slice(&PORTS);
        let packet = Packet::outbound(&ipv6(0, &rest)).unwrap();
        assert_eq!((packet.flow.protocol, packet.flow.local_port, packet.flow.remote_port), (17, 12345, 443));
        assert_eq!(packet.transport_offset, 104);
        assert!(packet.fragmented && !packet.flow.fragment);
    }

    #[test]
    fn a_later_ipv6_fragment_ends_the_walk() {
        let flow = outbound_flow(&ipv6(44, &[6, 0, 0, 8, 0, 0, 0, 0])).unwrap();
        assert!(flow.fragment);
        assert_eq!((flow.protocol, flow.local_port, flow.remote_port), (6, 0, 0));
        // The fragmented part begins with an extension header, which is not parsed.
        assert_eq!(outbound_flow(&ipv6(44, &[60, 0, 1, 0, 0, 0, 0, 0])).unwrap().protocol, 60);
    }

    #[test]
    fn unknown_next_headers_are_the_final_protocol_without_ports() {
        for next in [33, 47, 50, 59, 135, 139, 140, 253] {
            let flow = outbound_flow(&ipv6(next, &PORTS)).unwrap();
            assert_eq!((flow.protocol, flow.local_port, flow.remote_port), (next, 0, 0));
        }
    }

    #[test]
    fn eight_extension_headers_are_walked_and_nine_refused() {
        let chain = |n: usize| {
            let mut rest = Vec::new();
            for left in (0..n).rev() {
                rest.extend_from_slice(&[if left == 0 { 6 } else { 60 }, 0, 0, 0, 0, 0, 0, 0]);
            }
            rest.extend_from_slice(&PORTS);
            ipv6(60, &rest)
        };
        assert_eq!(outbound_flow(&chain(8)).unwrap().local_port, 12345);
        assert!(outbound_flow(&chain(9)).is_err());
    }

    #[test]
    fn an_extension_header_longer_than_the_packet_is_refused() {
        assert!(outbound_flow(&ipv6(0, &[59, 1, 0, 0, 0, 0, 0, 0])).is_err());
        assert!(outbound_flow(&ipv6(0, &[44])).is_err());
        assert!(outbound_flow(&ipv6(44, &[17, 0, 0, 1, 0, 0, 0])).is_err());
    }

    #[test]
    fn other_ip_versions_and_short_packets_are_refused() {
        for packet in [&[][..], &[0x45; 19], &[0x60; 39], &[0x50; 60], &[0x00; 60]] {
            assert_eq!(outbound_flow(packet), Err(DropReason::BadPacket));
        }
    }

    proptest! {
        #[test]
        fn any_bytes_parse_or_are_refused(
            first in prop_oneof![Just(0x45_u8), Just(0x4f), Just(0x60), any::<u8>()],
            next in prop_oneof![Just(0_u8), Just(43), Just(44), Just(51), Just(60), Just(58), any::<u8>()],
            mut bytes in proptest::collection::vec(prop_oneof![Just(0_u8), Just(44), Just(60), any::<u8>()], 0..200),
        ) {
            if let Some(byte) = bytes.get_mut(0) { *byte = first; }
            if let Some(byte) = bytes.get_mut(6) { *byte = next; }
            let (outbound, inbound) = (Packet::outbound(&bytes), Packet::inbound(&bytes));
            prop_assert_eq!(outbound.is_ok(), inbound.is_ok());
            if let Ok(packet) = outbound {
                prop_assert!(packet.transport_offset <= bytes.len());
                if packet.flow.fragment {
                    prop_assert_eq!((packet.flow.local_port, packet.flow.remote_port), (0, 0));
                }
            }
        }
    }
}
