//! Changes of tables that take effect together.

use std::io;
use std::os::fd::AsRawFd;

use ipnet::IpNet;
use nix::libc;
use nix::sys::socket::{MsgFlags, SockProtocol, recv, send, setsockopt, sockopt};

use crate::netlink::nftables::attribute;
use crate::netlink::nftables::chain::Chain;
use crate::netlink::nftables::endpoint_map::{EndpointMap, MapEntry};
use crate::netlink::nftables::interval_set::{Interval, IntervalSet};
use crate::netlink::nftables::set::{AddressSet, Set};
use crate::netlink::nftables::table::Family;
use crate::netlink::{self, push_attribute};

/// Changes of any number of tables, in order. Either all of them take effect or none.
#[derive(Debug, Default)]
pub struct Transaction {
    bytes: Vec<u8>,
    messages: u32,
}

impl Transaction {
    /// No change.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a table unless there is one of that name.
    pub fn table(&mut self, family: Family, name: &str) {
        let body = attributes(|out| push_text(out, attribute::TABLE_NAME, name));
        self.ask(family, libc::NFT_MSG_NEWTABLE, libc::NLM_F_CREATE, &body);
    }

    /// Removes a table with all that is in it; the transaction fails if there is none.
    pub fn remove_table(&mut self, family: Family, name: &str) {
        let body = attributes(|out| push_text(out, attribute::TABLE_NAME, name));
        self.ask(family, libc::NFT_MSG_DELTABLE, 0, &body);
    }

    /// Adds a set that rules keep, unless there is the same one; its keys stay. `number` is unique among the new sets
    /// of the transaction.
    pub fn set(&mut self, family: Family, table: &str, set: &Set, number: u32) {
        self.ask(family, libc::NFT_MSG_NEWSET, libc::NLM_F_CREATE, &set.attributes(table, number));
    }

    /// Removes a set that no rule uses; the transaction fails if there is none.
    pub fn remove_set(&mut self, family: Family, table: &str, name: &str) {
        let body = attributes(|out| {
            push_text(out, attribute::SET_TABLE, table);
            push_text(out, attribute::SET_NAME, name);
        });
        self.ask(family, libc::NFT_MSG_DELSET, 0, &body);
    }

    /// Adds a set unless there is the same one; its elements stay. `number` is unique among the new sets of the
    /// transaction.
    pub fn address_set(&mut self, family: Family, table: &str, set: &AddressSet, number: u32) {
        self.ask(family, libc::NFT_MSG_NEWSET, libc::NLM_F_CREATE, &set.attributes(table, number));
    }

    /// Adds a map. `number` is unique among the new sets of the transaction.
    pub fn endpoint_map(&mut self, family: Family, table: &str, map: &EndpointMap, number: u32) {
        self.ask(family, libc::NFT_MSG_NEWSET, libc::NLM_F_CREATE, &map.attributes(table, number));
    }

    /// Adds entries to a map.
    pub fn add_entries(&mut self, family: Family, table: &str, map: &EndpointMap, entries: &[MapEntry]) {
        for body in map.elements(table, entries) {
            self.ask(family, libc::NFT_MSG_NEWSETELEM, libc::NLM_F_CREATE, &body);
        }
    }

    /// Adds a set unless there is the same one; its elements stay. `number` is unique among the new sets of the
    /// transaction.
    pub fn interval_set(&mut self, family: Family, table: &str, set: &IntervalSet, number: u32) {
        self.ask(family, libc::NFT_MSG_NEWSET, libc::NLM_F_CREATE, &set.attributes(table, number));
    }

    /// Makes these intervals the only elements of a set; the transaction fails if there is none. They must not
    /// overlap.
    pub fn replace_intervals(&mut self, family: Family, table: &str, set: &IntervalSet, intervals: &[Interval]) {
        self.empty_set(family, table, &set.name);
        for body in set.elements(table, intervals) {
            self.ask(family, libc::NFT_MSG_NEWSETELEM, libc::NLM_F_CREATE, &body);
        }
    }

    /// Adds elements to a set; those that are in it stay.
    pub fn add(&mut self, family: Family, table: &str, set: &AddressSet, prefixes: &[IpNet]) {
        for body in set.elements(table, prefixes) {
            self.ask(family, libc::NFT_MSG_NEWSETELEM, libc::NLM_F_CREATE, &body);
        }
    }

    /// Removes elements from a set; the transaction fails if one of them is not in it.
    pub fn take(&mut self, family: Family, table: &str, set: &AddressSet, prefixes: &[IpNet]) {
        for body in set.elements(table, prefixes) {
            self.ask(family, libc::NFT_MSG_DELSETELEM, 0, &body);
        }
    }

    /// Removes all elements of a set.
    pub fn empty(&mut self, family: Family, table: &str, set: &AddressSet) {
        self.empty_set(family, table, &set.name);
    }

    fn empty_set(&mut self, family: Family, table: &str, name: &str) {
        let body = attributes(|out| {
            push_text(out, attribute::ELEMENTS_TABLE, table);
            push_text(out, attribute::ELEMENTS_SET, name);
        });
        self.ask(family, libc::NFT_MSG_DELSETELEM, 0, &body);
    }

    /// Adds a chain with its rules.
    pub fn chain(&mut self, family: Family, table: &str, chain: &Chain) {
        self.ask(family, libc::NFT_MSG_NEWCHAIN, libc::NLM_F_CREATE, &chain.attributes(table));
        for rule in &chain.rules {
            let body = rule.attributes(table, &chain.name);
            self.ask(family, libc::NFT_MSG_NEWRULE, libc::NLM_F_CREATE | libc::NLM_F_APPEND, &body);
        }
    }

    /// Removes a chain with its rules; the transaction fails if there is none.
    pub fn remove_chain(&mut self, family: Family, table: &str, name: &str) {
        let body = attributes(|out| {
            push_text(out, attribute::CHAIN_TABLE, table);
            push_text(out, attribute::CHAIN_NAME, name);
        });
        self.ask(family, libc::NFT_MSG_DELCHAIN, 0, &body);
    }

    /// Makes the changes, in the network namespace of the calling thread.
    ///
    /// # Errors
    /// Returns the kernel's error; nothing has changed then.
    pub fn run(self) -> io::Result<()> {
        self.send(None)
    }

    /// Like [`Transaction::run`], unless anything in nf_tables has changed since [`super::generation`] returned this
    /// number.
    ///
    /// # Errors
    /// As [`Transaction::run`]; `ERESTART` if anything has changed.
    pub fn run_at(self, generation: u32) -> io::Result<()> {
        self.send(Some(generation))
    }

    fn ask(&mut self, family: Family, kind: i32, flags: i32, attributes: &[u8]) {
        self.messages += 1;
        let kind = SUBSYSTEM | kind as u16;
        push_message(&mut self.bytes, kind, flags | libc::NLM_F_ACK, self.messages, attributes, family as i32, 0);
    }

    /// The bytes, and how many messages the kernel acknowledges.
    pub(super) fn encoded(self, generation: Option<u32>) -> (Vec<u8>, u32) {
        let mut bytes = Vec::with_capacity(self.bytes.len() + 64);
        let since =
            attributes(|out| generation.into_iter().for_each(|id| push_number(out, attribute::BATCH_GENERATION, id)));
        // This header names the netfilter subsystem.
        let (unspecified, subsystem) = (libc::AF_UNSPEC, libc::NFNL_SUBSYS_NFTABLES as u16);
        push_message(&mut bytes, libc::NFNL_MSG_BATCH_BEGIN as u16, 0, 0, &since, unspecified, subsystem);
        bytes.extend(self.bytes);
        let end = libc::NFNL_MSG_BATCH_END as u16;
        push_message(&mut bytes, end, 0, self.messages + 1, &[], unspecified, subsystem);
        (bytes, self.messages)
    }

    fn send(self, generation: Option<u32>) -> io::Result<()> {
        let (bytes, messages) = self.encoded(generation);
        let socket = netlink::connect(SockProtocol::NetlinkNetFilter)?;
        if bytes.len() > MAX_TRANSACTION_BYTES {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "too many rules or addresses"));
        }
        // Best effort: the default buffer holds a few hundred rules.
        let room = (bytes.len() * 2).max(MIN_BUFFER_BYTES);
        if setsockopt(&socket, sockopt::SndBufForce, &room).is_err() {
            let _ = setsockopt(&socket, sockopt::SndBuf, &room);
        }
        if setsockopt(&socket, sockopt::RcvBufForce, &MIN_BUFFER_BYTES).is_err() {
            let _ = setsockopt(&socket, sockopt::RcvBuf, &MIN_BUFFER_BYTES);
        }
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
}

pub(super) fn push_expression(out: &mut Vec<u8>, name: &str, data: impl FnOnce(&mut Vec<u8>)) {
    push_nested(out, attribute::LIST_ELEM, |out| {
        push_text(out, attribute::EXPR_NAME, name);
        push_nested(out, attribute::EXPR_DATA, data);
    });
}

pub(super) fn push_value(out: &mut Vec<u8>, kind: u16, value: &[u8]) {
    push_nested(out, kind, |out| push_attribute(out, attribute::DATA_VALUE, value));
}

pub(super) fn push_number(out: &mut Vec<u8>, kind: u16, value: u32) {
    push_attribute(out, kind, &value.to_be_bytes());
}

pub(super) fn push_text(out: &mut Vec<u8>, kind: u16, text: &str) {
    push_attribute(out, kind, &[text.as_bytes(), &[0]].concat());
}

pub(super) fn push_nested(out: &mut Vec<u8>, kind: u16, data: impl FnOnce(&mut Vec<u8>)) {
    push_attribute(out, kind | libc::NLA_F_NESTED as u16, &attributes(data));
}

pub(super) fn attributes(data: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    let mut out = Vec::new();
    data(&mut out);
    out
}

/// Appends a message with a struct nfgenmsg before the attributes.
fn push_message(
    out: &mut Vec<u8>,
    kind: u16,
    flags: i32,
    sequence: u32,
    attributes: &[u8],
    family: i32,
    resource: u16,
) {
    let [high, low] = resource.to_be_bytes();
    netlink::push_message(out, kind, flags, sequence, &[&[family as u8, 0, high, low], attributes].concat());
}

pub(super) const SUBSYSTEM: u16 = (libc::NFNL_SUBSYS_NFTABLES as u16) << 8;
// Room for the 200,000 addresses of a large cluster.
const MAX_TRANSACTION_BYTES: usize = 32 << 20;
const MIN_BUFFER_BYTES: usize = 1 << 20;
