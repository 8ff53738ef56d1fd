//! Whoever calls the plugin may end with its control groups and everything in them, as the container of a node agent
//! does. Instances are in none of them.

use nebula_cni_contract::clock::SystemClock;

use crate::container::Container;
use crate::harness::{Node, PLUGIN, eventually, spawn, wait};

#[test]
#[ignore = "needs root and control groups"]
fn an_instance_is_in_no_group_of_whoever_attached_or_restarted_it_and_outlives_them() {
    let container = Container::new();
    for memory in [None, Some(64)] {
        let mut node = Node::new();
        if let Some(mebibytes) = memory {
            node.entry["memoryLimitMiB"] = mebibytes.into();
        }
        let mut add = container.command(PLUGIN);
        add.env_clear().envs(&node.env).env("CNI_COMMAND", "ADD").env("PATH", std::env::var_os("PATH").unwrap());
        wait(spawn(&mut add, node.stdin().as_bytes())).expect_ok();
        let first = node.process();
        assert_eq!(container.members(), Vec::<String>::new(), "after an attach, with limit {memory:?}");
        container.kill();
        assert!(first.is_alive() && node.answers(), "the instance ended with who attached it, with limit {memory:?}");

        first.stop(&SystemClock).unwrap();
        let mut repair = container.command(PLUGIN);
        repair.arg("reconcile").arg(node.entry["stateDir"].as_str().unwrap());
        assert!(repair.status().unwrap().success());
        let second = node.process();
        assert!(second.is_alive() && second != first);
        eventually("the instance serves", || node.answers());
        assert_eq!(container.members(), Vec::<String>::new(), "after a repair, with limit {memory:?}");
        container.kill();
        assert!(second.is_alive() && node.answers(), "the instance ended with who restarted it, with limit {memory:?}");
        node.call("DEL").expect_ok();
        assert_eq!(node.residue(), Vec::<String>::new());
    }
}
