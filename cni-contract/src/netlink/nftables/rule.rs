//! Rules: conditions on a packet, and what becomes of it if all of them hold.

use std::borrow::Cow;
use std::time::Duration;

use ipnet::IpNet;
use nix::libc;

use crate::netlink::nftables::attribute;
use crate::netlink::nftables::endpoint_map::{EndpointMap, SLOTS};
use crate::netlink::nftables::transaction::{
    attributes, push_expression, push_nested, push_number, push_text, push_value,
};
use crate::netlink::{octets, push_attribute};

/// A rule, whose conditions are evaluated in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    conditions: Vec<Match>,
    action: Action,
    /// Why, for whoever lists the rules; such a rule counts its packets.
    comment: Option<&'static str>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Action {
    Decide(Verdict),
    /// The rules of this chain decide, or nothing does.
    Goto(String),
    /// The next rule is evaluated.
    Continue,
    Mark(u32),
    /// The source becomes an address of the interface by which the packet leaves.
    Masquerade,
    /// The map, and whether it is drawn by the whole connection, else by the source address.
    Translate(EndpointMap, bool),
}

/// The end of the evaluation of a chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// The packet passes this chain.
    Accept = libc::NF_ACCEPT as isize,
    /// The packet is dropped.
    Drop = libc::NF_DROP as isize,
}

impl Rule {
    /// A rule that accepts.
    #[must_use]
    pub fn accept(conditions: Vec<Match>) -> Self {
        Self { conditions, action: Action::Decide(Verdict::Accept), comment: None }
    }

    /// A rule that drops.
    #[must_use]
    pub fn drop(conditions: Vec<Match>) -> Self {
        Self { conditions, action: Action::Decide(Verdict::Drop), comment: None }
    }

    /// A rule that leaves the decision to a chain without a hook; the rules after this one are not evaluated.
    #[must_use]
    pub fn goto(conditions: Vec<Match>, chain: impl Into<String>) -> Self {
        Self { conditions, action: Action::Goto(chain.into()), comment: None }
    }

    /// A rule for the sake of [`Match::Remember`]; the evaluation goes on.
    #[must_use]
    pub fn note(conditions: Vec<Match>) -> Self {
        Self { conditions, action: Action::Continue, comment: None }
    }

    /// A rule that sets these bits of the packet's mark; the evaluation goes on.
    #[must_use]
    pub fn mark(conditions: Vec<Match>, bits: u32) -> Self {
        Self { conditions, action: Action::Mark(bits), comment: None }
    }

    /// A rule that translates the destination by the map, for [`Hook::Translate`](super::Hook::Translate). All
    /// connections of a source to a destination get the same endpoint if `by_client`. Without an entry the evaluation
    /// goes on.
    #[must_use]
    pub fn translate(conditions: Vec<Match>, map: EndpointMap, by_client: bool) -> Self {
        Self { conditions, action: Action::Translate(map, !by_client), comment: None }
    }

    /// A rule that puts an address of the interface by which a connection leaves into the place of its source, for
    /// [`Hook::Leave`](super::Hook::Leave).
    #[must_use]
    pub fn masquerade(conditions: Vec<Match>) -> Self {
        Self { conditions, action: Action::Masquerade, comment: None }
    }

    /// Counts the packets of this rule under a comment of at most 127 bytes, which `nft list` shows.
    #[must_use]
    pub fn counted(mut self, comment: &'static str) -> Self {
        self.comment = Some(comment);
        self
    }

    /// Whether it leaves the decision to this chain.
    pub(super) fn leads_to(&self, chain: &str) -> bool {
        matches!(&self.action, Action::Goto(name) if name == chain)
    }

    pub(super) fn attributes(&self, table: &str, chain: &str) -> Vec<u8> {
        attributes(|out| {
            push_text(out, attribute::RULE_TABLE, table);
            push_text(out, attribute::RULE_CHAIN, chain);
            push_nested(out, attribute::RULE_EXPRESSIONS, |out| {
                self.conditions.iter().for_each(|condition| condition.push(out));
                if self.comment.is_some() {
                    push_expression(out, "counter", |_| ());
                }
                self.action.push(out);
            });
            if let Some(comment) = self.comment {
                // One entry of type, length and value.
                let text = [comment.as_bytes(), &[0]].concat();
                let entry = [&[COMMENT, text.len() as u8], &text[..]].concat();
                push_attribute(out, attribute::RULE_USERDATA, &entry);
            }
        })
    }
}

impl Action {
    fn push(&self, out: &mut Vec<u8>) {
        match self {
            Self::Decide(verdict) => push_verdict(out, *verdict as u32, None),
            Self::Goto(chain) => push_verdict(out, libc::NFT_GOTO.cast_unsigned(), Some(chain)),
            Self::Continue => {}
            Self::Mark(bits) => {
                push_meta(out, REGISTER, libc::NFT_META_MARK as u32);
                push_bitwise(out, &(!bits).to_ne_bytes(), &bits.to_ne_bytes());
                push_expression(out, "meta", |out| {
                    push_number(out, attribute::META_KEY, libc::NFT_META_MARK as u32);
                    push_number(out, attribute::META_SREG, REGISTER);
                });
            }
            Self::Masquerade => push_expression(out, "masq", |_| ()),
            Self::Translate(map, with_port) => push_translation(out, map, *with_port),
        }
    }
}

/// Looks the destination up with a number drawn from the source, and puts what is found into its place.
fn push_translation(out: &mut Vec<u8>, map: &EndpointMap, with_port: bool) {
    let (source, destination, len) = if map.is_v4 { (12, 16, 4) } else { (8, 24, 16) };
    let bytes = |header, offset, len| Field::Bytes { header, offset, len };
    let key = [bytes(Header::Network, destination, len), Field::Protocol, bytes(Header::Transport, 2, 2)];
    let words: u32 = key.iter().map(|field| field.words()).sum();
    let (drawn, of_source) = (FIRST_WORD + words, FIRST_WORD + words + 1);
    push_key(out, &key);
    push_load(out, of_source, Header::Network, source, len);
    if with_port {
        push_load(out, of_source + len / 4, Header::Transport, 0, 2);
    }
    push_expression(out, "hash", |out| {
        push_number(out, attribute::HASH_SREG, of_source);
        push_number(out, attribute::HASH_DREG, drawn);
        push_number(out, attribute::HASH_LEN, len + if with_port { 4 } else { 0 });
        push_number(out, attribute::HASH_MODULUS, SLOTS);
        push_number(out, attribute::HASH_SEED, SEED);
    });
    push_expression(out, "lookup", |out| {
        push_text(out, attribute::LOOKUP_SET, map.name);
        push_number(out, attribute::LOOKUP_SREG, FIRST_WORD);
        push_number(out, attribute::LOOKUP_DREG, FIRST_WORD);
    });
    push_expression(out, "nat", |out| {
        push_number(out, attribute::NAT_TYPE, libc::NFT_NAT_DNAT as u32);
        push_number(out, attribute::NAT_FAMILY, if map.is_v4 { libc::NFPROTO_IPV4 } else { libc::NFPROTO_IPV6 } as u32);
        push_number(out, attribute::NAT_REG_ADDR_MIN, FIRST_WORD);
        push_number(out, attribute::NAT_REG_PROTO_MIN, FIRST_WORD + len / 4);
    });
}

fn push_verdict(out: &mut Vec<u8>, code: u32, chain: Option<&str>) {
    push_expression(out, "immediate", |out| {
        push_number(out, attribute::IMMEDIATE_DREG, 0);
        push_nested(out, attribute::IMMEDIATE_DATA, |out| {
            push_nested(out, attribute::DATA_VERDICT, |out| {
                push_number(out, attribute::VERDICT_CODE, code);
                chain.into_iter().for_each(|chain| push_text(out, attribute::VERDICT_CHAIN, chain));
            });
        });
    });
}

/// The comment in the user data of a rule.
pub(super) fn comment(user_data: &[u8]) -> Option<String> {
    let [COMMENT, len, rest @ ..] = user_data else { return None };
    let text = rest.get(..usize::from(*len))?;
    String::from_utf8(text.strip_suffix(&[0]).unwrap_or(text).to_vec()).ok()
}

/// A part of a packet that serves as a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Field {
    /// Bytes of a header.
    Bytes {
        /// Which header.
        header: Header,
        /// Offset in bytes.
        offset: u32,
        /// Length in bytes.
        len: u32,
    },
    /// IP protocol number, after any extension headers.
    Protocol,
}

/// A header of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Header {
    /// Ethernet, with VLAN tags.
    Link = libc::NFT_PAYLOAD_LL_HEADER as isize,
    /// ARP, IPv4 or IPv6.
    Network = libc::NFT_PAYLOAD_NETWORK_HEADER as isize,
    /// TCP, UDP or ICMP; only the first fragment has it.
    Transport = libc::NFT_PAYLOAD_TRANSPORT_HEADER as isize,
}

/// A comparison.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Is {
    /// =
    Equal = libc::NFT_CMP_EQ as isize,
    /// !=
    Not = libc::NFT_CMP_NEQ as isize,
    /// <=
    AtMost = libc::NFT_CMP_LTE as isize,
    /// >=
    AtLeast = libc::NFT_CMP_GTE as isize,
}

/// One condition of a rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Match {
    /// The packet arrived on this device.
    From(String),
    /// The packet leaves by this device.
    By(String),
    /// Source address, in [`Family::Inet`](super::Family::Inet).
    Source(IpNet),
    /// Destination address, in [`Family::Inet`](super::Family::Inet).
    Destination(IpNet),
    /// IP protocol number.
    Protocol(u8),
    /// Another IP protocol number.
    NotProtocol(u8),
    /// Source port.
    SourcePort(u16),
    /// Destination port.
    DestinationPort(u16),
    /// The packet belongs to an accepted connection or is an error about one (conntrack: established or related).
    Known,
    /// IPv6 neighbour discovery: neighbour solicitations and advertisements.
    Discovery,
    /// Compares at most 16 bytes of a header, after an optional mask of the same length.
    Bytes(Header, u32, Is, Vec<u8>, Option<Vec<u8>>),
    /// Compares the length of the packet in bytes; it includes the link header for frames sent to a link.
    Length(Is, u32),
    /// A socket in this network namespace sent the packet.
    OfLocalSocket,
    /// The packet is an IPv4 packet, else it is an IPv6 packet; in [`Family::Inet`](super::Family::Inet).
    IsV4(bool),
    /// The set contains the key made of these fields.
    In(Cow<'static, str>, Vec<Field>),
    /// The set does not contain the key made of these fields.
    NotIn(Cow<'static, str>, Vec<Field>),
    /// Adds the key made of these fields to the set, with a timeout; the condition fails if the set is full.
    Remember(Cow<'static, str>, Vec<Field>, Duration),
}

impl Match {
    fn push(&self, out: &mut Vec<u8>) {
        match self {
            Self::From(device) => push_device(out, libc::NFT_META_IIFNAME as u32, device),
            Self::By(device) => push_device(out, libc::NFT_META_OIFNAME as u32, device),
            Self::Source(network) => push_network(out, *network, 12, 8),
            Self::Destination(network) => push_network(out, *network, 16, 24),
            Self::Protocol(number) => push_protocol(out, Is::Equal, *number),
            Self::NotProtocol(number) => push_protocol(out, Is::Not, *number),
            Self::SourcePort(port) => push_payload(out, Header::Transport, 0, &port.to_be_bytes()),
            Self::DestinationPort(port) => push_payload(out, Header::Transport, 2, &port.to_be_bytes()),
            Self::Known => {
                push_expression(out, "ct", |out| {
                    push_number(out, attribute::CT_DREG, REGISTER);
                    push_number(out, attribute::CT_KEY, libc::NFT_CT_STATE as u32);
                });
                push_mask(out, &(ESTABLISHED | RELATED).to_ne_bytes());
                push_comparison(out, Is::Not, &0u32.to_ne_bytes());
            }
            Self::Discovery => {
                push_protocol(out, Is::Equal, libc::IPPROTO_ICMPV6 as u8);
                push_load(out, REGISTER, Header::Transport, 0, 1);
                push_comparison(out, Is::AtLeast, &[SOLICITATION]);
                push_comparison(out, Is::AtMost, &[ADVERTISEMENT]);
            }
            Self::Bytes(header, offset, is, value, mask) => {
                push_load(out, REGISTER, *header, *offset, value.len() as u32);
                mask.iter().for_each(|mask| push_mask(out, mask));
                push_comparison(out, *is, value);
            }
            Self::Length(is, bytes) => {
                push_meta(out, REGISTER, libc::NFT_META_LEN as u32);
                push_expression(out, "byteorder", |out| {
                    push_number(out, attribute::BYTEORDER_SREG, REGISTER);
                    push_number(out, attribute::BYTEORDER_DREG, REGISTER);
                    push_number(out, attribute::BYTEORDER_OP, libc::NFT_BYTEORDER_HTON as u32);
                    push_number(out, attribute::BYTEORDER_LEN, 4);
                    push_number(out, attribute::BYTEORDER_SIZE, 4);
                });
                push_comparison(out, *is, &bytes.to_be_bytes());
            }
            // If there is no such socket, the expression stops the evaluation of the rule.
            Self::OfLocalSocket => push_meta(out, REGISTER, libc::NFT_META_SKUID as u32),
            Self::IsV4(is_v4) => {
                push_meta(out, REGISTER, libc::NFT_META_NFPROTO as u32);
                push_comparison(out, Is::Equal, &[if *is_v4 { libc::NFPROTO_IPV4 } else { libc::NFPROTO_IPV6 } as u8]);
            }
            Self::In(set, key) => push_lookup(out, set, key, 0),
            Self::NotIn(set, key) => push_lookup(out, set, key, libc::NFT_LOOKUP_F_INV as u32),
            Self::Remember(set, key, time) => {
                push_key(out, key);
                push_expression(out, "dynset", |out| {
                    push_text(out, attribute::DYNSET_SET, set);
                    push_number(out, attribute::DYNSET_OP, libc::NFT_DYNSET_OP_UPDATE as u32);
                    push_number(out, attribute::DYNSET_SREG, FIRST_WORD);
                    push_attribute(out, attribute::DYNSET_TIMEOUT, &(time.as_millis() as u64).to_be_bytes());
                });
            }
        }
    }
}

impl Field {
    /// Length in registers of four bytes.
    fn words(self) -> u32 {
        match self {
            Self::Bytes { len, .. } => len.div_ceil(4),
            Self::Protocol => 1,
        }
    }
}

fn push_key(out: &mut Vec<u8>, key: &[Field]) {
    let mut register = FIRST_WORD;
    for field in key {
        match *field {
            Field::Bytes { header, offset, len } => push_load(out, register, header, offset, len),
            Field::Protocol => push_meta(out, register, libc::NFT_META_L4PROTO as u32),
        }
        register += field.words();
    }
}

fn push_lookup(out: &mut Vec<u8>, set: &str, key: &[Field], flags: u32) {
    push_key(out, key);
    push_expression(out, "lookup", |out| {
        push_text(out, attribute::LOOKUP_SET, set);
        push_number(out, attribute::LOOKUP_SREG, FIRST_WORD);
        push_number(out, attribute::LOOKUP_FLAGS, flags);
    });
}

fn push_device(out: &mut Vec<u8>, key: u32, device: &str) {
    push_meta(out, REGISTER, key);
    let mut name = [0; libc::IFNAMSIZ];
    device.bytes().take(libc::IFNAMSIZ - 1).zip(&mut name).for_each(|(byte, place)| *place = byte);
    push_comparison(out, Is::Equal, &name);
}

fn push_protocol(out: &mut Vec<u8>, is: Is, number: u8) {
    push_meta(out, REGISTER, libc::NFT_META_L4PROTO as u32);
    push_comparison(out, is, &[number]);
}

/// Matches the address at offset `v4` or `v6` of the network header.
fn push_network(out: &mut Vec<u8>, network: IpNet, v4: u32, v6: u32) {
    let (family, offset) = if network.addr().is_ipv4() { (libc::NFPROTO_IPV4, v4) } else { (libc::NFPROTO_IPV6, v6) };
    push_meta(out, REGISTER, libc::NFT_META_NFPROTO as u32);
    push_comparison(out, Is::Equal, &[family as u8]);
    let (address, mask) = (octets(network.network()), octets(network.netmask()));
    push_load(out, REGISTER, Header::Network, offset, address.len() as u32);
    push_mask(out, &mask);
    push_comparison(out, Is::Equal, &address);
}

fn push_payload(out: &mut Vec<u8>, header: Header, offset: u32, value: &[u8]) {
    push_load(out, REGISTER, header, offset, value.len() as u32);
    push_comparison(out, Is::Equal, value);
}

fn push_meta(out: &mut Vec<u8>, register: u32, key: u32) {
    push_expression(out, "meta", |out| {
        push_number(out, attribute::META_DREG, register);
        push_number(out, attribute::META_KEY, key);
    });
}

fn push_load(out: &mut Vec<u8>, register: u32, header: Header, offset: u32, len: u32) {
    push_expression(out, "payload", |out| {
        push_number(out, attribute::PAYLOAD_DREG, register);
        push_number(out, attribute::PAYLOAD_BASE, header as u32);
        push_number(out, attribute::PAYLOAD_OFFSET, offset);
        push_number(out, attribute::PAYLOAD_LEN, len);
    });
}

fn push_mask(out: &mut Vec<u8>, mask: &[u8]) {
    push_bitwise(out, mask, &vec![0; mask.len()]);
}

fn push_bitwise(out: &mut Vec<u8>, mask: &[u8], xor: &[u8]) {
    push_expression(out, "bitwise", |out| {
        push_number(out, attribute::BITWISE_SREG, REGISTER);
        push_number(out, attribute::BITWISE_DREG, REGISTER);
        push_number(out, attribute::BITWISE_LEN, mask.len() as u32);
        push_value(out, attribute::BITWISE_MASK, mask);
        push_value(out, attribute::BITWISE_XOR, xor);
    });
}

fn push_comparison(out: &mut Vec<u8>, is: Is, value: &[u8]) {
    push_expression(out, "cmp", |out| {
        push_number(out, attribute::CMP_SREG, REGISTER);
        push_number(out, attribute::CMP_OP, is as u32);
        push_value(out, attribute::CMP_DATA, value);
    });
}

// NFTNL_UDATA_RULE_COMMENT: what `nft` reads as the comment of a rule.
const COMMENT: u8 = 0;
const REGISTER: u32 = libc::NFT_REG_1 as u32;
// Connection states of linux/netfilter/nf_conntrack_common.h, as bits in the state that rules see.
const ESTABLISHED: u32 = 2;
const RELATED: u32 = 4;
// The same on all nodes, so that a client that moves keeps what it was drawn.
const SEED: u32 = 0x6e65_6275;
// RFC 4861. Router messages and redirects are left out, because the routes of an isolated pod are fixed at setup.
const SOLICITATION: u8 = 135;
const ADVERTISEMENT: u8 = 136;
// First of the 32-bit registers; a key occupies as many of them as it needs.
const FIRST_WORD: u32 = libc::NFT_REG32_00 as u32;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netlink;

    #[test]
    fn a_comment_is_read_back_from_the_user_data_of_its_rule() {
        let bytes = Rule::drop(vec![Match::Known]).counted("to enrolled pods").attributes("t", "c");
        let data = netlink::attribute(&bytes, attribute::RULE_USERDATA).unwrap();
        assert_eq!(comment(data).as_deref(), Some("to enrolled pods"));
        assert_eq!(comment(&data[..5]), None);
        assert_eq!(comment(&[]), None);
        let plain = Rule::drop(vec![Match::Known]).attributes("t", "c");
        assert_eq!(netlink::attribute(&plain, attribute::RULE_USERDATA), None);
    }
}
