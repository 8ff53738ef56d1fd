//! The plugin, and the instance that it starts, under filters of system calls.

use std::fs::File;
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use nix::libc;
use nix::sched::{CloneFlags, setns};
use serde_json::{Value, json};

use super::{BpfProgram, Call, filter, heading, misleads, rounds, spawn};
use crate::world::World;
use crate::world::cluster::{Cluster, LIGHTHOUSE, Node, binary};

/// A node with a pod that the primary plugin has attached.
struct Pod {
    cluster: Cluster,
    node: Node,
    result: Value,
}

/// What the plugin said, and whether it succeeded.
type Said = (bool, String);

impl Pod {
    fn new(change: impl FnOnce(&mut Value)) -> Self {
        let mut cluster = Cluster::new();
        let mut node = cluster.node("n1", "1.0.0");
        node.conf["plugins"][1]["timeoutSeconds"] = 5.into();
        change(&mut node.conf["plugins"][1]);
        let mut plain = node.clone();
        plain.conf["plugins"].as_array_mut().unwrap().truncate(1);
        let result = plain.add_pods(&mut cluster.world, &["web"]).remove(0);
        Self { cluster, node, result }
    }

    fn world(&self) -> &World {
        &self.cluster.world
    }

    /// Calls the plugin under a filter, which the instance that it starts has too.
    /// `name` is that of the pod at the CA.
    fn call(&self, verb: &str, name: &str, program: BpfProgram) -> Said {
        let mut entry = self.node.conf["plugins"][1].clone();
        for key in ["name", "cniVersion"] {
            entry[key] = self.node.conf[key].clone();
        }
        entry["prevResult"] = self.result.clone();
        let node = File::open(format!("/run/netns/{}", self.world().namespace_of("n1"))).unwrap();
        let mut command = Command::new(binary("nebula-cni-plugin"));
        command
            .envs([("CNI_COMMAND", verb), ("CNI_CONTAINERID", "web"), ("CNI_IFNAME", "eth0")])
            .env("CNI_NETNS", format!("/run/netns/{}", self.world().namespace_of("web")))
            .env("CNI_PATH", self.node.dir.join("bin"))
            .env("CNI_ARGS", format!("K8S_POD_NAMESPACE=shop;K8S_POD_NAME={name};K8S_POD_UID=uid-{name}"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        // SAFETY: one system call.
        unsafe { command.pre_exec(move || Ok(setns(&node, CloneFlags::CLONE_NEWNET)?)) };
        let mut child = spawn(&mut command, program);
        let _ = child.stdin.take().unwrap().write_all(entry.to_string().as_bytes());
        let output = child.wait_with_output().unwrap();
        let texts = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text).into_owned());
        (output.status.success(), format!("{}{}", texts.concat(), self.node.instance_logs()))
    }

    /// What is wrong with how ADD, CHECK and DEL of the pod take it.
    fn complaint(&self, word: &str, name: &str, program: &BpfProgram) -> Option<String> {
        let is_named = |said: &str| said.to_lowercase().contains(&word.to_lowercase());
        let mut complaints = Vec::new();
        let mut is_attached = true;
        for verb in ["ADD", "CHECK", "DEL"] {
            if verb == "CHECK" && !is_attached {
                continue;
            }
            let (done, said) = self.call(verb, name, program.clone());
            if let Some(text) = misleads(&said) {
                complaints.push(format!("{verb} says {text:?}\n{said}"));
            } else if !done && !is_named(&said) {
                complaints.push(format!("{verb} fails and does not say why\n{said}"));
            }
            is_attached &= done;
            if verb == "ADD" && done {
                let ping = ["ping", "-c", "1", "-W", "1", LIGHTHOUSE];
                let works = (0..4).any(|_| self.world().exec("web", &ping).status.success());
                // It says why when it ends, some moments after its device is gone.
                let says_why = || {
                    std::thread::sleep(std::time::Duration::from_millis(100));
                    is_named(&self.node.instance_logs())
                };
                if !works && !(0..30).any(|_| says_why()) {
                    let log = self.node.instance_logs();
                    complaints.push(format!("the tunnel does not work, and nobody says why\n{log}"));
                }
            }
        }
        let (done, said) = self.call("DEL", name, filter(&[], libc::ENOSYS));
        if !done || !self.node.leftovers().is_empty() {
            complaints.push(format!("it leaves {:?}\n{said}", self.node.leftovers()));
        }
        (!complaints.is_empty()).then(|| complaints.join("\n"))
    }
}

#[test]
#[ignore = "needs root, network namespaces and a build of the programs"]
fn without_one_kind_of_system_call_each_verb_works_or_names_what_it_needs() {
    let pod = Pod::new(|_| ());
    let mut complaints = Vec::new();
    for (number, (word, errno, program)) in rounds().enumerate() {
        // The CA gives a pod only a few certificates in a row.
        let found = pod.complaint(word, &format!("web-{number}"), &program);
        complaints.extend(found.map(|found| heading(word, errno) + &found));
    }
    assert!(complaints.is_empty(), "{}", complaints.join("\n"));
}

#[test]
#[ignore = "needs root, network namespaces and a build of the programs"]
fn where_the_kernel_has_no_netfilter_del_of_a_captured_pod_succeeds() {
    let pod = Pod::new(|entry| {
        entry["capture"] = json!({"ranges": ["10.244.0.0/16"], "services": ["10.96.0.0/16"]});
        entry["mode"] = "lazy".into();
    });
    let netfilter: Call = (libc::SYS_socket, &[(0, libc::AF_NETLINK), (2, libc::NETLINK_NETFILTER)]);
    let (done, said) = pod.call("ADD", "web", filter(&[], libc::ENOSYS));
    assert!(done, "{said}");
    let forbidden = pod.call("DEL", "web", filter(&[netfilter], libc::EACCES));
    assert!(!forbidden.0 && forbidden.1.contains("cannot end the capture"), "there are rules: {forbidden:?}");
    let absent = pod.call("DEL", "web", filter(&[netfilter], libc::EPROTONOSUPPORT));
    assert!(absent.0, "{}", absent.1);
    assert!(pod.node.leftovers().is_empty());
}
