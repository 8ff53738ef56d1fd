//! Interfaces to the kernel, the service manager and other programs: namespaces, privileges, signals, netlink.

pub mod capabilities;
pub mod clock;
pub mod command_line;
pub mod companion;
pub mod confinement;
pub mod descriptors;
pub mod errno;
pub mod folder_watch;
pub mod kernel_view;
pub mod line_file;
pub mod link_contents;
pub mod link_events;
pub mod mapped_file;
pub mod memory;
pub mod netns;
pub mod next_hop;
pub mod notify;
pub mod rtnetlink;
pub mod signals;
pub mod store;
mod system_calls;
pub mod terminal;
pub mod used_networks;
