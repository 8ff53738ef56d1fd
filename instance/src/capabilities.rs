//! Capabilities of this program: few, and no way to more.

use std::io;

use rustix::thread::{CapabilitySet, CapabilitySets};

/// Keeps those that are in `wanted` and held, for this thread and those that it will start, and for programs that are run.
///
/// # Errors
/// The kernel refuses.
pub(crate) fn keep(wanted: CapabilitySet) -> io::Result<()> {
    let held = rustix::thread::capabilities(None)?.permitted;
    // A change of the user leaves them permitted, and not in effect.
    hold(held)?;
    if held.contains(CapabilitySet::SETPCAP) {
        for capability in CapabilitySet::all().iter() {
            match rustix::thread::remove_capability_from_bounding_set(capability) {
                // An older kernel, which knows fewer.
                Ok(()) | Err(rustix::io::Errno::INVAL) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }
    rustix::thread::clear_ambient_capability_set()?;
    rustix::thread::set_no_new_privs(true)?;
    hold(held.intersection(wanted))
}

fn hold(set: CapabilitySet) -> io::Result<()> {
    let sets = CapabilitySets { effective: set, permitted: set, inheritable: CapabilitySet::empty() };
    Ok(rustix::thread::set_capabilities(None, sets)?)
}
