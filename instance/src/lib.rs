//! The host side of Nebula: the `nebula` daemon and one pod's tunnel, around `nebula-core`.
//!
//! The programs in `bin/` are thin. [`host`] is the daemon and [`pod`] one pod's instance; neither knows the other, and what
//! both need lies below them: [`overlay`], [`metrics`], [`listener`], [`log`], [`ca_client`], [`config`], [`go`], [`linux`].

pub mod ca_client;
pub mod config;
pub mod enrol;
#[doc(hidden)]
pub mod fuzzing;
pub mod go;
pub mod host;
pub mod init;
pub mod linux;
mod listener;
pub mod log;
mod metrics;
pub mod overlay;
pub mod pod;
