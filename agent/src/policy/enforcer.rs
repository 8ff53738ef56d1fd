//! Makes the numbers and programs of the next table. Its inputs are values; it keeps what it compiled, and compiles
//! again what a change concerns.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nebula_cni_policy::compile::{Cluster, Compiled, Subject, closed};
use nebula_cni_policy::model::{Direction, Labels};
use nebula_cni_policy::program::{Identity, Program, Who};

use super::applied::Applied;
use super::carried::Carried;
use super::described::{Described, Packed};
use super::numbers::Numbers;
use super::report::Report;
use super::said::Said;
use super::{Bystander, Holder, OwnPod, Records, Relabelled};
use crate::table::member::Addresses;

/// What is known when a table is made.
pub(crate) struct Scene<'a> {
    pub(crate) said: &'a Said,
    /// Inputs that have not been listed completely yet.
    pub(crate) missing: &'a [&'static str],
    /// Enrolled addresses.
    pub(crate) holders: &'a [Holder],
    /// Pods without a certificate, if any pod of this node is judged in clear.
    pub(crate) bystanders: &'a [Bystander],
    /// Pods of this node.
    pub(crate) own: &'a [OwnPod],
    /// Addresses of this node.
    pub(crate) node: &'a [IpAddr],
    /// Addresses of the cluster's DNS.
    pub(crate) resolvers: &'a [IpAddr],
    /// All nodes; asked only if some policy does.
    pub(crate) nodes: &'a dyn Fn() -> Vec<NodeSeen<'a>>,
}

/// A node.
pub(crate) struct NodeSeen<'a> {
    pub(crate) name: &'a str,
    pub(crate) labels: Option<&'a Packed>,
    pub(crate) addresses: Vec<IpAddr>,
}

/// Keeps numbers and programs of one node.
#[derive(Debug, Default)]
pub(crate) struct Enforcer {
    cluster: Cluster,
    applied: Applied,
    numbers: Numbers,
    own: BTreeMap<Addresses, Own>,
    /// Nodes that the compiler knows.
    nodes: BTreeSet<String>,
    /// Epochs with the time when their first table was published.
    epochs: VecDeque<(Instant, u64)>,
    /// What an earlier agent said, until everything has been listed once.
    carried: Option<Carried>,
    /// Pods whose labels changed since unused numbers were released last.
    relabelled: usize,
    report: Report,
}

/// An own pod with its programs.
#[derive(Debug)]
struct Own {
    described: Arc<Described>,
    /// That of its certificate; 0 if it has none.
    incarnation: u64,
    /// `None`: it has no number, so it is closed.
    identity: Option<Identity>,
    subject: Subject,
    /// For ingress and egress.
    compiled: [Compiled; 2],
}

impl Own {
    /// Whether a policy selects it.
    fn is_selected(&self) -> bool {
        let selects = |bytes| Program::read(bytes).is_ok_and(|program| program.policies().next().is_some());
        self.compiled.iter().any(|program| selects(&program.bytes))
    }
}

impl Enforcer {
    /// Goes on with what an earlier agent said.
    pub(crate) fn new(carried: Carried) -> Self {
        Self { carried: Some(carried), ..Self::default() }
    }

    /// How far policies are enforced, as of the last records.
    pub(crate) const fn report(&self) -> &Report {
        &self.report
    }

    /// Own pods with a certificate that some policy selects, with their namespaces and incarnations.
    pub(crate) fn selected(&self) -> impl Iterator<Item = (&Addresses, &str, u64)> {
        let selected = self.own.iter().filter(|(_, own)| own.incarnation != 0 && own.is_selected());
        selected.map(|(addresses, own)| (addresses, &*own.described.namespace, own.incarnation))
    }

    /// For the next table.
    pub(crate) fn records(&mut self, scene: &Scene<'_>) -> Records {
        if !scene.missing.is_empty() {
            return self.before_all_is_listed(scene);
        }
        self.carried = None;
        let namespaces: BTreeSet<&str> = scene.own.iter().map(|pod| &*pod.described.namespace).collect();
        self.applied.sync(scene.said, &namespaces, &mut self.cluster);
        self.sync_nodes(scene);
        let own = scene.own.iter().map(|pod| &pod.described);
        let bystanders = scene.bystanders.iter().filter_map(|pod| pod.described.as_ref());
        let all = scene.holders.iter().filter_map(|holder| holder.described.as_ref()).chain(own).chain(bystanders);
        self.numbers.sync(all, &mut self.cluster, &scene.said.namespaces, &self.applied.mentions);
        self.sync_own(scene);
        self.compile_changed();
        let (identities, bystanders) = (self.identities(scene), self.bystanders(scene));
        let mut records = Records { identities, programs: Vec::new(), bystanders };
        self.relabelled = 0;
        let too_large = self.place_programs(scene.resolvers, &mut records);
        self.report = self.reported(too_large);
        records
    }

    /// For the next table, if only labels or named ports of these pods changed since the last one: their numbers, and
    /// all programs. `None` if [`Enforcer::records`] has to make them.
    pub(crate) fn relabelled(&mut self, pods: &[Relabelled], said: &Said, resolvers: &[IpAddr]) -> Option<Records> {
        self.relabelled += pods.len();
        if self.carried.is_some() || self.relabelled > MAX_RELABELLED {
            return None;
        }
        let mut identities = Vec::new();
        for pod in pods {
            let (cluster, mentions) = (&mut self.cluster, &self.applied.mentions);
            let identity = self.numbers.add(&pod.described, cluster, &said.namespaces, mentions)?;
            identities.extend(pod.enrolled.iter().map(|address| (*address, Some(identity.number()))));
            if let Some(own) = &pod.own {
                self.relabel_own(own, identity)?;
            }
        }
        self.compile_changed();
        let mut records = Records { identities, ..Records::default() };
        let too_large = self.place_programs(resolvers, &mut records);
        self.report = self.reported(too_large);
        Some(records)
    }

    /// A table with these records has been published.
    pub(crate) fn published(&mut self, now: Instant) {
        // A table is one file with numbers and programs that mean each other. So readers of an older one are never
        // wrong; a number is kept from other labels for long all the same.
        if self.epochs.back().is_none_or(|(at, _)| now.saturating_duration_since(*at) > EPOCH) {
            self.epochs.push_back((now, self.cluster.advance()));
        }
        while let Some((at, epoch)) = self.epochs.front().copied() {
            if now.saturating_duration_since(at) < RECYCLE_AFTER {
                return;
            }
            self.cluster.recycle(epoch);
            self.epochs.pop_front();
        }
    }

    /// Pods that an earlier agent gave programs go on with them, and others are closed.
    fn before_all_is_listed(&mut self, scene: &Scene<'_>) -> Records {
        let carried = self.carried.get_or_insert_default();
        let number = |holder: &Holder| match &holder.described {
            None => Some((holder.address, None)),
            Some(_) => Some((holder.address, Some(carried.number(holder.address, holder.incarnation)?))),
        };
        let identities = scene.holders.iter().filter_map(number).collect();
        let mut programs = Vec::new();
        let mut waiting = 0;
        for pod in scene.own {
            let shut =
                Direction::ALL.map(|direction| closed(&subject(pod, None, scene.node), direction, scene.resolvers));
            for address in pod.addresses.iter().flatten() {
                let before = carried.programs(*address, pod.incarnation);
                waiting += usize::from(before.is_none());
                programs.push((*address, before.unwrap_or(&shut).clone()));
            }
        }
        let closed = if waiting > 0 { [(NOT_LISTED, waiting)].into() } else { BTreeMap::new() };
        let waits_for = scene.missing.to_vec();
        self.report = Report { waits_for, closed, pods: scene.own.len(), ..Report::default() };
        Records { identities, programs, bystanders: Vec::new() }
    }

    /// Nodes count only where a policy names them.
    fn sync_nodes(&mut self, scene: &Scene<'_>) {
        let nodes = if self.applied.mentions.has_nodes() { (scene.nodes)() } else { Vec::new() };
        let names: BTreeSet<&str> = nodes.iter().map(|node| node.name).collect();
        let gone: Vec<String> = self.nodes.iter().filter(|name| !names.contains(name.as_str())).cloned().collect();
        for name in gone {
            self.cluster.set_node(&name, None);
            self.nodes.remove(&name);
        }
        for NodeSeen { name, labels, addresses } in nodes {
            let labels = labels.map_or_else(Labels::new, |labels| labels.only(|_| true));
            self.cluster.set_node(name, Some((labels, addresses)));
            self.nodes.insert(name.to_owned());
        }
    }

    /// Own pods that are new, or that have other labels or addresses, get programs.
    fn sync_own(&mut self, scene: &Scene<'_>) {
        let there: HashMap<Addresses, &OwnPod> = scene.own.iter().rev().map(|pod| (pod.addresses, pod)).collect();
        let (cluster, numbers) = (&mut self.cluster, &self.numbers);
        self.own.retain(|addresses, own| {
            let is_there = there.contains_key(addresses);
            if let Some(identity) = own.identity.filter(|_| !is_there) {
                cluster.unwatch(identity);
            }
            is_there
        });
        for (addresses, pod) in there {
            let identity = numbers.of(&pod.described);
            let subject = subject(pod, identity, scene.node);
            let before = self.own.get(&addresses);
            let incarnation = pod.incarnation;
            let is_same =
                |own: &Own| own.identity == identity && own.subject == subject && own.incarnation == incarnation;
            // The programs of closed pods follow the addresses of the DNS.
            if identity.is_some() && before.is_some_and(is_same) {
                continue;
            }
            if before.and_then(|own| own.identity) != identity {
                identity.into_iter().for_each(|identity| cluster.watch(identity));
                before.and_then(|own| own.identity).into_iter().for_each(|identity| cluster.unwatch(identity));
            }
            let compiled = Direction::ALL.map(|direction| match identity {
                None => Compiled { bytes: closed(&subject, direction, scene.resolvers), is_closed: false },
                Some(_) => cluster.compile(&subject, direction),
            });
            let described = Arc::clone(&pod.described);
            self.own.insert(addresses, Own { described, incarnation, identity, subject, compiled });
        }
    }

    /// Gives an own pod its new number and programs. `None` if no own pod, or more than one, can be meant, or the pod
    /// had no number.
    fn relabel_own(&mut self, pod: &OwnPod, identity: Identity) -> Option<()> {
        let shares = |addresses: &Addresses| addresses.iter().flatten().any(|it| pod.addresses.contains(&Some(*it)));
        let mut found = self.own.iter_mut().filter(|(at, own)| own.incarnation == pod.incarnation && shares(at));
        let (Some((_, own)), None) = (found.next(), found.next()) else { return None };
        let before = own.identity?;
        if before != identity {
            self.cluster.watch(identity);
            self.cluster.unwatch(before);
            (own.identity, own.subject.identity) = (Some(identity), identity);
            own.compiled = Direction::ALL.map(|direction| self.cluster.compile(&own.subject, direction));
        }
        own.described = Arc::clone(&pod.described);
        Some(())
    }

    fn compile_changed(&mut self) {
        let changed = self.cluster.take_changed();
        if changed.is_empty() {
            return;
        }
        for own in self.own.values_mut() {
            let Some(identity) = own.identity else { continue };
            for (direction, compiled) in Direction::ALL.into_iter().zip(&mut own.compiled) {
                if changed.contains(&(identity, direction)) {
                    *compiled = self.cluster.compile(&own.subject, direction);
                }
            }
        }
    }

    fn identities(&self, scene: &Scene<'_>) -> Vec<(IpAddr, Option<u32>)> {
        let number = |holder: &Holder| match &holder.described {
            None => Some((holder.address, None)),
            Some(described) => Some((holder.address, Some(self.numbers.of(described)?.number()))),
        };
        scene.holders.iter().filter_map(number).collect()
    }

    fn bystanders(&self, scene: &Scene<'_>) -> Vec<(IpAddr, Who)> {
        let number = |pod: &Bystander| pod.described.as_ref().and_then(|described| self.numbers.of(described));
        let who = |pod: &Bystander| (pod.address, number(pod).map_or(Who::Unnumbered, Who::Pod));
        scene.bystanders.iter().map(who).collect()
    }

    /// Puts the programs into the records; returns how many pods are closed because those of their namespace are too
    /// large together: a table that is too large would be none for all pods of the node.
    fn place_programs(&self, resolvers: &[IpAddr], records: &mut Records) -> usize {
        let (mut too_large, mut used) = (0, HashMap::<&str, usize>::new());
        let mut total = 0;
        for (addresses, own) in &self.own {
            let addresses: Vec<IpAddr> = addresses.iter().flatten().copied().collect();
            let len = own.compiled.iter().map(|program| program.bytes.len()).sum::<usize>() * addresses.len();
            let used = used.entry(&own.described.namespace).or_default();
            let fits = *used + len <= PROGRAMS_OF_NAMESPACE && total + len <= PROGRAMS;
            let programs = match fits {
                true => own.compiled.each_ref().map(|program| program.bytes.clone()),
                false => Direction::ALL.map(|direction| closed(&own.subject, direction, resolvers)),
            };
            too_large += usize::from(!fits);
            (*used, total) = if fits { (*used + len, total + len) } else { (*used, total) };
            records.programs.extend(addresses.into_iter().map(|address| (address, programs.clone())));
        }
        too_large
    }

    fn reported(&self, too_large: usize) -> Report {
        let count = |is_so: &dyn Fn(&Own) -> bool| self.own.values().filter(|own| is_so(own)).count();
        let closed = [
            (NO_NUMBER, count(&|own| own.identity.is_none())),
            (TOO_MUCH, count(&|own| own.compiled.iter().any(|program| program.is_closed))),
            (TOO_LARGE, too_large),
        ];
        Report {
            policies: self.applied.counts(),
            identities: self.cluster.identities().len(),
            unnumbered: self.numbers.without(),
            pods: self.own.len(),
            closed: closed.into_iter().filter(|(_, count)| *count > 0).collect(),
            not_enforced: self.applied.not_enforced(),
            ..Report::default()
        }
    }
}

fn subject(pod: &OwnPod, identity: Option<Identity>, node: &[IpAddr]) -> Subject {
    let addresses = pod.addresses.iter().flatten().copied().collect();
    Subject { identity: identity.unwrap_or(NOBODY), addresses, node: node.to_vec() }
}

/// The number of a pod that has none; the table keeps it for those that are no pods.
const NOBODY: Identity = match Identity::new(u32::MAX) {
    Some(nobody) => nobody,
    None => unreachable!(),
};
const NOT_LISTED: &str = "policies, namespaces and pods are not all known yet";
const NO_NUMBER: &str = "the labels of their namespace are not known, or they have too many labels";
const TOO_MUCH: &str = "their policies are more than a program can hold";
const TOO_LARGE: &str = "the programs of their namespace are too large together";
/// Bytes of the programs of one namespace, and of all, on this node. The table may have four times as many.
const PROGRAMS_OF_NAMESPACE: usize = 4 << 20;
const PROGRAMS: usize = 16 << 20;
/// Unused numbers make programs longer.
const MAX_RELABELLED: usize = 256;
/// Numbers that are given back together.
const EPOCH: Duration = Duration::from_secs(60);
/// Longer than an instance takes to use a table, or to be replaced.
const RECYCLE_AFTER: Duration = Duration::from_secs(30 * 60);

#[cfg(test)]
mod tests;
