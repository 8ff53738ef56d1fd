//! The guards of captured pods in the kernel: the tables of the node, which the first captured pod makes and the last one
//! takes away.

use std::io;
use std::net::IpAddr;

use ipnet::IpNet;
use nix::libc;

use crate::link::capture_guard::{CaptureGuard, TABLE, chain_names, clear_sets, routed, sets_of_chain};
use crate::netlink::nftables::{self, Existing, Family, Transaction};

/// Installs the rules of a captured pod, and those of the node if they are missing.
///
/// # Errors
/// Returns the kernel's error; nothing has changed then.
pub(super) fn install(guard: &CaptureGuard) -> io::Result<()> {
    change_rules(|change| {
        let chains = chains(Family::Link)?;
        let forwarded = guard.forwarded();
        change.table(Family::Link, TABLE);
        for (number, set) in clear_sets().iter().enumerate() {
            change.address_set(Family::Link, TABLE, set, number as u32 + 1);
        }
        // The link may have the name of an earlier one whose rules were never removed.
        let is_old = |chain: &&Existing| {
            guard.chain_names().contains(&chain.name) || chain.link.as_deref() == Some(guard.link.as_str())
        };
        for old in chains.iter().filter(is_old) {
            change.remove_chain(Family::Link, TABLE, &old.name);
        }
        for chain in guard.on_link() {
            change.chain(Family::Link, TABLE, &chain);
        }
        change.table(Family::Inet, TABLE);
        for (number, set) in clear_sets().iter().chain(&guard.captured_sets()).enumerate() {
            change.address_set(Family::Inet, TABLE, set, number as u32 + 1);
        }
        let present = nftables::chain(Family::Inet, TABLE, forwarded.name())?;
        if present.as_ref().map(|chain| chain.rules) != Some(forwarded.rules()) {
            if present.is_some() {
                change.remove_chain(Family::Inet, TABLE, forwarded.name());
            }
            change.chain(Family::Inet, TABLE, &forwarded);
        }
        for set in guard.captured_sets() {
            change.add(Family::Inet, TABLE, &set, &guard.captured());
        }
        Ok(true)
    })
}

/// Names the rules that are missing.
///
/// # Errors
/// Returns the kernel's error.
pub(super) fn missing(guard: &CaptureGuard) -> io::Result<Vec<String>> {
    let mut missing = Vec::new();
    for chain in guard.on_link() {
        let found = nftables::chain(Family::Link, TABLE, chain.name())?;
        let is_there = found
            .is_some_and(|found| found.rules == chain.rules() && found.link.as_deref() == Some(guard.link.as_str()));
        if !is_there {
            missing.push(format!("rules on its link {} (nft chain netdev {TABLE} {})", guard.link, chain.name()));
        }
    }
    let chain = guard.forwarded();
    let found = nftables::chain(Family::Inet, TABLE, chain.name())?;
    if found.is_none_or(|found| found.rules != chain.rules()) {
        missing.push(format!("rules about forwarded packets (nft chain inet {TABLE} {})", chain.name()));
    }
    for set in guard.captured_sets() {
        if !nftables::contains(Family::Inet, TABLE, &set, &guard.captured())? {
            missing.push(format!("its address in the nft set inet {TABLE} {}", set.name));
        }
    }
    Ok(missing)
}

/// Removes the rules of an attachment and of these addresses, and those of the node with the last pod; does nothing if
/// there are none.
///
/// # Errors
/// Returns the kernel's error.
pub(super) fn remove(attachment: &str, addresses: &[IpAddr]) -> io::Result<()> {
    let names = chain_names(attachment);
    take_away(|chain| names.contains(&chain.name), &routed(addresses))
}

/// Removes the rules of links that are gone.
///
/// # Errors
/// Returns the kernel's error.
pub(super) fn sweep() -> io::Result<()> {
    let is_gone = |chain: &Existing| match &chain.link {
        Some(link) => nix::net::if_::if_nametoindex(link.as_str()).is_err(),
        None => true,
    };
    take_away(is_gone, &[])
}

/// Replaces the addresses that are known not to be enrolled, for frames and for forwarded packets, in one transaction.
/// Returns whether there are any captured pods; if not, nothing is done. The sets begin empty; [`tables_with_clear_sets`]
/// says when they must be filled again.
///
/// # Errors
/// Returns the kernel's error; nothing has changed then.
pub fn replace_clear(prefixes: &[IpNet]) -> io::Result<bool> {
    let disjoint = IpNet::aggregate(&prefixes.iter().map(IpNet::trunc).collect());
    let mut change = Transaction::new();
    for family in [Family::Link, Family::Inet] {
        for set in clear_sets() {
            change.empty(family, TABLE, &set);
            change.add(family, TABLE, &set, &disjoint);
        }
    }
    match change.run() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        done => done.map(|()| true),
    }
}

/// Handles of the tables that have the sets of [`replace_clear`]; `None` without captured pods. The first captured pod makes
/// them, and so does whoever restores rules that were flushed: with other handles, and with empty sets.
///
/// # Errors
/// Returns the kernel's error.
pub fn tables_with_clear_sets() -> io::Result<Option<[u64; 2]>> {
    let link = nftables::table_handle(Family::Link, TABLE)?;
    let forwarded = nftables::table_handle(Family::Inet, TABLE)?;
    Ok(link.zip(forwarded).map(<[u64; 2]>::from))
}

/// How many packets were refused on the links of captured pods and between them, by the pod's link (`None` for forwarded
/// packets) and the reason.
///
/// # Errors
/// Returns the kernel's error.
pub fn refused() -> io::Result<Vec<(Option<String>, String, u64)>> {
    let mut all = Vec::new();
    for family in [Family::Link, Family::Inet] {
        for chain in chains(family)? {
            for (reason, packets) in nftables::counts(family, TABLE, &chain.name)? {
                all.push((chain.link.clone(), reason, packets));
            }
        }
    }
    Ok(all)
}

fn take_away(is_stale: impl Fn(&Existing) -> bool, addresses: &[IpNet]) -> io::Result<()> {
    if tables().is_empty() {
        return Ok(());
    }
    change_rules(|change| {
        let chains = chains(Family::Link)?;
        let (stale, kept): (Vec<&Existing>, Vec<&Existing>) = chains.iter().partition(|chain| is_stale(chain));
        if kept.is_empty() {
            let tables = tables();
            tables.iter().for_each(|family| change.remove_table(*family, TABLE));
            return Ok(!tables.is_empty());
        }
        stale.iter().for_each(|chain| change.remove_chain(Family::Link, TABLE, &chain.name));
        let mut found = !stale.is_empty();
        for set in self::chains(Family::Inet)?.iter().filter_map(|chain| sets_of_chain(&chain.name)).flatten() {
            for address in addresses {
                let address = std::slice::from_ref(address);
                if nftables::contains(Family::Inet, TABLE, &set, address)? && set.is_v4 == address[0].addr().is_ipv4() {
                    change.take(Family::Inet, TABLE, &set, address);
                    found = true;
                }
            }
        }
        Ok(found)
    })
}

/// The families that have our table. If the kernel does not support such tables, there are none.
fn tables() -> Vec<Family> {
    let has = |family: &Family| nftables::tables(*family).unwrap_or_default().iter().any(|name| name == TABLE);
    [Family::Link, Family::Inet].into_iter().filter(has).collect()
}

fn chains(family: Family) -> io::Result<Vec<Existing>> {
    let mut chains = nftables::chains(family)?;
    chains.retain(|chain| chain.table == TABLE);
    Ok(chains)
}

/// Applies the changes that `plan` makes after a look at the present rules, as one transaction. If somebody else changes
/// rules between the look and the transaction, plans and tries again. `plan` returns whether there is anything to change.
fn change_rules(plan: impl Fn(&mut Transaction) -> io::Result<bool>) -> io::Result<()> {
    let mut attempts = 0;
    loop {
        let generation = nftables::generation()?;
        let mut change = Transaction::new();
        if !plan(&mut change)? {
            return Ok(());
        }
        match change.run_at(generation) {
            Err(error) if error.raw_os_error() == Some(libc::ERESTART) && attempts < MAX_ATTEMPTS => attempts += 1,
            done => return done,
        }
    }
}

// Other pods are started at the same time, and kube-proxy may use nf_tables too.
const MAX_ATTEMPTS: u32 = 50;
