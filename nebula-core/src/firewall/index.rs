//! Rules indexed by protocol, port, then peer, so that a lookup among ten thousand costs about as much as among ten.

use std::collections::HashMap;
use std::net::IpAddr;

use ipnet::IpNet;
use nebula_cert::Fingerprint;

use super::{Cidr, Peer, PortRange, Protocol, Rule};
use crate::wire::ip::FlowKey;

const TCP: u8 = 6;
const UDP: u8 = 17;
const ICMP: u8 = 1;
const ICMPV6: u8 = 58;

/// The rules of one direction.
#[derive(Debug, Default)]
pub(super) struct RuleIndex {
    any: Ports,
    tcp: Ports,
    udp: Ports,
    icmp: Ports,
}

/// Rules of one protocol. A port range is split into aligned blocks, like an address range into prefixes: at most 30
/// for any range. A lookup tries one block for each block length in use.
#[derive(Debug, Default)]
struct Ports {
    any: Peers,
    fragment: Peers,
    blocks: HashMap<(u8, u16), Peers>,
    /// Bit n: there is a block of 2^n ports.
    sizes: u32,
}

/// Rules of one port, by what they require of the peer.
#[derive(Debug, Default)]
struct Peers {
    anyone: Constraints,
    named: Option<Box<Named>>,
}

#[derive(Debug, Default)]
struct Named {
    hosts: HashMap<String, Constraints>,
    /// Keyed by the rarest group of the rule; the values hold the rule's other groups.
    groups: HashMap<String, Vec<(Vec<String>, Constraints)>>,
    cidrs: Prefixes<Constraints>,
}

/// Further conditions: the peer's CA and the local address. One matching entry suffices.
#[derive(Debug, Default)]
struct Constraints(Vec<(Ca, Locals)>);

#[derive(Debug, PartialEq, Eq)]
struct Ca {
    name: Option<String>,
    sha: Option<Fingerprint>,
}

#[derive(Debug, Default)]
struct Locals {
    any: bool,
    prefixes: Prefixes<()>,
}

/// Maps prefixes to values. A lookup finds all prefixes that contain an address, not only the longest.
#[derive(Debug)]
struct Prefixes<T> {
    /// Prefix lengths in use, IPv4 and IPv6.
    lengths: [Vec<u8>; 2],
    values: HashMap<IpNet, T>,
}

impl RuleIndex {
    /// `default_local` is what a rule without `local_cidr` covers; `None`: every address.
    pub(super) fn new(rules: &[Rule], default_local: Option<&[IpNet]>) -> Self {
        let mut uses: HashMap<&str, usize> = HashMap::new();
        for group in rules.iter().flat_map(|rule| &rule.groups) {
            *uses.entry(group).or_default() += 1;
        }
        let mut index = Self::default();
        for rule in rules {
            let ports = match rule.protocol {
                Protocol::Any => &mut index.any,
                Protocol::Tcp => &mut index.tcp,
                Protocol::Udp => &mut index.udp,
                Protocol::Icmp => &mut index.icmp,
            };
            let port = if rule.protocol == Protocol::Icmp { PortRange::Any } else { rule.port };
            ports.for_each(port, |peers| peers.add(rule, &uses, default_local));
        }
        index
    }

    /// Whether a rule allows the flow. `port` is the one that rules refer to: local inbound, remote outbound.
    pub(super) fn allows(&self, flow: &FlowKey, port: u16, peer: Peer<'_>) -> bool {
        if self.any.allows(flow, port, peer) {
            return true;
        }
        match flow.protocol {
            TCP => self.tcp.allows(flow, port, peer),
            UDP => self.udp.allows(flow, port, peer),
            ICMP | ICMPV6 => self.icmp.allows(flow, port, peer),
            _ => false,
        }
    }
}

#[cfg(test)]
impl RuleIndex {
    /// Port blocks in use.
    pub(super) fn blocks(&self) -> usize {
        [&self.any, &self.tcp, &self.udp, &self.icmp].map(|ports| ports.blocks.len()).into_iter().sum()
    }
}

impl Ports {
    fn for_each(&mut self, range: PortRange, mut add: impl FnMut(&mut Peers)) {
        let (first, last) = match range {
            PortRange::Any => return add(&mut self.any),
            PortRange::Fragment => return add(&mut self.fragment),
            PortRange::Range(first, last) => (u32::from(first), u32::from(last)),
        };
        let mut at = first;
        while at <= last {
            // The largest aligned block that starts here and does not reach past the end.
            let mut size = at.trailing_zeros().min(16);
            while at + (1 << size) - 1 > last {
                size -= 1;
            }
            self.sizes |= 1 << size;
            add(self.blocks.entry((size as u8, at as u16)).or_default());
            at += 1 << size;
        }
    }

    fn allows(&self, flow: &FlowKey, port: u16, peer: Peer<'_>) -> bool {
        if self.any.allows(flow, peer) {
            return true;
        }
        // The identifier of an echo takes the place of a port, but rules for ports do not apply to it.
        if matches!(flow.protocol, ICMP | ICMPV6) {
            return false;
        }
        if flow.fragment {
            return self.fragment.allows(flow, peer);
        }
        let mut sizes = self.sizes;
        while sizes != 0 {
            let size = sizes.trailing_zeros();
            sizes &= sizes - 1;
            let start = (u32::from(port) >> size << size) as u16;
            step();
            if self.blocks.get(&(size as u8, start)).is_some_and(|peers| peers.allows(flow, peer)) {
                return true;
            }
        }
        false
    }
}

impl Peers {
    fn add(&mut self, rule: &Rule, uses: &HashMap<&str, usize>, default_local: Option<&[IpNet]>) {
        if is_for_everyone(rule) {
            return self.anyone.add(rule, default_local);
        }
        let named = self.named.get_or_insert_default();
        if let Some(host) = &rule.host {
            named.hosts.entry(host.clone()).or_default().add(rule, default_local);
        }
        if let Some(rarest) = rule.groups.iter().min_by_key(|group| (uses.get(group.as_str()), *group)) {
            let others: Vec<_> = rule.groups.iter().filter(|group| *group != rarest).cloned().collect();
            let sets = named.groups.entry(rarest.clone()).or_default();
            let at = sets.iter().position(|(set, _)| *set == others).unwrap_or_else(|| {
                sets.push((others, Constraints::default()));
                sets.len() - 1
            });
            sets[at].1.add(rule, default_local);
        }
        if let Some(Cidr::Prefix(prefix)) = rule.cidr {
            named.cidrs.entry(prefix).add(rule, default_local);
        }
    }

    fn allows(&self, flow: &FlowKey, peer: Peer<'_>) -> bool {
        self.anyone.allow(flow, peer) || self.named.as_ref().is_some_and(|named| named.allows(flow, peer))
    }
}

/// Whether a rule requires nothing of the peer, except perhaps its CA.
fn is_for_everyone(rule: &Rule) -> bool {
    let asks_nothing = rule.host.is_none() && rule.groups.is_empty() && rule.cidr.is_none();
    let any_host = rule.host.as_deref() == Some("any");
    let any_group = rule.groups.iter().any(|group| group == "any");
    asks_nothing || any_host || any_group || rule.cidr == Some(Cidr::Any)
}

impl Named {
    fn allows(&self, flow: &FlowKey, peer: Peer<'_>) -> bool {
        let in_peer = |group: &String| peer.groups.contains(group);
        step();
        let by_host = self.hosts.get(peer.name).is_some_and(|constraints| constraints.allow(flow, peer));
        let by_groups = || {
            let sets = peer.groups.iter().inspect(|_| step()).filter_map(|group| self.groups.get(group)).flatten();
            sets.into_iter().any(|(others, constraints)| {
                step();
                others.iter().all(in_peer) && constraints.allow(flow, peer)
            })
        };
        let by_cidr = || self.cidrs.containing(flow.remote).any(|constraints| constraints.allow(flow, peer));
        by_host || by_groups() || by_cidr()
    }
}

impl Constraints {
    fn add(&mut self, rule: &Rule, default_local: Option<&[IpNet]>) {
        let ca = Ca { name: rule.ca_name.clone(), sha: rule.ca_sha };
        let at = self.0.iter().position(|(other, _)| *other == ca).unwrap_or_else(|| {
            self.0.push((ca, Locals::default()));
            self.0.len() - 1
        });
        let locals = &mut self.0[at].1;
        match (rule.local_cidr, default_local) {
            (Some(Cidr::Any), _) | (None, None) => locals.any = true,
            (Some(Cidr::Prefix(prefix)), _) => *locals.prefixes.entry(prefix) = (),
            (None, Some(networks)) => networks.iter().for_each(|network| *locals.prefixes.entry(*network) = ()),
        }
    }

    fn allow(&self, flow: &FlowKey, peer: Peer<'_>) -> bool {
        self.0.iter().any(|(ca, locals)| {
            step();
            ca.vouches(peer) && (locals.any || locals.prefixes.containing(flow.local).next().is_some())
        })
    }
}

impl Ca {
    /// With name and fingerprint given, either suffices.
    fn vouches(&self, peer: Peer<'_>) -> bool {
        let none_asked = self.name.is_none() && self.sha.is_none();
        none_asked || self.sha == Some(peer.issuer) || self.name.as_deref() == Some(peer.issuer_name)
    }
}

impl<T> Default for Prefixes<T> {
    fn default() -> Self {
        Self { lengths: Default::default(), values: HashMap::new() }
    }
}

impl<T: Default> Prefixes<T> {
    fn entry(&mut self, prefix: IpNet) -> &mut T {
        let lengths = &mut self.lengths[usize::from(prefix.addr().is_ipv6())];
        if !lengths.contains(&prefix.prefix_len()) {
            lengths.push(prefix.prefix_len());
        }
        self.values.entry(prefix.trunc()).or_default()
    }
}

impl<T> Prefixes<T> {
    fn containing(&self, address: IpAddr) -> impl Iterator<Item = &T> {
        self.lengths[usize::from(address.is_ipv6())].iter().filter_map(move |length| {
            step();
            let prefix = IpNet::new(address, *length).ok()?;
            self.values.get(&prefix.trunc())
        })
    }
}

/// Called for every table lookup and every entry compared; tests count these steps.
#[cfg(not(test))]
#[inline(always)]
fn step() {}

#[cfg(test)]
fn step() {
    STEPS.set(STEPS.get() + 1);
}

#[cfg(test)]
thread_local! {
    /// Work done on this thread.
    pub(super) static STEPS: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}
