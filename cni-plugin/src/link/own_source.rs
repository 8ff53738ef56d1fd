//! A pod sends from its own addresses only: rules on the node's end of a link that this plugin made. They see every
//! frame of the pod, also of a raw socket, and before the node routes it.

use std::io;
use std::net::IpAddr;

use nebula_cni_contract::netlink::nftables::{self, Family, Header, Hook, Is, Rule, Table};
use nebula_cni_contract::netlink::octets;

use crate::link::ip::{BOTH, bytes};
use crate::link::veth::Veth;

/// Installs the rules, before the link is up.
///
/// # Errors
/// Returns the kernel's error; nothing has changed then.
pub fn install(veth: &Veth, addresses: &[IpAddr]) -> io::Result<()> {
    let from = |address: &IpAddr| {
        let ip = BOTH[usize::from(address.is_ipv6())];
        Rule::accept(vec![ip.is(), bytes(Header::Network, ip.source, Is::Equal, &octets(*address))])
    };
    let others = Rule::drop(Vec::new()).counted("not from an address of the pod");
    let rules = addresses.iter().map(from).chain([others]).collect();
    Table::new(Family::Link, name(veth)).chain(Hook::FromLink(veth.node_end.clone()), rules).install()
}

/// Whether they are there.
///
/// # Errors
/// Returns the kernel's error.
pub fn is_installed(veth: &Veth) -> io::Result<bool> {
    Ok(nftables::tables(Family::Link)?.contains(&name(veth)))
}

/// Removes the rules; does nothing if they are gone already.
///
/// # Errors
/// Returns the kernel's error.
pub fn remove(veth: &Veth) -> io::Result<()> {
    nftables::remove(Family::Link, &name(veth))
}

fn name(veth: &Veth) -> String {
    format!("nebula-pod-{}", veth.node_end)
}
