//! The roll-out of a node with one instance, with a fake in place of the plugin.

use nebula_cni_contract::launch::Pod;
use serde_json::json;

use super::super::plan::Request;
use super::super::upgrade::tests::{GOOD, Site as Instance};
use super::*;
use crate::host_root::HostRoot;
use crate::readiness::Standing;

struct Node {
    instance: Instance,
    entry: Arc<Entry>,
    metrics: Metrics,
    readiness: Readiness,
    files: Files,
    terms: Terms,
    roller: Option<Roller>,
    busy: HashSet<String>,
    runtime: tokio::runtime::Runtime,
}

fn node(instance: Instance) -> Node {
    let root = instance.dir.path();
    let list = json!({"name": "pods", "cniVersion": "1.0.0", "plugins": [{"type": "nebula-cni-plugin",
        "stateDir": root.join("state"), "ca": {"url": "https://ca:8443", "tlsCaFile": "/t", "tokenFile": "/k"}}]});
    let readiness = Readiness::default();
    readiness.set(Part::Programs, Standing::good(""));
    readiness.set(Part::SelfTest, Standing::good(""));
    let files = Files::at(root.to_owned());
    let policy = Policy { watch_seconds: 1, ..Policy::DEFAULT };
    let terms = Terms { policy, retirement: Retirement::new(HostRoot::new(Some(root.to_owned()))) };
    Node {
        entry: Arc::new(Entry::of_list(&list).unwrap()),
        metrics: Metrics::new(false),
        readiness,
        roller: Some(Roller::with_files(&terms, files.clone())),
        files,
        terms,
        busy: HashSet::new(),
        runtime: tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap(),
        instance,
    }
}

impl Node {
    /// A look at the node, and all that follows from it. Returns the containers whose upgrade ended.
    fn work(&mut self) -> Vec<String> {
        let upgrade = &self.instance.upgrade;
        let queue = ApiQueue::none();
        let site = Site {
            plugin: &upgrade.plugin,
            entry: &self.entry,
            api_queue: &queue,
            metrics: &self.metrics,
            readiness: &self.readiness,
        };
        self.runtime.block_on(async {
            let status = upgrade.look().await.map(|sample| Arc::new(sample.status)).unwrap();
            let record = Attachment {
                key: upgrade.key.clone(),
                pod: Pod { namespace: "shop".into(), name: "web".into(), uid: "u".into() },
                is_complete: true,
                has_rules: false,
                netns_id: serde_json::from_str("[4, 9]").unwrap(),
                has_netns: true,
                instance: seen::Instance::Answers(status),
                silent_for: Duration::ZERO,
                has_device: None,
                restarts: 0,
                crash_loop: None,
            };
            let seen = Seen { records: vec![record], ..Seen::default() };
            self.roller.as_mut().unwrap().look(&site, &seen, &Plan::default(), &mut self.busy).await;
            let mut ended = Vec::new();
            while let Some(step) = Roller::step(&mut self.roller).await {
                assert!(self.busy.contains("c1"), "no repair begins meanwhile");
                assert!(self.roller.as_ref().unwrap().is_upgrading("c1"));
                ended.extend(self.roller.as_mut().unwrap().handle(&site, step, &mut self.busy));
            }
            assert!(self.busy.is_empty());
            ended
        })
    }

    fn restart(&mut self) {
        self.roller = Some(Roller::with_files(&self.terms, self.files.clone()));
    }

    fn shows(&self, metric: &str) -> bool {
        self.metrics.text().lines().any(|line| line == metric)
    }
}

#[test]
fn an_outdated_instance_is_upgraded_and_the_next_agent_finds_nothing_to_do() {
    let mut node = node(Instance::new(&json!({}), GOOD));
    assert_eq!(node.work(), ["c1"]);
    assert!(node.shows("nebula_cni_upgrades_total{result=\"upgraded\"} 1"));
    assert!(node.shows("nebula_cni_outdated_instances 0"));
    node.restart();
    assert!(node.work().is_empty());
    let state = node.files.state(0);
    assert_eq!((state.upgraded, state.outdated, state.is_finished), (1, 0, true));
    assert_eq!(node.instance.calls().len(), 1);
}

#[test]
fn a_failure_pauses_also_the_next_agent_until_an_operator_resumes() {
    let mut node = node(Instance::new(&json!({"certificate": null}), GOOD));
    assert_eq!(node.work(), ["c1"]);
    assert!(node.shows("nebula_cni_upgrades_total{result=\"rolled_back\"} 1"));
    assert!(node.shows("nebula_cni_outdated_instances 1") && node.shows("nebula_cni_upgrade_paused 1"));
    node.restart();
    assert!(node.roller.as_ref().unwrap().remark().is_some_and(|text| text.contains("lost the certificate")));
    assert!(node.work().is_empty());
    node.files.request(Request::Resume).unwrap();
    assert_eq!(node.work(), ["c1"], "once more");
    assert!(!node.files.is_requested());
    assert_eq!(node.files.state(0).rolled_back, 2);
}

#[test]
fn nothing_is_replaced_before_the_node_is_prepared_or_after_its_uninstallation_has_begun() {
    let mut node = node(Instance::new(&json!({}), GOOD));
    node.readiness.set(Part::SelfTest, Standing::bad("it fails"));
    assert!(node.work().is_empty());
    assert_eq!(node.files.state(0).waits_for.as_deref(), Some("the condition self-test"));
    node.readiness.set(Part::SelfTest, Standing::good(""));
    let marker = crate::retirement::Marker::set(&HostRoot::new(Some(node.instance.dir.path().to_owned()))).unwrap();
    assert!(node.work().is_empty());
    assert!(node.files.state(0).waits_for.is_some_and(|why| why.contains("uninstallation")));
    drop(marker);
    assert!(node.instance.calls().is_empty());
}

#[test]
fn what_cannot_be_noted_is_not_begun() {
    let mut node = node(Instance::new(&json!({}), GOOD));
    node.files = Files::at(node.instance.dir.path().join("none"));
    node.restart();
    assert_eq!(node.work(), ["c1"]);
    assert!(node.instance.calls().is_empty(), "postponed");
}
