//! Entry points for the fuzzer to private decoders.

use crate::netlink::{self, nftables, policy, route};

/// Decodes a netlink datagram of the kernel: acknowledgements, routes, rules and chains.
pub fn netlink(data: &[u8]) {
    netlink::answers(data).for_each(drop);
    for body in netlink::messages(data).map(|message| message.body).chain([data]) {
        route::fuzz(body);
        policy::fuzz(body);
        nftables::fuzz(body);
    }
}
