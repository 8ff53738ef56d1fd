//! Underlay datagrams to overlay (super-)packets, stage by stage (ingress path).

use std::time::Instant;

use super::{Forwarder, Lane, Received};

/// Scratch of one call.
#[derive(Debug, Default)]
pub(super) struct Batch {}

pub(super) fn inbound(
    _forwarder: &Forwarder,
    _lane: &mut Lane,
    _now: Instant,
    _buffer: &mut [u8],
    _received: &[Received],
) {
    unimplemented!()
}
