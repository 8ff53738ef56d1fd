//! Flows to Services from before the capture whose endpoint is not known yet, as while the pods of a node are captured
//! one after the other: each waits for the endpoint that the primary network chose, for any other one would reset its
//! connection.

use std::collections::HashMap;
use std::net::SocketAddr;

use super::hash::{Hashed, Key};
use super::{OpenedBefore, Target};
use crate::wire::ip::FlowKey;

/// How long a flow waits, in ms: a pod is captured, and in every directory, long before. After that it may get any
/// endpoint.
const WAIT: u64 = 60_000;

/// By flow, each with its endpoint.
#[derive(Debug, Default)]
pub(super) struct Led(HashMap<Key, Waiting, Hashed>);

#[derive(Debug, Clone, Copy)]
struct Waiting {
    flow: FlowKey,
    endpoint: SocketAddr,
    since: u64,
}

impl Led {
    /// As many as a node is given at its start, which bounds them.
    pub(super) fn note(&mut self, key: Key, flow: &FlowKey, endpoint: SocketAddr, now: u64) {
        self.0.insert(key, Waiting { flow: *flow, endpoint, since: now });
    }

    /// The endpoint that a flow waits for.
    pub(super) fn endpoint(&self, key: &Key, now: u64) -> Option<SocketAddr> {
        self.0.get(key).filter(|waiting| waiting.waits(now)).map(|waiting| waiting.endpoint)
    }

    /// The flow has its endpoint, or is over.
    pub(super) fn forget(&mut self, key: &Key) {
        if !self.0.is_empty() {
            self.0.remove(key);
        }
    }

    /// Takes out the flows whose endpoint `is_known` by now.
    pub(super) fn take(&mut self, is_known: impl Fn(&Target) -> bool) -> Vec<OpenedBefore> {
        let found = self.0.extract_if(|_, waiting| {
            let (address, port) = (waiting.endpoint.ip(), waiting.endpoint.port());
            is_known(&Target { address, port, protocol: waiting.flow.protocol })
        });
        found.map(|(_, Waiting { flow, endpoint, .. })| OpenedBefore { flow, led_to: Some(endpoint) }).collect()
    }

    pub(super) fn expire(&mut self, now: u64) {
        self.0.retain(|_, waiting| waiting.waits(now));
        if self.0.is_empty() {
            self.0 = HashMap::default();
        }
    }
}

impl Waiting {
    fn waits(&self, now: u64) -> bool {
        now < self.since.saturating_add(WAIT)
    }
}
