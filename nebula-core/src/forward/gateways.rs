//! What all lanes know about the gateways of subnet routes: which of them answer, and which flows were moved.

use std::net::IpAddr;

use crate::sync::HashMap;
use crate::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use crate::wire::ip::FlowKey;

/// Whether a gateway takes flows. The control plane decides, lanes read.
#[derive(Debug, Default)]
pub(crate) struct Health {
    is_dead: AtomicBool,
}

impl Health {
    /// A gateway takes flows until it is found dead.
    #[inline]
    pub(crate) fn is_alive(&self) -> bool {
        !self.is_dead.load(Ordering::Relaxed)
    }

    pub(crate) fn set_alive(&self, is_alive: bool) {
        self.is_dead.store(!is_alive, Ordering::Relaxed);
    }
}

/// Flows that stay on a gateway which their hash does not select. Empty unless a gateway was dead or had no tunnel.
#[derive(Debug, Default)]
pub(crate) struct Pins {
    gateways: HashMap<FlowKey, IpAddr>,
    /// Kept beside the map, because every packet of a shared route reads it.
    count: AtomicUsize,
}

impl Pins {
    /// The gateway on which a flow stays.
    #[inline]
    pub(crate) fn of(&self, flow: &FlowKey) -> Option<IpAddr> {
        if self.count.load(Ordering::Relaxed) == 0 {
            return None;
        }
        let gateways = self.gateways.pin();
        let gateway = gateways.get(flow)?;
        Some(*gateway)
    }

    /// Keeps a flow on a gateway. Without room for another flow, it stays only while the gateway of its hash is dead.
    pub(crate) fn set(&self, flow: &FlowKey, gateway: IpAddr) {
        // Later fragments have no ports, and no flow of their own.
        if flow.fragment || self.count.load(Ordering::Relaxed) >= MAX_PINS {
            return;
        }
        if self.gateways.pin().insert(*flow, gateway).is_none() {
            self.count.fetch_add(1, Ordering::Relaxed);
        }
    }

    pub(crate) fn remove(&self, flow: &FlowKey) {
        if self.gateways.pin().remove(flow).is_some() {
            self.count.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Forgets the flows that are not wanted any more.
    pub(crate) fn retain(&self, is_wanted: impl Fn(&FlowKey, IpAddr) -> bool) {
        let pinned = self.gateways.pin();
        let over: Vec<_> = pinned.iter().filter(|(flow, at)| !is_wanted(flow, **at)).map(|(flow, _)| *flow).collect();
        over.iter().for_each(|flow| self.remove(flow));
    }

    pub(crate) fn len(&self) -> usize {
        self.count.load(Ordering::Relaxed)
    }
}

/// About 6 MB.
const MAX_PINS: usize = 1 << 16;

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    fn flow(port: u16, other: u16) -> FlowKey {
        let address = [192, 168, 7, 9].into();
        FlowKey { local: address, remote: address, local_port: port, remote_port: other, protocol: 6, fragment: false }
    }

    #[test]
    fn the_number_of_moved_flows_is_bounded_and_those_that_are_over_make_room() {
        let (pins, gateway) = (Pins::default(), [10, 1, 0, 2].into());
        for port in 0..=u16::MAX {
            pins.set(&flow(port, 1), gateway);
            pins.set(&flow(port, 1), gateway);
        }
        pins.set(&flow(0, 2), gateway);
        assert_eq!((pins.len(), pins.of(&flow(0, 2))), (MAX_PINS, None));
        pins.retain(|flow, _| flow.local_port % 2 == 0);
        assert_eq!((pins.len(), pins.of(&flow(1, 1)), pins.of(&flow(2, 1))), (MAX_PINS / 2, None, Some(gateway)));
        pins.set(&flow(0, 2), gateway);
        pins.remove(&flow(2, 1));
        pins.remove(&flow(2, 1));
        assert_eq!((pins.len(), pins.of(&flow(0, 2)), pins.of(&flow(2, 1))), (MAX_PINS / 2, Some(gateway), None));
    }
}
