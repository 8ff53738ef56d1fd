//! Sets: keys that rules look up, kept by rules or by whoever installed the table.

use std::borrow::Cow;
use std::net::IpAddr;

use ipnet::IpNet;
use nix::libc;

use crate::netlink::nftables::attribute;
use crate::netlink::nftables::transaction::{attributes, push_nested, push_number, push_text, push_value};
use crate::netlink::octets;

/// A set of keys that some rules add and others look up. Keys expire after a timeout.
#[derive(Debug, Clone)]
pub struct Set {
    /// Name, unique in its table.
    pub name: Cow<'static, str>,
    /// Length of a key in bytes, with each field padded to a multiple of four.
    pub key_len: u32,
    /// Maximum number of keys; the kernel refuses further ones. It allocates memory for all of them at once. With 0 the
    /// memory grows with the keys, up to 65,535.
    pub size: u32,
}

impl Set {
    pub(super) fn attributes(&self, table: &str, number: u32) -> Vec<u8> {
        attributes(|out| {
            push_text(out, attribute::SET_TABLE, table);
            push_text(out, attribute::SET_NAME, &self.name);
            push_number(out, attribute::SET_FLAGS, (libc::NFT_SET_TIMEOUT | libc::NFT_SET_EVAL) as u32);
            push_number(out, attribute::SET_KEY_LEN, self.key_len);
            push_number(out, attribute::SET_ID, number + 1);
            if self.size > 0 {
                push_nested(out, attribute::SET_DESCRIPTION, |out| push_number(out, attribute::SET_SIZE, self.size));
            }
        })
    }
}

/// A set of addresses of one family, which only transactions change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AddressSet {
    /// Name, unique in its table.
    pub name: Cow<'static, str>,
    /// Whether it holds IPv4 addresses, else IPv6 addresses.
    pub is_v4: bool,
    /// Whether its elements are prefixes, else single addresses.
    pub of_prefixes: bool,
}

impl AddressSet {
    pub(super) fn attributes(&self, table: &str, number: u32) -> Vec<u8> {
        attributes(|out| {
            push_text(out, attribute::SET_TABLE, table);
            push_text(out, attribute::SET_NAME, &self.name);
            push_number(out, attribute::SET_FLAGS, if self.of_prefixes { libc::NFT_SET_INTERVAL as u32 } else { 0 });
            push_number(out, attribute::SET_KEY_TYPE, if self.is_v4 { TYPE_IPV4 } else { TYPE_IPV6 });
            push_number(out, attribute::SET_KEY_LEN, if self.is_v4 { 4 } else { 16 });
            push_number(out, attribute::SET_ID, number + 1);
        })
    }

    /// The messages that add or remove elements, each with as many as fit. Prefixes must not overlap; those of the
    /// other family are left out.
    pub(super) fn elements(&self, table: &str, prefixes: &[IpNet]) -> Vec<Vec<u8>> {
        let own: Vec<&IpNet> = prefixes.iter().filter(|prefix| prefix.addr().is_ipv4() == self.is_v4).collect();
        let message = |chunk: &[&IpNet]| {
            attributes(|out| {
                push_text(out, attribute::ELEMENTS_TABLE, table);
                push_text(out, attribute::ELEMENTS_SET, &self.name);
                push_nested(out, attribute::ELEMENTS, |out| chunk.iter().for_each(|prefix| self.push(out, prefix)));
            })
        };
        own.chunks(ELEMENTS_IN_MESSAGE).map(message).collect()
    }

    fn push(&self, out: &mut Vec<u8>, prefix: &IpNet) {
        push_element(out, &octets(prefix.network()), 0);
        // An interval ends before the first address that is not in it; the last one of all has no end.
        if self.of_prefixes
            && let Some(end) = after(prefix.broadcast())
        {
            push_element(out, &octets(end), libc::NFT_SET_ELEM_INTERVAL_END as u32);
        }
    }
}

fn push_element(out: &mut Vec<u8>, key: &[u8], flags: u32) {
    push_nested(out, attribute::LIST_ELEM, |out| {
        push_value(out, attribute::ELEMENT_KEY, key);
        if flags != 0 {
            push_number(out, attribute::ELEMENT_FLAGS, flags);
        }
    });
}

fn after(address: IpAddr) -> Option<IpAddr> {
    Some(match address {
        IpAddr::V4(v4) => IpAddr::V4(v4.to_bits().checked_add(1)?.into()),
        IpAddr::V6(v6) => IpAddr::V6(v6.to_bits().checked_add(1)?.into()),
    })
}

// Types of keys as `nft` shows them.
const TYPE_IPV4: u32 = 7;
const TYPE_IPV6: u32 = 8;
// At 72 bytes for a prefix of IPv6, far below the 64 KiB that an attribute holds.
const ELEMENTS_IN_MESSAGE: usize = 500;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netlink;

    #[test]
    fn a_prefix_is_an_interval_that_ends_before_the_next_address() {
        let set = |is_v4| AddressSet { name: "s".into(), is_v4, of_prefixes: true };
        let prefixes: Vec<IpNet> =
            ["10.4.0.0/16", "255.0.0.0/8", "fd00::/8"].iter().map(|text| text.parse().unwrap()).collect();
        let [v4] = &set(true).elements("t", &prefixes)[..] else { panic!("one message") };
        let list = netlink::attribute(v4, attribute::ELEMENTS).unwrap();
        let keys = |list: &[u8]| -> Vec<(Vec<u8>, bool)> {
            let key = |element: &[u8]| netlink::attribute(element, attribute::ELEMENT_KEY).unwrap()[4..].to_vec();
            let is_end = |element: &[u8]| netlink::attribute(element, attribute::ELEMENT_FLAGS).is_some();
            netlink::attributes(list).map(|(_, element)| (key(element), is_end(element))).collect()
        };
        assert_eq!(keys(list), [(vec![10, 4, 0, 0], false), (vec![10, 5, 0, 0], true), (vec![255, 0, 0, 0], false)],);
        assert_eq!(set(false).elements("t", &prefixes).len(), 1);
        assert!(set(true).elements("t", &prefixes[2..]).is_empty());
        let many: Vec<IpNet> = (0..1001_u32).map(|n| IpNet::from(IpAddr::V4((n * 2).into()))).collect();
        assert_eq!(set(true).elements("t", &many).len(), 3);
    }
}
