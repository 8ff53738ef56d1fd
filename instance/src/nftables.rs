//! The few messages of nf_tables that one table of filter rules needs, sent as one transaction: all of it or nothing.

use std::io;
use std::os::fd::AsRawFd;

use ipnet::IpNet;
use nix::libc;
use nix::sys::socket::{MsgFlags, SockProtocol, recv, send, setsockopt, sockopt};

use crate::netlink::{self, octets, push_attribute};

/// A table of base chains that drop what no rule accepts.
#[derive(Debug)]
pub(crate) struct Table {
    name: &'static str,
    chains: Vec<Chain>,
}

/// Where packets meet a chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Hook {
    Input = 1,
    Forward = 2,
    Output = 3,
}

#[derive(Debug)]
struct Chain {
    hook: Hook,
    accepted: Vec<Vec<Match>>,
}

/// One condition of a rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Match {
    /// Arrived on this device.
    From(String),
    /// Leaves by this device.
    By(String),
    Source(IpNet),
    Destination(IpNet),
    /// IP protocol number.
    Protocol(u8),
    SourcePort(u16),
    DestinationPort(u16),
    /// Of a connection that was accepted, or an error about one.
    Known,
    /// Neighbour and router discovery of IPv6.
    Discovery,
}

impl Table {
    pub(crate) fn new(name: &'static str) -> Self {
        Self { name, chains: Vec::new() }
    }

    /// Adds a chain; a packet passes if all conditions of one of `accepted` hold.
    pub(crate) fn chain(mut self, hook: Hook, accepted: Vec<Vec<Match>>) -> Self {
        self.chains.push(Chain { hook, accepted });
        self
    }

    /// Puts the table into force in the network namespace of the calling thread, in place of one of that name.
    ///
    /// # Errors
    /// The kernel's; then nothing has changed.
    pub(crate) fn install(&self) -> io::Result<()> {
        let socket = netlink::connect(SockProtocol::NetlinkNetFilter)?;
        let (transaction, messages) = self.transaction();
        if transaction.len() > LONGEST_TRANSACTION {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "too many rules"));
        }
        // Best effort: the default holds a few hundred rules.
        let _ = setsockopt(&socket, sockopt::SndBuf, &LONGEST_TRANSACTION);
        let _ = setsockopt(&socket, sockopt::RcvBuf, &LONGEST_TRANSACTION);
        send(socket.as_raw_fd(), &transaction, MsgFlags::empty())?;
        let mut answered = 0;
        let mut answer = [0; 8192];
        while answered < messages {
            let len = recv(socket.as_raw_fd(), &mut answer, MsgFlags::empty())?;
            for (_, outcome) in netlink::answers(&answer[..len]) {
                outcome?;
                answered += 1;
            }
        }
        Ok(())
    }

    /// The bytes, and how many messages in them are answered.
    fn transaction(&self) -> (Vec<u8>, usize) {
        let mut out = Vec::new();
        let mut sequence = 0;
        push_message(&mut out, BATCH_BEGIN, 0, 0, &[]);
        let mut ask = |kind: u16, flags: i32, attributes: &[u8]| {
            sequence += 1;
            push_message(&mut out, SUBSYSTEM | kind, flags | libc::NLM_F_ACK, sequence, attributes);
        };
        let create = libc::NLM_F_CREATE;
        let table = attributes(|out| push_text(out, attribute::TABLE_NAME, self.name));
        // Made first, so that there is one to remove.
        ask(libc::NFT_MSG_NEWTABLE as u16, create, &table);
        ask(libc::NFT_MSG_DELTABLE as u16, 0, &table);
        ask(libc::NFT_MSG_NEWTABLE as u16, create, &table);
        for chain in &self.chains {
            ask(libc::NFT_MSG_NEWCHAIN as u16, create, &chain.attributes(self.name));
            for accepted in &chain.accepted {
                let rule = attributes(|out| {
                    push_text(out, attribute::RULE_TABLE, self.name);
                    push_text(out, attribute::RULE_CHAIN, chain.hook.name());
                    push_nested(out, attribute::RULE_EXPRESSIONS, |out| {
                        accepted.iter().for_each(|condition| condition.push(out));
                        push_expression(out, "immediate", |out| {
                            push_number(out, attribute::IMMEDIATE_DREG, 0);
                            push_nested(out, attribute::IMMEDIATE_DATA, |out| {
                                push_nested(out, attribute::DATA_VERDICT, |out| {
                                    push_number(out, attribute::VERDICT_CODE, libc::NF_ACCEPT as u32);
                                });
                            });
                        });
                    });
                });
                ask(libc::NFT_MSG_NEWRULE as u16, create | libc::NLM_F_APPEND, &rule);
            }
        }
        push_message(&mut out, BATCH_END, 0, sequence + 1, &[]);
        (out, sequence as usize)
    }
}

impl Hook {
    fn name(self) -> &'static str {
        match self {
            Self::Input => "input",
            Self::Forward => "forward",
            Self::Output => "output",
        }
    }
}

impl Chain {
    fn attributes(&self, table: &str) -> Vec<u8> {
        attributes(|out| {
            push_text(out, attribute::CHAIN_TABLE, table);
            push_text(out, attribute::CHAIN_NAME, self.hook.name());
            push_nested(out, attribute::CHAIN_HOOK, |out| {
                push_number(out, attribute::HOOK_NUMBER, self.hook as u32);
                push_number(out, attribute::HOOK_PRIORITY, 0);
            });
            push_number(out, attribute::CHAIN_POLICY, libc::NF_DROP as u32);
            push_text(out, attribute::CHAIN_TYPE, "filter");
        })
    }
}

impl Match {
    fn push(&self, out: &mut Vec<u8>) {
        match self {
            Self::From(device) => push_device(out, libc::NFT_META_IIFNAME as u32, device),
            Self::By(device) => push_device(out, libc::NFT_META_OIFNAME as u32, device),
            Self::Source(network) => push_network(out, *network, 12, 8),
            Self::Destination(network) => push_network(out, *network, 16, 24),
            Self::Protocol(number) => push_protocol(out, *number),
            Self::SourcePort(port) => {
                push_payload(out, libc::NFT_PAYLOAD_TRANSPORT_HEADER as u32, 0, &port.to_be_bytes())
            }
            Self::DestinationPort(port) => {
                push_payload(out, libc::NFT_PAYLOAD_TRANSPORT_HEADER as u32, 2, &port.to_be_bytes());
            }
            Self::Known => {
                push_expression(out, "ct", |out| {
                    push_number(out, attribute::CT_DREG, REGISTER);
                    push_number(out, attribute::CT_KEY, libc::NFT_CT_STATE as u32);
                });
                push_mask(out, &(ESTABLISHED | RELATED).to_ne_bytes());
                push_comparison(out, libc::NFT_CMP_NEQ, &0u32.to_ne_bytes());
            }
            Self::Discovery => {
                push_protocol(out, libc::IPPROTO_ICMPV6 as u8);
                push_load(out, libc::NFT_PAYLOAD_TRANSPORT_HEADER as u32, 0, 1);
                push_comparison(out, libc::NFT_CMP_GTE, &[FIRST_DISCOVERY]);
                push_comparison(out, libc::NFT_CMP_LTE, &[LAST_DISCOVERY]);
            }
        }
    }
}

fn push_device(out: &mut Vec<u8>, key: u32, device: &str) {
    push_meta(out, key);
    let mut name = [0; libc::IFNAMSIZ];
    device.bytes().take(libc::IFNAMSIZ - 1).zip(&mut name).for_each(|(byte, place)| *place = byte);
    push_comparison(out, libc::NFT_CMP_EQ, &name);
}

fn push_protocol(out: &mut Vec<u8>, number: u8) {
    push_meta(out, libc::NFT_META_L4PROTO as u32);
    push_comparison(out, libc::NFT_CMP_EQ, &[number]);
}

/// The address at `v4` or `v6` of the network header.
fn push_network(out: &mut Vec<u8>, network: IpNet, v4: u32, v6: u32) {
    let (family, offset) = if network.addr().is_ipv4() { (libc::NFPROTO_IPV4, v4) } else { (libc::NFPROTO_IPV6, v6) };
    push_meta(out, libc::NFT_META_NFPROTO as u32);
    push_comparison(out, libc::NFT_CMP_EQ, &[family as u8]);
    let (address, mask) = (octets(network.network()), octets(network.netmask()));
    push_load(out, libc::NFT_PAYLOAD_NETWORK_HEADER as u32, offset, address.len() as u32);
    push_mask(out, &mask);
    push_comparison(out, libc::NFT_CMP_EQ, &address);
}

fn push_payload(out: &mut Vec<u8>, base: u32, offset: u32, value: &[u8]) {
    push_load(out, base, offset, value.len() as u32);
    push_comparison(out, libc::NFT_CMP_EQ, value);
}

fn push_meta(out: &mut Vec<u8>, key: u32) {
    push_expression(out, "meta", |out| {
        push_number(out, attribute::META_DREG, REGISTER);
        push_number(out, attribute::META_KEY, key);
    });
}

fn push_load(out: &mut Vec<u8>, base: u32, offset: u32, len: u32) {
    push_expression(out, "payload", |out| {
        push_number(out, attribute::PAYLOAD_DREG, REGISTER);
        push_number(out, attribute::PAYLOAD_BASE, base);
        push_number(out, attribute::PAYLOAD_OFFSET, offset);
        push_number(out, attribute::PAYLOAD_LEN, len);
    });
}

fn push_mask(out: &mut Vec<u8>, mask: &[u8]) {
    push_expression(out, "bitwise", |out| {
        push_number(out, attribute::BITWISE_SREG, REGISTER);
        push_number(out, attribute::BITWISE_DREG, REGISTER);
        push_number(out, attribute::BITWISE_LEN, mask.len() as u32);
        push_value(out, attribute::BITWISE_MASK, mask);
        push_value(out, attribute::BITWISE_XOR, &vec![0; mask.len()]);
    });
}

fn push_comparison(out: &mut Vec<u8>, operator: i32, value: &[u8]) {
    push_expression(out, "cmp", |out| {
        push_number(out, attribute::CMP_SREG, REGISTER);
        push_number(out, attribute::CMP_OP, operator as u32);
        push_value(out, attribute::CMP_DATA, value);
    });
}

fn push_expression(out: &mut Vec<u8>, name: &str, data: impl FnOnce(&mut Vec<u8>)) {
    push_nested(out, attribute::LIST_ELEM, |out| {
        push_text(out, attribute::EXPR_NAME, name);
        push_nested(out, attribute::EXPR_DATA, data);
    });
}

fn push_value(out: &mut Vec<u8>, kind: u16, value: &[u8]) {
    push_nested(out, kind, |out| push_attribute(out, attribute::DATA_VALUE, value));
}

fn push_number(out: &mut Vec<u8>, kind: u16, value: u32) {
    push_attribute(out, kind, &value.to_be_bytes());
}

fn push_text(out: &mut Vec<u8>, kind: u16, text: &str) {
    push_attribute(out, kind, &[text.as_bytes(), &[0]].concat());
}

fn push_nested(out: &mut Vec<u8>, kind: u16, data: impl FnOnce(&mut Vec<u8>)) {
    push_attribute(out, kind | libc::NLA_F_NESTED as u16, &attributes(data));
}

fn attributes(data: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    let mut out = Vec::new();
    data(&mut out);
    out
}

/// With struct nfgenmsg before the attributes.
fn push_message(out: &mut Vec<u8>, kind: u16, flags: i32, sequence: u32, attributes: &[u8]) {
    // A batch says in this header which part of netfilter it is for.
    let (family, resource) = if kind & SUBSYSTEM == 0 { (libc::AF_UNSPEC, 10) } else { (libc::NFPROTO_INET, 0u16) };
    let [high, low] = resource.to_be_bytes();
    netlink::push_message(out, kind, flags, sequence, &[&[family as u8, 0, high, low], attributes].concat());
}

/// Numbers of attributes (linux/netfilter/nf_tables.h).
mod attribute {
    pub(super) const RULE_TABLE: u16 = 1;
    pub(super) const RULE_CHAIN: u16 = 2;
    pub(super) const RULE_EXPRESSIONS: u16 = 4;
    pub(super) const IMMEDIATE_DREG: u16 = 1;
    pub(super) const IMMEDIATE_DATA: u16 = 2;
    pub(super) const DATA_VALUE: u16 = 1;
    pub(super) const DATA_VERDICT: u16 = 2;
    pub(super) const VERDICT_CODE: u16 = 1;
    pub(super) const CHAIN_TABLE: u16 = 1;
    pub(super) const CHAIN_NAME: u16 = 3;
    pub(super) const CHAIN_HOOK: u16 = 4;
    pub(super) const CHAIN_POLICY: u16 = 5;
    pub(super) const CHAIN_TYPE: u16 = 7;
    pub(super) const CT_DREG: u16 = 1;
    pub(super) const CT_KEY: u16 = 2;
    pub(super) const META_DREG: u16 = 1;
    pub(super) const META_KEY: u16 = 2;
    pub(super) const PAYLOAD_DREG: u16 = 1;
    pub(super) const PAYLOAD_BASE: u16 = 2;
    pub(super) const PAYLOAD_OFFSET: u16 = 3;
    pub(super) const PAYLOAD_LEN: u16 = 4;
    pub(super) const BITWISE_SREG: u16 = 1;
    pub(super) const BITWISE_DREG: u16 = 2;
    pub(super) const BITWISE_LEN: u16 = 3;
    pub(super) const BITWISE_MASK: u16 = 4;
    pub(super) const BITWISE_XOR: u16 = 5;
    pub(super) const CMP_SREG: u16 = 1;
    pub(super) const CMP_OP: u16 = 2;
    pub(super) const CMP_DATA: u16 = 3;
    pub(super) const LIST_ELEM: u16 = 1;
    pub(super) const EXPR_NAME: u16 = 1;
    pub(super) const EXPR_DATA: u16 = 2;
    pub(super) const TABLE_NAME: u16 = 1;
    pub(super) const HOOK_NUMBER: u16 = 1;
    pub(super) const HOOK_PRIORITY: u16 = 2;
}

const SUBSYSTEM: u16 = (libc::NFNL_SUBSYS_NFTABLES as u16) << 8;
const BATCH_BEGIN: u16 = libc::NFNL_MSG_BATCH_BEGIN as u16;
const BATCH_END: u16 = libc::NFNL_MSG_BATCH_END as u16;
const REGISTER: u32 = libc::NFT_REG_1 as u32;
// linux/netfilter/nf_conntrack_common.h, as the bits that rules see.
const ESTABLISHED: u32 = 2;
const RELATED: u32 = 4;
// RFC 4861: router solicitation to redirect.
const FIRST_DISCOVERY: u8 = 133;
const LAST_DISCOVERY: u8 = 137;
const LONGEST_TRANSACTION: usize = 1 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_transaction_is_made_of_whole_messages_between_begin_and_end() {
        let table = Table::new("t").chain(Hook::Input, vec![vec![Match::From("lo".to_owned())], vec![Match::Known]]);
        let (bytes, asked) = table.transaction();
        let mut kinds = Vec::new();
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            let len = u32::from_ne_bytes(rest[..4].try_into().unwrap()) as usize;
            assert!(len >= 20 && len.is_multiple_of(4));
            kinds.push(u16::from_ne_bytes(rest[4..6].try_into().unwrap()));
            rest = &rest[len..];
        }
        assert_eq!(kinds, [0x10, 0xa00, 0xa02, 0xa00, 0xa03, 0xa06, 0xa06, 0x11]);
        assert_eq!(asked, 6);
    }
}
