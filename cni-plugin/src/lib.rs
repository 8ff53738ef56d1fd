//! A CNI plugin, chained behind another one or the first of its list ([`primary`]): one run per verb, with no state
//! but the records on disk. The binary reads a [`request`], lets [`verb`] answer it and prints the [`reply`]. What it
//! shares with the agent and the instances is in `nebula-cni-contract`.

pub mod attachment;
pub mod enrolment;
#[doc(hidden)]
pub mod fuzzing;
pub mod host;
pub mod link;
pub mod primary;
pub mod programs;
pub mod reply;
pub mod request;
pub mod settings;
pub mod supervisor;
pub mod verb;
