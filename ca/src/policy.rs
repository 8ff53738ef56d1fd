//! Who gets which name, groups, addresses and life: read from one file, valid as a whole or not at all (certificate policy).

use std::net::IpAddr;

use ipnet::IpNet;
use nebula_cert::{Certificate, Version, issuance::Pod};
use serde::Deserialize;

use crate::{
    address::{self, AddressMode},
    refusal::Refusal,
    time::{self, DurationError},
};

/// What the service signs for.
#[derive(Debug, Clone, Default)]
pub struct Policy {
    /// Pods a node vouches for; none refuses the node proof.
    pub pods: Option<PodPolicy>,
    /// Longest life a token may give a host, in seconds.
    pub longest_host_life: i64,
}

/// What pods get.
#[derive(Debug, Clone)]
pub struct PodPolicy {
    name: NameTemplate,
    groups: Vec<NameTemplate>,
    /// Where addresses come from.
    pub address: AddressMode,
    /// One network per entry in each certificate.
    pub overlay: Vec<IpNet>,
    pod_networks: Vec<IpNet>,
    /// Overlay networks and addresses no pod gets.
    pub reserved: Vec<IpNet>,
    /// Life of a certificate in seconds.
    pub life: i64,
}

/// Why a policy file was refused.
#[derive(Debug, thiserror::Error)]
pub enum PolicyError {
    /// Not JSON, or an unknown or missing key.
    #[error("not a valid policy file: {0}")]
    Json(#[from] serde_json::Error),
    /// A template that names something unknown.
    #[error("template {template:?}: {problem}")]
    Template {
        /// The template.
        template: String,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// A life that is not a duration.
    #[error("{key}: {error}")]
    Life {
        /// Key in the file.
        key: &'static str,
        /// What is wrong with it.
        error: DurationError,
    },
    /// No overlay, or one that addresses cannot come from.
    #[error("pods.overlay: {0}")]
    Overlay(String),
    /// Pod networks that would share overlay addresses.
    #[error("pods.pod_networks: {0}")]
    PodNetworks(String),
    /// More than the CA certificate allows.
    #[error("the CA certificate does not allow this policy: {0}")]
    Ca(String),
}

impl Policy {
    /// Reads a policy: JSON in which lines that start with `//` are comments.
    ///
    /// # Errors
    /// The first thing that is wrong, named by its key.
    pub fn parse(text: &str) -> Result<Self, PolicyError> {
        // Blank instead of removed, so that the line numbers in errors stay right.
        let json: String =
            text.lines().flat_map(|line| [if line.trim_start().starts_with("//") { "" } else { line }, "\n"]).collect();
        let file: PolicyFile = serde_json::from_str(&json)?;
        let life = |key, text: &str| time::parse_duration(text).map_err(|error| PolicyError::Life { key, error });
        Ok(Self {
            pods: file.pods.map(PodPolicy::try_from).transpose()?,
            longest_host_life: life("hosts.longest_life", &file.hosts.longest_life)?,
        })
    }

    /// Checks what can be checked before the first request: overlay prefixes and groups against the CA certificate.
    ///
    /// # Errors
    /// The constraint of the CA that every pod certificate would violate.
    pub fn check_against(&self, ca: &Certificate) -> Result<(), PolicyError> {
        let Some(pods) = &self.pods else { return Ok(()) };
        if ca.version() == Version::V1 && !matches!(pods.overlay[..], [IpNet::V4(_)]) {
            return Err(PolicyError::Ca("a version 1 CA needs exactly one IPv4 prefix in pods.overlay".to_owned()));
        }
        for overlay in &pods.overlay {
            if !ca.networks().is_empty() && !ca.networks().iter().any(|allowed| allowed.trunc().contains(overlay)) {
                return Err(PolicyError::Ca(format!("{overlay} is in none of the CA's networks")));
            }
        }
        for group in &pods.groups {
            if let Some(fixed) = group.literal()
                && !ca.groups().is_empty()
                && !ca.groups().iter().any(|allowed| *allowed == fixed)
            {
                return Err(PolicyError::Ca(format!("{fixed:?} is not one of the CA's groups")));
            }
        }
        Ok(())
    }
}

impl PodPolicy {
    /// Name of the pod's certificate.
    ///
    /// # Errors
    /// It would be longer than Nebula allows.
    pub fn name(&self, pod: &Pod) -> Result<String, Refusal> {
        let name = self.name.render(pod);
        if name.len() > LONGEST_NAME { Err(Refusal::NameTooLong(name.len())) } else { Ok(name) }
    }

    /// Groups of the pod's certificate.
    #[must_use]
    pub fn groups(&self, pod: &Pod) -> Vec<String> {
        self.groups.iter().map(|group| group.render(pod)).collect()
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

    /// Whether no pod may have this overlay address.
    #[must_use]
    pub fn is_reserved(&self, address: IpAddr) -> bool {
        self.reserved.iter().any(|network| network.contains(&address))
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PolicyFile {
    pods: Option<PodsFile>,
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
    overlay: Vec<IpNet>,
    #[serde(default)]
    pod_networks: Vec<IpNet>,
    #[serde(default)]
    reserved: Vec<NetworkOrAddress>,
    #[serde(default = "default_life")]
    life: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct HostsFile {
    longest_life: String,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum NetworkOrAddress {
    Network(IpNet),
    Address(IpAddr),
}

impl Default for HostsFile {
    fn default() -> Self {
        Self { longest_life: "365d".to_owned() }
    }
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

fn default_life() -> String {
    "24h".to_owned()
}

impl TryFrom<PodsFile> for PodPolicy {
    type Error = PolicyError;

    fn try_from(file: PodsFile) -> Result<Self, PolicyError> {
        let pods = Self {
            name: NameTemplate::parse(&file.name)?,
            groups: file.groups.iter().map(|group| NameTemplate::parse(group)).collect::<Result<_, _>>()?,
            address: file.address,
            overlay: file.overlay.iter().map(IpNet::trunc).collect(),
            pod_networks: file.pod_networks.iter().map(IpNet::trunc).collect(),
            reserved: file
                .reserved
                .into_iter()
                .map(|entry| match entry {
                    NetworkOrAddress::Network(network) => network.trunc(),
                    NetworkOrAddress::Address(address) => address.into(),
                })
                .collect(),
            life: time::parse_duration(&file.life).map_err(|error| PolicyError::Life { key: "pods.life", error })?,
        };
        pods.check_overlay()?;
        if pods.address == AddressMode::Derive {
            pods.check_images()?;
        }
        Ok(pods)
    }
}

impl PodPolicy {
    fn check_overlay(&self) -> Result<(), PolicyError> {
        if self.overlay.is_empty() {
            return Err(PolicyError::Overlay("at least one prefix is needed, for example 10.42.0.0/16".to_owned()));
        }
        for (at, overlay) in self.overlay.iter().enumerate() {
            if self.overlay[..at].iter().any(|other| other.contains(overlay) || overlay.contains(other)) {
                return Err(PolicyError::Overlay(format!("{overlay} overlaps another prefix of the list")));
            }
            if overlay.addr().is_ipv6() && overlay.prefix_len() > 96 && self.address == AddressMode::Derive {
                return Err(PolicyError::Overlay(format!(
                    "{overlay} leaves no room for an embedded IPv4 address; use a prefix of /96 or shorter"
                )));
            }
        }
        Ok(())
    }

    /// Two pods must never have one overlay address, so the pod networks must have separate images in each overlay.
    fn check_images(&self) -> Result<(), PolicyError> {
        for overlay in &self.overlay {
            let mut seen: Vec<(IpNet, IpNet)> = Vec::new();
            for network in &self.pod_networks {
                let Some(image) = image_of(*network, *overlay) else {
                    return Err(PolicyError::PodNetworks(format!(
                        "{network} does not fit into the overlay {overlay}; use an overlay prefix of at most its length"
                    )));
                };
                if let Some((other, _)) = seen.iter().find(|(_, seen)| seen.contains(&image) || image.contains(seen)) {
                    return Err(PolicyError::PodNetworks(format!(
                        "{other} and {network} would share addresses in the overlay {overlay}; use a larger overlay"
                    )));
                }
                seen.push((*network, image));
            }
        }
        Ok(())
    }
}

/// The part of `overlay` that the addresses of a pod network map to; none if two of them would map to one.
fn image_of(network: IpNet, overlay: IpNet) -> Option<IpNet> {
    let length = match (network, overlay) {
        (IpNet::V4(_), IpNet::V6(_)) => network.prefix_len() + 96,
        (IpNet::V6(_), IpNet::V4(_)) => return None,
        _ => network.prefix_len(),
    };
    let base = match address::derive(network.addr(), overlay) {
        Ok(image) => image.addr(),
        // The network address of a pod network may well map to the one of the overlay.
        Err(address::DeriveError::Reserved(image)) => image,
        Err(address::DeriveError::Family(_)) => return None,
    };
    if length < overlay.prefix_len() { None } else { IpNet::new(base, length).ok().map(|image| image.trunc()) }
}

/// A text with `{name}`, `{namespace}` and `{uid}` of a pod in it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct NameTemplate(Vec<Part>);

#[derive(Debug, Clone, PartialEq, Eq)]
enum Part {
    Literal(String),
    Namespace,
    Name,
    Uid,
}

impl NameTemplate {
    fn parse(template: &str) -> Result<Self, PolicyError> {
        let refuse = |problem| Err(PolicyError::Template { template: template.to_owned(), problem });
        if template.is_empty() || template.len() > LONGEST_NAME || template.chars().any(char::is_control) {
            return refuse("it must be 1 to 253 characters without control characters");
        }
        let (mut parts, mut rest) = (Vec::new(), template);
        while let Some((literal, tail)) = rest.split_once('{') {
            let Some((field, tail)) = tail.split_once('}') else { return refuse("a { has no }") };
            if !literal.is_empty() {
                parts.push(Part::Literal(literal.to_owned()));
            }
            parts.push(match field {
                "namespace" => Part::Namespace,
                "name" => Part::Name,
                "uid" => Part::Uid,
                _ => return refuse("only {name}, {namespace} and {uid} are known"),
            });
            rest = tail;
        }
        if !rest.is_empty() {
            parts.push(Part::Literal(rest.to_owned()));
        }
        let is_stray = |part: &Part| matches!(part, Part::Literal(text) if text.contains('}'));
        if parts.iter().any(is_stray) { refuse("a } has no {") } else { Ok(Self(parts)) }
    }

    fn render(&self, pod: &Pod) -> String {
        self.0
            .iter()
            .map(|part| match part {
                Part::Literal(text) => text.as_str(),
                Part::Namespace => &pod.namespace,
                Part::Name => &pod.name,
                Part::Uid => &pod.uid,
            })
            .collect()
    }

    /// The text, if it is the same for every pod.
    fn literal(&self) -> Option<&str> {
        match &self.0[..] {
            [Part::Literal(text)] => Some(text),
            _ => None,
        }
    }
}

/// Longest certificate name of Nebula.
pub(crate) const LONGEST_NAME: usize = 253;

#[cfg(test)]
mod tests {
    use super::*;

    fn pods(json: &str) -> Result<PodPolicy, PolicyError> {
        Ok(Policy::parse(&format!("{{\"pods\": {json}}}"))?.pods.unwrap())
    }

    fn refused(json: &str) -> String {
        pods(json).unwrap_err().to_string()
    }

    fn pod() -> Pod {
        Pod {
            namespace: "shop".into(),
            name: "web-0".into(),
            uid: "u-1".into(),
            address: "10.244.0.5".parse().unwrap(),
        }
    }

    #[test]
    fn defaults_name_a_pod_by_namespace_and_name() {
        let pods = pods(r#"{"overlay": ["10.42.0.0/16"]}"#).unwrap();
        assert_eq!(pods.name(&pod()).unwrap(), "web-0.shop.pod");
        assert_eq!(pods.groups(&pod()), ["ns:shop"]);
        assert_eq!((pods.life, pods.address), (86_400, AddressMode::Derive));
        assert_eq!(pods.derive(pod().address).unwrap(), ["10.42.0.5/16".parse().unwrap()]);
    }

    #[test]
    fn the_file_made_by_init_is_valid_and_documents_itself() {
        let text = crate::init::policy_text(&["10.42.0.0/16".parse().unwrap(), "fd42::/64".parse().unwrap()]);
        assert_eq!(Policy::parse(&text).unwrap().pods.unwrap().overlay.len(), 2);
        assert!(text.lines().filter(|line| line.trim_start().starts_with("//")).count() > 10);
    }

    #[test]
    fn without_a_pods_section_there_is_no_pod_policy() {
        let policy = Policy::parse("// nothing\n{}").unwrap();
        assert!(policy.pods.is_none());
        assert_eq!(policy.longest_host_life, 365 * 86_400);
    }

    #[test]
    fn templates_take_name_namespace_and_uid() {
        let pods =
            pods(r#"{"overlay": ["10.42.0.0/16"], "name": "{uid}", "groups": ["all", "a {namespace}/{name} z"]}"#);
        let pods = pods.unwrap();
        assert_eq!(pods.name(&pod()).unwrap(), "u-1");
        assert_eq!(pods.groups(&pod()), ["all", "a shop/web-0 z"]);
    }

    #[test]
    fn a_template_is_never_applied_to_its_own_output() {
        let pods = pods(r#"{"overlay": ["10.42.0.0/16"], "name": "{name}"}"#).unwrap();
        assert_eq!(pods.name(&Pod { name: "{uid}".into(), ..pod() }).unwrap(), "{uid}");
    }

    #[test]
    fn bad_templates_are_refused_at_start() {
        for template in ["", "{node}", "{name", "name}", "{}", "a\\u0000b"] {
            let text = refused(&format!(r#"{{"overlay": ["10.42.0.0/16"], "name": "{template}"}}"#));
            assert!(text.contains("template"), "{template}: {text}");
        }
    }

    #[test]
    fn a_name_too_long_for_nebula_is_refused_not_cut() {
        let pods = pods(r#"{"overlay": ["10.42.0.0/16"]}"#).unwrap();
        let name = "a".repeat(250);
        assert!(matches!(pods.name(&Pod { name, ..pod() }), Err(Refusal::NameTooLong(259))));
    }

    #[test]
    fn misspelt_keys_and_bad_values_are_refused_with_their_name() {
        assert!(refused(r#"{"overlay": ["10.42.0.0/16"], "lifetime": "1h"}"#).contains("lifetime"));
        assert!(refused(r#"{"overlay": ["10.42.0.0/16"], "life": "1 day"}"#).contains("pods.life"));
        assert!(refused(r#"{"overlay": []}"#).contains("pods.overlay"));
        assert!(refused("{}").contains("overlay"));
        assert!(refused(r#"{"overlay": ["10.42.0.0/16", "10.42.3.0/24"]}"#).contains("overlaps"));
        assert!(refused(r#"{"overlay": ["fd42::/112"]}"#).contains("/96"));
        assert!(Policy::parse("").is_err());
    }

    #[test]
    fn errors_name_the_line_of_the_file_with_its_comments() {
        let text = Policy::parse("// one\n// two\n{\n\"wrong\": 1\n}").unwrap_err().to_string();
        assert!(text.contains("line 4"), "{text}");
    }

    #[test]
    fn pod_networks_that_would_share_overlay_addresses_are_refused() {
        let with = |overlay: &str, networks: &str| {
            pods(&format!(r#"{{"overlay": ["{overlay}"], "pod_networks": {networks}}}"#))
        };
        assert!(with("10.42.0.0/16", r#"["10.244.0.0/16"]"#).is_ok());
        assert!(with("10.42.0.0/16", r#"["10.244.0.0/17", "10.9.128.0/17"]"#).is_ok());
        assert!(with("10.42.0.0/24", r#"["10.244.0.0/16"]"#).is_err());
        assert!(with("10.42.0.0/16", r#"["10.244.0.0/16", "10.245.0.0/16"]"#).is_err());
        assert!(with("fd42::/96", r#"["10.244.0.0/16", "10.245.0.0/16"]"#).is_ok());
        assert!(with("10.42.0.0/16", r#"["fd00::/64"]"#).is_err());
    }

    #[test]
    fn addresses_outside_known_pod_networks_are_refused() {
        let pods = pods(r#"{"overlay": ["10.42.0.0/16"], "pod_networks": ["10.244.0.0/16"]}"#).unwrap();
        pods.check_pod_address("10.244.9.9".parse().unwrap()).unwrap();
        assert!(matches!(pods.check_pod_address("192.0.2.1".parse().unwrap()), Err(Refusal::OutsidePodNetworks(_))));
    }

    #[test]
    fn reserved_overlay_addresses_are_not_given_to_pods() {
        let pods = pods(r#"{"overlay": ["10.42.0.0/16"], "reserved": ["10.42.0.1", "10.42.255.0/24"]}"#).unwrap();
        assert!(matches!(pods.derive("10.244.0.1".parse().unwrap()), Err(Refusal::ReservedAddress(_))));
        assert!(matches!(pods.derive("10.244.255.9".parse().unwrap()), Err(Refusal::ReservedAddress(_))));
        assert!(pods.derive("10.244.0.2".parse().unwrap()).is_ok());
    }
}
