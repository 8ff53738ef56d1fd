//! Interfaces to the kernel, the service manager and other programs: namespaces, privileges, signals, netlink.

pub(crate) mod capabilities;
pub mod clock;
pub mod companion;
pub mod confinement;
pub(crate) mod errno;
pub(crate) mod kernel_view;
pub(crate) mod link_events;
pub mod memory;
pub mod netns;
pub mod notify;
pub(crate) mod rtnetlink;
pub mod signals;
mod system_calls;
