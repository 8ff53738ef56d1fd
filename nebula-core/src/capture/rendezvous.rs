//! Rendezvous hashing (Thaler and Ravishankar, 1998): a choice that needs no memory. Who asks again for the same flow
//! gets the same endpoint, also after a restart, in whatever order the endpoints are listed; when one is added or
//! removed, only the flows move that go to it.

use std::net::IpAddr;

use crate::wire::ip::FlowKey;

/// The position of the greatest weight for a flow with this hash. A tag names an endpoint; of equal ones the first is
/// chosen.
pub fn rendezvous(hash: u64, tags: impl Iterator<Item = u32>) -> Option<u32> {
    let mut best = None;
    for (position, tag) in (0..).zip(tags) {
        let weight = mix(hash ^ u64::from(tag).wrapping_mul(SPREAD));
        if best.is_none_or(|(greatest, _)| weight > greatest) {
            best = Some((weight, position));
        }
    }
    best.map(|(_, position)| position)
}

/// A well-mixed number that depends on the whole flow, and on nothing else.
pub(super) fn scramble(flow: &FlowKey) -> u64 {
    let rest = u64::from(flow.local_port) << 32 | u64::from(flow.remote_port) << 16 | u64::from(flow.protocol);
    scramble_address(scramble_address(rest, flow.local), flow.remote)
}

/// A tag for an endpoint, if the directory has none.
pub(super) fn tag(address: IpAddr, port: u16) -> u32 {
    scramble_address(port.into(), address) as u32
}

/// Tags for a Service's endpoints that are not enrolled. Which one of them a flow gets is not decided here, so they
/// are only counted: when there is one more or less, the flows move that go to the last one. A directory's own tags
/// are smaller.
pub fn clear_tags(count: u32) -> impl Iterator<Item = u32> {
    (0..count).map(|n| FIRST_CLEAR.saturating_add(n))
}

/// Mixes an address into a number.
pub(crate) fn scramble_address(x: u64, address: IpAddr) -> u64 {
    let bits = match address {
        IpAddr::V4(v4) => v4.to_bits().into(),
        IpAddr::V6(v6) => v6.to_bits(),
    };
    mix(mix(x ^ bits as u64) ^ (bits >> 64) as u64)
}

/// A step of SplitMix64.
fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(SPREAD);
    let x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ x >> 31
}

const FIRST_CLEAR: u32 = 1 << 16;
/// Odd, with its ones spread evenly.
const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;
