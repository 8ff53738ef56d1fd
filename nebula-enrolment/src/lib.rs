//! How a host or a pod gets its certificate from the CA service, and keeps it.
//!
//! A module imports only from lines below its own:
//!
//! - [`renewal`]: keeps a running node enrolled, by a child process; [`renewal_health`] is how that goes
//! - [`enrol`]: the files of an enrolled host, and the program `nebula-enrol`
//! - [`ca_client`]: requests to the CA service, and when to make them

pub mod ca_client;
pub mod enrol;
mod follower;
#[doc(hidden)]
pub mod fuzzing;
pub mod renewal;
pub mod renewal_health;
