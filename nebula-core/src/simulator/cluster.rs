//! A directory of a cluster in plain maps, to be edited by tests.

use std::collections::{HashMap, HashSet};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use crate::capture::{Directory, Endpoint, Found, Service, Target};

/// What a cluster consists of. Each change makes a new version of it; a node sees what it was given.
#[derive(Debug, Clone, Default)]
pub struct Cluster {
    version: u64,
    pods: HashMap<IpAddr, u64>,
    clear: HashSet<IpAddr>,
    by_target: HashMap<Target, u32>,
    service_addresses: HashSet<IpAddr>,
    services: Vec<Entry>,
    likely: HashMap<IpAddr, Vec<SocketAddr>>,
}

#[derive(Debug, Clone, Default)]
struct Entry {
    /// The ready ones first.
    endpoints: Vec<Endpoint>,
    ready: u32,
    /// Number of ready endpoints that are not enrolled.
    clear: u32,
    affinity: Option<Duration>,
}

impl Cluster {
    /// An enrolled pod. Another incarnation is another pod.
    pub fn pod(&mut self, address: IpAddr, incarnation: u64) {
        self.version += 1;
        self.clear.remove(&address);
        self.pods.insert(address, incarnation);
    }

    /// The peer with this overlay address is probably at these endpoints.
    pub fn likely(&mut self, address: IpAddr, endpoints: &[SocketAddr]) {
        self.version += 1;
        self.likely.insert(address, endpoints.to_vec());
    }

    /// The pod is gone.
    pub fn remove(&mut self, address: IpAddr) {
        self.version += 1;
        self.clear.remove(&address);
        self.pods.remove(&address);
    }

    /// A pod that is known not to be enrolled.
    pub fn clear(&mut self, address: IpAddr) {
        self.version += 1;
        self.pods.remove(&address);
        self.clear.insert(address);
    }

    /// A Service with these endpoints, the first `ready` of them ready and the others terminating. Endpoints that are
    /// no enrolled pods are left out; without any left, the Service is refused.
    pub fn service(&mut self, target: Target, endpoints: &[(IpAddr, u16)], ready: u32, affinity: Option<Duration>) {
        let endpoint = |(address, port): &(IpAddr, u16)| {
            Some(Endpoint { address: *address, port: *port, incarnation: *self.pods.get(address)? })
        };
        let (ready, terminating) = endpoints.split_at((ready as usize).min(endpoints.len()));
        let mut enrolled: Vec<_> = ready.iter().filter_map(endpoint).collect();
        let ready = enrolled.len() as u32;
        enrolled.extend(terminating.iter().filter_map(endpoint));
        self.set(target, Entry { endpoints: enrolled, ready, clear: 0, affinity });
    }

    /// The Service has so many ready endpoints that are not enrolled, too.
    pub fn clear_endpoints(&mut self, target: Target, clear: u32) {
        let known = self.by_target.get(&target).and_then(|id| self.services.get(*id as usize));
        let entry = Entry { clear, ..known.cloned().unwrap_or_default() };
        self.set(target, entry);
    }

    /// A Service that only has endpoints that are not enrolled.
    pub fn clear_service(&mut self, target: Target) {
        self.set(target, Entry { clear: 1, ..Entry::default() });
    }

    /// A Service of none of whose endpoints it is known whether it is enrolled.
    pub fn unknown_service(&mut self, target: Target) {
        self.version += 1;
        self.by_target.remove(&target);
        self.service_addresses.remove(&target.address);
    }

    fn set(&mut self, target: Target, entry: Entry) {
        self.version += 1;
        self.service_addresses.insert(target.address);
        let id = *self.by_target.entry(target).or_insert(self.services.len() as u32);
        match self.services.get_mut(id as usize) {
            Some(known) => *known = entry,
            None => self.services.push(entry),
        }
    }

    fn entry(&self, service: &Service) -> Option<&Entry> {
        self.services.get(service.id as usize)
    }
}

impl Directory for Cluster {
    fn version(&self) -> u64 {
        self.version
    }

    fn find(&self, target: &Target) -> Found {
        if let Some(&incarnation) = self.pods.get(&target.address) {
            return Found::Peer { incarnation };
        }
        if self.clear.contains(&target.address) {
            return Found::Clear;
        }
        let Some((&id, entry)) = self.by_target.get(target).and_then(|id| Some((id, self.services.get(*id as usize)?)))
        else {
            let is_service = self.service_addresses.contains(&target.address);
            return if is_service { Found::Refused } else { Found::Unknown };
        };
        match entry {
            Entry { ready: 0, clear: 0, .. } => Found::Refused,
            Entry { ready, clear, affinity, .. } => {
                Found::Service(Service { id, ready: *ready, clear: *clear, affinity: *affinity })
            }
        }
    }

    fn endpoint(&self, service: &Service, n: u32) -> Option<Endpoint> {
        self.entry(service)?.endpoints.get(n as usize).copied()
    }

    fn serves(&self, service: &Service, endpoint: &Endpoint) -> bool {
        self.entry(service).is_some_and(|entry| entry.endpoints.contains(endpoint))
    }

    fn incarnation(&self, address: IpAddr) -> Option<u64> {
        self.pods.get(&address).copied()
    }

    fn likely_endpoints(&self, peer: IpAddr) -> Vec<SocketAddr> {
        self.likely.get(&peer).cloned().unwrap_or_default()
    }
}
