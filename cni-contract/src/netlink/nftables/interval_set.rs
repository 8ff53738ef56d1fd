//! Sets whose elements are intervals of several fields at once, which only transactions change.

use std::net::IpAddr;

use nix::libc;

use crate::netlink::nftables::attribute;
use crate::netlink::nftables::transaction::{attributes, push_nested, push_number, push_text, push_value};
use crate::netlink::{octets, push_attribute};

/// A set of addresses of one family with IP protocols and ports, each of the three as an interval. A rule looks up the
/// address, the protocol and the port. Needs Linux 5.6.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IntervalSet {
    /// Name, unique in its table.
    pub name: String,
    /// Whether it holds IPv4 addresses, else IPv6 addresses.
    pub is_v4: bool,
    /// For whoever lists the sets; at most 250 bytes.
    pub comment: String,
}

/// An element of such a set: everything from the first of each to the last of each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Interval {
    /// Addresses of one family.
    pub addresses: (IpAddr, IpAddr),
    /// IP protocols.
    pub protocols: (u8, u8),
    /// Ports, or whatever else is in a packet at their place.
    pub ports: (u16, u16),
}

impl IntervalSet {
    pub(super) fn attributes(&self, table: &str, number: u32) -> Vec<u8> {
        let (address, address_type) = if self.is_v4 { (4, TYPE_IPV4) } else { (16, TYPE_IPV6) };
        let types = [address_type, TYPE_PROTOCOL, TYPE_PORT].iter().fold(0, |joined, one| joined << TYPE_BITS | one);
        attributes(|out| {
            push_text(out, attribute::SET_TABLE, table);
            push_text(out, attribute::SET_NAME, &self.name);
            push_number(out, attribute::SET_FLAGS, libc::NFT_SET_INTERVAL as u32 | CONCAT);
            push_number(out, attribute::SET_KEY_TYPE, types);
            // Each field is padded to a multiple of four bytes.
            push_number(out, attribute::SET_KEY_LEN, address + 8);
            push_number(out, attribute::SET_ID, number + 1);
            push_nested(out, attribute::SET_DESCRIPTION, |out| {
                push_nested(out, attribute::SET_CONCAT, |out| {
                    for len in [address, 1, 2] {
                        push_nested(out, attribute::LIST_ELEM, |out| push_number(out, attribute::FIELD_LEN, len));
                    }
                });
            });
            let text = [self.comment.as_bytes(), &[0]].concat();
            let text = text.get(..MAX_COMMENT).unwrap_or(&text);
            push_attribute(out, attribute::SET_USERDATA, &[&[COMMENT, text.len() as u8], text].concat());
        })
    }

    /// The messages that add elements, each with as many as fit. Those of the other family are left out; the others
    /// must not overlap.
    pub(super) fn elements(&self, table: &str, intervals: &[Interval]) -> Vec<Vec<u8>> {
        let own: Vec<&Interval> =
            intervals.iter().filter(|interval| interval.addresses.0.is_ipv4() == self.is_v4).collect();
        let message = |chunk: &[&Interval]| {
            attributes(|out| {
                push_text(out, attribute::ELEMENTS_TABLE, table);
                push_text(out, attribute::ELEMENTS_SET, &self.name);
                push_nested(out, attribute::ELEMENTS, |out| chunk.iter().for_each(|interval| interval.push(out)));
            })
        };
        own.chunks(INTERVALS_IN_MESSAGE).map(message).collect()
    }
}

impl Interval {
    fn push(&self, out: &mut Vec<u8>) {
        let key = |address: IpAddr, protocol: u8, port: u16| {
            let [high, low] = port.to_be_bytes();
            [octets(address), vec![protocol, 0, 0, 0, high, low, 0, 0]].concat()
        };
        push_nested(out, attribute::LIST_ELEM, |out| {
            push_value(out, attribute::ELEMENT_KEY, &key(self.addresses.0, self.protocols.0, self.ports.0));
            push_value(out, attribute::ELEMENT_KEY_END, &key(self.addresses.1, self.protocols.1, self.ports.1));
        });
    }
}

/// The comment in the user data of a set.
pub(super) fn comment(user_data: &[u8]) -> Option<String> {
    let mut rest = user_data;
    while let [kind, len, more @ ..] = rest {
        let value = more.get(..usize::from(*len))?;
        if *kind == COMMENT {
            return String::from_utf8(value.strip_suffix(&[0]).unwrap_or(value).to_vec()).ok();
        }
        rest = more.get(usize::from(*len)..)?;
    }
    None
}

// NFT_SET_CONCAT.
const CONCAT: u32 = 0x80;
// Types as `nft` shows them, each a group of bits where they are joined.
const TYPE_BITS: u32 = 6;
const TYPE_IPV4: u32 = 7;
const TYPE_IPV6: u32 = 8;
const TYPE_PROTOCOL: u32 = 12;
const TYPE_PORT: u32 = 13;
// NFTNL_UDATA_SET_COMMENT: what `nft` reads as the comment of a set. The length is a byte.
const COMMENT: u8 = 7;
const MAX_COMMENT: usize = 255;
// At 72 bytes for one of IPv6, far below the 64 KiB that an attribute holds.
const INTERVALS_IN_MESSAGE: usize = 400;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netlink;

    fn set(is_v4: bool) -> IntervalSet {
        IntervalSet { name: "s".into(), is_v4, comment: "10.0.0.1".into() }
    }

    #[test]
    fn an_element_has_the_first_and_the_last_of_each_field() {
        let interval = |first: &str, last: &str| Interval {
            addresses: (first.parse().unwrap(), last.parse().unwrap()),
            protocols: (6, 17),
            ports: (80, 8080),
        };
        let all = [interval("10.0.0.0", "10.0.1.255"), interval("fd00::", "fd00::9")];
        let [message] = &set(true).elements("t", &all)[..] else { panic!("one message") };
        let list = netlink::attribute(message, attribute::ELEMENTS).unwrap();
        let element = netlink::attribute(list, attribute::LIST_ELEM).unwrap();
        let value =
            |kind| netlink::attribute(netlink::attribute(element, kind).unwrap(), attribute::DATA_VALUE).unwrap();
        assert_eq!(value(attribute::ELEMENT_KEY), [10, 0, 0, 0, 6, 0, 0, 0, 0, 80, 0, 0]);
        assert_eq!(value(attribute::ELEMENT_KEY_END), [10, 0, 1, 255, 17, 0, 0, 0, 0x1f, 0x90, 0, 0]);
        assert_eq!(netlink::attributes(list).count(), 1, "the other family is left out");
        assert_eq!(set(false).elements("t", &vec![all[1]; 401]).len(), 2);
    }

    #[test]
    fn a_set_says_how_long_its_fields_are() {
        for (is_v4, len) in [(true, 4_u8), (false, 16)] {
            let bytes = set(is_v4).attributes("t", 0);
            assert_eq!(netlink::attribute(&bytes, attribute::SET_KEY_LEN).unwrap(), [0, 0, 0, len + 8]);
            let description = netlink::attribute(&bytes, attribute::SET_DESCRIPTION).unwrap();
            let fields = netlink::attribute(description, attribute::SET_CONCAT).unwrap();
            let lengths = netlink::attributes(fields).map(|(_, field)| field[7]).collect::<Vec<_>>();
            assert_eq!(lengths, [len, 1, 2]);
        }
    }

    #[test]
    fn the_comment_of_a_set_is_read_back() {
        let bytes = set(true).attributes("t", 0);
        let data = netlink::attribute(&bytes, attribute::SET_USERDATA).unwrap();
        assert_eq!(comment(data).as_deref(), Some("10.0.0.1"));
        assert_eq!(comment(&data[..data.len() - 1]), None);
        assert_eq!(comment(&[]), None);
    }
}
