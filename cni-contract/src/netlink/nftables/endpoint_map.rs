//! Maps from a port of a Service to endpoints, by which rules translate destinations.

use std::net::{IpAddr, SocketAddr};

use nix::libc;

use crate::netlink::nftables::attribute;
use crate::netlink::nftables::transaction::{attributes, push_nested, push_number, push_text, push_value};
use crate::netlink::octets;

/// A map of one family. Its keys are address, protocol and port of a destination, and a number from 0 to [`SLOTS`] -
/// 1, which the rule draws for each connection; its values are addresses with ports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EndpointMap {
    /// Name, unique in its table.
    pub name: &'static str,
    /// Whether it holds IPv4 addresses, else IPv6 addresses.
    pub is_v4: bool,
}

/// An entry of such a map.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MapEntry {
    /// The destination.
    pub service: SocketAddr,
    /// IP protocol number.
    pub protocol: u8,
    /// The number that is drawn.
    pub slot: u32,
    /// The destination instead.
    pub endpoint: SocketAddr,
}

/// How many entries each destination has.
pub const SLOTS: u32 = 64;

impl EndpointMap {
    pub(super) fn attributes(&self, table: &str, number: u32) -> Vec<u8> {
        let (address, word) = (if self.is_v4 { 4 } else { 16 }, 4);
        let types = |all: &[u32]| all.iter().fold(0, |joined, one| joined << TYPE_BITS | one);
        let address_type = if self.is_v4 { TYPE_IPV4 } else { TYPE_IPV6 };
        attributes(|out| {
            push_text(out, attribute::SET_TABLE, table);
            push_text(out, attribute::SET_NAME, self.name);
            push_number(out, attribute::SET_FLAGS, libc::NFT_SET_MAP as u32);
            push_number(out, attribute::SET_KEY_TYPE, types(&[address_type, TYPE_PROTOCOL, TYPE_PORT, TYPE_MARK]));
            push_number(out, attribute::SET_KEY_LEN, address + 3 * word);
            push_number(out, attribute::SET_DATA_TYPE, types(&[address_type, TYPE_PORT]));
            push_number(out, attribute::SET_DATA_LEN, address + word);
            push_number(out, attribute::SET_ID, number + 1);
        })
    }

    /// The messages that add entries, each with as many as fit. Those of the other family are left out.
    pub(super) fn elements(&self, table: &str, entries: &[MapEntry]) -> Vec<Vec<u8>> {
        let is_own = |address: IpAddr| address.is_ipv4() == self.is_v4;
        let own = |entry: &&MapEntry| is_own(entry.service.ip()) && is_own(entry.endpoint.ip());
        let own: Vec<&MapEntry> = entries.iter().filter(own).collect();
        let message = |chunk: &[&MapEntry]| {
            attributes(|out| {
                push_text(out, attribute::ELEMENTS_TABLE, table);
                push_text(out, attribute::ELEMENTS_SET, self.name);
                push_nested(out, attribute::ELEMENTS, |out| chunk.iter().for_each(|entry| entry.push(out)));
            })
        };
        own.chunks(ENTRIES_IN_MESSAGE).map(message).collect()
    }
}

impl MapEntry {
    fn push(&self, out: &mut Vec<u8>) {
        let port = |address: &SocketAddr| [address.port().to_be_bytes(), [0; 2]].concat();
        let key = [
            octets(self.service.ip()),
            vec![self.protocol, 0, 0, 0],
            port(&self.service),
            self.slot.to_ne_bytes().to_vec(),
        ];
        push_nested(out, attribute::LIST_ELEM, |out| {
            push_value(out, attribute::ELEMENT_KEY, &key.concat());
            push_value(out, attribute::ELEMENT_DATA, &[octets(self.endpoint.ip()), port(&self.endpoint)].concat());
        });
    }
}

// Types as `nft` shows them, each a group of bits where they are joined.
const TYPE_BITS: u32 = 6;
const TYPE_IPV4: u32 = 7;
const TYPE_IPV6: u32 = 8;
const TYPE_PROTOCOL: u32 = 12;
const TYPE_PORT: u32 = 13;
const TYPE_MARK: u32 = 19;
// At about 90 bytes for one of IPv6, far below the 64 KiB that an attribute holds.
const ENTRIES_IN_MESSAGE: usize = 400;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netlink;

    #[test]
    fn an_entry_has_a_key_of_four_fields_and_an_address_with_a_port() {
        let entry = |service: &str, endpoint: &str| MapEntry {
            service: service.parse().unwrap(),
            protocol: 6,
            slot: 7,
            endpoint: endpoint.parse().unwrap(),
        };
        let map = EndpointMap { name: "m", is_v4: true };
        let entries = [entry("10.96.0.1:80", "10.244.0.9:8080"), entry("[fd00:96::1]:80", "[fd00::9]:8080")];
        let [message] = &map.elements("t", &entries)[..] else { panic!("one message") };
        let list = netlink::attribute(message, attribute::ELEMENTS).unwrap();
        let element = netlink::attribute(list, attribute::LIST_ELEM).unwrap();
        let value =
            |kind| netlink::attribute(netlink::attribute(element, kind).unwrap(), attribute::DATA_VALUE).unwrap();
        let slot = 7_u32.to_ne_bytes();
        assert_eq!(value(attribute::ELEMENT_KEY), [&[10, 96, 0, 1, 6, 0, 0, 0, 0, 80, 0, 0][..], &slot].concat());
        assert_eq!(value(attribute::ELEMENT_DATA), [10, 244, 0, 9, 0x1f, 0x90, 0, 0]);
        let of_v6 = EndpointMap { name: "m", is_v4: false };
        assert_eq!(of_v6.elements("t", &vec![entries[1]; 401]).len(), 2);
        assert!(of_v6.elements("t", &entries[..1]).is_empty());
    }
}
