//! Makes the program of one pod from the policies that select it.

use std::collections::BTreeMap;
use std::net::IpAddr;

use super::classes::Classes;
use super::encode::{Header, Sections};
use super::identities::Identities;
use super::masks::{Mask, Masks, insert};
use super::nodes::Nodes;
use super::policies::Policy;
use super::ranges::{Addresses, Interval, merged};
use super::rules::PreparedRule;
use super::selectors::Selectors;
use super::{Compiled, Subject};
use crate::model::{Direction, MAX_NODE_ADDRESSES, MAX_PROGRAM_LEN, Profile};
use crate::program::{
    FLAG_AUDITED, FLAG_CLOSED, FLAG_ENFORCED, MAX_ROWS, NONE, POLICY_AUDITED, POLICY_ISOLATES, SectionKind, Tier,
    action, port_key, protocol,
};

/// What a program is made from, besides its policies.
#[derive(Debug)]
pub(super) struct Context<'a> {
    pub(super) identities: &'a Identities,
    pub(super) selectors: &'a Selectors,
    pub(super) nodes: &'a Nodes,
}

impl Context<'_> {
    /// The program of a pod in a direction, from the policies that select it then, in their order.
    pub(super) fn assemble(&self, subject: &Subject, direction: Direction, policies: &[&Policy]) -> Compiled {
        let all = policies
            .iter()
            .zip(0..)
            .flat_map(|(policy, number)| policy.rules(direction).iter().map(move |rule| (*policy, number, rule)));
        let rows: Vec<(&Policy, u32, &PreparedRule)> = all.take(MAX_ROWS as usize + 1).collect();
        if rows.len() > MAX_ROWS as usize {
            return Compiled { bytes: closed(subject, direction, &[]), is_closed: true };
        }
        let mut sections = Sections::default();
        for policy in policies {
            let isolates = if policy.tier == Tier::NetworkPolicy { POLICY_ISOLATES } else { 0 };
            let audited = if policy.is_audited { POLICY_AUDITED } else { 0 };
            sections.policy(&policy.key.title(), policy.tier as u8, isolates | audited, policy.priority);
        }
        let rules: Vec<&PreparedRule> = rows.iter().map(|(.., rule)| *rule).collect();
        let mut masks = Masks::new(rows.len());
        let (mut outside, mut audited) = (masks.empty(), masks.empty());
        for ((policy, number, rule), row) in rows.iter().zip(0..) {
            sections.row(*number, rule.place, rule.action, &rule.name);
            if rule.peers.everyone {
                insert(&mut outside, row);
            }
            if policy.is_audited {
                insert(&mut audited, row);
            }
        }
        let own = self.identities.profile(subject.identity).filter(|_| direction == Direction::Ingress);
        self.ports(&rules, own, &mut masks, &mut sections);
        self.addresses(&rules, &mut masks, &mut sections);
        write_groups(&rules, &mut masks, &mut sections);
        let classes = Classes::new(&rules, direction, self.identities, self.selectors, &mut masks);
        let Some(classes) = classes.filter(|_| !masks.are_too_large()) else {
            return Compiled { bytes: closed(subject, direction, &[]), is_closed: true };
        };
        write_classes(&classes, &mut sections);
        subject.write(&mut sections);
        let first = |is_one: &dyn Fn(&Policy) -> bool| {
            let isolating = |policy: &Policy| policy.tier == Tier::NetworkPolicy && is_one(policy);
            policies.iter().position(|policy| isolating(policy)).map_or(NONE, |number| number as u32)
        };
        let end = |tier| rows.partition_point(|(policy, ..)| policy.tier <= tier) as u32;
        let has = |is_audited| policies.iter().any(|policy| policy.is_audited == is_audited);
        let flag = |is_set, flag| if is_set { flag } else { 0 };
        let header = Header {
            direction,
            flags: flag(has(true), FLAG_AUDITED) | flag(has(false), FLAG_ENFORCED),
            identity: subject.identity.number(),
            admin_end: end(Tier::Admin),
            policies_end: end(Tier::NetworkPolicy),
            outside: masks.number(&outside),
            audited: masks.number(&audited),
            isolating: [first(&|policy| !policy.is_audited), first(&|_| true)],
        };
        sections.masks(masks.list());
        let bytes = sections.finish(&header);
        if bytes.len() > MAX_PROGRAM_LEN {
            return Compiled { bytes: closed(subject, direction, &[]), is_closed: true };
        }
        Compiled { bytes, is_closed: false }
    }

    /// Writes which rows match each port. Names in ingress rules are those of the pod's own ports.
    fn ports(&self, rules: &[&PreparedRule], own: Option<&Profile>, masks: &mut Masks, sections: &mut Sections) {
        let own = own.map(Profile::ports).unwrap_or_default();
        let intervals = |rule: &&PreparedRule| -> Vec<Interval> {
            let named = rule.ports.names.iter().flat_map(|name| {
                own.iter().filter(|port| port.name == name.name && name.is_of(port.protocol)).map(|port| {
                    let key = port_key(port.protocol.number(), port.port).into();
                    (key, key)
                })
            });
            merged(rule.ports.intervals.iter().copied().chain(named).collect())
        };
        let intervals: Vec<_> = rules.iter().map(intervals).collect();
        for (start, mask) in masks.sweep((0..).zip(intervals.iter().map(Vec::as_slice))) {
            sections.pair(SectionKind::Ports, start as u32, mask);
        }
    }

    /// Writes which rows match each address.
    fn addresses(&self, rules: &[&PreparedRule], masks: &mut Masks, sections: &mut Sections) {
        let of = |rule: &&PreparedRule| -> Addresses {
            if rule.peers.nodes.is_empty() {
                return rule.peers.addresses.clone();
            }
            let mut addresses = rule.peers.addresses.clone();
            self.nodes.addresses(&rule.peers.nodes).for_each(|address| addresses.add_address(address));
            addresses.merged()
        };
        let addresses: Vec<_> = rules.iter().map(of).collect();
        for (start, mask) in masks.sweep((0..).zip(addresses.iter().map(|addresses| addresses.v4.as_slice()))) {
            // What begins after the last address is the end of an interval.
            if let Ok(start) = u32::try_from(start) {
                sections.pair(SectionKind::V4, start, mask);
            }
        }
        for (start, mask) in masks.sweep((0..).zip(addresses.iter().map(|addresses| addresses.v6.as_slice()))) {
            sections.v6(start, mask);
        }
    }
}

impl Subject {
    fn write(&self, sections: &mut Sections) {
        let canonical = |address: &IpAddr| address.to_canonical();
        let own = |is_v4| self.addresses.iter().map(canonical).find(|address| address.is_ipv4() == is_v4);
        sections.addresses(SectionKind::Own, [own(true), own(false)].into_iter().flatten());
        sections.addresses(SectionKind::Node, self.node.iter().take(MAX_NODE_ADDRESSES).map(canonical));
    }
}

/// The program of a pod before its first one: nobody but itself and its node reaches it, and it reaches only these and
/// the resolvers of names, by TCP and UDP on port 53.
#[must_use]
pub fn closed(subject: &Subject, direction: Direction, resolvers: &[IpAddr]) -> Vec<u8> {
    let mut sections = Sections::default();
    let mut addresses = Addresses::default();
    if direction == Direction::Egress {
        resolvers.iter().take(MAX_NODE_ADDRESSES).for_each(|address| addresses.add_address(*address));
    }
    let addresses = addresses.merged();
    let rows = u32::from(!addresses.is_empty());
    let mut masks = Masks::new(rows as usize);
    if rows > 0 {
        sections.policy("resolvers", Tier::NetworkPolicy as u8, 0, 0);
        sections.row(0, 0, action::ACCEPT, "");
    }
    let ports =
        [protocol::TCP, protocol::UDP].map(|protocol| u128::from(port_key(protocol, DNS))).map(|key| (key, key));
    for (start, mask) in masks.sweep((0..rows).zip([&ports[..]])) {
        sections.pair(SectionKind::Ports, start as u32, mask);
    }
    for (start, mask) in masks.sweep((0..rows).zip([&addresses.v4[..]])) {
        if let Ok(start) = u32::try_from(start) {
            sections.pair(SectionKind::V4, start, mask);
        }
    }
    for (start, mask) in masks.sweep((0..rows).zip([&addresses.v6[..]])) {
        sections.v6(start, mask);
    }
    sections.class(NONE, &[]);
    subject.write(&mut sections);
    sections.masks(masks.list());
    sections.finish(&Header {
        direction,
        flags: FLAG_CLOSED,
        identity: subject.identity.number(),
        admin_end: 0,
        policies_end: rows,
        outside: NONE,
        audited: NONE,
        isolating: [NONE, NONE],
    })
}

/// Writes which rows allow each group.
fn write_groups(rules: &[&PreparedRule], masks: &mut Masks, sections: &mut Sections) {
    let mut groups: BTreeMap<&str, Mask> = BTreeMap::new();
    for (rule, row) in rules.iter().zip(0..) {
        for group in rule.peers.groups.iter().flat_map(|groups| groups.iter()) {
            insert(groups.entry(group).or_insert_with(|| masks.empty()), row);
        }
    }
    for (name, mask) in groups {
        sections.group(name, masks.number(&mask));
    }
}

fn write_classes(classes: &Classes, sections: &mut Sections) {
    for (mask, named) in &classes.list {
        sections.class(*mask, named);
    }
    let runs = classes.runs();
    let has_short_numbers = u16::try_from(classes.list.len()).is_ok();
    if has_short_numbers
        && classes.of.len() * SectionKind::Dense.record_len() < runs.len() * SectionKind::Runs.record_len()
    {
        sections.dense(classes.of.iter().map(|class| *class as u16));
        return;
    }
    for (identity, class) in runs {
        sections.pair(SectionKind::Runs, identity, class);
    }
}

/// The port of resolvers.
const DNS: u16 = 53;
