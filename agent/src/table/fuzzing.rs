//! Entry point for fuzzing the table writer with what the watches of the API server say, without a server.

use std::net::IpAddr;

use k8s_openapi::api::core::v1 as core;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use nebula_cni_contract::cluster_table::contents::Contents;
use nebula_cni_contract::cluster_table::{Layout, version_of};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::endpoints::Slice;
use super::facts::{Facts, Settings};
use super::kept::Keep;
use super::member::{self, Member, addresses};
use super::nodes::NodeFacts;
use super::services::Service;
use super::shown::{Namespaces, Pod, Rules};
use super::watches::name;
use super::writer::next_version;
use crate::reconcile::entry::Entry;

/// A line of the input: an event of a watch, as the API server sends it.
#[derive(Deserialize)]
struct Line {
    /// `ADDED`, `MODIFIED` or `DELETED`; or `CLOCK`, and the object is the time in seconds.
    #[serde(rename = "type")]
    kind: String,
    object: Value,
}

/// A holder of a certificate, as the CA's directory has it.
#[derive(Deserialize)]
struct Holder {
    uid: String,
    addresses: Vec<IpAddr>,
}

/// What is known, and the version of the last table.
struct World {
    facts: Facts,
    rules: Rules,
    version: u64,
    clock: i64,
}

/// Follows events of watches, one a line, and makes the table after each. Its readers take every table, versions rise
/// whatever the clock does, the same facts make the same table, and no namespace takes more memory than its budget.
///
/// # Panics
/// Panics if one of these is not so.
pub fn events(data: &[u8]) {
    let Some(mut world) = World::new() else { return };
    for line in data.split(|byte| *byte == b'\n').take(MAX_EVENTS) {
        if let Ok(line) = serde_json::from_slice(line)
            && world.take(&line).is_some()
        {
            world.check();
        }
    }
}

impl World {
    fn new() -> Option<Self> {
        let entry = json!({"type": "nebula-cni", "enrol": {"namespaces": ["shop"]}, "overlay": ["10.244.0.0/16"],
            "ca": {"url": "https://ca:1", "tlsCaFile": "/a", "tokenFile": "/b"}});
        let entry = Entry::of_list(&json!({"name": "n", "cniVersion": "1.0.0", "plugins": [entry]})).ok()?;
        let mut facts = Facts::default();
        let pod_ranges = vec!["10.244.0.0/16".parse().ok()?];
        facts.settings = Settings {
            pod_ranges,
            exclude: Vec::new(),
            load_balancers: Vec::new(),
            node_ranges: true,
            ports: Some((61_000, 61_999)),
            policies: None,
        };
        facts.services.limit(BUDGET);
        facts.slices.limit(BUDGET);
        Some(Self { facts, rules: Rules::new(entry.clone(), entry, false), version: 0, clock: 0 })
    }

    /// Returns `None` if the line is no event of something that is followed.
    fn take(&mut self, line: &Line) -> Option<()> {
        let is_there = match line.kind.as_str() {
            "ADDED" | "MODIFIED" => true,
            "DELETED" => false,
            "CLOCK" => {
                self.clock = line.object.as_i64()?;
                return Some(());
            }
            _ => return None,
        };
        let facts = &mut self.facts;
        match line.object.get("kind")?.as_str()? {
            "Service" => {
                let service: core::Service = read(&line.object)?;
                facts.services.put(name(&service), Service::of(&service).filter(|_| is_there));
            }
            "EndpointSlice" => {
                let slice: EndpointSlice = read(&line.object)?;
                let parts = Slice::of_slice(&slice);
                facts.slices.put(name(&slice), Some(parts).filter(|parts| is_there && !parts.is_empty()));
            }
            "Endpoints" => {
                let endpoints: core::Endpoints = read(&line.object)?;
                let parts = Slice::of_endpoints(&endpoints);
                facts.slices.put(name(&endpoints), Some(parts).filter(|parts| is_there && !parts.is_empty()));
            }
            "Node" => {
                let node: core::Node = read(&line.object)?;
                let name = node.metadata.name.clone().unwrap_or_default();
                facts.nodes.put(name.into(), Some(NodeFacts::of(&node)).filter(|_| is_there));
            }
            "Pod" => {
                let pod: Pod = read(&line.object)?;
                let id = member::id(pod.metadata.uid.as_deref().unwrap_or_default());
                facts.pods.put(id, self.rules.shown(&pod, &Namespaces::new()).filter(|_| is_there));
            }
            "Holder" => {
                let Holder { uid, addresses: all } = read(&line.object)?;
                let incarnation = member::id(&uid) as u64;
                let member = Member {
                    addresses: addresses(all),
                    incarnation,
                    port_number: incarnation as u32,
                    is_host: uid.starts_with("host "),
                };
                facts.members.put(member::id(&uid), Some(member).filter(|_| is_there));
            }
            _ => return None,
        }
        Some(())
    }

    fn check(&mut self) {
        let version = next_version(self.version, self.clock);
        assert!(version > self.version || version == u64::MAX, "{version} after {}", self.version);
        let judgement = self.facts.judge(NODE);
        let (bytes, _) = self.facts.table(&judgement, NODE, version);
        let layout = Layout::read(&bytes).expect("readers take what is written");
        assert_eq!((layout.version(), version_of(&bytes)), (version, Some(version)));
        let _ = Contents::of(&layout.table(&bytes)).to_string();
        let (again, _) = self.facts.table(&self.facts.judge(NODE), NODE, version);
        assert!(bytes == again, "the same facts make another table");
        assert!(self.facts.services.is_within_budget() && self.facts.slices.is_within_budget());
        self.version = version;
    }
}

fn read<T: DeserializeOwned>(object: &Value) -> Option<T> {
    T::deserialize(object).ok()
}

const NODE: &str = "n1";
const MAX_EVENTS: usize = 64;
/// Small, so that inputs of a fuzzer exceed it.
const BUDGET: usize = 4 << 10;
