//! The host side of Nebula: the `nebula` daemon and one pod's tunnel, around `nebula-core`.

pub mod config_file;
pub mod daemon;
mod errno;
mod events;
pub mod go_flags;
pub mod log;
pub mod names;
pub mod netns;
pub mod notify;
pub mod overlay_link;
pub mod reload;
pub mod signals;
