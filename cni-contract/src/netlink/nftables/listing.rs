//! What the kernel has: tables, chains and the counters of rules.

use std::io;

use ipnet::IpNet;
use nix::libc;
use nix::sys::socket::SockProtocol;

use crate::netlink;
use crate::netlink::nftables::attribute;
use crate::netlink::nftables::interval_set;
use crate::netlink::nftables::rule::comment;
use crate::netlink::nftables::set::AddressSet;
use crate::netlink::nftables::table::Family;
use crate::netlink::nftables::transaction::{SUBSYSTEM, attributes, push_text};

/// A chain in the kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Existing {
    /// Its table.
    pub table: String,
    /// Its name.
    pub name: String,
    /// Its link, if it sees the frames of one.
    pub link: Option<String>,
    /// The number of its rules, and of the rules of other chains that lead to it.
    pub uses: u32,
}

/// A set in the kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExistingSet {
    /// Its name.
    pub name: String,
    /// A number that no other set of its table gets.
    pub handle: u64,
    /// What was noted with it, if anything.
    pub comment: Option<String>,
}

/// Names of the tables of a family.
///
/// # Errors
/// Returns the kernel's error.
pub fn tables(family: Family) -> io::Result<Vec<String>> {
    let bodies = ask(family, libc::NFT_MSG_GETTABLE, libc::NLM_F_DUMP, &[])?;
    Ok(bodies.iter().filter_map(|body| netlink::text(body, attribute::TABLE_NAME)).collect())
}

/// Like [`tables`]; where the kernel cannot have any, there are none.
///
/// # Errors
/// Returns the kernel's error: there may be tables.
pub fn tables_if_any(family: Family) -> io::Result<Vec<String>> {
    match tables(family) {
        Err(error) if has_no_tables(&error) => Ok(Vec::new()),
        listed => listed,
    }
}

/// Whether a request failed because the kernel has no nf_tables, and so nobody can have made a table.
#[must_use]
pub fn has_no_tables(error: &io::Error) -> bool {
    error.raw_os_error().is_some_and(|code| NO_NF_TABLES.contains(&code))
}

/// The handle of a table, which the kernel gives to no other table; `None` if there is no such table.
///
/// # Errors
/// Returns the kernel's error.
pub fn table_handle(family: Family, name: &str) -> io::Result<Option<u64>> {
    let body = attributes(|out| push_text(out, attribute::TABLE_NAME, name));
    match ask(family, libc::NFT_MSG_GETTABLE, libc::NLM_F_ACK, &body) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        bodies => Ok(bodies?.first().and_then(|body| read_handle(body))),
    }
}

/// The chains of all tables of a family.
///
/// # Errors
/// Returns the kernel's error.
pub fn chains(family: Family) -> io::Result<Vec<Existing>> {
    let bodies = ask(family, libc::NFT_MSG_GETCHAIN, libc::NLM_F_DUMP, &[])?;
    Ok(bodies.iter().filter_map(|body| read_chain(body)).collect())
}

/// One chain; `None` if it does not exist.
///
/// # Errors
/// Returns the kernel's error.
pub fn chain(family: Family, table: &str, name: &str) -> io::Result<Option<Existing>> {
    let body = attributes(|out| {
        push_text(out, attribute::CHAIN_TABLE, table);
        push_text(out, attribute::CHAIN_NAME, name);
    });
    match ask(family, libc::NFT_MSG_GETCHAIN, libc::NLM_F_ACK, &body) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        bodies => Ok(bodies?.first().and_then(|body| read_chain(body))),
    }
}

/// The sets of a table; none if there is no such table.
///
/// # Errors
/// Returns the kernel's error.
pub fn sets(family: Family, table: &str) -> io::Result<Vec<ExistingSet>> {
    let body = attributes(|out| push_text(out, attribute::SET_TABLE, table));
    match ask(family, libc::NFT_MSG_GETSET, libc::NLM_F_DUMP, &body) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        bodies => Ok(bodies?.iter().filter_map(|body| read_set(body)).collect()),
    }
}

/// Counts the base chains of a table that are hooked to a link of this name, and the rules in them.
///
/// # Errors
/// Returns the kernel's error.
pub fn chains_on_link(table: &str, link: &str) -> io::Result<(usize, u32)> {
    let all = chains(Family::Link)?;
    let of_link = all.iter().filter(|chain| chain.table == table && chain.link.as_deref() == Some(link));
    Ok(of_link.fold((0, 0), |(chains, rules), chain| (chains + 1, rules + chain.uses)))
}

/// Whether a set has all these elements; not for a set of prefixes.
///
/// # Errors
/// Returns the kernel's error.
pub fn contains(family: Family, table: &str, set: &AddressSet, elements: &[IpNet]) -> io::Result<bool> {
    for body in set.elements(table, elements) {
        match ask(family, libc::NFT_MSG_GETSETELEM, libc::NLM_F_ACK, &body) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
            answer => answer.map(drop)?,
        }
    }
    Ok(true)
}

/// The counted rules of a chain: the comment of each, and how many packets it has met.
///
/// # Errors
/// Returns the kernel's error.
pub fn counts(family: Family, table: &str, chain: &str) -> io::Result<Vec<(String, u64)>> {
    let body = attributes(|out| {
        push_text(out, attribute::RULE_TABLE, table);
        push_text(out, attribute::RULE_CHAIN, chain);
    });
    let bodies = ask(family, libc::NFT_MSG_GETRULE, libc::NLM_F_DUMP, &body)?;
    Ok(bodies.iter().filter_map(|body| read_count(body)).collect())
}

/// The number of the present state of nf_tables, which each change increments.
///
/// # Errors
/// Returns the kernel's error.
pub fn generation() -> io::Result<u32> {
    let bodies = ask(Family::Inet, libc::NFT_MSG_GETGEN, libc::NLM_F_ACK, &[])?;
    let id = bodies.first().and_then(|body| number(body, attribute::GENERATION));
    id.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "nf_tables tells no generation"))
}

fn read_handle(table: &[u8]) -> Option<u64> {
    Some(u64::from_be_bytes(netlink::attribute(table, attribute::TABLE_HANDLE)?.try_into().ok()?))
}

fn read_chain(body: &[u8]) -> Option<Existing> {
    let hook = netlink::attribute(body, attribute::CHAIN_HOOK);
    Some(Existing {
        table: netlink::text(body, attribute::CHAIN_TABLE)?,
        name: netlink::text(body, attribute::CHAIN_NAME)?,
        link: hook.and_then(|hook| netlink::text(hook, attribute::HOOK_DEVICE)),
        uses: number(body, attribute::CHAIN_USE).unwrap_or_default(),
    })
}

fn read_set(body: &[u8]) -> Option<ExistingSet> {
    let handle = netlink::attribute(body, attribute::SET_HANDLE)?;
    Some(ExistingSet {
        name: netlink::text(body, attribute::SET_NAME)?,
        handle: u64::from_be_bytes(handle.try_into().ok()?),
        comment: netlink::attribute(body, attribute::SET_USERDATA).and_then(interval_set::comment),
    })
}

fn read_count(body: &[u8]) -> Option<(String, u64)> {
    let comment = comment(netlink::attribute(body, attribute::RULE_USERDATA)?)?;
    let expressions = netlink::attribute(body, attribute::RULE_EXPRESSIONS)?;
    let counter = netlink::attributes(expressions)
        .find(|(_, expression)| netlink::text(expression, attribute::EXPR_NAME).as_deref() == Some("counter"))?;
    let packets = netlink::attribute(netlink::attribute(counter.1, attribute::EXPR_DATA)?, attribute::COUNTER_PACKETS)?;
    Some((comment, u64::from_be_bytes(packets.try_into().ok()?)))
}

/// Decodes a table, a chain, a set and a rule, for the fuzzer.
pub(crate) fn fuzz(body: &[u8]) {
    let _ = (read_handle(body), read_chain(body), read_set(body), read_count(body));
}

fn number(body: &[u8], kind: u16) -> Option<u32> {
    Some(u32::from_be_bytes(netlink::attribute(body, kind)?.try_into().ok()?))
}

/// The attributes of the answers.
fn ask(family: Family, kind: i32, flags: i32, attributes: &[u8]) -> io::Result<Vec<Vec<u8>>> {
    let mut request = Vec::new();
    let body = [&[family as u8, 0, 0, 0], attributes].concat();
    netlink::push_message(&mut request, SUBSYSTEM | kind as u16, flags, 1, &body);
    let bodies = netlink::dump(&netlink::connect(SockProtocol::NetlinkNetFilter)?, &request)?;
    Ok(bodies.iter().filter_map(|body| body.get(NFGENMSG..)).map(<[u8]>::to_vec).collect())
}

// struct nfgenmsg.
const NFGENMSG: usize = 4;

// No netlink for netfilter (the first two); netfilter without nf_tables, in answer to a transaction and to another
// request (net/netfilter/nfnetlink.c).
const NO_NF_TABLES: [i32; 4] = [libc::EPROTONOSUPPORT, libc::EAFNOSUPPORT, libc::EOPNOTSUPP, libc::EINVAL];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netlink::push_attribute;

    #[test]
    fn what_is_cut_short_is_no_chain_and_no_counter() {
        let chain = attributes(|out| {
            push_text(out, attribute::CHAIN_TABLE, "t");
            push_text(out, attribute::CHAIN_NAME, "c");
            push_attribute(out, attribute::CHAIN_USE, &7u32.to_be_bytes());
        });
        let expected = Existing { table: "t".into(), name: "c".into(), link: None, uses: 7 };
        assert_eq!(read_chain(&chain), Some(expected.clone()));
        assert_eq!(read_chain(&chain[..20]), Some(Existing { uses: 0, ..expected }));
        assert_eq!(read_chain(&chain[..9]), None);
        assert_eq!(read_count(&chain), None);
        assert_eq!(read_set(&chain), None, "it has no handle");
        let set = attributes(|out| {
            push_text(out, attribute::SET_NAME, "s");
            push_attribute(out, attribute::SET_HANDLE, &7u64.to_be_bytes());
        });
        assert_eq!(read_set(&set), Some(ExistingSet { name: "s".into(), handle: 7, comment: None }));
        assert_eq!(read_set(&set[..12]), None);
    }
}
