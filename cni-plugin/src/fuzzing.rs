//! Entry points for the fuzzer to private decoders.

use crate::{
    link::pod_link,
    netlink::{self, nftables, policy, route},
    supervisor,
};

/// Decodes a message of the system bus.
pub fn dbus(data: &[u8]) {
    supervisor::fuzz_dbus(data);
}

/// Decodes a netlink datagram of the kernel: acknowledgements, links, routes, rules and chains.
pub fn netlink(data: &[u8]) {
    netlink::answers(data).for_each(drop);
    for body in netlink::messages(data).map(|message| message.body).chain([data]) {
        route::fuzz(body);
        pod_link::fuzz(body);
        policy::fuzz(body);
        nftables::fuzz(body);
    }
}
