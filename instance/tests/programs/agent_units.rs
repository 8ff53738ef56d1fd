//! The node agent where a systemd is the first process and runs the instances as units. `./test systemd` runs these tests
//! inside the namespaces of one, as `tests/tools/systemd-ns.sh sh DIR TEST` does after `tests/tools/systemd-ns.sh start DIR`.
//! TMPDIR must name a folder outside /tmp and /run, of which units have private ones.

use crate::agent::Prepared;
use crate::agent_orders::in_random_orders;

use std::env;
use std::fs;

#[test]
#[ignore = "needs root, containerd, the shared CRI tools, a build of the programs, and systemd as first process"]
fn in_whatever_order_a_node_with_systemd_starts_no_enrolled_pod_sends_in_clear() {
    let first = fs::read_to_string("/proc/1/comm").expect("the first process");
    assert_eq!(first.trim(), "systemd", "the first process; see the head of this file");
    assert!(!env::temp_dir().starts_with("/tmp"), "TMPDIR; see the head of this file");
    in_random_orders(Prepared::under_systemd);
}
