//! Who gets which name, groups, addresses and life: read from one file, valid as a whole or not at all (certificate
//! policy).

mod file;
mod template;

use std::{collections::BTreeMap, net::IpAddr};

use ipnet::IpNet;
use nebula_cert::{Certificate, Version, issuance::Lighthouses};

use self::{file::PolicyFile, template::Template};
use crate::{
    address::{self, AddressMode},
    pod::{KubernetesPolicy, PodFacts},
    refusal::Refusal,
};

/// What the service signs for.
#[derive(Debug, Clone, Default)]
pub struct Policy {
    /// Pods a node vouches for; none refuses the node proof.
    pub pods: Option<PodPolicy>,
    /// The API server that confirms pods; `None`: every holder of the shared node token is believed.
    pub kubernetes: Option<KubernetesPolicy>,
    /// What hosts get.
    pub hosts: HostPolicy,
}

/// What hosts get beside what their tokens say.
#[derive(Debug, Clone, Default)]
pub struct HostPolicy {
    /// Longest life of a certificate, in seconds.
    pub longest_life: i64,
    /// Where addresses come from for tokens that name none.
    pub pool: Vec<IpNet>,
    /// Overlay networks that the pool is a part of, which give its addresses their length; empty: they have the pool's own.
    pub overlay: Vec<IpNet>,
    /// Addresses and networks of the pool that no host gets.
    pub reserved: Vec<IpNet>,
    /// Lighthouses that hosts are told of.
    pub lighthouses: Lighthouses,
}

/// What pods get.
#[derive(Debug, Clone)]
pub struct PodPolicy {
    name: Template,
    groups: Vec<Template>,
    /// Where addresses come from.
    pub address: AddressMode,
    /// One network per entry in each certificate.
    pub overlay: Vec<IpNet>,
    pod_networks: Vec<IpNet>,
    /// Overlay networks and addresses no pod gets.
    pub reserved: Vec<IpNet>,
    /// Life of a certificate in seconds.
    pub life: i64,
    /// What a pod gets until it can speak for itself; none: nothing.
    pub(crate) provisional: Option<Provisional>,
    rules: Vec<Rule>,
}

/// What is different about a provisional certificate; it has no networks behind the pod either.
#[derive(Debug, Clone)]
pub(crate) struct Provisional {
    groups: Vec<Template>,
    /// In seconds; never longer than that of another certificate.
    pub(crate) life: i64,
}

/// What some pods get besides; all rules that fit a pod apply.
#[derive(Debug, Clone)]
struct Rule {
    /// Empty: all.
    namespaces: Vec<String>,
    /// Empty: all.
    service_accounts: Vec<String>,
    /// All of these must be there.
    labels: BTreeMap<String, String>,
    refuse: bool,
    groups: Vec<Template>,
    unsafe_networks: Vec<IpNet>,
    life: Option<i64>,
}

/// Why a policy file was refused.
#[derive(Debug, thiserror::Error)]
pub enum PolicyError {
    /// Not JSON, or an unknown or missing key.
    #[error("not a valid policy file: {0}")]
    Json(#[from] serde_json::Error),
    /// Everything that is wrong with the values, each after its key.
    #[error("{}", .0.join("; "))]
    Findings(Vec<String>),
    /// More than the CA certificate allows.
    #[error("the CA certificate does not allow this policy: {}", .0.join("; "))]
    Ca(Vec<String>),
}

impl Policy {
    /// Reads a policy: JSON in which lines that start with `//` are comments.
    ///
    /// # Errors
    /// Where it is not such JSON, or else all values that are wrong, each named by its key.
    pub fn parse(text: &str) -> Result<Self, PolicyError> {
        // Blank instead of removed, so that the line numbers in errors stay right.
        let json: String =
            text.lines().flat_map(|line| [if line.trim_start().starts_with("//") { "" } else { line }, "\n"]).collect();
        serde_json::from_str::<PolicyFile>(&json)?.check()
    }

    /// Checks what can be checked before the first request: overlay prefixes and groups against the CA certificate.
    ///
    /// # Errors
    /// All constraints of the CA that pod certificates would violate.
    pub fn check_against(&self, ca: &Certificate) -> Result<(), PolicyError> {
        let Some(pods) = &self.pods else { return Ok(()) };
        let mut findings = Vec::new();
        if ca.version() == Version::V1 && !matches!(pods.overlay[..], [IpNet::V4(_)]) {
            findings.push("a version 1 CA needs exactly one IPv4 prefix in pods.overlay".to_owned());
        }
        let is_outside = |allowed: &[IpNet], network: &IpNet| {
            !allowed.is_empty() && !allowed.iter().any(|allowed| allowed.trunc().contains(network))
        };
        for overlay in pods.overlay.iter().filter(|overlay| is_outside(ca.networks(), overlay)) {
            findings.push(format!("{overlay} is in none of the CA's networks"));
        }
        for network in pods.rules.iter().flat_map(|rule| &rule.unsafe_networks) {
            if is_outside(ca.unsafe_networks(), network) {
                findings.push(format!("{network} is in none of the CA's unsafe networks"));
            }
            if ca.version() == Version::V1 && network.addr().is_ipv6() {
                findings.push(format!("a version 1 CA cannot sign for the unsafe network {network}"));
            }
        }
        let provisional = pods.provisional.iter().flat_map(|provisional| &provisional.groups);
        for group in pods.groups.iter().chain(pods.rules.iter().flat_map(|rule| &rule.groups)).chain(provisional) {
            if let Some(fixed) = group.literal()
                && !ca.groups().is_empty()
                && !ca.groups().iter().any(|allowed| *allowed == fixed)
            {
                findings.push(format!("{fixed:?} is not one of the CA's groups"));
            }
        }
        if findings.is_empty() { Ok(()) } else { Err(PolicyError::Ca(findings)) }
    }

    /// Life of the longest certificate in seconds: nothing that was issued under this policy lives longer.
    #[must_use]
    pub fn longest_pod_life(&self) -> i64 {
        let Some(pods) = &self.pods else { return 0 };
        pods.rules.iter().filter_map(|rule| rule.life).chain([pods.life]).max().unwrap_or(pods.life)
    }
}

impl HostPolicy {
    /// An address of the pool, with the length of its overlay network.
    #[must_use]
    pub(crate) fn in_overlay(&self, address: IpNet) -> IpNet {
        let overlay = self.overlay.iter().find(|overlay| overlay.contains(&address.addr()));
        overlay.and_then(|overlay| IpNet::new(address.addr(), overlay.prefix_len()).ok()).unwrap_or(address)
    }
}

impl PodPolicy {
    /// Refuses pods that a rule keeps out.
    ///
    /// # Errors
    /// Such a rule fits the pod.
    pub fn check_pod(&self, pod: &PodFacts) -> Result<(), Refusal> {
        match self.rules(pod).any(|rule| rule.refuse) {
            true => Err(Refusal::PodNotWanted(pod.shown())),
            false => Ok(()),
        }
    }

    /// Name of the pod's certificate.
    ///
    /// # Errors
    /// It would be longer than Nebula allows.
    pub fn name(&self, pod: &PodFacts) -> Result<String, Refusal> {
        // Facts that a name takes are always there: the file was checked for it.
        let name = self.name.render(pod).unwrap_or_default();
        if name.len() > MAX_NAME_BYTES { Err(Refusal::NameTooLong(name.len())) } else { Ok(name) }
    }

    /// Groups of the pod's certificate, each once. A group with a label that the pod lacks is left out.
    #[must_use]
    pub fn groups(&self, pod: &PodFacts) -> Vec<String> {
        rendered(self.groups.iter().chain(self.rules(pod).flat_map(|rule| &rule.groups)), pod)
    }

    /// Networks behind the pod that it may route.
    #[must_use]
    pub fn unsafe_networks(&self, pod: &PodFacts) -> Vec<IpNet> {
        let mut networks: Vec<IpNet> = self.rules(pod).flat_map(|rule| rule.unsafe_networks.iter().copied()).collect();
        networks.sort();
        networks.dedup();
        networks
    }

    /// Life of the pod's certificate in seconds: the shortest that a rule gives, or the general one.
    #[must_use]
    pub fn life(&self, pod: &PodFacts) -> i64 {
        self.rules(pod).filter_map(|rule| rule.life).min().unwrap_or(self.life)
    }

    fn rules<'a>(&'a self, pod: &'a PodFacts) -> impl Iterator<Item = &'a Rule> {
        self.rules.iter().filter(|rule| rule.fits(pod))
    }

    /// Refuses a pod whose primary address is outside the pod networks, where these are known.
    ///
    /// # Errors
    /// The address is in none of them.
    pub fn check_pod_address(&self, address: IpAddr) -> Result<(), Refusal> {
        let known = |network: &IpNet| network.contains(&address);
        if self.pod_networks.is_empty() || self.pod_networks.iter().any(known) {
            Ok(())
        } else {
            Err(Refusal::OutsidePodNetworks(address))
        }
    }

    /// The overlay networks of a pod in mode `derive`.
    ///
    /// # Errors
    /// The address has no image, or a reserved one.
    pub fn derive(&self, address: IpAddr) -> Result<Vec<IpNet>, Refusal> {
        let derive = |overlay: &IpNet| {
            let image =
                address::derive(address, *overlay).map_err(|reason| Refusal::NoOverlayAddress { address, reason })?;
            if self.is_reserved(image.addr()) { Err(Refusal::ReservedAddress(image.addr())) } else { Ok(image) }
        };
        self.overlay.iter().map(derive).collect()
    }

    /// The overlay network of a pod in mode `same`: its own address, with the length of the prefix it is in.
    ///
    /// # Errors
    /// No overlay prefix has the address, or it is one no pod gets.
    pub fn same(&self, address: IpAddr) -> Result<Vec<IpNet>, Refusal> {
        let overlay = self.overlay.iter().find(|overlay| overlay.contains(&address));
        let overlay = overlay.ok_or(Refusal::OutsideOverlay(address))?;
        match address::derive(address, *overlay) {
            _ if self.is_reserved(address) => Err(Refusal::ReservedAddress(address)),
            Ok(network) => Ok(vec![network]),
            Err(reason) => Err(Refusal::NoOverlayAddress { address, reason }),
        }
    }

    /// Whether no pod may have this overlay address.
    #[must_use]
    pub fn is_reserved(&self, address: IpAddr) -> bool {
        self.reserved.iter().any(|network| network.contains(&address))
    }
}

impl Provisional {
    /// As [`PodPolicy::groups`].
    pub(crate) fn groups(&self, pod: &PodFacts) -> Vec<String> {
        rendered(self.groups.iter(), pod)
    }
}

fn rendered<'a>(templates: impl Iterator<Item = &'a Template>, pod: &PodFacts) -> Vec<String> {
    let mut groups: Vec<String> = Vec::new();
    for template in templates {
        if let Some(group) = template.render(pod).filter(|group| !groups.contains(group)) {
            groups.push(group);
        }
    }
    groups
}

impl Rule {
    fn fits(&self, pod: &PodFacts) -> bool {
        let is_named = |names: &[String], name: &str| names.is_empty() || names.iter().any(|known| known == name);
        let (account, labels) = match &pod.confirmed {
            Some(confirmed) => (confirmed.service_account.as_str(), Some(&confirmed.labels)),
            None => ("", None),
        };
        is_named(&self.namespaces, &pod.namespace)
            && is_named(&self.service_accounts, account)
            && self.labels.iter().all(|(key, value)| labels.and_then(|labels| labels.get(key)) == Some(value))
    }
}

/// Longest certificate name of Nebula.
pub(crate) const MAX_NAME_BYTES: usize = 253;

#[cfg(test)]
mod tests;
