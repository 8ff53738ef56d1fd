//! What the gateways of nodes get: name and overlay address by their node, and the networks of its pods.

use ipnet::IpNet;
use serde::Deserialize;

use super::{MAX_NAME_BYTES, Policy, findings::Findings};
use crate::{
    address::{first_host, with_prefix_of},
    proof::gateway::GatewayPod,
    refusal::Refusal,
};

/// What certificates of gateways contain.
#[derive(Debug, Clone)]
pub(crate) struct GatewayPolicy {
    /// Service account of the DaemonSet's pods, as `namespace/name`.
    pub(crate) account: String,
    /// Name of the certificate, with [`NODE`] in it.
    name: String,
    pub(crate) groups: Vec<String>,
    /// Lifetime of a certificate in seconds.
    pub(crate) life: i64,
    /// The overlay networks that pods have addresses in.
    overlay: Vec<IpNet>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct GatewaysFile {
    account: String,
    #[serde(default = "default_name")]
    name: String,
    #[serde(default = "default_groups")]
    groups: Vec<String>,
    #[serde(default = "default_life")]
    life: String,
}

fn default_name() -> String {
    format!("{NODE}.node")
}

fn default_groups() -> Vec<String> {
    vec!["node".to_owned()]
}

fn default_life() -> String {
    "24h".to_owned()
}

impl GatewaysFile {
    pub(super) fn check(self, policy: &Policy, findings: &mut Findings) -> GatewayPolicy {
        if policy.kubernetes.is_none() {
            findings.add("gateways", "a pod speaks for itself only with a \"kubernetes\" section");
        }
        findings.account("gateways", &self.account);
        // Half of it is for names of nodes; one that is longer is refused when it asks.
        findings.name("gateways", &self.name, NODE, MAX_NAME_BYTES - MAX_NAME_BYTES / 2);
        findings.groups("gateways", &self.groups);
        let overlay: Vec<IpNet> = policy.pods.iter().flat_map(|pods| &pods.overlay).copied().collect();
        if overlay.is_empty() {
            findings.add("gateways", "a gateway has an address of \"pods.overlay\", and there is none");
        }
        GatewayPolicy {
            account: self.account,
            name: self.name,
            groups: self.groups,
            life: findings.life("gateways.life", &self.life),
            overlay,
        }
    }
}

impl GatewayPolicy {
    /// Name of the certificate of the gateway of this node.
    ///
    /// # Errors
    /// Returns an error if the name would be longer than Nebula allows.
    pub(crate) fn name(&self, node: &str) -> Result<String, Refusal> {
        let name = self.name.replacen(NODE, node, 1);
        if name.len() > MAX_NAME_BYTES { Err(Refusal::NameTooLong(name.len())) } else { Ok(name) }
    }

    /// Overlay addresses of a gateway, with the lengths of the overlay prefixes, and the ranges that are behind it.
    /// Ranges of a family that the overlay does not have are left out.
    ///
    /// # Errors
    /// Returns an error if a range is in no overlay network.
    pub(crate) fn networks(&self, pod: &GatewayPod) -> Result<(Vec<IpNet>, Vec<IpNet>), Refusal> {
        let (mut networks, mut behind): (Vec<IpNet>, Vec<IpNet>) = Default::default();
        for range in &pod.ranges {
            let is_v4 = range.addr().is_ipv4();
            if !self.overlay.iter().any(|overlay| overlay.addr().is_ipv4() == is_v4) {
                continue;
            }
            let is_around = |overlay: &&IpNet| overlay.contains(range) && overlay.prefix_len() < range.prefix_len();
            let overlay = self.overlay.iter().find(is_around);
            let overlay = overlay.ok_or(Refusal::RangeOutsideOverlay(*range))?;
            behind.push(*range);
            // One address of each family, as pods have.
            if networks.iter().all(|network| network.addr().is_ipv4() != is_v4) {
                networks.push(with_prefix_of(first_host(*range), *overlay));
            }
        }
        match networks.is_empty() {
            true => Err(Refusal::NodeWithoutRange(pod.node.clone())),
            false => Ok((networks, behind)),
        }
    }
}

const NODE: &str = "{node}";

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(section: &str) -> Result<GatewayPolicy, String> {
        let text = format!(
            r#"{{"kubernetes": {{"node_account": "n/a"}}, "pods": {{"overlay": ["10.244.0.0/16", "fd00:244::/48"]}},
            "gateways": {{"account": "nebula-system/nebula-gateway" {section}}}}}"#
        );
        let policy = Policy::parse(&text).map_err(|error| error.to_string())?;
        Ok(policy.gateways.unwrap())
    }

    fn pod(ranges: &[&str]) -> GatewayPod {
        let ranges = ranges.iter().map(|range| range.parse().unwrap()).collect();
        GatewayPod { namespace: "n".into(), name: "g-1".into(), uid: "u".into(), node: "n1".into(), ranges }
    }

    fn networks(ranges: &[&str]) -> Result<String, Refusal> {
        let shown = |all: &[IpNet]| all.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
        policy("").unwrap().networks(&pod(ranges)).map(|(own, behind)| format!("{} {}", shown(&own), shown(&behind)))
    }

    #[test]
    fn a_gateway_has_the_first_address_of_its_nodes_ranges_and_all_of_them_behind_it() {
        assert_eq!(policy("").unwrap().name("n1.example").unwrap(), "n1.example.node");
        assert_eq!(networks(&["10.244.1.0/24"]).unwrap(), "10.244.1.1/16 10.244.1.0/24");
        assert_eq!(
            networks(&["10.244.1.0/24", "10.244.9.0/24", "fd00:244:0:1::/64"]).unwrap(),
            "10.244.1.1/16,fd00:244:0:1::1/48 10.244.1.0/24,10.244.9.0/24,fd00:244:0:1::/64"
        );
    }

    #[test]
    fn a_range_outside_of_the_overlay_or_as_large_as_it_is_refused() {
        for range in ["10.245.1.0/24", "10.244.0.0/16", "10.0.0.0/8", "fd00:245::/64"] {
            assert!(matches!(networks(&[range]), Err(Refusal::RangeOutsideOverlay(_))), "{range}");
        }
        assert!(policy("").unwrap().name(&"n".repeat(250)).is_err());
    }

    #[test]
    fn every_mistake_in_the_section_is_named() {
        let text = r#"{"gateways": {"account": "x", "name": "gw", "groups": ["{a}"], "life": "x"}}"#;
        let error = Policy::parse(text).unwrap_err().to_string();
        for key in ["gateways: a pod", "account", "name", "groups", "life", "pods.overlay"] {
            assert!(error.contains(key), "{key}: {error}");
        }
    }
}
