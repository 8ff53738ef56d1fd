//! The node agent where a systemd is the first process and runs the instances as units. `./test systemd` runs these
//! tests inside the namespaces of one, as `tests/tools/systemd-ns.sh sh DIR TEST` does after
//! `tests/tools/systemd-ns.sh start DIR`. TMPDIR must name a folder outside /tmp and /run, of which units have
//! private ones.

use crate::agent::orders::in_random_orders;
use crate::agent::prepared::{self, Prepared};
use crate::agent::repair::{self, Site};
use crate::pods::runtime::Runtime;

use std::env;
use std::fs;

use serde_json::json;

#[test]
#[ignore = "needs root, containerd, the shared CRI tools, a build of the programs, and systemd as first process"]
fn in_whatever_order_a_node_with_systemd_starts_no_enrolled_pod_sends_in_clear() {
    assert_systemd_is_first();
    in_random_orders(Prepared::under_systemd);
}

#[test]
#[ignore = "needs root, containerd, the shared CRI tools, a build of the programs, and systemd as first process"]
fn a_node_with_systemd_is_made_ready_from_nothing_kept_so_and_uninstalled() {
    assert_systemd_is_first();
    prepared::install_keep_and_uninstall(Prepared::under_systemd(json!({}), Runtime::start));
}

#[test]
#[ignore = "needs root, containerd, the shared CRI tools, a build of the programs, and systemd as first process"]
fn an_agent_of_a_node_with_systemd_that_is_killed_at_any_moment_leaves_nothing_wrong() {
    assert_systemd_is_first();
    prepared::kill_at_any_moment(Prepared::under_systemd(json!({}), Runtime::start));
}

#[test]
#[ignore = "needs root, containerd, the shared CRI tools, a build of the programs, and systemd as first process"]
fn pods_that_ran_before_the_agent_get_units_without_a_restart_and_leave_nothing() {
    assert_systemd_is_first();
    repair::attach_running_pods(Site::under_systemd());
}

#[test]
#[ignore = "needs root, containerd, the shared CRI tools, a build of the programs, and systemd as first process"]
fn what_a_pod_of_a_node_with_systemd_loses_it_gets_back() {
    assert_systemd_is_first();
    repair::give_back_what_is_lost(Site::under_systemd());
}

fn assert_systemd_is_first() {
    let first = fs::read_to_string("/proc/1/comm").expect("the first process");
    assert_eq!(first.trim(), "systemd", "the first process; see the head of this file");
    assert!(!env::temp_dir().starts_with("/tmp"), "TMPDIR; see the head of this file");
}
