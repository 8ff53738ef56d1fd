//! How hosts get a certificate and keep it: `nebula up`, `nebula-enrol`, and renewal.

mod enrol_timer;
mod host;
pub(crate) mod join;
mod join_watched;
mod joined_again;
mod renewal;
