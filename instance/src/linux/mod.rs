//! Interfaces to the kernel, the service manager and other programs: namespaces, privileges, signals, netlink.

pub(crate) mod capabilities;
pub mod clock;
pub mod command_line;
pub mod companion;
pub mod confinement;
pub(crate) mod errno;
pub(crate) mod folder_watch;
pub(crate) mod kernel_view;
pub(crate) mod link_events;
pub(crate) mod mapped_file;
pub mod memory;
pub mod netns;
pub(crate) mod next_hop;
pub mod notify;
pub(crate) mod rtnetlink;
pub mod signals;
mod system_calls;
pub mod terminal;
pub mod used_networks;
