//! Builds the cluster table of a node from the facts and the judgement about them.

use std::collections::HashMap;
use std::net::SocketAddr;

use nebula_cni_contract::cluster_table::Builder;
use nebula_cni_plugin::link::service_choice::Choice;

use super::endpoints::Slice;
use super::facts::Facts;
use super::judgement::Judgement;
use super::kept::{self, Name};
use super::services::{Service, Taken};

impl Facts {
    /// The table for the node with this name, and what the node itself chooses for Services of which only some
    /// endpoints are enrolled.
    #[must_use]
    pub fn table(&self, judgement: &Judgement, node: &str, version: u64) -> (Vec<u8>, Vec<Choice>) {
        let mut builder = Builder::new();
        judgement.enrolled.iter().for_each(|(address, incarnation)| builder.pod(*address, *incarnation));
        judgement.ends.iter().for_each(|(address, end)| builder.end(*address, *end));
        judgement.clear.iter().for_each(|address| builder.clear(*address));
        self.settings.pod_ranges.iter().for_each(|range| builder.pod_prefix(*range));
        let outside = self.settings.exclude.iter().chain(&self.settings.load_balancers);
        outside.for_each(|range| builder.clear_prefix(*range));
        judgement.nodes.iter().for_each(|address| builder.node(*address));
        judgement.policy.identities.iter().for_each(|(address, number)| builder.identity(*address, *number));
        judgement.policy.programs.iter().for_each(|(address, programs)| builder.programs(*address, programs.clone()));
        let mut slices: HashMap<&str, Vec<&Slice>> = HashMap::with_capacity(self.services.count());
        for slice in self.slices.iter().flat_map(|(_, slices)| slices) {
            slices.entry(&slice.service).or_default().push(slice);
        }
        // Of two Services with one address the older one counts.
        let mut services: Vec<(&Name, &Service)> = self.services.iter().collect();
        services.sort_unstable_by_key(|(name, service)| (service.created, *name));
        // No load balancer has the address of a node, a pod or a Service: those who may write its status are not asked.
        let is_any_balanced = services.iter().any(|(_, service)| service.is_balanced());
        let clusters = services.iter().flat_map(|(_, service)| service.addresses());
        let pods = judgement.enrolled.iter().map(|(address, _)| address).chain(&judgement.clear);
        let reserved = clusters.chain(pods).chain(&judgement.nodes).filter(|_| is_any_balanced).copied().collect();
        let (mut taken, mut left) = (Taken { reserved, ..Taken::default() }, HashMap::new());
        for (name, service) in services {
            let slices = slices.get(&**name).map(Vec::as_slice).unwrap_or_default();
            let left = left.entry(kept::namespace(name)).or_insert(RECORDS_OF_NAMESPACE);
            service.add_to(&mut builder, slices, node, &mut taken, left);
        }
        let (bytes, mixed) = builder.finish_with_mixed(version);
        let choice = |mixed: nebula_cni_contract::cluster_table::Mixed| Choice {
            service: SocketAddr::new(mixed.port.address, mixed.port.port),
            protocol: mixed.port.protocol,
            by_client: mixed.port.affinity.is_some(),
            endpoints: mixed.endpoints,
        };
        (bytes, mixed.into_iter().map(choice).collect())
    }

    /// Numbers of entries by kind, for the metrics.
    #[must_use]
    pub fn counts(&self, judgement: &Judgement) -> [(&'static str, usize); 8] {
        let endpoints = self.slices.iter().flat_map(|(_, slices)| slices).map(|slice| slice.endpoints.len()).sum();
        [
            ("enrolled", self.members.len()),
            ("unconfirmed", judgement.unconfirmed),
            ("withheld", judgement.withheld),
            ("clear_pods", self.pods.values().filter(|pod| pod.is_left_out).count()),
            ("node_addresses", self.nodes.values().map(|node| node.reported.len() + 2 * node.ranges.len()).sum()),
            ("services", self.services.count()),
            ("endpoints", endpoints),
            ("crowded_namespaces", self.crowded().len()),
        ]
    }
}

/// So many records of the table the Services of one namespace may take. A port takes one and, if it leads to
/// different ports of its endpoints, one for each of them.
const RECORDS_OF_NAMESPACE: usize = 250_000;
