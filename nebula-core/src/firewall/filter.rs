//! Rules and own addresses, compiled for one lookup per flow.

use ipnet::IpNet;

use super::Policy;

/// One published set of rules.
#[derive(Debug)]
pub(crate) struct Filter {
    generation: u32,
}

impl Filter {
    pub(crate) fn new(_policy: &Policy, _networks: &[IpNet], _unsafe_networks: &[IpNet], generation: u32) -> Self {
        Self { generation }
    }
    /// Differs from that of the rules before.
    pub(crate) fn generation(&self) -> u32 {
        self.generation
    }
}
