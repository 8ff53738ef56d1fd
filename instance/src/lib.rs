//! The host side of Nebula: the `nebula` daemon and one pod's tunnel, around `nebula-core`.
//!
//! The programs in `bin/` are thin. [`host`] is the daemon and [`pod`] one pod's instance; neither imports the other.
//! Code that both need is in lower layers. A module imports only from lines below its own:
//!
//! - [`host`], [`pod`], [`init`]
//! - [`enrol`]
//! - [`overlay`], `handoff`, [`ca_client`]
//! - `metrics`
//! - [`log`], `listener`, [`names`]
//! - [`config`]
//! - [`go`], [`linux`], `causes`

pub mod ca_client;
mod causes;
pub mod config;
pub mod enrol;
#[doc(hidden)]
pub mod fuzzing;
pub mod go;
mod handoff;
pub mod host;
pub mod init;
pub mod linux;
mod listener;
pub mod log;
mod metrics;
pub mod names;
pub mod overlay;
pub mod pod;
