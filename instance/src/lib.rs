//! The host side of Nebula: the `nebula` daemon and one pod's tunnel, around `nebula-core`.
//!
//! The programs in `bin/` are thin. [`host`] is the daemon and [`pod`] one pod's instance; neither imports the other.
//! Code that both need is in lower layers, or in crates below (`nebula-config`, `nebula-enrolment`, `nebula-linux`). A
//! module imports only from lines below its own:
//!
//! - [`host`], [`pod`], [`init`]
//! - [`overlay`], `handoff`, `handover`
//! - `metrics`, `flow_records`
//! - `listener`

#[cfg(all(feature = "fips", feature = "ssh"))]
compile_error!("a FIPS build has no console: --no-default-features --features fips");

mod flow_records;
#[doc(hidden)]
pub mod fuzzing;
mod handoff;
mod handover;
pub mod host;
pub mod init;
mod listener;
mod metrics;
pub mod overlay;
pub mod pod;
