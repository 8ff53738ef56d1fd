//! Answers questions about recorded flows.

use std::time::Instant;

use super::Node;
use crate::firewall::{AskedRecords, FlowRecords};

impl Node {
    /// Records of flows, at most so many; none unless [`crate::Config::flow_records`] is set. Records of flows whose
    /// rules or policies have changed since do not say which of them decided.
    pub fn flow_records(&mut self, now: Instant, asked: AskedRecords, most: usize) -> FlowRecords {
        self.now = now;
        self.forwarder.decide_records(&self.config.firewall);
        self.forwarder.flow_records(now, asked, most, self.wall)
    }

    /// Whether flows are recorded.
    #[must_use]
    pub fn records_flows(&self) -> bool {
        self.config.flow_records > 0
    }
}
