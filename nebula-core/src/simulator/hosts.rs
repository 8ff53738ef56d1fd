//! The hosts of a network, found by endpoint and by deadline: a step costs the same however many there are.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::ops::Index;
use std::time::Instant;

use super::HostId;
use super::deadlines::Deadlines;
use super::host::Host;
use crate::Transmit;

/// All hosts, in the order of their ids. Whoever is found by several is the first.
#[derive(Default)]
pub(super) struct Hosts {
    all: Vec<Host>,
    deadlines: Deadlines,
    by_endpoint: BTreeMap<SocketAddr, BTreeSet<HostId>>,
    changed: BTreeSet<HostId>,
}

impl Index<HostId> for Hosts {
    type Output = Host;

    fn index(&self, id: HostId) -> &Host {
        &self.all[id.0]
    }
}

impl Hosts {
    pub(super) fn next_id(&self) -> HostId {
        HostId(self.all.len())
    }

    pub(super) fn push(&mut self, host: Host) {
        let id = self.next_id();
        for endpoint in host.endpoints() {
            self.by_endpoint.entry(endpoint).or_default().insert(id);
        }
        self.all.push(host);
        self.changed(id);
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Host> {
        self.all.iter()
    }

    /// Whatever may change a host's deadline goes through here.
    pub(super) fn change<T>(&mut self, id: HostId, change: impl FnOnce(&mut Host) -> T) -> T {
        let result = change(&mut self.all[id.0]);
        self.changed(id);
        result
    }

    /// Gives a host another underlay endpoint instead of its first.
    pub(super) fn relocate(&mut self, id: HostId, underlay: SocketAddr, nat: Option<usize>) {
        for endpoint in self.all[id.0].endpoints() {
            if let Some(hosts) = self.by_endpoint.get_mut(&endpoint) {
                hosts.remove(&id);
            }
        }
        self.change(id, |host| (host.underlay, host.nat) = (underlay, nat));
        for endpoint in self.all[id.0].endpoints() {
            self.by_endpoint.entry(endpoint).or_default().insert(id);
        }
    }

    /// Next datagram of a host for the underlay.
    pub(super) fn next_datagram(&mut self, id: HostId) -> Option<Transmit> {
        self.all[id.0].next_datagram()
    }

    /// Takes the packets that were delivered to a host.
    pub(super) fn take_received(&mut self, id: HostId) -> Vec<Vec<u8>> {
        std::mem::take(&mut self.all[id.0].received)
    }

    /// The earliest deadline of a host that is up.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.deadlines.next()
    }

    /// Hosts whose deadline has come.
    pub(super) fn due(&self, now: Instant) -> impl Iterator<Item = HostId> + use<> {
        self.deadlines.due(now).into_iter().map(HostId)
    }

    /// Hosts with this endpoint, up or not.
    pub(super) fn at(&self, endpoint: SocketAddr) -> impl Iterator<Item = HostId> {
        self.by_endpoint.get(&endpoint).into_iter().flatten().copied()
    }

    /// Hosts that did or got anything since the last call.
    pub(super) fn take_changed(&mut self) -> BTreeSet<HostId> {
        std::mem::take(&mut self.changed)
    }

    fn changed(&mut self, id: HostId) {
        self.deadlines.set(id.0, self.all[id.0].next_deadline());
        self.changed.insert(id);
    }
}
