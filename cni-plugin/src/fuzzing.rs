//! Doors for the fuzzer to decoders that are private.

use crate::{link::host_route, supervisor};

/// A message of the system bus.
pub fn dbus(data: &[u8]) {
    supervisor::fuzz_dbus(data);
}

/// The kernel's answer to the question for a route.
pub fn route_answer(data: &[u8]) {
    host_route::fuzz(data);
}
