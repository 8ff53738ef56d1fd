//! The tables that all lanes share, as the control plane publishes them.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use arc_swap::ArcSwap;
use ipnet::IpNet;
use nebula_cert::VerifiedCertificate;

use super::Lane;
use super::gateways::Health;
use super::route::{NextHop, Routes};
use crate::capture::{Current, Directory, OpenedBefore, Pass, Translations};
use crate::config::SubnetRoute;
use crate::counters::Counters;
use crate::firewall::{self, Conntrack, Filter, NetworkPolicy};
use crate::index::LocalIndex;
use crate::relay::RelayTable;
use crate::tunnel::{Tunnel, TunnelTable};
use crate::wire::ip::FlowKey;
use crate::{Config, DropReason};

/// This node's addresses, routes and firewall policy, as published by the control plane.
#[derive(Debug, Clone)]
pub(crate) struct LocalPolicy {
    /// Own overlay addresses, each with the prefix of its network.
    pub(crate) networks: Vec<IpNet>,
    /// Networks behind this node, according to its certificate.
    pub(crate) unsafe_networks: Vec<IpNet>,
    /// Networks behind other nodes.
    pub(crate) subnets: Vec<SubnetRoute>,
    /// Drop packets to the IPv4 broadcast address of an own network.
    pub(crate) drop_local_broadcast: bool,
    /// Drop multicast packets.
    pub(crate) drop_multicast: bool,
    /// Rules and timeouts.
    pub(crate) firewall: firewall::Policy,
    /// Policies of the network.
    pub(crate) network_policy: Option<Arc<dyn NetworkPolicy>>,
}

impl From<&Config> for LocalPolicy {
    fn from(config: &Config) -> Self {
        let certificate = config.identity.primary();
        Self {
            networks: certificate.networks().to_vec(),
            unsafe_networks: certificate.unsafe_networks().to_vec(),
            subnets: config.subnets.clone(),
            drop_local_broadcast: config.drop_local_broadcast,
            drop_multicast: config.drop_multicast,
            firewall: config.firewall.clone(),
            network_policy: config.network_policy.clone(),
        }
    }
}

/// A [`LocalPolicy`] compiled for lanes, and the directory in force; replaced as a whole.
#[derive(Debug, Clone)]
pub(super) struct Snapshot {
    pub(super) routes: Arc<Routes>,
    pub(super) filter: Arc<Filter>,
    pub(super) drop_local_broadcast: bool,
    pub(super) drop_multicast: bool,
    /// `None`: all packets are addressed to overlay nodes.
    pub(super) capture: Option<Current>,
}

/// The tables that all lanes share. Every method takes `&self`; only [`crate::Node`] publishes changes.
#[derive(Debug)]
pub struct Forwarder {
    pub(super) tunnels: TunnelTable,
    pub(super) relays: RelayTable,
    pub(super) snapshot: ArcSwap<Snapshot>,
    pub(super) conntrack: Conntrack,
    pub(super) translations: Translations,
    /// Packets that wait in the control plane for a newer directory are as many as it takes.
    is_hold_full: AtomicBool,
    counters: Mutex<Vec<Arc<Counters>>>,
}

impl Forwarder {
    /// Empty tables. `now` is the earliest time that will ever be passed in; `key` is random and makes indexes and
    /// hashes unpredictable.
    #[must_use]
    pub(crate) fn new(local: LocalPolicy, now: Instant, key: [u64; 2]) -> Self {
        let conntrack = Conntrack::new(now, key[1], local.firewall.max_flows);
        let translations = Translations::new(now, local.firewall.max_flows);
        Self {
            tunnels: TunnelTable::new(key[0]),
            relays: RelayTable::default(),
            snapshot: ArcSwap::from_pointee(Snapshot::new(local, None, 1, None)),
            conntrack,
            translations,
            is_hold_full: AtomicBool::new(false),
            counters: Mutex::default(),
        }
    }

    /// Live tunnels. The control plane publishes and retires here.
    #[must_use]
    pub(crate) fn tunnels(&self) -> &TunnelTable {
        &self.tunnels
    }

    /// Hops this node is part of. The control plane publishes and retires here.
    #[must_use]
    pub(crate) fn relays(&self) -> &RelayTable {
        &self.relays
    }

    /// Replaces addresses, rules and flags. Flows that are already allowed are checked again with their next packet.
    pub(crate) fn set_policy(&self, local: LocalPolicy) {
        self.conntrack.set_max_flows(local.firewall.max_flows);
        self.translations.set_max_flows(local.firewall.max_flows);
        let old = self.snapshot.load();
        let generation = old.filter.generation().wrapping_add(1);
        self.snapshot.store(Arc::new(Snapshot::new(local, old.capture.clone(), generation, Some(&old.routes))));
    }

    /// Replaces the policies of the network. Flows that are already allowed are checked again with their next packet,
    /// unless the version is that of before.
    pub(crate) fn set_network_policy(&self, policy: Option<Arc<dyn NetworkPolicy>>) {
        let old = self.snapshot.load();
        let version = |policy: Option<&Arc<dyn NetworkPolicy>>| policy.map(|policy| policy.version());
        let differs = version(old.filter.network_policy()) != version(policy.as_ref());
        let generation = old.filter.generation().wrapping_add(u32::from(differs));
        let filter = Arc::new(old.filter.with(policy, generation));
        self.snapshot.store(Arc::new(Snapshot { filter, ..Snapshot::clone(&old) }));
    }

    /// Replaces what is known about the cluster. Known flows are checked again with their next packet.
    pub(crate) fn set_directory(&self, directory: Option<Arc<dyn Directory>>) {
        let old = self.snapshot.load();
        self.snapshot.store(Arc::new(Snapshot { capture: directory.map(Current::new), ..Snapshot::clone(&old) }));
    }

    /// Takes over flows that programs of this node opened before this program started, as an earlier one gave them
    /// their endpoints, or the primary network before. Of those that are not translated it is noted that they were in
    /// a tunnel.
    pub(crate) fn resume(&self, flows: &[OpenedBefore], now: Instant) {
        if let Some(current) = &self.snapshot.load().capture {
            flows.iter().for_each(|flow| self.translations.resume(current, flow, now));
        }
    }

    /// Gives those of them whose endpoint was not known a course by the present directory, if that knows it.
    pub(crate) fn resume_waiting(&self, now: Instant) {
        if let Some(current) = &self.snapshot.load().capture {
            self.translations.resume_waiting(current, now);
        }
    }

    /// Notes the flows with pods that `old` has and `new` has not, so that nothing of them leaves in clear: also
    /// those whose packets only came from the pod so far.
    pub(crate) fn seal_flows(&self, old: &dyn Directory, new: &dyn Directory, now: Instant) {
        let mut gone = HashMap::new();
        let mut flows = Vec::new();
        self.conntrack.each_flow(|flow| {
            let has_left = || old.incarnation(flow.remote).is_some() && new.incarnation(flow.remote).is_none();
            if *gone.entry(flow.remote).or_insert_with(has_left) {
                flows.push(*flow);
            }
        });
        if !flows.is_empty() {
            self.translations.seal(&flows, now);
        }
    }

    /// Replaces the networks behind other nodes. Keeps rules and known flows, so it is cheap enough to be called
    /// often.
    pub(crate) fn set_subnets(&self, networks: &[IpNet], subnets: &[SubnetRoute]) {
        let old = self.snapshot.load();
        let routes = Arc::new(Routes::new(networks, subnets, Some(&old.routes)));
        self.snapshot.store(Arc::new(Snapshot { routes, ..Snapshot::clone(&old) }));
    }

    /// The gateways of subnet routes with several gateways.
    pub(crate) fn shared_gateways(&self) -> BTreeMap<IpAddr, Arc<Health>> {
        self.snapshot.load().routes.shared_gateways().clone()
    }

    /// Forgets the moved flows that are over, and those whose gateway is dead: with their next packet they get
    /// another.
    pub(crate) fn expire_moved_flows(&self) {
        let routes = Arc::clone(&self.snapshot.load().routes);
        let is_alive = |gateway| routes.shared_gateways().get(&gateway).is_some_and(|health| health.is_alive());
        let is_known = |flow: &FlowKey| {
            routes.subnet(flow.remote).is_some_and(|network| self.conntrack.is_shared_flow(flow, network))
        };
        routes.pins().retain(|flow, gateway| is_alive(gateway) && is_known(flow));
    }

    /// Number of tracked flows by subnet route and gateway, for routes with several gateways. Slow, for people.
    #[must_use]
    pub fn flows_by_gateway(&self) -> BTreeMap<(IpNet, IpAddr), usize> {
        let routes = Arc::clone(&self.snapshot.load().routes);
        let mut count = BTreeMap::new();
        self.conntrack.each_flow(|flow| {
            if let Some((network, gateway)) = routes.shared_gateway_of(flow) {
                *count.entry((network, gateway)).or_default() += 1;
            }
        });
        count
    }

    /// Number of flows that stay on a gateway which their hash does not select.
    #[must_use]
    pub fn moved_flows(&self) -> usize {
        self.snapshot.load().routes.pins().len()
    }

    /// A lane for one thread.
    #[must_use]
    pub fn lane(&self) -> Lane {
        let counters = Arc::new(Counters::default());
        self.counters.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::clone(&counters));
        Lane::new(counters)
    }

    /// Adds what an earlier process counted.
    pub(super) fn count_from(&self, before: Counters) {
        self.counters.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::new(before));
    }

    /// The verified certificate of the peer at the other end of a tunnel; `None` if that has ended.
    #[must_use]
    pub fn certificate(&self, tunnel: LocalIndex) -> Option<VerifiedCertificate> {
        Some(self.tunnels().by_index(tunnel)?.peer.as_ref().clone())
    }

    /// Sum of the counters of all lanes, by name.
    #[must_use]
    pub fn counters(&self) -> BTreeMap<&'static str, u64> {
        let mut sum = BTreeMap::new();
        for counters in self.counters.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            counters.add_to(&mut sum);
        }
        sum
    }

    /// Expires flows that were idle for too long. New flows evict expired ones as well; this call covers times
    /// without new flows. Cheap if called often.
    pub(crate) fn expire_flows(&self, now: Instant) {
        self.conntrack.expire(now, &self.snapshot.load().filter);
    }

    /// Expires translated flows that were idle for too long. Slower than [`Forwarder::expire_flows`].
    pub(crate) fn expire_translations(&self, now: Instant) {
        self.translations.expire(now);
    }

    /// Forgets the firewall's flows with a peer, named by the first address of its certificate.
    pub(crate) fn forget_flows(&self, peer: IpAddr, now: Instant) {
        self.conntrack.forget(peer, now);
    }

    /// Number of flows under translated addresses.
    #[must_use]
    pub fn translated_flows(&self) -> usize {
        self.translations.len()
    }

    /// Whether the control plane holds as many packets as it takes. Lanes then drop such packets themselves.
    pub(crate) fn set_hold_full(&self, is_full: bool) {
        self.is_hold_full.store(is_full, Ordering::Relaxed);
    }

    pub(super) fn is_hold_full(&self) -> bool {
        self.is_hold_full.load(Ordering::Relaxed)
    }

    /// Number of flows that the firewall tracks.
    #[must_use]
    pub fn flows(&self) -> usize {
        self.conntrack.len()
    }
}

impl Snapshot {
    fn new(local: LocalPolicy, capture: Option<Current>, generation: u32, old: Option<&Routes>) -> Self {
        let filter = Filter::new(&local.firewall, &local.networks, &local.unsafe_networks, generation);
        Self {
            capture,
            drop_local_broadcast: local.drop_local_broadcast,
            drop_multicast: local.drop_multicast,
            routes: Arc::new(Routes::new(&local.networks, &local.subnets, old)),
            filter: Arc::new(filter.under(local.network_policy)),
        }
    }

    /// Where a flow goes. `keeps`: see [`Routes::next_hop`].
    pub(super) fn next_hop(&self, flow: &FlowKey, keeps: bool) -> Result<NextHop<'_>, DropReason> {
        let destination = flow.remote;
        if self.drop_local_broadcast && self.routes.is_broadcast(destination) {
            return Err(DropReason::Broadcast);
        }
        if self.routes.is_own(destination) {
            return Err(DropReason::ToSelf);
        }
        if self.drop_multicast && destination.is_multicast() {
            return Err(DropReason::Broadcast);
        }
        self.routes.next_hop(flow, keeps).ok_or(DropReason::NoRoute)
    }

    /// What a flow needs to pass through this tunnel again. Routes and rules change together.
    #[inline]
    pub(super) fn pass(&self, tunnel: &Tunnel) -> Pass {
        Pass { tunnel: tunnel.local_index, generation: self.filter.generation() }
    }
}
