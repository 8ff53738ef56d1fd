//! Answers pings for a node that has no overlay device to answer them.

use super::checksum::{self, Sum};
use crate::wire::ip::{Packet, protocol};

/// The reply to an ICMP or ICMPv6 echo request; `None` for any other packet, a fragment or a truncated packet.
#[must_use]
pub fn echo_reply(packet: &[u8]) -> Option<Vec<u8>> {
    const REQUEST_V4: u8 = 8;
    const REPLY_V4: u8 = 0;
    const REQUEST_V6: u8 = 128;
    const REPLY_V6: u8 = 129;
    let parsed = Packet::inbound(packet).ok().filter(|parsed| !parsed.fragmented)?;
    let at = parsed.transport_offset;
    let body = packet.get(at..).filter(|body| body.len() >= 8)?;
    let mut reply = packet.to_vec();
    let sum = match (parsed.flow.protocol, body[0]) {
        (protocol::ICMP, REQUEST_V4) => {
            reply[at] = REPLY_V4;
            reply[12..20].rotate_left(4);
            reply[8] = TTL;
            checksum::finish_ipv4_header(&mut reply[..at]);
            Sum::default()
        }
        (protocol::ICMPV6, REQUEST_V6) => {
            reply[at] = REPLY_V6;
            reply[8..40].rotate_left(16);
            reply[7] = TTL;
            Sum::default().add_pseudo_header(&reply[8..40], protocol::ICMPV6, packet.len() - at)
        }
        _ => return None,
    };
    reply[at + 2..at + 4].fill(0);
    let sum = sum.add(&reply[at..]).complement();
    reply[at + 2..at + 4].copy_from_slice(&sum.to_be_bytes());
    Some(reply)
}

const TTL: u8 = 64;

#[cfg(test)]
mod tests {
    use super::*;

    fn request(v6: bool) -> Vec<u8> {
        let mut packet = if v6 {
            [&[0x60, 0, 0, 0, 0, 12, 58, 9][..], &[1; 16], &[2; 16]].concat()
        } else {
            [&[0x45, 0, 0, 32, 0, 7, 0x40, 0, 9, 1, 0, 0][..], &[10, 0, 0, 1], &[10, 0, 0, 2]].concat()
        };
        packet.extend([if v6 { 128 } else { 8 }, 0, 0xab, 0xcd, 0, 7, 0, 1, b'd', b'a', b't', b'a']);
        packet
    }

    #[test]
    fn a_request_comes_back_with_turned_addresses_and_good_checksums() {
        let reply = echo_reply(&request(false)).unwrap();
        assert_eq!(reply[12..20], [10, 0, 0, 2, 10, 0, 0, 1]);
        assert_eq!((reply[20], &reply[24..]), (0, &request(false)[24..]));
        assert_eq!(Sum::default().add(&reply[..20]).partial(), 0xffff);
        assert_eq!(Sum::default().add(&reply[20..]).partial(), 0xffff);
        let reply = echo_reply(&request(true)).unwrap();
        assert_eq!((reply[8], reply[24], reply[40]), (2, 1, 129));
        assert_eq!(Sum::default().add_pseudo_header(&reply[8..40], 58, 12).add(&reply[40..]).partial(), 0xffff);
    }

    #[test]
    fn replies_fragments_and_parts_have_no_reply() {
        for v6 in [false, true] {
            let reply = echo_reply(&request(v6)).unwrap();
            assert_eq!(echo_reply(&reply), None);
            let cut = request(v6);
            assert_eq!(echo_reply(&cut[..cut.len() - 5]), None);
        }
        let mut fragment = request(false);
        fragment[6] = 0x20;
        assert_eq!(echo_reply(&fragment), None);
    }
}
