//! The cluster table of this node: what the CA's directory and the API server say, in one file that all instances map.
//! Written while pods are captured, and by nobody else.
//!
//! Each input is followed on its own; one that fails holds up no other. Nothing is written before all of them have
//! said what they know, so that a restart of the agent never makes the table poorer; after that, what was known is
//! kept while the CA or the API server is away.

pub mod clear_policies;
pub mod clear_sets;
pub mod departed;
pub mod directory;
pub mod endpoints;
mod enforced;
pub mod facts;
pub mod fuzzing;
pub mod judgement;
mod keeper;
pub mod kept;
pub mod member;
pub mod nodes;
mod outputs;
mod pods;
pub mod ranges;
mod records;
mod relabel;
pub(crate) mod seeded;
pub mod service_choices;
pub mod services;
pub mod shown;
pub(crate) mod watches;
pub mod writer;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use nebula_cni_contract::launch::CLUSTER_TABLE;
use serde_json::{Map, Value, json};
use tokio::sync::{Notify, oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;

use self::departed::Departed;
use self::directory::DirectoryClient;
use self::enforced::Enforced;
use self::facts::{Facts, Input};
use self::keeper::Keeper;
use self::outputs::Outputs;
use self::shown::{Namespaces, Rules};
use self::writer::Writer;
use crate::ca::Target;
use crate::cluster::api;
use crate::config::{Config, STATE_DIR};
use crate::host_root::HostRoot;
use crate::metrics::Metrics;
use crate::node::Node;
use crate::policy;
use crate::readiness::{Part, Standing};
use crate::reconcile::entry::{Entry, EntryError};
use crate::underlay::nodes::Ports;

/// What the followers tell and the writer reads.
#[derive(Debug, Default)]
pub(crate) struct Shared {
    facts: Mutex<Facts>,
    changed: Notify,
    /// What is wrong with an input, and since when.
    problems: Mutex<BTreeMap<&'static str, (String, Instant)>>,
}

/// Keeps the table for ever, if pods are captured. `name` is the node's name in Kubernetes.
/// The endpoints of instances on other nodes are sent to `ports`.
pub async fn keep(
    node: &Node,
    name: Option<String>,
    (target, ports): (watch::Receiver<Option<Target>>, watch::Sender<Ports>),
    metrics: Arc<Metrics>,
) {
    let Node { config, readiness, .. } = node;
    if !is_wanted(&config.entry) {
        let is_not_needed = || Standing::good("is not needed: the chain entry captures nothing");
        readiness.set(Part::Policies, is_not_needed());
        return readiness.set(Part::Table, is_not_needed());
    }
    if !config.policies.enabled {
        let off = "are not enforced in tunnels: \"policy.enabled\" is off; what passes through a tunnel meets Nebula's rules only";
        readiness.set(Part::Policies, Standing::good(off));
    }
    let unusable = |why: String, advice: &str| readiness.set(Part::Table, Standing::bad(why).advice(advice));
    let Some(name) = name else {
        return unusable("the name of the node is not known".to_owned(), "set --node or NODE_NAME");
    };
    let rules = match rules(config) {
        Ok(rules) => rules,
        Err(error) => return unusable(error.to_string(), "correct \"entry\" in agent.json"),
    };
    let client = loop {
        match api::open(None).await {
            Ok(client) => break client,
            Err(error) => unusable(error.to_string(), "the agent's pod needs its service account's token"),
        }
        tokio::time::sleep(RETRY).await;
    };
    let shared = Arc::new(Shared::default());
    shared.facts().settings = facts::Settings {
        pod_ranges: rules.pod_ranges().to_vec(),
        exclude: rules.exclude().to_vec(),
        load_balancers: rules.load_balancers().to_vec(),
        node_ranges: config.node_ranges,
        ports: rules.ports(),
        policies: config.policies.enabled.then(|| facts::PolicySettings {
            dns: config.policies.dns.clone(),
            services: rules.services().to_vec(),
            node_ports: rules.node_ports(),
        }),
    };
    // Dropped with this task, and all of them with it.
    let mut followers = JoinSet::new();
    let conditions = config.policies.condition.then(|| policy::conditions::Conditions::new(&name));
    follow_cluster(&mut followers, &shared, &client, (rules, asks_for_namespaces(config)), conditions);
    followers.spawn(follow_directory(Arc::clone(&shared), config.host_root.clone(), target));
    let path = config.host_root.resolve(Path::new(CLUSTER_TABLE));
    let (writer, readiness) = (Writer::open(&path), readiness.clone());
    let departed = Departed::since_table(&path);
    let enforced = match config.policies.enabled {
        true => {
            let state_dir = config.host_root.resolve(Path::new(STATE_DIR));
            Enforced::since_table(&path, state_dir, config.policies.required)
        }
        false => Enforced::default(),
    };
    let outputs = Outputs { node: name, writer, ports, departed, enforced, ..Outputs::default() };
    let unenforced = node.unenforced.clone();
    Keeper { shared, outputs, metrics, readiness, unenforced, failure: None }.run().await;
}

/// Starts to follow everything that the API server knows.
fn follow_cluster(
    followers: &mut JoinSet<()>,
    shared: &Arc<Shared>,
    client: &kube::Client,
    (rules, asks_for_namespaces): (Rules, bool),
    conditions: Option<policy::conditions::Conditions>,
) {
    let (known, namespaces) = watch::channel((!asks_for_namespaces).then(|| Arc::new(Namespaces::new())));
    let (own, api) = (|| Arc::clone(shared), || client.clone());
    let has_policies = shared.facts().settings.policies.is_some();
    let rules = if has_policies { rules.describing() } else { rules };
    followers.spawn(watches::services(own(), api()));
    followers.spawn(watches::endpoints(own(), api()));
    followers.spawn(watches::nodes(own(), api()));
    followers.spawn(watches::pods(own(), api(), rules, namespaces));
    if asks_for_namespaces {
        followers.spawn(watches::namespaces(own(), api(), known));
    }
    if has_policies {
        followers.spawn(policy::watches::namespaces(own(), api()));
        followers.spawn(policy::watches::policies(own(), api()));
        if let Some(conditions) = conditions.clone() {
            followers.spawn(conditions.keep(api()));
        }
        followers.spawn(policy::watches::cluster_policies(own(), api(), conditions));
    }
}

/// Whether the chain entry captures.
#[must_use]
pub fn is_wanted(entry: &Map<String, Value>) -> bool {
    entry.get("capture").is_some_and(|capture| *capture != Value::Bool(false))
}

fn rules(config: &Config) -> Result<Rules, EntryError> {
    let entry = |entry: Map<String, Value>| {
        Entry::of_list(&json!({"name": "cluster-table", "cniVersion": "1.0.0", "plugins": [entry]}))
    };
    // Where the CA is makes no difference to who is enrolled.
    let all = config.chain_entry("https://ca.invalid", None);
    let mut of_namespaces = all.clone();
    if let Some(enrol) = of_namespaces.get_mut("enrol").and_then(Value::as_object_mut) {
        enrol.remove("podSelector");
    }
    Ok(Rules::new(entry(all)?, entry(of_namespaces)?, has_selector(config, "podSelector")))
}

fn asks_for_namespaces(config: &Config) -> bool {
    has_selector(config, "namespaceSelector")
}

fn has_selector(config: &Config, key: &str) -> bool {
    config.entry.get("enrol").is_some_and(|enrol| enrol.get(key).is_some())
}

impl Shared {
    pub(crate) fn facts(&self) -> MutexGuard<'_, Facts> {
        // Each change is complete before the lock is given back.
        self.facts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the facts; the table is written again if `change` returns `true`.
    pub(crate) fn change(&self, change: impl FnOnce(&mut Facts) -> bool) {
        let mut facts = self.facts();
        if change(&mut facts) {
            facts.changes += 1;
            self.changed.notify_one();
        }
    }

    pub(crate) fn has_problem(&self, input: Input, why: String) {
        let mut problems = self.problems.lock().unwrap_or_else(PoisonError::into_inner);
        let since = problems.get(input.name()).map_or_else(Instant::now, |(_, since)| *since);
        let before = problems.insert(input.name(), (why.clone(), since));
        if before.is_none_or(|(before, _)| before != why) {
            tracing::warn!(input = input.name(), error = why, "cannot follow an input of the cluster table");
        }
    }

    pub(crate) fn is_well(&self, input: Input) {
        let mut problems = self.problems.lock().unwrap_or_else(PoisonError::into_inner);
        if problems.remove(input.name()).is_some() {
            tracing::info!(input = input.name(), "an input of the cluster table is followed again");
        }
    }

    /// Inputs of policies that have not been listed completely; `None` if policies are not enforced.
    fn policies_missing(&self) -> Option<Vec<&'static str>> {
        let facts = self.facts();
        facts.settings.policies.is_some().then(|| facts.missing_for_policies())
    }

    pub(crate) fn problems(&self) -> BTreeMap<&'static str, (String, Duration)> {
        let problems = self.problems.lock().unwrap_or_else(PoisonError::into_inner);
        problems.iter().map(|(input, (why, since))| (*input, (why.clone(), since.elapsed()))).collect()
    }
}

/// Follows the directory for ever.
async fn follow_directory(shared: Arc<Shared>, host: HostRoot, mut target: watch::Receiver<Option<Target>>) {
    let mut known: Option<(Target, DirectoryClient)> = None;
    let (mut failures, mut read_all) = (0u32, Instant::now());
    loop {
        let Ok(now) = target.wait_for(Option::is_some).await.map(|target| target.clone()) else { return };
        let Some(now) = now else { continue };
        let mut client = match known.take().filter(|(before, _)| *before == now) {
            Some((_, client)) => client,
            None => DirectoryClient::new(now.clone(), &host),
        };
        if read_all.elapsed() > READ_ALL_EVERY {
            read_all = Instant::now();
            client.forget();
        }
        // A thread of its own: a long poll must not hold up the end of the process.
        let (sender, outcome) = oneshot::channel();
        let asked = std::thread::Builder::new().name("directory".to_owned()).spawn(move || {
            let outcome = client.ask();
            let _ = sender.send((client, outcome));
        });
        let pause = match (asked, outcome.await) {
            (Ok(_), Ok((mut client, Ok(answer)))) => {
                failures = 0;
                shared.is_well(Input::Directory);
                let pause = answer.retry_after.unwrap_or_default().clamp(ASK_EVERY, MAX_PAUSE);
                shared.change(|facts| client.take(answer, facts));
                let pause = if client.is_reading() { Duration::ZERO } else { pause };
                known = Some((now, client));
                pause
            }
            (Ok(_), Ok((mut client, Err(error)))) => {
                shared.has_problem(Input::Directory, format!("{error}; {}", error.advice()));
                client.failed();
                known = Some((now, client));
                failures += 1;
                pause_after(failures)
            }
            _ => MAX_PAUSE,
        };
        tokio::time::sleep(pause).await;
    }
}

/// The time until the next question after so many failed ones in a row: 2, 4, 8, 16, then 30 seconds.
fn pause_after(failures: u32) -> Duration {
    RETRY.saturating_mul(1 << failures.min(5)).min(MAX_PAUSE)
}

const RETRY: Duration = Duration::from_secs(1);
/// Between a change and the next question; the CA gathers changes, too.
const ASK_EVERY: Duration = Duration::from_millis(200);
const MAX_PAUSE: Duration = Duration::from_secs(30);
/// Against a directory that is wrong in a way that nobody thought of.
const READ_ALL_EVERY: Duration = Duration::from_secs(3_600);

#[cfg(test)]
mod tests;
