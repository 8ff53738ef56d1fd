//! Everything that happens while a node starts, in random orders, beside a real containerd: whatever the order, every
//! enrolled pod is protected in the end, and none ever sends in clear once it has its tunnel. A pod that starts while
//! the runtime has our entry loaded does not send in clear at all: its sandbox sends from its first instruction on.
//!
//! `AGENT_ORDERS` (10) is the number of orders; `AGENT_SEED` repeats a run. What "in clear" means says
//! `world/clear.rs`.

#![allow(clippy::disallowed_methods, reason = "these tests watch real processes on a real clock")]

use crate::agent::prepared::{Prepared, STATE, removed_everything};
use crate::pods::runtime::Runtime;
use crate::world;

use std::fs;
use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use serde_json::{Value, json};
use world::chaos::{Random, instances, leases, number};
use world::clear::{Listener, Speaker, now};
use world::cluster::{Node, links};
use world::cri_session::CriSession;

const QUIET_WITHIN: Duration = Duration::from_secs(40);
/// The least time in which pods speak once all is quiet.
const LISTENED: Duration = Duration::from_millis(500);

/// What each sandbox runs.
const TALK: &str = "while :; do /bin/busybox ping -q -i 0.3 10.42.255.1; /bin/busybox sleep 0.1; done";

/// What happens in each order, and the first order itself: its first pod starts before the runtime has our entry, and
/// is attached in place. What cannot happen at its turn, such as the end of a process that does not run, is left out.
const STEPS: [Step; 13] = [
    Step::PrimaryWrites,
    Step::ContainerdRestarts,
    Step::PodStarts,
    Step::AgentStarts,
    Step::PrimaryRewrites,
    Step::PodStarts,
    Step::AgentKilled,
    Step::PrimaryRemovesOurs,
    Step::AgentStarts,
    Step::CaGoes,
    Step::PodStarts,
    Step::PodEnds,
    Step::CaReturns,
];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    PrimaryWrites,
    PrimaryRewrites,
    /// As an exclusive one does when it writes its own.
    PrimaryRemovesOurs,
    AgentStarts,
    AgentKilled,
    ContainerdRestarts,
    PodStarts,
    PodEnds,
    CaGoes,
    CaReturns,
}

/// A pod that runs.
struct Pod {
    number: u32,
    id: String,
    primary: Ipv4Addr,
    /// Before its sandbox was asked for.
    born: u64,
    /// Whether the runtime had our entry loaded all the time while it started.
    is_chained: bool,
}

struct Site {
    cri: CriSession,
    speaker: Speaker,
    listener: Listener,
    p: Prepared,
    random: Random,
    primary: Value,
    is_agent_up: bool,
    is_ca_up: bool,
    pods: Vec<Pod>,
    /// Pods that could not start yet, with the number of tries.
    waiting: Vec<(u32, u32)>,
    last_number: u32,
    counts: Counts,
}

/// What the orders met.
#[derive(Debug, Default)]
struct Counts {
    chained: usize,
    attached_in_place: usize,
    failed_starts: usize,
    longest_quiet: Duration,
}

#[test]
#[ignore = "needs root, containerd, the shared CRI tools and a build of the programs"]
fn in_whatever_order_a_node_starts_no_enrolled_pod_sends_in_clear() {
    in_random_orders(Prepared::with);
}

/// What makes a node: from the keys of our chain entry and what starts the runtime.
type Prepare = fn(Value, fn(&world::World, &Node) -> Runtime) -> Prepared;

/// Tries the orders on a node that `prepare` makes.
pub(crate) fn in_random_orders(prepare: Prepare) {
    let (orders, seed) = (number("AGENT_ORDERS", 10), number("AGENT_SEED", u64::from(std::process::id())));
    println!("AGENT_ORDERS={orders} AGENT_SEED={seed}");
    let began = Instant::now();
    let mut site = Site::new(Random::new(seed), prepare);
    // A pod that is not enrolled says in clear what the others must not.
    let control = site.cri.sandbox("open", "control", 0).unwrap_or_else(|error| panic!("{error}"));
    let control_address: Ipv4Addr = control["ips"][0].as_str().and_then(|ip| ip.parse().ok()).expect("an address");
    fs::remove_file(site.p.primary()).expect("remove the primary");
    for order in 1..=orders {
        let mut steps = STEPS;
        for last in (1..steps.len()).rev().filter(|_| order > 1) {
            steps.swap(last, site.random.below(last + 1));
        }
        println!("order {order}: {steps:?}");
        let order_began = Instant::now();
        for step in steps {
            site.happen(step);
            thread::sleep(Duration::from_millis(site.random.below(300) as u64));
        }
        site.come_to_rest();
        site.assert_nothing_in_clear(control_address);
        site.tidy();
        println!("  {:.1} s", order_began.elapsed().as_secs_f64());
    }
    println!("{orders} orders in {:.0} s: {:?}", began.elapsed().as_secs_f64(), site.counts);
    assert!(site.counts.attached_in_place > 0, "the pod of the first order was not attached in place");
    assert!(site.counts.chained > 0, "no pod started beside an entry of ours");
    // The runtime tears it down with the result that it kept.
    fs::write(site.p.primary(), site.primary.to_string()).expect("write the primary");
    site.cri.remove(control["id"].as_str().expect("an id")).unwrap_or_else(|error| panic!("{error}"));
    site.nothing_is_left();
}

impl Site {
    fn new(random: Random, prepare: Prepare) -> Self {
        let more = json!({"enrol": {"namespaces": ["shop"]}, "timeoutSeconds": 3});
        let p = prepare(more, |world, node| Runtime::with_pause(world, node, TALK));
        Self {
            cri: CriSession::new(&p.runtime.dir.join("run/containerd.sock")),
            speaker: Speaker::start(),
            listener: Listener::start(&p.cluster.world.namespace_of("n1")),
            primary: serde_json::from_slice(&fs::read(p.primary()).expect("the primary")).expect("JSON"),
            p,
            random,
            is_agent_up: false,
            is_ca_up: true,
            pods: Vec::new(),
            waiting: Vec::new(),
            last_number: 0,
            counts: Counts::default(),
        }
    }

    fn happen(&mut self, step: Step) {
        match step {
            Step::PrimaryWrites if !self.p.primary().exists() => self.write_primary(),
            Step::PrimaryRewrites if self.p.primary().exists() => {
                self.primary["plugins"][0]["mtu"] = (1300 + self.random.below(200)).into();
                self.write_primary();
            }
            Step::PrimaryRemovesOurs => {
                let ours = self.p.own_file();
                if fs::rename(&ours, ours.with_extension("conflist.cilium_bak")).is_ok() {
                    // Until the runtime has noticed, and not only an agent that puts it back.
                    thread::sleep(Duration::from_millis(300));
                }
            }
            Step::AgentStarts if !self.is_agent_up => {
                self.p.start();
                self.is_agent_up = true;
            }
            Step::AgentKilled if self.is_agent_up => {
                self.p.stop(Signal::SIGKILL);
                self.is_agent_up = false;
            }
            Step::ContainerdRestarts => {
                self.p.runtime.kill();
                self.p.runtime.up(&self.p.cluster.world, &self.p.node, "");
                self.cri.close();
            }
            Step::PodStarts => {
                self.last_number += 1;
                self.start_pod(self.last_number, 0);
            }
            Step::PodEnds if !self.pods.is_empty() => {
                let pod = self.pods.swap_remove(self.random.below(self.pods.len()));
                // It may end while it is being attached, and for good.
                self.assert_pod_was_silent(&pod);
                self.remove_pod(&pod);
            }
            Step::CaGoes if self.is_ca_up => {
                self.p.cluster.world.stop("control", Signal::SIGKILL);
                self.is_ca_up = false;
            }
            Step::CaReturns if !self.is_ca_up => {
                self.p.cluster.start_ca();
                self.is_ca_up = true;
            }
            _ => {}
        }
    }

    /// Some write in place, others rename.
    fn write_primary(&mut self) {
        let (path, text) = (self.p.primary(), self.primary.to_string());
        if self.random.one_in(2) {
            fs::write(path, text).expect("write the primary");
        } else {
            let new = path.with_extension("tmp");
            fs::write(&new, text).expect("write the primary");
            fs::rename(new, path).expect("rename the primary");
        }
    }

    fn has_loaded_ours(&self) -> bool {
        self.cri.call(&["status"]).is_ok_and(|said| said.contains("nebula-cni-plugin"))
    }

    /// Starts a pod as a kubelet does; one that fails is tried again later.
    fn start_pod(&mut self, number: u32, attempt: u32) {
        let (born, was_loaded) = (now(), self.has_loaded_ours());
        let pod = match self.cri.sandbox("shop", &format!("p{number}"), attempt) {
            Ok(pod) => pod,
            Err(error) => {
                let is_excused = !self.is_ca_up || !was_loaded || attempt < 3;
                assert!(is_excused, "p{number} does not start: {error}\n{}", self.logs());
                self.counts.failed_starts += 1;
                self.waiting.push((number, attempt + 1));
                return;
            }
        };
        let is_chained = was_loaded && self.has_loaded_ours();
        let id = pod["id"].as_str().expect("an id").to_owned();
        let primary = pod["ips"][0].as_str().and_then(|ip| ip.parse().ok()).expect("an address");
        let launch = self.p.node.records().join(format!("{id}-eth0.launch"));
        self.speaker.join(number, PathBuf::from(pod["netns"].as_str().expect("a namespace")), launch);
        *(if is_chained { &mut self.counts.chained } else { &mut self.counts.attached_in_place }) += 1;
        self.pods.push(Pod { number, id, primary, born, is_chained });
    }

    fn remove_pod(&self, pod: &Pod) {
        self.speaker.leave(pod.number);
        self.cri.remove(&pod.id).unwrap_or_else(|error| panic!("{error}\n{}", self.logs()));
    }

    /// Everything that belongs on a node is there now: it becomes ready, one more pod starts, every pod gets its
    /// tunnel, and all reach each other.
    fn come_to_rest(&mut self) {
        self.happen(Step::PrimaryWrites);
        self.happen(Step::CaReturns);
        self.happen(Step::AgentStarts);
        let began = Instant::now();
        self.until("the node is ready", |site| site.p.status().1 && site.has_loaded_ours());
        for (number, attempt) in std::mem::take(&mut self.waiting) {
            self.start_pod(number, attempt);
        }
        self.happen(Step::PodStarts);
        assert!(self.waiting.is_empty(), "a ready node refuses pods {:?}\n{}", self.waiting, self.logs());
        self.until("every pod is attached", |site| {
            site.pods.iter().all(|pod| site.speaker.voice(pod.number).attached.is_some())
        });
        self.counts.longest_quiet = self.counts.longest_quiet.max(began.elapsed());
        let quiet = now();
        let numbers: Vec<u32> = self.pods.iter().map(|pod| pod.number).collect();
        self.until("all pods reach each other", |site| {
            numbers.iter().all(|to| {
                let heard = site.speaker.voice(*to).heard;
                numbers.iter().filter(|from| *from != to).all(|from| heard.get(from).is_some_and(|sent| *sent > quiet))
            })
        });
        thread::sleep(LISTENED);
    }

    fn until(&self, what: &str, is_so: impl Fn(&Self) -> bool) {
        let began = Instant::now();
        while !is_so(self) {
            assert!(began.elapsed() < QUIET_WITHIN, "{what}: {:#}\n{}", self.p.status().0, self.logs());
            thread::sleep(Duration::from_millis(50));
        }
    }

    /// Since when nothing of a pod may be heard; `None` while it has never had a tunnel.
    fn silent_since(&self, pod: &Pod) -> Option<u64> {
        if pod.is_chained { Some(pod.born) } else { self.speaker.voice(pod.number).attached }
    }

    fn assert_pod_was_silent(&self, pod: &Pod) {
        let Some(since) = self.silent_since(pod) else { return };
        let clear = self.listener.clear();
        let heard = [clear.speakers.get(&pod.number), clear.sources.get(&pod.primary)];
        let last = heard.into_iter().flatten().map(|heard| heard.last).max().unwrap_or_default();
        let late = Duration::from_nanos(last.saturating_sub(since));
        let Pod { number, primary, is_chained, .. } = pod;
        assert!(
            late.is_zero(),
            "p{number} ({primary}, chained: {is_chained}) spoke in clear {late:?} late: {clear:?}\n{}",
            self.logs()
        );
    }

    fn assert_nothing_in_clear(&self, control: Ipv4Addr) {
        for pod in &self.pods {
            self.assert_pod_was_silent(pod);
        }
        let clear = self.listener.clear();
        assert!(
            clear.sources.get(&control).is_some_and(|heard| heard.count > 3),
            "the capture hears nothing: {clear:?}"
        );
        // Not even by an address of the overlay, which no link of the node carries.
        let strange = clear.sources.keys().find(|source| source.octets()[..2] == [10, 42]);
        assert!(strange.is_none(), "{clear:?}\n{}", self.logs());
    }

    /// Ends the pods, uninstalls, and leaves a node on which nothing was ever installed.
    fn tidy(&mut self) {
        for pod in std::mem::take(&mut self.pods) {
            self.remove_pod(&pod);
        }
        let uninstalled = self.p.uninstall(&[]).wait_with_output().expect("it ends");
        removed_everything(&uninstalled);
        self.happen(Step::AgentKilled);
        let _ = fs::remove_file(self.p.own_file().with_extension("conflist.cilium_bak"));
        self.p.nothing_of_ours_is_left();
        fs::remove_file(self.p.primary()).expect("remove the primary");
        self.listener.forget();
    }

    fn nothing_is_left(&self) {
        // Also of self-tests that were interrupted: they end by themselves.
        self.until("the instances end", |_| instances(STATE).is_empty());
        let namespace = self.p.cluster.world.namespace_of("n1");
        self.until("the kernel removes the pods' links", |_| links(&namespace).len() <= 3);
        assert_eq!(leases(&self.p.node), Vec::<String>::new(), "addresses are left");
    }

    fn logs(&self) -> String {
        format!("{}\n{}", self.p.node.instance_logs(), self.p.cluster.world.all_logs())
    }
}
