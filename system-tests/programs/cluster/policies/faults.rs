//! Policies change while agents, instances, the CA, kubelets and the API server are killed. No flow ever passes that
//! neither the last policy in effect nor the one that replaces it allows.
//!
//! `KUBE_FAULTS` (8) is the number of changes; `KUBE_SEED` repeats a run.

use std::time::{Duration, Instant};

use super::super::capture::town::{ApiServer, Town};
use super::grid::{Flow, Grid};
use super::{Case, is_to_pass, network_policies, settle, site};
use crate::world::chaos::{Random, number};
use crate::world::kube::{NAMESPACE, text};

/// Until everything that was killed is back and the last change is in effect.
const RECOVERED_WITHIN: Duration = Duration::from_secs(180);

#[derive(Debug, Clone, Copy)]
enum Fault {
    AgentDies,
    InstanceDies,
    CaDies,
    KubeletRestarts,
    ApiServerDies,
}

const FAULTS: [Fault; 6] = [
    Fault::AgentDies,
    Fault::InstanceDies,
    Fault::AgentDies,
    Fault::CaDies,
    Fault::KubeletRestarts,
    Fault::ApiServerDies,
];

struct Site {
    town: Town,
    grid: Grid,
    random: Random,
    killed_server: Option<ApiServer>,
    rounds: usize,
}

#[test]
#[ignore = "needs root, containerd, etcd, conntrack, dnsmasq, a release build and a build of Kubernetes"]
fn whatever_is_killed_no_flow_passes_that_the_last_policies_refuse() {
    let (changes, seed) = (number("KUBE_FAULTS", 8), number("KUBE_SEED", u64::from(std::process::id())));
    println!("KUBE_FAULTS={changes} KUBE_SEED={seed}");
    let (town, grid) = site();
    let mut site = Site { town, grid, random: Random::new(seed), killed_server: None, rounds: 0 };
    let cases = network_policies::alternatives();
    let mut current = site.random.below(cases.len());
    site.apply(&cases[current]);
    settle(&site.town, &site.grid, cases[current].name, RECOVERED_WITHIN, &cases[current].allows);
    for change in 1..=changes {
        let next = (current + 1 + site.random.below(cases.len() - 1)) % cases.len();
        let faults: Vec<Fault> = (0..=site.random.below(3)).map(|_| site.pick()).collect();
        let change_at = site.random.below(faults.len() + 1);
        println!("{change}: {} -> {}, before fault {change_at} of {faults:?}", cases[current].name, cases[next].name);
        let began = Instant::now();
        for (index, fault) in faults.iter().enumerate() {
            if index == change_at {
                site.apply(&cases[next]);
            }
            site.happen(*fault);
            std::thread::sleep(Duration::from_millis(site.random.below(2000) as u64));
            let is_changed = index >= change_at;
            site.is_never_more_open(&|flow| (cases[current].allows)(flow) || is_changed && (cases[next].allows)(flow));
        }
        if change_at == faults.len() {
            site.apply(&cases[next]);
        }
        site.start_server();
        settle(&site.town, &site.grid, cases[next].name, RECOVERED_WITHIN, &cases[next].allows);
        println!("  in effect, everything is back: {:.0} s", began.elapsed().as_secs_f64());
        current = next;
    }
    println!("{} rounds of flows while parts of the cluster were away", site.rounds);
}

impl Site {
    fn pick(&mut self) -> Fault {
        FAULTS[self.random.below(FAULTS.len())]
    }

    /// Replaces what is there, in one step.
    fn apply(&mut self, case: &Case) {
        self.start_server();
        let [policy] = &case.policies[..] else { panic!("{} is not one policy", case.name) };
        self.town.nodes.apply("policy.json", &policy.to_string());
    }

    fn start_server(&mut self) {
        if let Some(server) = self.killed_server.take() {
            server.start(&self.town);
        }
    }

    fn happen(&mut self, fault: Fault) {
        let node = self.random.below(2) + 1;
        let number = u8::try_from(node).expect("one or two");
        let on = |script: &str| {
            let said = self.town.nodes.on(number, &["sh", "-c", script]);
            assert!(said.status.success(), "{fault:?}: {}\n{}", text(&said), self.town.details());
        };
        match fault {
            Fault::AgentDies if self.killed_server.is_some() => {
                on("pid=$(pgrep -o -f 'nebula-cni-agent run') && kill -9 \"$pid\" || :");
            }
            Fault::AgentDies => {
                let field = format!("--field-selector=spec.nodeName={}", ["test-node", "node2"][node - 1]);
                self.delete_pods(&[&field, "-l", "app.kubernetes.io/name=nebula-cni-agent"]);
            }
            Fault::InstanceDies => {
                let which = self.random.below(5) + 1;
                on(&format!("pid=$(pgrep nebula-cni-ins | sed -n {which}p) && kill -9 $pid || :"));
            }
            Fault::CaDies => {
                self.start_server();
                self.delete_pods(&["-l", "app.kubernetes.io/name=nebula-ca"]);
            }
            Fault::KubeletRestarts => {
                self.start_server();
                let done = self.town.nodes.tool("kubelet").arg(node.to_string()).output().expect("it runs");
                assert!(done.status.success(), "{}\n{}", text(&done), self.town.nodes.state());
            }
            Fault::ApiServerDies => {
                self.start_server();
                self.killed_server = Some(self.town.kill_api_server());
            }
        }
    }

    /// At once, without a chance to tidy up.
    fn delete_pods(&self, which: &[&str]) {
        self.town
            .nodes
            .kubectl(&[&["delete", "pod", "-n", NAMESPACE, "--grace-period=0", "--force"][..], which].concat());
    }

    fn is_never_more_open(&mut self, allows: &dyn Fn(&Flow) -> bool) {
        let opened = self.grid.opened();
        let passed: Vec<_> =
            opened.iter().filter(|((flow, _), opened)| **opened && !is_to_pass(flow, allows)).collect();
        assert!(passed.is_empty(), "{} flows, such as {:#?}\n{}", passed.len(), passed.first(), self.town.details());
        self.rounds += 1;
    }
}
