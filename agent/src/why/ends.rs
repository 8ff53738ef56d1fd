//! What this node knows of the ends of a flow, and of the way between them.

use std::net::IpAddr;
use std::path::Path;

use nebula_cni_contract::cluster_table::{Found, Layout, MAX_BYTES, Table};
use nebula_cni_contract::instance_status::Status;
use nebula_cni_contract::launch::{CLUSTER_TABLE, Target as Attached};
use nebula_cni_contract::policy_test::{Answer, Said};
use nebula_cni_contract::why::{
    Asked, End, Facts, InTable, Kind, PodEnd, PodTunnel, PolicySays, Question, Target, Way, Workload,
};
use nebula_cni_plugin::attachment::record::Record;

use super::listener;
use crate::durable;
use crate::host_root::HostRoot;
use crate::policy::asked;

/// This node.
pub(super) struct Here<'a> {
    pub(super) host: &'a HostRoot,
    /// Its name; empty if it is not known.
    pub(super) node: &'a str,
    /// Records of its attachments.
    pub(super) records: &'a [(String, Box<Record>)],
}

impl Here<'_> {
    /// Both ends by what this node knows, where no API server answers: the pod that sends must be here, and what it
    /// sends to must be so, too, or be an address.
    pub(super) fn resolve(&self, question: &Question) -> Option<(Workload, Target)> {
        let named = |namespace: &str, name: &str| {
            let of = |target: &Attached| (&*target.pod.namespace, &*target.pod.name) == (namespace, name);
            self.records
                .iter()
                .map(|(_, record)| &record.target)
                .find(|target| of(target))
                .map(|target| self.workload(target))
        };
        let source = named(&question.namespace, &question.name)?;
        let target = match &question.target {
            Asked::Name { kind: Some(Kind::Service), .. } => return None,
            Asked::Name { namespace, name, .. } => Target::Pod(named(namespace, name)?),
            Asked::Address(address) => {
                let targets = self.records.iter().map(|(_, record)| &record.target);
                let mut here = targets.map(|target| self.workload(target));
                here.find(|pod| pod.addresses.contains(address)).map_or(Target::Address(*address), Target::Pod)
            }
        };
        Some((source, target))
    }

    fn workload(&self, target: &Attached) -> Workload {
        Workload {
            namespace: target.pod.namespace.clone(),
            name: target.pod.name.clone(),
            is_found: true,
            phase: "Running".to_owned(),
            node: self.node.to_owned(),
            addresses: [Some(target.pod_address), target.other_address].into_iter().flatten().collect(),
            ..Workload::default()
        }
    }

    /// Adds what this node knows. Blocks.
    pub(super) fn add_to(&self, facts: &mut Facts) {
        let bytes = durable::read_bounded(&self.host.resolve(Path::new(CLUSTER_TABLE)), MAX_BYTES).unwrap_or_default();
        let layout = Layout::read(&bytes).ok();
        let table = layout.as_ref().map(|layout| layout.table(&bytes));
        let source = facts.source.clone();
        if let (Target::Address(address), Some(table)) = (&facts.target, &table)
            && matches!(table.find(*address, facts.port, facts.protocol), Found::Enrolled { .. })
        {
            // Somebody enrolled, whose name only the API server knows.
            let (name, addresses) = (address.to_string(), vec![*address]);
            let phase = "Running".to_owned();
            facts.target = Target::Pod(Workload { name, phase, addresses, is_found: true, ..Workload::default() });
        }
        let said = policies(facts, table.as_ref());
        if self.has(&source) {
            facts.way = Some(way(facts, table.as_ref()));
            let policy = said.as_ref().and_then(|answer| answer.egress.as_ref());
            facts.source_end = Some(self.end(facts, &source, End::Source, table.as_ref(), policy));
        }
        if let Some(destination) = facts.destination().cloned().filter(|pod| self.has(pod)) {
            let policy = said.as_ref().and_then(|answer| answer.ingress.as_ref());
            facts.destination_end = Some(self.end(facts, &destination, End::Destination, table.as_ref(), policy));
        }
    }

    /// Whether a pod is on this node.
    fn has(&self, pod: &Workload) -> bool {
        pod.is_found && (pod.node == self.node && !self.node.is_empty() || self.record(pod).is_some())
    }

    fn record(&self, pod: &Workload) -> Option<&Record> {
        let is_of = |record: &&(String, Box<Record>)| {
            let of = &record.1.target.pod;
            (&of.namespace, &of.name) == (&pod.namespace, &pod.name)
        };
        self.records.iter().find(is_of).map(|(_, record)| &**record)
    }

    fn end(&self, facts: &Facts, pod: &Workload, of: End, table: Option<&Table<'_>>, said: Option<&Said>) -> PodEnd {
        let record = self.record(pod);
        let tunnel = match record {
            Some(record) => match Status::ask(&self.host.resolve(&record.status_socket)) {
                Ok(status) => PodTunnel::Answers(Box::new(status)),
                Err(error) => PodTunnel::Silent { problem: error.to_string() },
            },
            None => without_record(pod, table),
        };
        let (port, address) = (facts.destination_port(), pod.addresses.first());
        let listener = match (of, record, address) {
            (End::Destination, Some(record), Some(address)) => {
                listener::of(self.host, &record.target, facts.protocol, port, *address)
            }
            _ => None,
        };
        let policy = said.map_or(PolicySays::Nothing, says);
        PodEnd { node: self.node.to_owned(), tunnel, policy, listener }
    }
}

/// What follows from a pod of this node having no attachment of ours.
fn without_record(pod: &Workload, table: Option<&Table<'_>>) -> PodTunnel {
    let Some((table, address)) = table.zip(pod.addresses.first()) else { return PodTunnel::Unknown };
    match table.find(*address, 0, ICMP) {
        Found::Enrolled { .. } => PodTunnel::Missing,
        Found::Clear => PodTunnel::NotMeant,
        Found::Service(_) | Found::NoEndpoint | Found::Unknown => PodTunnel::Unknown,
    }
}

fn says(said: &Said) -> PolicySays {
    let text = said.decision.text.clone();
    match said.decision.allowed {
        true => PolicySays::Allows { text, would_deny: said.would_deny.as_ref().map(|other| other.text.clone()) },
        false => PolicySays::Refuses { text },
    }
}

/// What the programs of this node say of the flow, at whichever end it has one.
fn policies(facts: &Facts, table: Option<&Table<'_>>) -> Option<Answer> {
    let destination = facts.destination()?;
    let pairs = facts.source.addresses.iter().flat_map(|from| destination.addresses.iter().map(move |to| (from, to)));
    let (from, to) = pairs.into_iter().find(|(from, to)| from.is_ipv4() == to.is_ipv4())?;
    Some(asked::judge(table?, *from, *to, facts.protocol, facts.destination_port()))
}

/// What the table says of where the source sends to.
fn way(facts: &Facts, table: Option<&Table<'_>>) -> Way {
    let Some(table) = table else { return Way::default() };
    let has_family = |address: &&IpAddr| facts.source.addresses.iter().any(|own| own.is_ipv4() == address.is_ipv4());
    let of = |addresses: &[IpAddr], port| {
        addresses
            .iter()
            .find(has_family)
            .map_or(InTable::Unknown, |address| in_table(table.find(*address, port, facts.protocol)))
    };
    let pod = facts.destination().map_or(InTable::Unknown, |pod| of(&pod.addresses, facts.destination_port()));
    let sent_to = match &facts.target {
        // A headless one is asked by the addresses of its pods.
        Target::Service(service) if !service.addresses.is_empty() => of(&service.addresses, facts.port),
        Target::Address(address) => of(&[*address], facts.port),
        Target::Service(_) | Target::Pod(_) | Target::Unknown | Target::Nothing { .. } | Target::Hidden => pod,
    };
    Way { table: Some(table.version()), sent_to, pod }
}

fn in_table(found: Found) -> InTable {
    match found {
        Found::Enrolled { .. } => InTable::Enrolled,
        Found::Service(_) => InTable::Service,
        Found::NoEndpoint => InTable::NoEndpoint,
        Found::Clear => InTable::Clear,
        Found::Unknown => InTable::Unknown,
    }
}

const ICMP: u8 = 1;
