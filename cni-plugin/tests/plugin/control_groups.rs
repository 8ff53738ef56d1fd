//! Whoever calls the plugin may end with its control groups and everything in them, as the container of a node agent
//! does. Instances are in none of them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{self, Command};

use nebula_cni_plugin::clock::SystemClock;

use crate::harness::{Node, PLUGIN, eventually, spawn, wait};

/// A group in each hierarchy of this machine, as a container has them.
struct Container(Vec<PathBuf>);

impl Container {
    fn new() -> Self {
        let tree = Path::new("/sys/fs/cgroup");
        let inside = fs::read_dir(tree).unwrap().map(|entry| entry.unwrap().path());
        let roots: Vec<PathBuf> = match tree.join("cgroup.procs").exists() {
            true => vec![tree.to_owned()],
            false => inside.filter(|root| root.join("cgroup.procs").exists() && !root.is_symlink()).collect(),
        };
        let group = |root: PathBuf| {
            let group = root.join(format!("nebula-test-caller-{}", process::id()));
            fs::create_dir(&group).unwrap();
            // Without them a group of version 1 takes no member.
            for file in ["cpuset.cpus", "cpuset.mems"] {
                let _ = fs::read(root.join(file)).map(|set| fs::write(group.join(file), set));
            }
            group
        };
        Self(roots.into_iter().map(group).collect())
    }

    /// A command of the plugin that runs in these groups.
    fn plugin(&self) -> Command {
        let mut shell = Command::new("sh");
        let joins: String =
            self.0.iter().map(|g| format!("echo $$ >'{}/cgroup.procs' || exit 9; ", g.display())).collect();
        shell.arg("-c").arg(joins + "exec \"$0\" \"$@\"").arg(PLUGIN);
        shell
    }

    /// Processes in each of the groups.
    fn members(&self) -> Vec<String> {
        let members = |group: &PathBuf| {
            let text = fs::read_to_string(group.join("cgroup.procs")).unwrap();
            text.lines().map(|pid| format!("{pid} in {}", group.display())).collect::<Vec<_>>()
        };
        self.0.iter().flat_map(members).collect()
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        for group in &self.0 {
            // What a failed test left in it; whoever it is, this test put it there.
            let text = fs::read_to_string(group.join("cgroup.procs")).unwrap_or_default();
            let root = group.parent().unwrap_or(group);
            for pid in text.lines() {
                let _ = fs::write(root.join("cgroup.procs"), pid);
            }
            let _ = fs::remove_dir(group);
        }
    }
}

#[test]
#[ignore = "needs root and control groups"]
fn an_instance_is_in_no_group_of_whoever_attached_or_restarted_it() {
    let container = Container::new();
    assert!(!container.0.is_empty());
    for memory in [None, Some(64)] {
        let mut node = Node::new();
        if let Some(mebibytes) = memory {
            node.entry["memoryLimitMiB"] = mebibytes.into();
        }
        let mut add = container.plugin();
        add.env_clear().envs(&node.env).env("CNI_COMMAND", "ADD").env("PATH", std::env::var_os("PATH").unwrap());
        wait(spawn(&mut add, node.stdin().as_bytes())).expect_ok();
        let first = node.process();
        assert!(first.is_alive());
        assert_eq!(container.members(), Vec::<String>::new(), "after an attach, with limit {memory:?}");

        first.stop(&SystemClock).unwrap();
        let mut repair = container.plugin();
        repair.arg("reconcile").arg(node.entry["stateDir"].as_str().unwrap());
        assert!(repair.status().unwrap().success());
        let second = node.process();
        assert!(second.is_alive() && second != first);
        eventually("the instance serves", || node.answers());
        assert_eq!(container.members(), Vec::<String>::new(), "after a repair, with limit {memory:?}");
        node.call("DEL").expect_ok();
        assert_eq!(node.residue(), Vec::<String>::new());
    }
}
