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
use crate::world::cluster::{LIGHTHOUSE, answer_at, binary, faulty_instance};
use crate::world::cost::{cpu_ticks, cpu_ticks_with_children};

const INSTANCE: &str = "nebula-cni-instance";
/// Ten seconds, and some where other tests run beside this one.
const ROLLED_BACK_WITHIN: Duration = Duration::from_secs(15);
/// Faults of a new program: what messages call it, and its name in `examples/faulty_instance.rs`.
const FAULTS: &[(&str, &str)] = &[
    // In recvmmsg(2).
    ("it dies as it takes over", "kill 299"),
    ("it sends no packet", "mute 4"),
    ("it dies a second later", "die 1"),
    ("it hangs", "stop 1"),
    ("it leaks", "leak 100"),
];

struct Site {
    prepared: Prepared,
    /// Sandboxes and containers of the pods.
    pods: Vec<(String, String)>,
}

impl Site {
    /// A node with `pods` running pods and the agent of the first image, which watches new programs for `watch` s.
    fn of(pods: u64, watch: u64) -> Self {
        let mut site = Self { prepared: Prepared::new(), pods: Vec::new() };
        site.prepared.configure("upgrade", json!({"watchSeconds": watch, "parallel": number("ROLLOUT_PARALLEL", 2)}));
        let first = site.image("first", &instance(b""));
        site.run_agent(&first);
        site.prepared.wait("the node is prepared", || site.prepared.chain().len() == 2);
        let start = |n| {
            let (sandbox, container, _) = site.prepared.runtime.pod(&format!("web-{n}"));
            (sandbox, container)
        };
        site.pods = (0..pods).map(start).collect();
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

    /// Whether this program runs in place of an instance, or is about to.
    fn takes_over(&self, program: &[u8]) -> bool {
        let is_it = |path: PathBuf| {
            let line = fs::read(path.join("cmdline")).unwrap_or_default();
            let replaces = line.split(|byte| *byte == 0).any(|word| word == b"--take-over");
            replaces && fs::metadata(path.join("exe")).is_ok_and(|found| found.len() == program.len() as u64)
        };
        fs::read_dir("/proc").expect("/proc").flatten().any(|entry| is_it(entry.path()))
    }

    fn end(mut self) {
        self.prepared.stop(Signal::SIGTERM);
        for (sandbox, _) in &self.pods {
            for verb in ["stop-pod", "remove-pod"] {
                self.prepared.runtime.cri(&[verb, sandbox]).expect("it ends");
            }
        }
        super::prepared::removed_everything(&self.prepared.uninstall(&[]).wait_with_output().expect("it ends"));
        self.prepared.nothing_of_ours_is_left();
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
fn a_new_program_that_fails_in_a_pod_is_rolled_back_by_itself_within_ten_seconds() {
    let mut site = Site::of(1, 15);
    let first = instance(b"");
    // The full depth has all of them.
    let most = usize::try_from(number("ROLLOUT_FAULTS", 2)).expect("a number");
    for (n, (what, fault)) in FAULTS.iter().enumerate().take(most) {
        let before = site.status()["rolled_back"].as_u64();
        let program = faulty_instance(fault);
        let image = site.image(&format!("faulty{n}"), &program);
        site.run_agent(&image);
        // One that dies at once may be gone before it was seen.
        site.wait(what, |status| site.takes_over(&program) || !status["paused"].is_null());
        let took = site.wait(what, |status| {
            !status["paused"].is_null() && status["rolled_back"].as_u64() > before && site.with(&first) == 1
        });
        println!("{what}: the first program serves again after {took:?}: {}", site.status()["paused"]["why"]);
        assert!(took < ROLLED_BACK_WITHIN, "{what}: {took:?}");
        site.everybody_reaches_the_lighthouse();
        // The operator installs the first one again.
        let image = site.prepared.node.dir.join("first");
        site.run_agent(&image);
        site.upgrade(&["resume"]);
        site.wait("all is as before", |status| status["stage"] == "current");
    }
    site.end();
}

#[test]
#[ignore = "needs root, containerd, the shared CRI tools and a build of the programs"]
fn a_new_program_reaches_running_pods_and_one_that_fails_is_taken_back() {
    let mut site = Site::of(number("ROLLOUT_PODS", 4), 3);
    let (first, second, third) = (instance(b""), instance(b"second"), instance(b"third"));
    assert_eq!(site.with(&first), site.pods.len());
    let (pids, certificates) = (site.pids(), site.certificates());
    let image = site.image("second", &second);
    site.run_agent(&image);
    let took = site.wait("all pods have the second program", |status| {
        status["outdated"] == 0 && status["upgraded"] == site.pods.len() && site.with(&second) == site.pods.len()
    });
    let agent = cpu_ticks_with_children(u64::from(site.prepared.cluster.world.pid("agent")));
    let instances: Vec<u64> = site.pids().into_iter().filter_map(|pid| pid.try_into().ok()).collect();
    println!(
        "{} pods have another program after {took:?}, with a canary that was watched for 3 s: {:.2} cores",
        site.pods.len(),
        (agent + cpu_ticks(&instances)) as f64 / 100.0 / took.as_secs_f64()
    );
    assert!(site.pids().iter().zip(&pids).all(|(now, before)| now != before));
    assert_eq!(site.certificates(), certificates);
    site.everybody_reaches_the_lighthouse();

    // The canary dies with the third program.
    let before = site.pids();
    let image = site.image("third", &third);
    site.run_agent(&image);
    // It is asked alone: the others take longer than a canary is watched, if there are many.
    let changed = |status: &Value| {
        let number: usize = status["under_way"][0].as_str()?.strip_prefix("shop/web-")?.parse().ok()?;
        let now = i32::try_from(site.ask(&site.pods[number].0)["pid"].as_i64()?).ok()?;
        (now != before[number]).then_some(now)
    };
    site.wait("a canary", |status| changed(status).is_some());
    kill(Pid::from_raw(changed(&site.status()).expect("a canary")), Signal::SIGKILL).expect("it runs");
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
    site.end();
}
