//! Capabilities of this program: few, and no way to more. A pod's instance has none once its set-up is over.
//!
//! The kernel keeps capabilities for each thread, and a new thread has those of the one that starts it; see also
//! [`crate::linux::confinement`].

use std::io;

use rustix::thread::{CapabilitySet, CapabilitySets};

/// Keeps those that are in `wanted` and held, for this thread and those that it will start, and for programs that are
/// run.
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

/// Leaves this thread, and those that it will start, with these and no way to others.
pub(crate) fn hold(set: CapabilitySet) -> io::Result<()> {
    let sets = CapabilitySets { effective: set, permitted: set, inheritable: CapabilitySet::empty() };
    Ok(rustix::thread::set_capabilities(None, sets)?)
}

/// Of a pod's instance: namespaces are entered (and found, where a process names them), the device and its routes made,
/// a low port bound, a socket made in the folder of the user that it becomes.
pub(crate) const FOR_SET_UP: CapabilitySet = CapabilitySet::NET_BIND_SERVICE
    .union(CapabilitySet::DAC_OVERRIDE)
    .union(CapabilitySet::SETUID)
    .union(CapabilitySet::SETGID)
    .union(CapabilitySet::NET_ADMIN)
    .union(CapabilitySet::SYS_PTRACE)
    .union(CapabilitySet::SYS_ADMIN);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_without_capabilities_starts_threads_without_any() {
        let left = || rustix::thread::capabilities(None).unwrap();
        let of_child = std::thread::spawn(move || {
            hold(CapabilitySet::empty()).unwrap();
            std::thread::spawn(left).join().unwrap()
        });
        let none = CapabilitySet::empty();
        assert_eq!(of_child.join().unwrap(), CapabilitySets { effective: none, permitted: none, inheritable: none });
    }
}
