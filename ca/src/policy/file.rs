//! The policy file: its keys, and how they become a valid policy or a list of all findings.

use std::{collections::BTreeMap, path::PathBuf};

use ipnet::IpNet;
use serde::Deserialize;

use super::{
    HostPolicy, MAX_RENEWAL_GRACE, Namespaces, PodPolicy, Policy, PolicyError, Provisional, Rule, findings::Findings,
    gateway::GatewaysFile, lighthouse::LighthousesFile, template::is_label_key,
};
use crate::{
    address::{self, AddressMode},
    pod::{KubernetesPolicy, is_name, is_namespace},
};
use nebula_cert::issuance::Lighthouses;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PolicyFile {
    pods: Option<PodsFile>,
    kubernetes: Option<KubernetesFile>,
    lighthouses: Option<LighthousesFile>,
    gateways: Option<GatewaysFile>,
    #[serde(default)]
    hosts: HostsFile,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PodsFile {
    #[serde(default = "default_name")]
    name: String,
    #[serde(default = "default_groups")]
    groups: Vec<String>,
    #[serde(default = "default_address")]
    address: AddressMode,
    overlay: Vec<String>,
    #[serde(default)]
    pod_networks: Vec<String>,
    #[serde(default)]
    reserved: Vec<String>,
    stable: Option<Vec<StableKind>>,
    #[serde(default = "default_stable_for")]
    stable_for: String,
    #[serde(default = "default_life")]
    life: String,
    provisional: Option<ProvisionalFile>,
    namespaces: Option<Vec<String>>,
    except_namespaces: Option<Vec<String>>,
    #[serde(default)]
    rules: Vec<RuleFile>,
}

/// Whose pods keep their addresses.
#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum StableKind {
    StatefulSets,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ProvisionalFile {
    #[serde(default = "default_provisional_groups")]
    groups: Vec<String>,
    #[serde(default = "default_provisional_life")]
    life: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RuleFile {
    #[serde(default)]
    namespaces: Vec<String>,
    #[serde(default)]
    service_accounts: Vec<String>,
    #[serde(default)]
    labels: BTreeMap<String, String>,
    #[serde(default)]
    refuse: bool,
    #[serde(default)]
    groups: Vec<String>,
    #[serde(default)]
    unsafe_networks: Vec<String>,
    life: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct KubernetesFile {
    node_account: String,
    #[serde(default = "default_audience")]
    audience: String,
    kubeconfig: Option<PathBuf>,
    #[serde(default = "default_node_ranges")]
    node_ranges: bool,
    trust_config_map: Option<String>,
    #[serde(default)]
    revocation: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct HostsFile {
    #[serde(default = "default_longest_life")]
    longest_life: String,
    #[serde(default = "default_renewal_grace")]
    renewal_grace: String,
    #[serde(default)]
    pool: Vec<String>,
    #[serde(default)]
    overlay: Vec<String>,
    #[serde(default)]
    reserved: Vec<String>,
    #[serde(default)]
    lighthouses: BTreeMap<String, Vec<String>>,
}

impl Default for HostsFile {
    fn default() -> Self {
        Self {
            longest_life: default_longest_life(),
            renewal_grace: default_renewal_grace(),
            pool: Vec::new(),
            overlay: Vec::new(),
            reserved: Vec::new(),
            lighthouses: BTreeMap::new(),
        }
    }
}

fn default_longest_life() -> String {
    "365d".to_owned()
}

fn default_renewal_grace() -> String {
    "7d".to_owned()
}

fn default_name() -> String {
    "{name}.{namespace}.pod".to_owned()
}

fn default_groups() -> Vec<String> {
    vec!["ns:{namespace}".to_owned()]
}

fn default_address() -> AddressMode {
    AddressMode::Derive
}

fn default_stable_for() -> String {
    "30d".to_owned()
}

fn default_life() -> String {
    "24h".to_owned()
}

fn default_provisional_groups() -> Vec<String> {
    vec!["provisional".to_owned()]
}

fn default_provisional_life() -> String {
    "10m".to_owned()
}

fn default_audience() -> String {
    "nebula-ca".to_owned()
}

fn default_node_ranges() -> bool {
    true
}

impl PolicyFile {
    /// The policy, or every error in the file.
    pub(super) fn check(self) -> Result<Policy, PolicyError> {
        let mut findings = Findings::default();
        let kubernetes = self.kubernetes.map(|file| file.check(&mut findings));
        let pods = self.pods.map(|file| file.check(kubernetes.is_some(), &mut findings));
        let hosts = self.hosts.check(&mut findings);
        let lighthouses = self.lighthouses.map(|file| file.check(kubernetes.is_some(), &mut findings));
        let mut policy = Policy { pods, kubernetes, lighthouses: None, gateways: None, hosts };
        if let Some(mut lighthouses) = lighthouses {
            lighthouses.settle(&policy, &mut findings);
            policy.lighthouses = Some(lighthouses);
        }
        policy.gateways = self.gateways.map(|file| file.check(&policy, &mut findings));
        match findings.0.is_empty() {
            true => Ok(policy),
            false => Err(PolicyError::Findings(findings.0)),
        }
    }
}

impl HostsFile {
    fn check(self, findings: &mut Findings) -> HostPolicy {
        let mut lighthouses = Lighthouses::new();
        for (address, endpoints) in self.lighthouses {
            let key = format!("hosts.lighthouses.{address}");
            if endpoints.is_empty() || endpoints.len() > MAX_ENDPOINTS {
                findings.add(&key, format!("give it 1 to {MAX_ENDPOINTS} endpoints, as HOST:PORT"));
            }
            for bad in endpoints.iter().filter(|endpoint| !is_endpoint(endpoint)) {
                findings.add(&key, format!("{bad:?} is not HOST:PORT"));
            }
            match address.parse() {
                Ok(address) => drop(lighthouses.insert(address, endpoints)),
                Err(_) => findings.add(&key, "not an overlay address"),
            }
        }
        if lighthouses.len() > MAX_LIGHTHOUSES {
            findings.add("hosts.lighthouses", format!("more than {MAX_LIGHTHOUSES}"));
        }
        let hosts = HostPolicy {
            longest_life: findings.life("hosts.longest_life", &self.longest_life),
            renewal_grace: match self.renewal_grace.as_str() {
                "0" | "0s" | "0d" => 0,
                grace => findings.life("hosts.renewal_grace", grace),
            },
            pool: findings.networks("hosts.pool", &self.pool),
            overlay: findings.networks("hosts.overlay", &self.overlay),
            reserved: findings.networks("hosts.reserved", &self.reserved),
            lighthouses,
        };
        if hosts.renewal_grace > MAX_RENEWAL_GRACE {
            findings.add("hosts.renewal_grace", "longer than 30d");
        }
        for pool in &hosts.pool {
            if !hosts.overlay.is_empty() && !hosts.overlay.iter().any(|overlay| overlay.trunc().contains(pool)) {
                findings.add("hosts.pool", format!("{pool} is in no network of hosts.overlay"));
            }
        }
        hosts
    }
}

/// Whether this is `HOST:PORT`, with a name, an IPv4 address or an IPv6 address in brackets.
fn is_endpoint(text: &str) -> bool {
    let Some((host, port)) = text.rsplit_once(':') else { return false };
    let is_v6 = host
        .strip_prefix('[')
        .and_then(|host| host.strip_suffix(']'))
        .is_some_and(|host| host.parse::<std::net::Ipv6Addr>().is_ok());
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_');
    let is_name = (1..=253).contains(&host.len()) && host.bytes().all(is_plain);
    (is_v6 || is_name) && port.parse::<u16>().is_ok_and(|port| port > 0)
}

/// Hosts ask all of them.
const MAX_LIGHTHOUSES: usize = 32;
const MAX_ENDPOINTS: usize = 8;

impl PodsFile {
    fn check(self, with_kubernetes: bool, findings: &mut Findings) -> PodPolicy {
        let name = findings.template("pods.name", &self.name, with_kubernetes);
        if name.has_label() {
            findings.add("pods.name", "a label cannot be part of a name: whoever makes the pod writes it");
        }
        let is_stable =
            self.stable.is_some_and(|kinds| kinds.iter().any(|kind| matches!(kind, StableKind::StatefulSets)));
        if is_stable && (self.address != AddressMode::Pool || !with_kubernetes) {
            findings.add(
                "pods.stable",
                "only with \"address\": \"pool\" and a \"kubernetes\" section, which says what a pod belongs to",
            );
        }
        for (key, list) in [("pods.namespaces", &self.namespaces), ("pods.except_namespaces", &self.except_namespaces)]
        {
            if let Some(bad) = list.iter().flatten().find(|name| !is_namespace(name)) {
                findings.add(key, format!("{bad:?} cannot be a namespace"));
            }
        }
        let namespaces = match (self.namespaces, self.except_namespaces) {
            (None, None) => Namespaces::All,
            (Some(list), None) => Namespaces::Only(list),
            (None, Some(list)) => Namespaces::Except(list),
            (Some(_), Some(_)) => {
                findings.add("pods.namespaces", "give it or pods.except_namespaces, not both");
                Namespaces::All
            }
        };
        let pods = PodPolicy {
            name,
            groups: findings.templates("pods.groups", &self.groups, with_kubernetes),
            address: self.address,
            overlay: findings.networks("pods.overlay", &self.overlay),
            pod_networks: findings.networks("pods.pod_networks", &self.pod_networks),
            reserved: findings.networks("pods.reserved", &self.reserved),
            stable: Some(findings.life("pods.stable_for", &self.stable_for)).filter(|_| is_stable),
            life: findings.life("pods.life", &self.life),
            provisional: self.provisional.map(|file| file.check(with_kubernetes, findings)),
            namespaces,
            rules: (0..)
                .zip(self.rules)
                .map(|(at, rule): (usize, _)| rule.check(&format!("pods.rules[{at}]"), with_kubernetes, findings))
                .collect(),
        };
        // An invalid prefix was reported already; checking the rest would report it again.
        if pods.overlay.len() == self.overlay.len() && pods.pod_networks.len() == self.pod_networks.len() {
            pods.check_overlay(findings);
            match pods.address {
                AddressMode::Derive => pods.check_images(findings),
                AddressMode::Same => pods.check_same(findings),
                AddressMode::Pool => {}
            }
        }
        pods
    }
}

impl ProvisionalFile {
    fn check(self, with_kubernetes: bool, findings: &mut Findings) -> Provisional {
        if !with_kubernetes {
            findings.add("pods.provisional", "a pod speaks for itself only with a \"kubernetes\" section");
        }
        Provisional {
            groups: findings.templates("pods.provisional.groups", &self.groups, with_kubernetes),
            life: findings.life("pods.provisional.life", &self.life),
        }
    }
}

impl RuleFile {
    fn check(self, key: &str, with_kubernetes: bool, findings: &mut Findings) -> Rule {
        let takes_facts = !self.service_accounts.is_empty() || !self.labels.is_empty();
        if takes_facts && !with_kubernetes {
            findings.add(key, "service accounts and labels are known only with a \"kubernetes\" section");
        }
        if let Some(bad) = self.namespaces.iter().find(|name| !is_namespace(name)) {
            findings.add(key, format!("{bad:?} cannot be a namespace"));
        }
        if let Some(bad) = self.service_accounts.iter().find(|name| !is_name(name)) {
            findings.add(key, format!("{bad:?} cannot be a service account; write its name without the namespace"));
        }
        if let Some(bad) = self.labels.keys().find(|key| !is_label_key(key)) {
            findings.add(key, format!("{bad:?} cannot be the key of a label"));
        }
        if !self.refuse && self.groups.is_empty() && self.unsafe_networks.is_empty() && self.life.is_none() {
            findings.add(key, "it changes nothing; give it groups, unsafe_networks, life or refuse");
        }
        Rule {
            namespaces: self.namespaces,
            service_accounts: self.service_accounts,
            labels: self.labels,
            refuse: self.refuse,
            groups: findings.templates(&format!("{key}.groups"), &self.groups, with_kubernetes),
            unsafe_networks: findings.networks(&format!("{key}.unsafe_networks"), &self.unsafe_networks),
            life: self.life.map(|life| findings.life(&format!("{key}.life"), &life)),
        }
    }
}

impl KubernetesFile {
    fn check(self, findings: &mut Findings) -> KubernetesPolicy {
        let is_account =
            self.node_account.split_once('/').is_some_and(|(space, name)| is_namespace(space) && is_name(name));
        if !is_account {
            findings.add("kubernetes.node_account", "write it as namespace/name of the node agent's service account");
        }
        if self.audience.is_empty() || self.audience.len() > 253 || self.audience.chars().any(char::is_control) {
            findings.add("kubernetes.audience", "it must be 1 to 253 characters without control characters");
        }
        let trust_config_map = self.trust_config_map.and_then(|name| match name.split_once('/') {
            Some((space, name)) if is_namespace(space) && is_name(name) => Some((space.to_owned(), name.to_owned())),
            _ => {
                findings.add("kubernetes.trust_config_map", "write it as namespace/name");
                None
            }
        });
        KubernetesPolicy {
            trust_config_map,
            node_account: self.node_account,
            audience: self.audience,
            kubeconfig: self.kubeconfig,
            node_ranges: self.node_ranges,
            revocation: self.revocation,
        }
    }
}

impl PodPolicy {
    fn check_overlay(&self, findings: &mut Findings) {
        let key = "pods.overlay";
        if self.overlay.is_empty() {
            findings.add(key, "at least one prefix is needed, for example 10.42.0.0/16");
        }
        for (at, overlay) in self.overlay.iter().enumerate() {
            if self.overlay[..at].iter().any(|other| other.contains(overlay) || overlay.contains(other)) {
                findings.add(key, format!("{overlay} overlaps another prefix of the list"));
            }
            if overlay.addr().is_ipv6() && overlay.prefix_len() > 96 && self.address == AddressMode::Derive {
                findings.add(
                    key,
                    format!("{overlay} leaves no room for an embedded IPv4 address; use a prefix of /96 or shorter"),
                );
            }
        }
    }

    /// No two pods may have the same overlay address, so the pod networks must have disjoint images in each overlay.
    fn check_images(&self, findings: &mut Findings) {
        let key = "pods.pod_networks";
        for overlay in &self.overlay {
            let mut seen: Vec<(IpNet, IpNet)> = Vec::new();
            for network in &self.pod_networks {
                let Some(image) = image_of(*network, *overlay) else {
                    findings.add(
                        key,
                        format!(
                            "{network} does not fit into the overlay {overlay}; use an overlay prefix of at most its length"
                        ),
                    );
                    continue;
                };
                if let Some((other, _)) = seen.iter().find(|(_, seen)| seen.contains(&image) || image.contains(seen)) {
                    findings.add(
                        key,
                        format!(
                            "{other} and {network} would share addresses in the overlay {overlay}; use a larger overlay"
                        ),
                    );
                }
                seen.push((*network, image));
            }
        }
    }

    /// A certificate for the pod's own address needs an overlay that contains it.
    fn check_same(&self, findings: &mut Findings) {
        for network in &self.pod_networks {
            if !self.overlay.iter().any(|overlay| overlay.contains(network)) {
                findings.add(
                    "pods.pod_networks",
                    format!("{network} is in no overlay prefix, as address mode \"same\" needs"),
                );
            }
        }
    }
}

/// The part of `overlay` that the addresses of a pod network map to; `None` if two of them would map to the same one.
fn image_of(network: IpNet, overlay: IpNet) -> Option<IpNet> {
    let length = match (network, overlay) {
        (IpNet::V4(_), IpNet::V6(_)) => network.prefix_len() + 96,
        (IpNet::V6(_), IpNet::V4(_)) => return None,
        _ => network.prefix_len(),
    };
    let base = match address::derive(network.addr(), overlay) {
        Ok(image) => image.addr(),
        // The network address of a pod network may map to that of the overlay.
        Err(address::DeriveError::Reserved(image)) => image,
        Err(address::DeriveError::Family(_)) => return None,
    };
    if length < overlay.prefix_len() { None } else { IpNet::new(base, length).ok().map(|image| image.trunc()) }
}
