//! Whether datagrams of this node arrive: at the lighthouses, and at the instances on other nodes. Pods whose peers
//! cannot be reached are ready all the same, and no instance can tell whether that is the network or the peer.

pub(crate) mod lighthouses;
pub(crate) mod nodes;
mod probe;

use std::time::Duration;

const TEST_EVERY: Duration = Duration::from_secs(30);
const RETRY: Duration = Duration::from_secs(10);
/// Rounds without any answer before the operator is told.
const SILENT_ROUNDS: u32 = 2;
/// So many are tested in a round.
const MAX_ENDPOINTS: usize = 16;
