//! Chained CNI plugin: one run per verb, no state but the records on disk. The binary reads a [`request`], lets
//! [`verb`] answer it and prints the [`reply`]. The instance uses [`launch::LaunchSpec`] of this crate, and its messages for the kernel
//! ([`netlink`], [`nftables`]).

pub mod add;
pub mod check;
pub mod del;
pub mod enrolment;
#[doc(hidden)]
pub mod fuzzing;
pub mod gc;
pub mod guard;
pub mod host;
pub mod host_route;
mod instance_status;
pub mod isolation;
pub mod labels;
pub mod launch;
pub mod lock;
pub mod netlink;
pub mod nftables;
pub mod pod_link;
pub mod prev_result;
pub mod reconcile;
pub mod record;
pub mod reply;
pub mod request;
pub mod room;
pub mod selector;
pub mod settings;
pub mod status;
pub mod supervisor;
pub mod verb;
