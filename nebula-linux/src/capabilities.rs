//! Drops this program's capabilities for good. A pod's instance has none once its set-up is over.
//!
//! Capabilities belong to each thread in the kernel, and a new thread inherits those of its creator; see also
//! [`crate::confinement`].

use std::io;

use rustix::thread::{CapabilitySet, CapabilitySets};

use crate::errno;

/// Keeps the held capabilities that are in `wanted`, for this thread, for threads that it starts later, and across
/// execve.
///
/// # Errors
/// Returns an error if the kernel refuses.
pub fn keep(wanted: CapabilitySet) -> io::Result<()> {
    let held = rustix::thread::capabilities(None).map_err(|error| errno::of_call("capget", error))?.permitted;
    // After a change of user they are still permitted, but no longer effective.
    hold(held)?;
    if held.contains(CapabilitySet::SETPCAP) {
        for capability in CapabilitySet::all().iter() {
            match rustix::thread::remove_capability_from_bounding_set(capability) {
                // An older kernel, which does not know this capability.
                Ok(()) | Err(rustix::io::Errno::INVAL) => {}
                Err(error) => return Err(errno::of_call("prctl(PR_CAPBSET_DROP)", error)),
            }
        }
    }
    rustix::thread::clear_ambient_capability_set().map_err(|error| errno::of_call("prctl(PR_CAP_AMBIENT)", error))?;
    rustix::thread::set_no_new_privs(true).map_err(|error| errno::of_call("prctl(PR_SET_NO_NEW_PRIVS)", error))?;
    hold(held.intersection(wanted))
}

/// Limits this thread, and threads that it starts later, to these capabilities, with no way to regain others.
pub fn hold(set: CapabilitySet) -> io::Result<()> {
    let sets = CapabilitySets { effective: set, permitted: set, inheritable: CapabilitySet::empty() };
    rustix::thread::set_capabilities(None, sets).map_err(|error| errno::of_call("capset", error))
}

/// Gives these capabilities up for this thread, and threads that it starts later.
pub fn give_up(set: CapabilitySet) -> io::Result<()> {
    hold(rustix::thread::capabilities(None)?.permitted.difference(set))
}

/// What the instance of a captured pod needs besides [`FOR_SET_UP`]: it opens raw sockets in the pod's namespace.
pub const FOR_CAPTURE: CapabilitySet = CapabilitySet::NET_RAW;

/// What a pod's instance needs for its set-up: it enters namespaces (and looks at a process that names one), creates
/// the device and its routes, binds a low port, and creates a socket in the folder of the user that it switches to.
pub const FOR_SET_UP: CapabilitySet = CapabilitySet::NET_BIND_SERVICE
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
