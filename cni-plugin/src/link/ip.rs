//! Conditions on the headers of IPv4 and IPv6 packets in frames of a link.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use nebula_cni_contract::netlink::nftables::{Field, Header, Is, Match};
use nebula_cni_contract::netlink::octets;
use nix::libc;

/// The offsets and numbers that differ between IPv4 and IPv6.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Ip {
    pub(super) is_v4: bool,
    ether_type: [u8; 2],
    pub(super) source: u32,
    pub(super) destination: u32,
    pub(super) address_len: u32,
    /// Protocol number of ICMP.
    pub(super) icmp: u8,
    pub(super) echo_request: IcmpType,
    pub(super) echo_reply: IcmpType,
    pub(super) too_big: IcmpType,
}

/// Type of an ICMP message, and its code if that matters.
pub(super) type IcmpType = (u8, Option<u8>);

pub(super) const V4: Ip = Ip {
    is_v4: true,
    ether_type: [8, 0],
    source: 12,
    destination: 16,
    address_len: 4,
    icmp: libc::IPPROTO_ICMP as u8,
    echo_request: (8, None),
    echo_reply: (0, None),
    too_big: (3, Some(4)),
};

pub(super) const V6: Ip = Ip {
    is_v4: false,
    ether_type: [0x86, 0xdd],
    source: 8,
    destination: 24,
    address_len: 16,
    icmp: libc::IPPROTO_ICMPV6 as u8,
    echo_request: (128, None),
    echo_reply: (129, None),
    too_big: (2, None),
};

pub(super) const BOTH: [Ip; 2] = [V4, V6];

/// Whether the pod is the source or the destination of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    Source,
    Destination,
}

impl Ip {
    pub(super) fn of(address: &IpAddr) -> Self {
        if address.is_ipv4() { V4 } else { V6 }
    }

    /// Tells the IP version by the EtherType, which differs if the frame has a VLAN tag.
    pub(super) fn is(self) -> Match {
        bytes(Header::Link, 12, Is::Equal, &self.ether_type)
    }

    pub(super) fn is_not(self) -> Match {
        bytes(Header::Link, 12, Is::Not, &self.ether_type)
    }

    pub(super) fn has(self, network: &IpNet) -> bool {
        network.addr().is_ipv4() == self.is_v4
    }

    /// Those of this family.
    pub(super) fn addresses(self, all: &[IpAddr]) -> impl Iterator<Item = IpAddr> {
        all.iter().copied().filter(move |address| address.is_ipv4() == self.is_v4)
    }

    /// Matches fragments. Later fragments carry no ports, though their payload can look like ports.
    pub(super) fn is_fragment(self) -> Match {
        if self.is_v4 {
            // The "more fragments" flag, or an offset.
            return Match::Bytes(Header::Network, 6, Is::Not, vec![0; 2], Some(vec![0x3f, 0xff]));
        }
        bytes(Header::Network, 6, Is::Equal, &[FRAGMENT])
    }

    /// Matches fragments that do not begin a packet; of IPv6 packets without other extension headers.
    pub(super) fn is_later_fragment(self) -> Vec<Match> {
        let offset = |at, mask: [u8; 2]| Match::Bytes(Header::Network, at, Is::Not, vec![0; 2], Some(mask.to_vec()));
        if self.is_v4 { vec![offset(6, [0x1f, 0xff])] } else { vec![self.is_fragment(), offset(42, [0xff, 0xf8])] }
    }

    pub(super) fn icmp(self, (kind, code): IcmpType) -> Vec<Match> {
        let first: Vec<u8> = std::iter::once(kind).chain(code).collect();
        vec![Match::Protocol(self.icmp), bytes(Header::Transport, 0, Is::Equal, &first)]
    }

    /// Matches ICMP messages of these types, inclusive.
    pub(super) fn icmp_types(self, lowest: u8, highest: u8) -> Vec<Match> {
        let bound = |is, kind| bytes(Header::Transport, 0, is, &[kind]);
        vec![Match::Protocol(self.icmp), bound(Is::AtLeast, lowest), bound(Is::AtMost, highest)]
    }

    pub(super) fn within(self, offset: u32, network: IpNet) -> Match {
        within(Header::Network, offset, network)
    }

    pub(super) fn address(self, header: Header, offset: u32) -> Field {
        field(header, offset, self.address_len)
    }

    /// The key of a flow: the pod's address, the peer's address, the protocol, the pod's port, the peer's port.
    pub(super) fn flow(self, pod: Side) -> Vec<Field> {
        let ports = if pod == Side::Source { [0, 2] } else { [2, 0] };
        self.key(pod, ports.map(|offset| field(Header::Transport, offset, 2)))
    }

    /// Like [`Ip::flow`], with the identifier of an echo in place of both ports.
    pub(super) fn echo(self, pod: Side) -> Vec<Field> {
        self.key(pod, [field(Header::Transport, 4, 2); 2])
    }

    /// Like [`Ip::flow`], for protocols without ports: with the same bytes of the pod's address in their place.
    pub(super) fn pair(self, pod: Side) -> Vec<Field> {
        let own = if pod == Side::Source { self.source } else { self.destination };
        self.key(pod, [field(Header::Network, own, 2); 2])
    }

    /// Packets that ask for answers, by kind, with the key of their flow; of TCP there are none.
    pub(super) fn asks(self, pod: Side) -> [(Vec<Match>, Vec<Field>); 4] {
        let others = [TCP, UDP, SCTP, self.icmp].map(Match::NotProtocol).to_vec();
        [
            (vec![Match::Protocol(UDP)], self.flow(pod)),
            (vec![Match::Protocol(SCTP)], self.flow(pod)),
            (self.icmp(self.echo_request), self.echo(pod)),
            (others, self.pair(pod)),
        ]
    }

    /// Packets that answer, by kind, with the key of the flow that asked.
    pub(super) fn answers(self, pod: Side) -> [(Vec<Match>, Vec<Field>); 3] {
        [
            (vec![Match::NotProtocol(self.icmp)], self.flow(pod)),
            (self.icmp(self.echo_reply), self.echo(pod)),
            (Vec::new(), self.pair(pod)),
        ]
    }

    /// 4 or 6, for names.
    pub(super) fn number(self) -> u8 {
        if self.is_v4 { 4 } else { 6 }
    }

    fn key(self, pod: Side, [own_port, other_port]: [Field; 2]) -> Vec<Field> {
        let addresses =
            if pod == Side::Source { [self.source, self.destination] } else { [self.destination, self.source] };
        let [own, other] = addresses.map(|offset| self.address(Header::Network, offset));
        // An echo reply differs from its request in the ICMP type only, so the protocol is part of the key and the type
        // is not.
        vec![own, other, Field::Protocol, own_port, other_port]
    }

    /// Length of such a key.
    pub(super) fn key_len(self) -> u32 {
        // Protocol and ports take a register each.
        2 * self.address_len + 3 * 4
    }

    pub(super) fn unspecified(self) -> IpAddr {
        if self.is_v4 { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() }
    }

    pub(super) fn link_local(self) -> IpNet {
        if self.is_v4 {
            IpNet::V4(Ipv4Net::new_assert(Ipv4Addr::new(169, 254, 0, 0), 16))
        } else {
            IpNet::V6(Ipv6Net::new_assert(Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 0), 10))
        }
    }

    /// Where packets without a source address go: to everybody on the link.
    pub(super) fn whole_link(self) -> IpNet {
        if self.is_v4 {
            IpAddr::V4(Ipv4Addr::BROADCAST).into()
        } else {
            IpNet::V6(Ipv6Net::new_assert(Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 0), 16))
        }
    }

    /// Group addresses.
    pub(super) fn multicast(self) -> IpNet {
        if self.is_v4 {
            IpNet::V4(Ipv4Net::new_assert(Ipv4Addr::new(224, 0, 0, 0), 4))
        } else {
            IpNet::V6(Ipv6Net::new_assert(Ipv6Addr::new(0xff00, 0, 0, 0, 0, 0, 0, 0), 8))
        }
    }
}

/// Matches a range of ports, inclusive; `offset` is that of the source or the destination port in the transport header.
pub(super) fn ports(protocol: u8, offset: u32, (lowest, highest): (u16, u16)) -> Vec<Match> {
    let bound = |is, port: u16| bytes(Header::Transport, offset, is, &port.to_be_bytes());
    vec![Match::Protocol(protocol), bound(Is::AtLeast, lowest), bound(Is::AtMost, highest)]
}

pub(super) fn bytes(header: Header, offset: u32, is: Is, value: &[u8]) -> Match {
    Match::Bytes(header, offset, is, value.to_vec(), None)
}

pub(super) fn within(header: Header, offset: u32, network: IpNet) -> Match {
    let (address, mask) = (octets(network.network()), octets(network.netmask()));
    Match::Bytes(header, offset, Is::Equal, address, Some(mask))
}

pub(super) fn not_within(offset: u32, network: IpNet) -> Match {
    let (address, mask) = (octets(network.network()), octets(network.netmask()));
    Match::Bytes(Header::Network, offset, Is::Not, address, Some(mask))
}

pub(super) fn field(header: Header, offset: u32, len: u32) -> Field {
    Field::Bytes { header, offset, len }
}

/// Offsets of the ports in a transport header.
pub(super) const SOURCE_PORT: u32 = 0;
pub(super) const DESTINATION_PORT: u32 = 2;
pub(super) const TCP: u8 = libc::IPPROTO_TCP as u8;
pub(super) const UDP: u8 = libc::IPPROTO_UDP as u8;
pub(super) const SCTP: u8 = libc::IPPROTO_SCTP as u8;
const FRAGMENT: u8 = 44;
