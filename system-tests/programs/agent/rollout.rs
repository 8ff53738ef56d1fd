//! A new program of instances on a node with a real containerd: the agent gives it to running pods, one after another;
//! takes it back from a pod where it fails; and stops where it does not start.

#![allow(clippy::disallowed_methods, reason = "these tests watch real processes on a real clock")]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};

use super::prepared::Prepared;
use crate::world::chaos::number;
use crate::world::cluster::{LIGHTHOUSE, answer_at, binary};

const INSTANCE: &str = "nebula-cni-instance";

struct Site {
    prepared: Prepared,
    /// Sandboxes and containers of the pods.
    pods: Vec<(String, String)>,
}

impl Site {
    /// A node with running pods and the agent of the first image.
    fn new() -> Self {
        let mut site = Self { prepared: Prepared::new(), pods: Vec::new() };
        site.prepared.configure("upgrade", json!({"watchSeconds": 3, "parallel": number("ROLLOUT_PARALLEL", 2)}));
        let first = site.image("first", &instance(b""));
        site.run_agent(&first);
        site.prepared.wait("the node is prepared", || site.prepared.chain().len() == 2);
        let start = |n| {
            let (sandbox, container, _) = site.prepared.runtime.pod(&format!("web-{n}"));
            (sandbox, container)
        };
        site.pods = (0..number("ROLLOUT_PODS", 4)).map(start).collect();
        site
    }

    /// A folder with the programs of an agent's image, with this program of instances.
    fn image(&self, name: &str, instance: &[u8]) -> PathBuf {
        let folder = self.prepared.node.dir.join(name);
        fs::create_dir(&folder).expect("a folder");
        for program in ["nebula-cni-agent", "nebula-cni-plugin"] {
            fs::copy(binary(program), folder.join(program)).expect("a copy");
        }
        fs::write(folder.join(INSTANCE), instance).expect("a program");
        fs::set_permissions(folder.join(INSTANCE), PermissionsExt::from_mode(0o755)).expect("rights");
        folder
    }

    fn run_agent(&mut self, image: &Path) {
        self.prepared.stop(Signal::SIGTERM);
        self.prepared.start_from(&image.join("nebula-cni-agent"));
    }

    fn upgrade(&self, words: &[&str]) -> Value {
        let (agent, config) = (binary("nebula-cni-agent").display().to_string(), self.prepared.config());
        let command = [&[agent.as_str(), "upgrade"], words, &["--config", config.as_str()]].concat();
        let said = self.prepared.cluster.world.exec("n1", &command);
        serde_json::from_slice(&said.stdout).unwrap_or_default()
    }

    fn status(&self) -> Value {
        self.upgrade(&["status", "--json"])
    }

    fn wait(&self, what: &str, is_so: impl Fn(&Value) -> bool) -> Duration {
        let began = Instant::now();
        loop {
            let status = self.status();
            if is_so(&status) {
                return began.elapsed();
            }
            let logs = || format!("{}{}", self.prepared.node.instance_logs(), self.prepared.cluster.world.all_logs());
            assert!(began.elapsed() < Duration::from_secs(60), "{what}: {status:#}\n{}", logs());
            thread::sleep(Duration::from_millis(50));
        }
    }

    fn pids(&self) -> Vec<i32> {
        self.pods
            .iter()
            .map(|(sandbox, _)| i32::try_from(self.ask(sandbox)["pid"].as_i64().expect("a pid")).expect("a pid"))
            .collect()
    }

    /// The status of an instance. One that has just handed over ends without an answer.
    fn ask(&self, sandbox: &str) -> Value {
        let end = Instant::now() + Duration::from_secs(5);
        loop {
            match answer_at(&self.prepared.node.status_socket(sandbox)) {
                Ok(status) => return status,
                Err(error) => {
                    assert!(Instant::now() < end, "{sandbox}: {error}\n{}", self.prepared.node.instance_logs())
                }
            }
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// How many pods run this program.
    fn with(&self, program: &[u8]) -> usize {
        let runs = |pid: &i32| fs::read(format!("/proc/{pid}/exe")).is_ok_and(|bytes| bytes == program);
        self.pids().iter().filter(|pid| runs(pid)).count()
    }

    fn certificates(&self) -> Vec<Value> {
        self.pods.iter().map(|(sandbox, _)| self.ask(sandbox)["certificate"].clone()).collect()
    }

    fn everybody_reaches_the_lighthouse(&self) {
        for (_, container) in &self.pods {
            let ping = ["exec", container, "--", "/bin/ping", "-c", "1", "-W", "1", LIGHTHOUSE];
            assert!(
                (0..15).any(|_| self.prepared.runtime.cri(&ping).is_ok()),
                "{}",
                self.prepared.node.instance_logs()
            );
        }
    }
}

/// Another program that does the same.
fn instance(more: &[u8]) -> Vec<u8> {
    [&fs::read(binary(INSTANCE)).expect("a program")[..], more].concat()
}

#[test]
#[ignore = "needs root, containerd, the shared CRI tools and a build of the programs"]
fn a_new_program_reaches_running_pods_and_one_that_fails_is_taken_back() {
    let mut site = Site::new();
    let (first, second, third) = (instance(b""), instance(b"second"), instance(b"third"));
    assert_eq!(site.with(&first), site.pods.len());
    let (pids, certificates) = (site.pids(), site.certificates());
    let image = site.image("second", &second);
    site.run_agent(&image);
    let took = site.wait("all pods have the second program", |status| {
        status["outdated"] == 0 && status["upgraded"] == site.pods.len() && site.with(&second) == site.pods.len()
    });
    println!("{} pods have another program after {took:?}, with a canary that was watched for 3 s", site.pods.len());
    assert!(site.pids().iter().zip(&pids).all(|(now, before)| now != before));
    assert_eq!(site.certificates(), certificates);
    site.everybody_reaches_the_lighthouse();

    // The canary dies with the third program.
    let before = site.pids();
    let image = site.image("third", &third);
    site.run_agent(&image);
    let changed = || site.pids().into_iter().zip(&before).find(|(now, before)| now != *before).map(|(now, _)| now);
    site.wait("a canary", |_| changed().is_some());
    kill(Pid::from_raw(changed().expect("a canary")), Signal::SIGKILL).expect("it runs");
    site.wait("it is rolled back, and the node pauses", |status| {
        !status["paused"].is_null() && status["rolled_back"] == 1 && site.with(&second) == site.pods.len()
    });
    site.everybody_reaches_the_lighthouse();
    let before = site.pids();
    thread::sleep(Duration::from_secs(5));
    assert_eq!(site.pids(), before, "no other pod is touched");
    site.upgrade(&["resume"]);
    site.wait("all pods have the third program", |status| {
        status["outdated"] == 0 && site.with(&third) == site.pods.len()
    });

    // One that does not start at all fails the self-test, and reaches no pod.
    let before = site.pids();
    let image = site.image("broken", b"#!/bin/sh\ncase $1 in --version) exit 0;; esac\nexit 3\n");
    site.run_agent(&image);
    site.wait("it waits", |status| {
        status["stage"] == "waits" && status["why"].as_str().is_some_and(|why| why.ends_with("self-test"))
    });
    thread::sleep(Duration::from_secs(3));
    assert_eq!((site.pids(), site.with(&third)), (before, site.pods.len()));
    // And back to the first, as by `helm rollback`.
    let image = site.prepared.node.dir.join("first");
    site.run_agent(&image);
    site.wait("all pods have the first program", |status| {
        status["outdated"] == 0 && site.with(&first) == site.pods.len()
    });
    site.everybody_reaches_the_lighthouse();
    site.prepared.stop(Signal::SIGTERM);
    for (sandbox, _) in &site.pods {
        for verb in ["stop-pod", "remove-pod"] {
            site.prepared.runtime.cri(&[verb, sandbox]).expect("it ends");
        }
    }
    super::prepared::removed_everything(&site.prepared.uninstall(&[]).wait_with_output().expect("it ends"));
    site.prepared.nothing_of_ours_is_left();
}
