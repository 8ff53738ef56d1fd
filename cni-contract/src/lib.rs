//! What the plugin, the agent, and a pod's instance and init container have to agree on, and the codecs that they
//! share.
//!
//! - [`launch`]: what an instance must know to serve one pod; [`instance_status`]: what it says of itself
//! - [`handoff`]: how the init container shows the pod's token to the instance
//! - [`flow_records`]: what daemons and instances say of flows
//! - [`agent_api`]: what an agent answers kubectl's plugin
//! - [`labels`]: how an instance's program is asked for the labels of a pod
//! - [`cluster_table`]: what agents know of the cluster, as instances map it
//! - [`netlink`], [`netns`]: messages to the kernel, and network namespaces
//! - [`format`](mod@format): versions of documents on disk
//! - [`clock`], [`hash`]: clocks as arguments; hashes of names
//! - [`columns`]: tables for people
//! - [`why`]: why a flow does not pass, by what API server and agents know
//! - [`policy_test`]: what network policies say of a flow; [`seen`]: the flows from which they are suggested

pub mod agent_api;
pub mod clock;
pub mod cluster_table;
pub mod columns;
pub mod flow_records;
pub mod format;
#[doc(hidden)]
pub mod fuzzing;
pub mod handoff;
pub mod hash;
pub mod instance_status;
pub mod labels;
pub mod launch;
pub mod netlink;
pub mod netns;
pub mod policy_test;
#[doc(hidden)]
pub mod recorded;
pub mod seen;
pub mod why;
