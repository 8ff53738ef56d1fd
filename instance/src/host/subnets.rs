//! Routes to networks behind other nodes: those from the configuration, and those learnt from the kernel's routing
//! table.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use ipnet::IpNet;
use nebula_core::config::{Gateway, SubnetRoute};
use nebula_core::io::Handle;

/// Merges both sources, and tells the driver about every change.
pub(crate) struct Subnets {
    /// Receives the merged routes after a change.
    tell: Box<dyn Fn(Vec<SubnetRoute>) + Send + Sync>,
    table: Mutex<Table>,
}

impl std::fmt::Debug for Subnets {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Subnets").field("table", &self.table).finish_non_exhaustive()
    }
}

#[derive(Debug, Default)]
struct Table {
    configured: Vec<SubnetRoute>,
    learnt: BTreeMap<IpNet, Vec<Gateway>>,
}

impl Subnets {
    /// For a driver that was started with `configured`.
    pub(crate) fn new(handle: Handle, configured: Vec<SubnetRoute>) -> Self {
        let tell = move |all| drop(handle.reconfigure(move |config| config.subnets = all));
        Self { tell: Box::new(tell), table: Mutex::new(Table { configured, learnt: BTreeMap::new() }) }
    }

    /// Hands every change to `tell`, without a driver.
    #[cfg(test)]
    pub(crate) fn telling(tell: impl Fn(Vec<SubnetRoute>) + Send + Sync + 'static) -> Self {
        Self { tell: Box::new(tell), table: Mutex::default() }
    }

    /// Replaces the configured routes. `apply` receives the merged routes while the table is locked, so no later change
    /// overtakes it.
    pub(crate) fn configure<T>(&self, configured: Vec<SubnetRoute>, apply: impl FnOnce(Vec<SubnetRoute>) -> T) -> T {
        let mut table = self.table();
        table.configured = configured;
        apply(table.all())
    }

    /// Whether a route of the kernel to this network is known.
    pub(crate) fn has_learnt(&self, network: IpNet) -> bool {
        self.table().learnt.contains_key(&network)
    }

    /// Replaces all that is known of the kernel's routes.
    pub(crate) fn replace_learnt(&self, routes: BTreeMap<IpNet, Vec<Gateway>>) {
        let gone =
            self.table().learnt.keys().filter(|network| !routes.contains_key(network)).copied().collect::<Vec<_>>();
        self.learn(gone.into_iter().map(|network| (network, Vec::new())).chain(routes));
    }

    /// Records the gateways of the kernel's routes to these networks; no gateways means that the route is gone.
    pub(crate) fn learn(&self, changes: impl IntoIterator<Item = (IpNet, Vec<Gateway>)>) {
        let mut table = self.table();
        let changed =
            changes.into_iter().fold(false, |changed, (network, gateways)| table.learn(network, gateways) | changed);
        if changed {
            (self.tell)(table.all());
        }
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Table {
    fn learn(&mut self, network: IpNet, gateways: Vec<Gateway>) -> bool {
        if gateways.is_empty() {
            return self.learnt.remove(&network).is_some();
        }
        // Bounded, because any process that may change the kernel's routes can fill it.
        let fits = self.learnt.len() < MAX_LEARNED_ROUTES || self.learnt.contains_key(&network);
        if !fits {
            tracing::warn!(%network, "Too many system routes, this one is not followed");
        }
        fits && self.learnt.insert(network, gateways.clone()) != Some(gateways)
    }

    /// The merged routes; the kernel's take precedence over configured ones.
    fn all(&self) -> Vec<SubnetRoute> {
        let configured = self.configured.iter().filter(|route| !self.learnt.contains_key(&route.network.trunc()));
        let learnt = self.learnt.iter();
        let learnt = learnt.map(|(network, gateways)| SubnetRoute::new(*network, gateways.clone()));
        configured.cloned().chain(learnt).collect()
    }
}

const MAX_LEARNED_ROUTES: usize = 65_536;

#[cfg(test)]
mod tests {
    use super::*;

    fn route(network: &str, gateway: &str) -> SubnetRoute {
        SubnetRoute::new(network.parse().unwrap(), vec![Gateway::new(gateway.parse().unwrap())])
    }

    #[test]
    fn what_is_learnt_hides_what_is_configured_until_it_is_gone() {
        let configured = vec![route("192.168.1.0/24", "10.1.0.2"), route("192.168.2.0/24", "10.1.0.2")];
        let mut table = Table { configured: configured.clone(), learnt: BTreeMap::new() };
        let learnt = route("192.168.1.0/24", "10.1.0.3");
        assert!(table.learn(learnt.network, learnt.gateways.clone()));
        assert!(!table.learn(learnt.network, learnt.gateways.clone()), "nothing new");
        assert_eq!(table.all(), [configured[1].clone(), learnt.clone()]);
        assert!(table.learn(learnt.network, Vec::new()));
        assert!(!table.learn(learnt.network, Vec::new()), "gone already");
        assert_eq!(table.all(), configured);
    }
}
