//! The few nf_tables messages that a table of filter rules needs, sent as one atomic transaction.

use std::io;
use std::os::fd::AsRawFd;
use std::time::Duration;

use ipnet::IpNet;
use nix::libc;
use nix::sys::socket::{MsgFlags, SockProtocol, recv, send, setsockopt, sockopt};

use crate::netlink::{self, octets, push_attribute};

/// A table of base chains that drop every packet no rule accepts.
#[derive(Debug)]
pub struct Table {
    family: Family,
    name: String,
    sets: Vec<Set>,
    chains: Vec<Chain>,
}

/// Which packets a table sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    /// The IPv4 and IPv6 packets of a network namespace.
    Inet = libc::NFPROTO_INET as isize,
    /// Every frame of a single link.
    Link = libc::NFPROTO_NETDEV as isize,
}

/// Where a chain sees packets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Hook {
    /// Packets addressed to this network namespace.
    Input,
    /// Packets forwarded by this network namespace.
    Forward,
    /// Packets sent by this network namespace.
    Output,
    /// Frames received from a link.
    FromLink(String),
    /// Frames sent to a link.
    ToLink(String),
}

#[derive(Debug)]
struct Chain {
    hook: Hook,
    rules: Vec<Rule>,
}

/// A rule: accepts or drops the packet if all conditions hold. They are evaluated in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    conditions: Vec<Match>,
    verdict: Verdict,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Accept = libc::NF_ACCEPT as isize,
    Drop = libc::NF_DROP as isize,
}

impl Rule {
    /// A rule that accepts.
    #[must_use]
    pub fn accept(conditions: Vec<Match>) -> Self {
        Self { conditions, verdict: Verdict::Accept }
    }

    /// A rule that drops.
    #[must_use]
    pub fn drop(conditions: Vec<Match>) -> Self {
        Self { conditions, verdict: Verdict::Drop }
    }
}

/// A set of keys that some rules add and others look up. Keys expire after a timeout.
#[derive(Debug, Clone)]
pub struct Set {
    /// Name, unique in its table.
    pub name: &'static str,
    /// Length of a key in bytes, with each field padded to a multiple of four.
    pub key_len: u32,
    /// Maximum number of keys; once the set is full, no further key is added.
    pub size: u32,
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
    /// Source address, in [`Family::Inet`].
    Source(IpNet),
    /// Destination address, in [`Family::Inet`].
    Destination(IpNet),
    /// IP protocol number.
    Protocol(u8),
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
    /// The set contains the key made of these fields.
    In(&'static str, Vec<Field>),
    /// Adds the key made of these fields to the set, with a timeout; the condition fails if the set is full.
    Remember(&'static str, Vec<Field>, Duration),
}

impl Table {
    /// An empty table.
    #[must_use]
    pub fn new(family: Family, name: impl Into<String>) -> Self {
        Self { family, name: name.into(), sets: Vec::new(), chains: Vec::new() }
    }

    /// Adds a set.
    #[must_use]
    pub fn set(mut self, set: Set) -> Self {
        self.sets.push(set);
        self
    }

    /// Adds a chain. The first rule whose conditions hold decides; if there is none, the packet is dropped.
    #[must_use]
    pub fn chain(mut self, hook: Hook, rules: Vec<Rule>) -> Self {
        self.chains.push(Chain { hook, rules });
        self
    }

    /// Installs the table in the network namespace of the calling thread, replacing any table of the same name.
    ///
    /// # Errors
    /// Returns the kernel's error; nothing has changed then.
    pub fn install(&self) -> io::Result<()> {
        run(self.transaction())
    }

    /// Encodes the table as a transaction.
    fn transaction(&self) -> Transaction {
        let mut batch = Transaction::begin(self.family);
        let create = libc::NLM_F_CREATE;
        let table = attributes(|out| push_text(out, attribute::TABLE_NAME, &self.name));
        // Creating the table first ensures that there is one to delete.
        batch.ask(libc::NFT_MSG_NEWTABLE, create, &table);
        batch.ask(libc::NFT_MSG_DELTABLE, 0, &table);
        batch.ask(libc::NFT_MSG_NEWTABLE, create, &table);
        for (number, set) in self.sets.iter().enumerate() {
            batch.ask(libc::NFT_MSG_NEWSET, create, &set.attributes(&self.name, number as u32));
        }
        for chain in &self.chains {
            batch.ask(libc::NFT_MSG_NEWCHAIN, create, &chain.attributes(&self.name));
            for rule in &chain.rules {
                batch.ask(
                    libc::NFT_MSG_NEWRULE,
                    create | libc::NLM_F_APPEND,
                    &rule.attributes(&self.name, &chain.hook),
                );
            }
        }
        batch.end()
    }
}

/// Removes a table; does nothing if it is gone already.
///
/// # Errors
/// Returns the kernel's error.
pub fn remove(family: Family, name: &str) -> io::Result<()> {
    let mut batch = Transaction::begin(family);
    batch.ask(libc::NFT_MSG_DELTABLE, 0, &attributes(|out| push_text(out, attribute::TABLE_NAME, name)));
    match run(batch.end()) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        done => done,
    }
}

/// Names of the tables of a family.
///
/// # Errors
/// Returns the kernel's error.
pub fn tables(family: Family) -> io::Result<Vec<String>> {
    let bodies = list(family, libc::NFT_MSG_GETTABLE)?;
    Ok(bodies.iter().filter_map(|body| netlink::text(body.get(NFGENMSG..)?, attribute::TABLE_NAME)).collect())
}

/// Counts the base chains of a table that are hooked to a link of this name, and the rules in them.
///
/// # Errors
/// Returns the kernel's error.
pub fn chains_on_link(table: &str, link: &str) -> io::Result<(usize, u32)> {
    let (mut chains, mut rules) = (0, 0);
    for body in list(Family::Link, libc::NFT_MSG_GETCHAIN)? {
        let Some(body) = body.get(NFGENMSG..) else { continue };
        let hook = netlink::attribute(body, attribute::CHAIN_HOOK);
        let is_there = hook.is_some_and(|hook| netlink::text(hook, attribute::HOOK_DEVICE).is_some_and(|d| d == link));
        if is_there && netlink::text(body, attribute::CHAIN_TABLE).is_some_and(|name| name == table) {
            chains += 1;
            let used = netlink::attribute(body, attribute::CHAIN_USE).and_then(|used| used.try_into().ok());
            rules += used.map_or(0, u32::from_be_bytes);
        }
    }
    Ok((chains, rules))
}

fn list(family: Family, kind: i32) -> io::Result<Vec<Vec<u8>>> {
    let mut request = Vec::new();
    let header = [family as u8, 0, 0, 0];
    netlink::push_message(&mut request, SUBSYSTEM | kind as u16, libc::NLM_F_DUMP, 1, &header);
    netlink::dump(&netlink::connect(SockProtocol::NetlinkNetFilter)?, &request)
}

/// Messages that take effect together.
struct Transaction {
    family: Family,
    bytes: Vec<u8>,
    messages: u32,
}

impl Transaction {
    fn begin(family: Family) -> Self {
        let mut bytes = Vec::new();
        push_message(&mut bytes, BATCH_BEGIN, 0, 0, &[], family);
        Self { family, bytes, messages: 0 }
    }

    fn ask(&mut self, kind: i32, flags: i32, attributes: &[u8]) {
        self.messages += 1;
        let kind = SUBSYSTEM | kind as u16;
        push_message(&mut self.bytes, kind, flags | libc::NLM_F_ACK, self.messages, attributes, self.family);
    }

    fn end(mut self) -> Self {
        push_message(&mut self.bytes, BATCH_END, 0, self.messages + 1, &[], self.family);
        self
    }
}

fn run(Transaction { bytes, messages, .. }: Transaction) -> io::Result<()> {
    let socket = netlink::connect(SockProtocol::NetlinkNetFilter)?;
    if bytes.len() > MAX_TRANSACTION_BYTES {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "too many rules"));
    }
    // Best effort: the default buffer holds a few hundred rules.
    let _ = setsockopt(&socket, sockopt::SndBuf, &MAX_TRANSACTION_BYTES);
    let _ = setsockopt(&socket, sockopt::RcvBuf, &MAX_TRANSACTION_BYTES);
    send(socket.as_raw_fd(), &bytes, MsgFlags::empty())?;
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

impl Hook {
    fn name(&self) -> &'static str {
        match self {
            Self::Input => "input",
            Self::Forward => "forward",
            Self::Output => "output",
            Self::FromLink(_) => "from-link",
            Self::ToLink(_) => "to-link",
        }
    }

    fn number(&self) -> u32 {
        match self {
            // NF_NETDEV_INGRESS, NF_NETDEV_EGRESS.
            Self::FromLink(_) => 0,
            Self::ToLink(_) | Self::Input => 1,
            Self::Forward => 2,
            Self::Output => 3,
        }
    }
}

impl Chain {
    fn attributes(&self, table: &str) -> Vec<u8> {
        attributes(|out| {
            push_text(out, attribute::CHAIN_TABLE, table);
            push_text(out, attribute::CHAIN_NAME, self.hook.name());
            push_nested(out, attribute::CHAIN_HOOK, |out| {
                push_number(out, attribute::HOOK_NUMBER, self.hook.number());
                push_number(out, attribute::HOOK_PRIORITY, 0);
                if let Hook::FromLink(link) | Hook::ToLink(link) = &self.hook {
                    push_text(out, attribute::HOOK_DEVICE, link);
                }
            });
            push_number(out, attribute::CHAIN_POLICY, libc::NF_DROP as u32);
            push_text(out, attribute::CHAIN_TYPE, "filter");
        })
    }
}

impl Set {
    fn attributes(&self, table: &str, number: u32) -> Vec<u8> {
        attributes(|out| {
            push_text(out, attribute::SET_TABLE, table);
            push_text(out, attribute::SET_NAME, self.name);
            push_number(out, attribute::SET_FLAGS, (libc::NFT_SET_TIMEOUT | libc::NFT_SET_EVAL) as u32);
            push_number(out, attribute::SET_KEY_LEN, self.key_len);
            push_number(out, attribute::SET_ID, number + 1);
            push_nested(out, attribute::SET_DESCRIPTION, |out| push_number(out, attribute::SET_SIZE, self.size));
        })
    }
}

impl Rule {
    fn attributes(&self, table: &str, hook: &Hook) -> Vec<u8> {
        attributes(|out| {
            push_text(out, attribute::RULE_TABLE, table);
            push_text(out, attribute::RULE_CHAIN, hook.name());
            push_nested(out, attribute::RULE_EXPRESSIONS, |out| {
                self.conditions.iter().for_each(|condition| condition.push(out));
                push_expression(out, "immediate", |out| {
                    push_number(out, attribute::IMMEDIATE_DREG, 0);
                    push_nested(out, attribute::IMMEDIATE_DATA, |out| {
                        push_nested(out, attribute::DATA_VERDICT, |out| {
                            push_number(out, attribute::VERDICT_CODE, self.verdict as u32);
                        });
                    });
                });
            });
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
                push_protocol(out, libc::IPPROTO_ICMPV6 as u8);
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
            Self::In(set, key) => {
                push_key(out, key);
                push_expression(out, "lookup", |out| {
                    push_text(out, attribute::LOOKUP_SET, set);
                    push_number(out, attribute::LOOKUP_SREG, FIRST_WORD);
                });
            }
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

fn push_device(out: &mut Vec<u8>, key: u32, device: &str) {
    push_meta(out, REGISTER, key);
    let mut name = [0; libc::IFNAMSIZ];
    device.bytes().take(libc::IFNAMSIZ - 1).zip(&mut name).for_each(|(byte, place)| *place = byte);
    push_comparison(out, Is::Equal, &name);
}

fn push_protocol(out: &mut Vec<u8>, number: u8) {
    push_meta(out, REGISTER, libc::NFT_META_L4PROTO as u32);
    push_comparison(out, Is::Equal, &[number]);
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
    push_expression(out, "bitwise", |out| {
        push_number(out, attribute::BITWISE_SREG, REGISTER);
        push_number(out, attribute::BITWISE_DREG, REGISTER);
        push_number(out, attribute::BITWISE_LEN, mask.len() as u32);
        push_value(out, attribute::BITWISE_MASK, mask);
        push_value(out, attribute::BITWISE_XOR, &vec![0; mask.len()]);
    });
}

fn push_comparison(out: &mut Vec<u8>, is: Is, value: &[u8]) {
    push_expression(out, "cmp", |out| {
        push_number(out, attribute::CMP_SREG, REGISTER);
        push_number(out, attribute::CMP_OP, is as u32);
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

/// Appends a message with a struct nfgenmsg before the attributes.
fn push_message(out: &mut Vec<u8>, kind: u16, flags: i32, sequence: u32, attributes: &[u8], family: Family) {
    // For a batch, this header names the netfilter subsystem.
    let (family, resource) = if kind & SUBSYSTEM == 0 { (libc::AF_UNSPEC, 10) } else { (family as i32, 0u16) };
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
    pub(super) const CHAIN_USE: u16 = 6;
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
    pub(super) const HOOK_DEVICE: u16 = 3;
    pub(super) const BYTEORDER_SREG: u16 = 1;
    pub(super) const BYTEORDER_DREG: u16 = 2;
    pub(super) const BYTEORDER_OP: u16 = 3;
    pub(super) const BYTEORDER_LEN: u16 = 4;
    pub(super) const BYTEORDER_SIZE: u16 = 5;
    pub(super) const SET_TABLE: u16 = 1;
    pub(super) const SET_NAME: u16 = 2;
    pub(super) const SET_FLAGS: u16 = 3;
    pub(super) const SET_KEY_LEN: u16 = 5;
    pub(super) const SET_DESCRIPTION: u16 = 9;
    pub(super) const SET_ID: u16 = 10;
    pub(super) const SET_SIZE: u16 = 1;
    pub(super) const LOOKUP_SET: u16 = 1;
    pub(super) const LOOKUP_SREG: u16 = 2;
    pub(super) const DYNSET_SET: u16 = 1;
    pub(super) const DYNSET_OP: u16 = 3;
    pub(super) const DYNSET_SREG: u16 = 4;
    pub(super) const DYNSET_TIMEOUT: u16 = 6;
}

const SUBSYSTEM: u16 = (libc::NFNL_SUBSYS_NFTABLES as u16) << 8;
const BATCH_BEGIN: u16 = libc::NFNL_MSG_BATCH_BEGIN as u16;
const BATCH_END: u16 = libc::NFNL_MSG_BATCH_END as u16;
const REGISTER: u32 = libc::NFT_REG_1 as u32;
// Connection states of linux/netfilter/nf_conntrack_common.h, as bits in the state that rules see.
const ESTABLISHED: u32 = 2;
const RELATED: u32 = 4;
// RFC 4861. Router messages and redirects are left out, because the routes of an isolated pod are fixed at setup.
const SOLICITATION: u8 = 135;
const ADVERTISEMENT: u8 = 136;
// First of the 32-bit registers; a key occupies as many of them as it needs.
const FIRST_WORD: u32 = libc::NFT_REG32_00 as u32;
// struct nfgenmsg.
const NFGENMSG: usize = 4;
const MAX_TRANSACTION_BYTES: usize = 1 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_transaction_is_made_of_whole_messages_between_begin_and_end() {
        let rules = [Match::From("lo".to_owned()), Match::Known].map(|condition| Rule::accept(vec![condition]));
        let set = Set { name: "s", key_len: 4, size: 1 };
        let table = Table::new(Family::Inet, "t").set(set).chain(Hook::Input, rules.to_vec());
        let Transaction { bytes, messages: asked, .. } = table.transaction();
        let mut kinds = Vec::new();
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            let len = u32::from_ne_bytes(rest[..4].try_into().unwrap()) as usize;
            assert!(len >= 20 && len.is_multiple_of(4));
            kinds.push(u16::from_ne_bytes(rest[4..6].try_into().unwrap()));
            rest = &rest[len..];
        }
        assert_eq!(kinds, [0x10, 0xa00, 0xa02, 0xa00, 0xa09, 0xa03, 0xa06, 0xa06, 0x11]);
        assert_eq!(asked, 7);
    }
}
