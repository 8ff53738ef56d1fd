//! Doors for the fuzzer to decoders that are private.

use crate::{
    link::{host_route, pod_link},
    netlink, supervisor,
};

/// A message of the system bus.
pub fn dbus(data: &[u8]) {
    supervisor::fuzz_dbus(data);
}

/// A datagram of the kernel: outcomes of requests, links, routes.
pub fn netlink(data: &[u8]) {
    netlink::answers(data).for_each(drop);
    for body in netlink::messages(data).map(|message| message.body).chain([data]) {
        host_route::fuzz(body);
        pod_link::fuzz(body);
    }
}
