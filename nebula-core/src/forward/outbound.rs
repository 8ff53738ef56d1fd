//! Overlay (super-)packet to underlay datagrams, stage by stage (egress path).

use std::time::Instant;

use super::{Forwarder, Lane, Offload};
use crate::Verdict;

pub(super) fn outbound(
    _forwarder: &Forwarder,
    _lane: &mut Lane,
    _now: Instant,
    _packet: &[u8],
    _offload: Offload,
) -> Verdict {
    unimplemented!()
}
