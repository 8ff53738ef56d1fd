//! A chained CNI plugin: one run per verb, with no state but the records on disk. The binary reads a [`request`], lets
//! [`verb`] answer it and prints the [`reply`]. The instance's crate uses [`launch::LaunchSpec`] and the netlink codec
//! ([`netlink`]) of this crate.

pub mod attachment;
pub mod clock;
pub mod cluster_table;
pub mod enrolment;
#[doc(hidden)]
pub mod fuzzing;
pub mod handoff;
pub mod hash;
pub mod host;
pub mod instance_status;
pub mod launch;
pub mod link;
pub mod netlink;
pub mod netns;
pub mod reply;
pub mod request;
pub mod settings;
pub mod supervisor;
pub mod verb;
