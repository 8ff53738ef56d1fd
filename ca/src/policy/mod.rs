//! Who gets which name, groups, addresses and lifetime, read from a file that is valid as a whole or not at all
//! (certificate policy).

mod file;
mod findings;
mod gateway;
mod lighthouse;
mod template;

use std::{collections::BTreeMap, net::IpAddr};

use ipnet::IpNet;
use nebula_cert::{Certificate, Version, issuance::Lighthouses};

pub(crate) use self::gateway::GatewayPolicy;
pub(crate) use self::lighthouse::LighthousePolicy;
use self::{file::PolicyFile, template::Template};
use crate::{
    address::{self, AddressMode, DeriveError},
    pod::{KubernetesPolicy, PodAddresses, PodFacts},
    refusal::Refusal,
};

/// What the service signs.
#[derive(Debug, Clone, Default)]
pub struct Policy {
    /// Policy for pods; `None`: proofs of pods are refused.
    pub pods: Option<PodPolicy>,
    /// The API server that confirms pods; `None` trusts every holder of the shared node token.
    pub kubernetes: Option<KubernetesPolicy>,
    /// What the lighthouses of a StatefulSet get; `None`: their proofs are refused.
    pub(crate) lighthouses: Option<LighthousePolicy>,
    /// What the gateways of nodes get; `None`: their proofs are refused.
    pub(crate) gateways: Option<GatewayPolicy>,
    /// What hosts get.
    pub hosts: HostPolicy,
}

/// What hosts get beside what their tokens say.
#[derive(Debug, Clone, Default)]
pub struct HostPolicy {
    /// Longest certificate lifetime that a token may give to a host, in seconds.
    pub longest_life: i64,
    /// For how many seconds after its end a host's certificate may still be renewed, and its addresses are kept.
    pub renewal_grace: i64,
    /// Where addresses come from for tokens that name none.
    pub pool: Vec<IpNet>,
    /// Overlay networks that the pool is a part of, which give its addresses their length; empty: they have the pool's
    /// own.
    pub overlay: Vec<IpNet>,
    /// Addresses and networks of the pool that no host gets.
    pub reserved: Vec<IpNet>,
    /// Lighthouses that hosts are told of.
    pub lighthouses: Lighthouses,
}

/// What certificates of pods contain.
#[derive(Debug, Clone)]
pub struct PodPolicy {
    name: Template,
    groups: Vec<Template>,
    /// Where addresses come from.
    pub address: AddressMode,
    /// Overlay prefixes; each certificate has one network per prefix.
    pub overlay: Vec<IpNet>,
    pod_networks: Vec<IpNet>,
    /// Overlay networks and addresses that no pod gets.
    pub reserved: Vec<IpNet>,
    /// For how many seconds addresses are kept for the names of StatefulSet pods after their last certificate; `None`:
    /// an address goes with its pod.
    pub(crate) stable: Option<i64>,
    /// Lifetime of a certificate in seconds.
    pub life: i64,
    /// What a pod gets until it can prove its identity itself; `None`: no certificate.
    pub(crate) provisional: Option<Provisional>,
    namespaces: Namespaces,
    rules: Vec<Rule>,
}

/// Namespaces whose pods get certificates.
#[derive(Debug, Clone)]
enum Namespaces {
    All,
    Only(Vec<String>),
    Except(Vec<String>),
}

/// How a provisional certificate differs; it also has no networks behind the pod.
#[derive(Debug, Clone)]
pub(crate) struct Provisional {
    groups: Vec<Template>,
    /// Lifetime in seconds; never longer than that of the other certificates.
    pub(crate) life: i64,
}

/// A rule for some pods; all rules that match a pod apply.
#[derive(Debug, Clone)]
struct Rule {
    /// Empty matches all.
    namespaces: Vec<String>,
    /// Empty matches all.
    service_accounts: Vec<String>,
    /// All of these must be present.
    labels: BTreeMap<String, String>,
    refuse: bool,
    groups: Vec<Template>,
    unsafe_networks: Vec<IpNet>,
    life: Option<i64>,
}

/// Why a policy file was refused.
#[derive(Debug, thiserror::Error)]
pub enum PolicyError {
    /// Not valid JSON, or a key is unknown or missing.
    #[error("not a valid policy file: {0}")]
    Json(#[from] serde_json::Error),
    /// All errors in the values, each preceded by its key.
    #[error("{}", .0.join("; "))]
    Findings(Vec<String>),
    /// The policy exceeds what the CA certificate allows.
    #[error("the CA certificate does not allow this policy: {}", .0.join("; "))]
    Ca(Vec<String>),
}

impl Policy {
    /// Parses a policy: JSON in which lines that start with `//` are comments.
    ///
    /// # Errors
    /// Returns the position at which the JSON is invalid, or else all invalid values with their keys.
    pub fn parse(text: &str) -> Result<Self, PolicyError> {
        // Blanked instead of removed, so that the line numbers in error messages stay right.
        let json: String =
            text.lines().flat_map(|line| [if line.trim_start().starts_with("//") { "" } else { line }, "\n"]).collect();
        serde_json::from_str::<PolicyFile>(&json)?.check()
    }

    /// Checks overlay prefixes and groups against the CA certificate, before the first request.
    ///
    /// # Errors
    /// Returns all constraints of the CA that pod certificates would violate.
    pub fn check_against(&self, ca: &Certificate) -> Result<(), PolicyError> {
        let mut findings = Vec::new();
        let is_outside = |allowed: &[IpNet], network: &IpNet| {
            !allowed.is_empty() && !allowed.iter().any(|allowed| allowed.trunc().contains(network))
        };
        let is_foreign = |group: &str| !ca.groups().is_empty() && !ca.groups().iter().any(|allowed| allowed == group);
        if let Some(lighthouses) = &self.lighthouses {
            if let Some(first) = lighthouses.network(0).filter(|first| is_outside(ca.networks(), first)) {
                findings.push(format!("the lighthouses' {first} is in none of the CA's networks"));
            }
            for group in lighthouses.groups.iter().filter(|group| is_foreign(group)) {
                findings.push(format!("{group:?} is not one of the CA's groups"));
            }
        }
        let gateways = self.gateways.iter().flat_map(|gateways| &gateways.groups);
        for group in gateways.filter(|group| is_foreign(group)) {
            findings.push(format!("{group:?} is not one of the CA's groups"));
        }
        let Some(pods) = &self.pods else {
            return if findings.is_empty() { Ok(()) } else { Err(PolicyError::Ca(findings)) };
        };
        if ca.version() == Version::V1 && !matches!(pods.overlay[..], [IpNet::V4(_)]) {
            findings.push("a version 1 CA needs exactly one IPv4 prefix in pods.overlay".to_owned());
        }
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
                && is_foreign(fixed)
            {
                findings.push(format!("{fixed:?} is not one of the CA's groups"));
            }
        }
        if findings.is_empty() { Ok(()) } else { Err(PolicyError::Ca(findings)) }
    }

    /// The networks that addresses of hosts are of, and whether these are all: what is said of pods and of the pool
    /// says nothing about a family that they lack.
    pub(crate) fn host_networks(&self) -> (Vec<IpNet>, bool) {
        if !self.hosts.overlay.is_empty() {
            return (self.hosts.overlay.clone(), true);
        }
        let pods = self.pods.iter().flat_map(|pods| &pods.overlay);
        (self.hosts.pool.iter().chain(pods).map(IpNet::trunc).collect(), false)
    }

    /// Whether a pod's certificate depends on the address that it has on the primary network.
    pub(crate) fn certifies_addresses(&self) -> bool {
        self.pods.as_ref().is_some_and(|pods| pods.address != AddressMode::Pool)
    }

    /// The longest lifetime of a pod certificate in seconds; nothing issued to pods under this policy lives longer.
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
    /// Refuses a first certificate to pods of namespaces that the operator does not enrol.
    ///
    /// # Errors
    /// Returns an error if the lists leave out the pod's namespace.
    pub fn check_namespace(&self, pod: &PodFacts) -> Result<(), Refusal> {
        let is_listed = |list: &[String]| list.contains(&pod.namespace);
        let is_enrolled = match &self.namespaces {
            Namespaces::All => true,
            Namespaces::Only(list) => is_listed(list),
            Namespaces::Except(list) => !is_listed(list),
        };
        if is_enrolled { Ok(()) } else { Err(Refusal::NamespaceNotEnrolled(pod.shown())) }
    }

    /// Refuses pods that a rule excludes.
    ///
    /// # Errors
    /// Returns an error if such a rule matches the pod.
    pub fn check_pod(&self, pod: &PodFacts) -> Result<(), Refusal> {
        match self.rules(pod).any(|rule| rule.refuse) {
            true => Err(Refusal::PodNotWanted(pod.shown())),
            false => Ok(()),
        }
    }

    /// Name of the pod's certificate.
    ///
    /// # Errors
    /// Returns an error if the name would be longer than Nebula allows.
    pub fn name(&self, pod: &PodFacts) -> Result<String, Refusal> {
        // The facts in a name are always known, which was checked when the file was read.
        let name = self.name.render(pod).unwrap_or_default();
        if name.len() > MAX_NAME_BYTES { Err(Refusal::NameTooLong(name.len())) } else { Ok(name) }
    }

    /// Groups of the pod's certificate, without duplicates. A group with a label that the pod lacks is left out.
    #[must_use]
    pub fn groups(&self, pod: &PodFacts) -> Vec<String> {
        rendered(self.groups.iter().chain(self.rules(pod).flat_map(|rule| &rule.groups)), pod)
    }

    /// Networks behind the pod that its certificate allows it to route.
    #[must_use]
    pub fn unsafe_networks(&self, pod: &PodFacts) -> Vec<IpNet> {
        let mut networks: Vec<IpNet> = self.rules(pod).flat_map(|rule| rule.unsafe_networks.iter().copied()).collect();
        networks.sort();
        networks.dedup();
        networks
    }

    /// Lifetime of the pod's certificate in seconds: the shortest of the matching rules, or the general one.
    #[must_use]
    pub fn life(&self, pod: &PodFacts) -> i64 {
        self.rules(pod).filter_map(|rule| rule.life).min().unwrap_or(self.life)
    }

    fn rules<'a>(&'a self, pod: &'a PodFacts) -> impl Iterator<Item = &'a Rule> {
        self.rules.iter().filter(|rule| rule.fits(pod))
    }

    /// Refuses a pod whose primary address is outside the pod networks, if these are configured.
    ///
    /// # Errors
    /// Returns an error if no pod network contains the address.
    pub fn check_pod_address(&self, address: IpAddr) -> Result<(), Refusal> {
        let known = |network: &IpNet| network.contains(&address);
        if self.pod_networks.is_empty() || self.pod_networks.iter().any(known) {
            Ok(())
        } else {
            Err(Refusal::OutsidePodNetworks(address))
        }
    }

    /// The overlay networks of a pod in mode `derive`: the image of its first address in each overlay, or of its IPv4
    /// address where there is an IPv4 overlay. In IPv6 overlays, too: there all 32 bits of an IPv4 address count, while
    /// the low bits of IPv6 addresses repeat from node to node (Kubernetes gives each node a /64). Of several overlays,
    /// those in which the address has no image are left out.
    ///
    /// # Errors
    /// Returns an error if no address has an image, or one that is reserved.
    pub fn derive(&self, PodAddresses { first, other }: PodAddresses) -> Result<Vec<IpNet>, Refusal> {
        let is_wanted = |address: &IpAddr| address.is_ipv4() && self.has_family(*address);
        let address = other.filter(is_wanted).unwrap_or(first);
        let derive = |overlay: &IpNet| {
            let image =
                address::derive(address, *overlay).map_err(|reason| Refusal::NoOverlayAddress { address, reason })?;
            if self.is_reserved(image.addr()) { Err(Refusal::ReservedAddress(image.addr())) } else { Ok(image) }
        };
        let has_no_image = |derived: &Result<IpNet, Refusal>| {
            matches!(derived, Err(Refusal::NoOverlayAddress { reason: DeriveError::Family(_), .. }))
        };
        let (without, with): (Vec<_>, Vec<_>) = self.overlay.iter().map(derive).partition(has_no_image);
        let counts = if with.is_empty() { without } else { with };
        counts.into_iter().collect()
    }

    /// The pod's address of the other family, if its certificate gets that or its image: in the modes `same` and
    /// `derive`, with an overlay of that family; in mode `derive` an IPv4 address only.
    ///
    /// # Errors
    /// Returns an error if no pod network contains the address.
    pub(crate) fn other_address(&self, pod: &PodFacts) -> Result<Option<IpAddr>, Refusal> {
        let counts = |other: &IpAddr| match self.address {
            AddressMode::Pool => false,
            AddressMode::Same => self.has_family(*other),
            // Outside of the pod networks, the image of the first address will do.
            AddressMode::Derive => other.is_ipv4() && self.has_family(*other) && self.check_pod_address(*other).is_ok(),
        };
        let other = pod.confirmed_other_address().filter(counts);
        other.map_or(Ok(()), |other| self.check_pod_address(other)).map(|()| other)
    }

    /// The overlay networks of a pod in mode `same`: its own addresses, each with the length of the overlay prefix that
    /// contains it. Without an overlay of its family, one of two addresses is left out.
    ///
    /// # Errors
    /// Returns an error if no overlay prefix contains an address, or if it is reserved.
    pub fn same(&self, addresses: PodAddresses) -> Result<Vec<IpNet>, Refusal> {
        let PodAddresses { first, other } = addresses;
        let first = Some(first).filter(|first| other.is_none() || self.has_family(*first));
        let mut networks: Vec<IpNet> =
            first.into_iter().chain(other).map(|address| self.same_one(address)).collect::<Result<_, _>>()?;
        // As in the certificate.
        networks.sort();
        Ok(networks)
    }

    fn same_one(&self, address: IpAddr) -> Result<IpNet, Refusal> {
        let overlay = self.overlay.iter().find(|overlay| overlay.contains(&address));
        let overlay = overlay.ok_or(Refusal::OutsideOverlay(address))?;
        if self.is_reserved(address) {
            return Err(Refusal::ReservedAddress(address));
        }
        address::derive(address, *overlay).map_err(|reason| Refusal::NoOverlayAddress { address, reason })
    }

    fn has_family(&self, address: IpAddr) -> bool {
        self.overlay.iter().any(|overlay| overlay.addr().is_ipv4() == address.is_ipv4())
    }

    /// Whether this overlay address is reserved, so that no pod may have it.
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

/// Longest [`HostPolicy::renewal_grace`]; so long the ledger knows certificates of hosts that expired.
pub(crate) const MAX_RENEWAL_GRACE: i64 = 30 * 86_400;
/// Longest certificate name that Nebula allows.
pub(crate) const MAX_NAME_BYTES: usize = 253;

#[cfg(test)]
mod tests;
