//! Which rows each pod of the cluster matches, as classes of identities.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::identities::Identities;
use super::masks::{Mask, Masks, insert};
use super::rules::{PortName, PreparedRule};
use super::selectors::{SelectorId, Selectors};
use crate::program::{Direction, Identity, NONE, port_key};

/// Protocols and ports of a class, in order, with the rows that name them.
pub(super) type NamedPorts = Vec<(u32, u32)>;

/// Classes by number, and the class of each identity.
#[derive(Debug)]
pub(super) struct Classes {
    /// Masks and named ports. The first class is that of all pods without another one.
    pub(super) list: Vec<(u32, NamedPorts)>,
    /// By identity; shorter if the last ones have the first class.
    pub(super) of: Vec<u32>,
}

/// The rows that match pods because of a selector, by identity.
#[derive(Debug)]
struct Selected {
    words: usize,
    rows: Vec<u64>,
}

impl Selected {
    /// `None` if it would take too much memory.
    fn new(rules: &[&PreparedRule], selectors: &Selectors, masks: &Masks) -> Option<Self> {
        let mut rows_of: BTreeMap<SelectorId, Mask> = BTreeMap::new();
        for (rule, row) in rules.iter().zip(0..) {
            for id in &rule.peers.selectors {
                insert(rows_of.entry(*id).or_insert_with(|| masks.empty()), row);
            }
        }
        let mut selected = Self { words: masks.empty().len(), rows: Vec::new() };
        for (id, rows) in rows_of {
            let words: Vec<(usize, u64)> = rows.into_iter().enumerate().filter(|(_, word)| *word != 0).collect();
            for identity in selectors.selected(id) {
                let begin = identity as usize * selected.words;
                if begin >= selected.rows.len() {
                    if begin > MAX_WORDS {
                        return None;
                    }
                    selected.rows.resize(begin + selected.words, 0);
                }
                let Some(of_identity) = selected.rows.get_mut(begin..) else { continue };
                for (place, word) in &words {
                    if let Some(of_identity) = of_identity.get_mut(*place) {
                        *of_identity |= word;
                    }
                }
            }
        }
        Some(selected)
    }

    /// The rows of an identity; empty if there are none.
    fn of(&self, identity: u32) -> &[u64] {
        let begin = identity as usize * self.words;
        self.rows.get(begin..begin + self.words).filter(|rows| rows.iter().any(|word| *word != 0)).unwrap_or_default()
    }

    /// The first number after those of all identities with rows.
    fn end(&self) -> u32 {
        self.rows.len().checked_div(self.words).unwrap_or(0) as u32
    }
}

impl Classes {
    /// The classes of all pods for the rules of a program, which are its rows; `None` if they are too many.
    pub(super) fn new(
        rules: &[&PreparedRule],
        direction: Direction,
        identities: &Identities,
        selectors: &Selectors,
        masks: &mut Masks,
    ) -> Option<Self> {
        let (mut every_pod, mut by_address) = (masks.empty(), masks.empty());
        for (rule, row) in rules.iter().zip(0..) {
            if rule.peers.everyone || rule.peers.every_pod {
                insert(&mut every_pod, row);
            }
            if rule.peers.have_addresses() {
                insert(&mut by_address, row);
            }
        }
        let selected = Selected::new(rules, selectors, masks)?;
        let mut named = match direction {
            // The compiler knows the ports of the pod itself.
            Direction::Ingress => BTreeMap::new(),
            Direction::Egress => named_ports(rules, identities, &selected, &union(&every_pod, &by_address), masks),
        };
        let mut classes = Self { list: vec![(masks.number(&every_pod), Vec::new())], of: Vec::new() };
        let mut numbers: HashMap<(u32, NamedPorts), u32> = classes.list.iter().cloned().zip(0..).collect();
        let end = selected.end().max(named.keys().next_back().map_or(0, |last| last + 1));
        for identity in 0..end {
            let (rows, ports) = (selected.of(identity), named.remove(&identity));
            if rows.is_empty() && ports.is_none() {
                classes.of.push(0);
                continue;
            }
            let class = (masks.number(&union(&every_pod, rows)), ports.unwrap_or_default());
            if masks.are_too_large() {
                return None;
            }
            let next = classes.list.len() as u32;
            let number = *numbers.entry(class).or_insert_with_key(|class| {
                classes.list.push(class.clone());
                next
            });
            classes.of.push(number);
        }
        while classes.of.last() == Some(&0) {
            classes.of.pop();
        }
        Some(classes)
    }

    /// The places from which on identities have another class than the one before; class 0 is before the first.
    pub(super) fn runs(&self) -> Vec<(u32, u32)> {
        let mut runs = Vec::new();
        let mut before = 0;
        for (class, identity) in self.of.iter().chain([&0]).zip(0..) {
            if *class != before {
                runs.push((identity, *class));
                before = *class;
            }
        }
        runs
    }
}

/// The ports that rules name, of the pods that these rules match: by identity, with the rows. `always` are the rows
/// that may match every pod.
fn named_ports(
    rules: &[&PreparedRule],
    identities: &Identities,
    selected: &Selected,
    always: &Mask,
    masks: &mut Masks,
) -> BTreeMap<u32, NamedPorts> {
    let mut names: BTreeMap<&str, Vec<(&PortName, u32)>> = BTreeMap::new();
    let mut naming = masks.empty();
    for (rule, row) in rules.iter().zip(0..) {
        for name in &rule.ports.names {
            names.entry(&name.name).or_default().push((name, row));
            insert(&mut naming, row);
        }
    }
    let candidates: BTreeSet<u32> = if intersect(always, &naming) {
        names.keys().flat_map(|name| identities.with_port(name)).map(Identity::number).collect()
    } else {
        (0..selected.end()).filter(|identity| intersect(selected.of(*identity), &naming)).collect()
    };
    let mut named = BTreeMap::new();
    for identity in candidates {
        let Some(profile) = Identity::new(identity).and_then(|identity| identities.profile(identity)) else { continue };
        let matching = union(always, selected.of(identity));
        let mut ports: BTreeMap<u32, Mask> = BTreeMap::new();
        for port in profile.ports() {
            let users = names.get(port.name.as_str()).into_iter().flatten();
            let rows = users.filter(|(name, row)| name.is_of(port.protocol) && contains(&matching, *row));
            for (_, row) in rows {
                let key = port_key(port.protocol.number(), port.port);
                insert(ports.entry(key).or_insert_with(|| masks.empty()), *row);
            }
        }
        let ports: NamedPorts = ports.into_iter().map(|(key, rows)| (key, masks.number(&rows))).collect();
        debug_assert!(ports.iter().all(|(_, mask)| *mask != NONE));
        if !ports.is_empty() {
            named.insert(identity, ports);
        }
        // The program will not be used.
        if masks.are_too_large() {
            break;
        }
    }
    named
}

fn union(mask: &[u64], other: &[u64]) -> Mask {
    let mut mask = mask.to_vec();
    mask.iter_mut().zip(other).for_each(|(word, other)| *word |= other);
    mask
}

fn intersect(mask: &[u64], other: &[u64]) -> bool {
    mask.iter().zip(other).any(|(word, other)| word & other != 0)
}

fn contains(mask: &[u64], row: u32) -> bool {
    mask.get(row as usize / 64).is_some_and(|word| word >> (row % 64) & 1 != 0)
}

/// Words for the rows of all identities while a program is compiled: 64 MiB.
const MAX_WORDS: usize = 8 << 20;
