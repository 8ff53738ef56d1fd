//! The guards of captured pods in the kernel: the tables of the node, which the first captured pod makes and the last
//! one takes away.

use std::io;
use std::net::IpAddr;

use ipnet::IpNet;
use nebula_cni_contract::netlink::nftables::{self, Existing, Family, Transaction};
use nix::libc;

use crate::link::attached::Attached;
use crate::link::capture_guard::{CaptureGuard, TABLE, attachment_of, routed, sets_of_chain};
use crate::link::clear::clear_sets;

/// Installs the rules of a captured pod, and those of the node if they are missing.
///
/// # Errors
/// Returns the kernel's error; nothing has changed then.
pub(super) fn install(guard: &CaptureGuard) -> io::Result<()> {
    change_rules(|change| {
        let attached = Attached::of(&chains(Family::Link)?);
        let (forwarded, sets) = (guard.forwarded(), guard.sets());
        change.table(Family::Link, TABLE);
        let numbers = 1..;
        for (set, number) in clear_sets().iter().zip(numbers.clone()) {
            change.address_set(Family::Link, TABLE, set, number);
        }
        // The link may have the name of an earlier one whose rules were never removed.
        let is_own = |old: &Attached| old.attachment == guard.attachment();
        for old in attached.iter().filter(|old| is_own(old) || old.link.as_deref() == Some(guard.link.as_str())) {
            old.remove_chains(change);
            // What the pod asked is still to be answered, and its policies hold.
            if !is_own(old) || !guard.has_clear_rules() {
                old.remove_asked_sets(change);
            }
            if !is_own(old) || guard.policy_rules().is_none() {
                old.remove_policy_sets(change);
            }
        }
        for (set, number) in sets.iter().zip(numbers.clone().skip(clear_sets().len())) {
            change.set(Family::Link, TABLE, set, number);
        }
        if let Some(rules) = guard.policy_rules() {
            let policy_sets = rules.policy_sets();
            for (set, number) in policy_sets.iter().zip(numbers.skip(clear_sets().len() + sets.len())) {
                change.interval_set(Family::Link, TABLE, set, number);
            }
            if !attached.iter().any(|old| is_own(old) && old.has_policy()) {
                rules.at_first().write(guard.attachment(), change);
            }
        }
        for chain in guard.on_link() {
            change.chain(Family::Link, TABLE, &chain);
        }
        change.table(Family::Inet, TABLE);
        for (number, set) in clear_sets().iter().chain(&guard.captured_sets()).enumerate() {
            change.address_set(Family::Inet, TABLE, set, number as u32 + 1);
        }
        let present = nftables::chain(Family::Inet, TABLE, forwarded.name())?;
        if present.as_ref().map(|chain| chain.uses) != Some(forwarded.rules()) {
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
    let on_link = guard.on_link();
    for chain in &on_link {
        let uses = chain.rules() + on_link.iter().map(|other| other.leads_to(chain)).sum::<u32>();
        let found = nftables::chain(Family::Link, TABLE, chain.name())?;
        let link = chain.has_hook().then_some(guard.link.as_str());
        if !found.is_some_and(|found| found.uses == uses && found.link.as_deref() == link) {
            missing.push(format!("rules on its link {} (nft chain netdev {TABLE} {})", guard.link, chain.name()));
        }
    }
    let chain = guard.forwarded();
    let found = nftables::chain(Family::Inet, TABLE, chain.name())?;
    if found.is_none_or(|found| found.uses != chain.rules()) {
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
    take_away(|attached| attached.attachment == attachment, &routed(addresses))
}

/// Removes the rules of links that are gone.
///
/// # Errors
/// Returns the kernel's error.
pub(super) fn sweep() -> io::Result<()> {
    let is_gone = |attached: &Attached| match &attached.link {
        Some(link) => nix::net::if_::if_nametoindex(link.as_str()).is_err(),
        None => true,
    };
    take_away(is_gone, &[])
}

/// Replaces the addresses that are known not to be enrolled, for frames and for forwarded packets, in one
/// transaction. Returns whether there are any captured pods; if not, nothing is done. The sets begin empty;
/// [`tables_with_clear_sets`] says when they must be filled again.
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

/// Handles of the tables that have the sets of [`replace_clear`]; `None` without captured pods. The first captured
/// pod makes them, and so does whoever restores rules that were flushed: with other handles, and with empty sets.
///
/// # Errors
/// Returns the kernel's error.
pub fn tables_with_clear_sets() -> io::Result<Option<[u64; 2]>> {
    let link = nftables::table_handle(Family::Link, TABLE)?;
    let forwarded = nftables::table_handle(Family::Inet, TABLE)?;
    Ok(link.zip(forwarded).map(<[u64; 2]>::from))
}

/// How many packets were refused on the links of captured pods and between them, by the pod's link (`None` for
/// forwarded packets) and the reason.
///
/// # Errors
/// Returns the kernel's error.
pub fn refused() -> io::Result<Vec<(Option<String>, String, u64)>> {
    let mut all = Vec::new();
    for family in [Family::Link, Family::Inet] {
        let chains = chains(family)?;
        let attached = Attached::of(&chains);
        for chain in chains {
            let own = attached.iter().find(|own| attachment_of(&chain.name) == Some(own.attachment.as_str()));
            let link = own.and_then(|own| own.link.clone());
            for (reason, packets) in nftables::counts(family, TABLE, &chain.name)? {
                all.push((link.clone(), reason, packets));
            }
        }
    }
    Ok(all)
}

fn take_away(is_stale: impl Fn(&Attached) -> bool, addresses: &[IpNet]) -> io::Result<()> {
    if tables()?.is_empty() {
        return Ok(());
    }
    change_rules(|change| {
        let attached = Attached::of(&chains(Family::Link)?);
        let (stale, kept): (Vec<&Attached>, Vec<&Attached>) = attached.iter().partition(|attached| is_stale(attached));
        if kept.is_empty() {
            let tables = tables()?;
            tables.iter().for_each(|family| change.remove_table(*family, TABLE));
            return Ok(!tables.is_empty());
        }
        for attached in &stale {
            attached.remove_chains(change);
            attached.remove_sets(change);
        }
        let mut found = !stale.is_empty();
        for set in chains(Family::Inet)?.iter().filter_map(|chain| sets_of_chain(&chain.name)).flatten() {
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

/// The families that have our table.
fn tables() -> io::Result<Vec<Family>> {
    let mut found = Vec::new();
    for family in [Family::Link, Family::Inet] {
        if nftables::tables_if_any(family)?.iter().any(|name| name == TABLE) {
            found.push(family);
        }
    }
    Ok(found)
}

fn chains(family: Family) -> io::Result<Vec<Existing>> {
    let mut chains = nftables::chains(family)?;
    chains.retain(|chain| chain.table == TABLE);
    Ok(chains)
}

/// Applies the changes that `plan` makes after a look at the present rules, as one transaction. If somebody else
/// changes rules between the look and the transaction, plans and tries again. `plan` returns whether there is
/// anything to change.
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
