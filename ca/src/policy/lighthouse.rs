//! What the lighthouses of a StatefulSet get: name and overlay address by their ordinal.

use std::{net::IpAddr, num::NonZeroU16};

use ipnet::IpNet;
use serde::Deserialize;

use super::{Policy, findings::Findings};
use crate::address;

/// What certificates of lighthouses contain.
#[derive(Debug, Clone)]
pub(crate) struct LighthousePolicy {
    /// Service account of the StatefulSet's pods, as `namespace/name`.
    pub(crate) account: String,
    /// Overlay address of the pod with ordinal 0, with the length of the overlay prefix.
    first: IpNet,
    /// The only addresses that lighthouses get; `None`: as many as there may be lighthouses.
    range: Option<IpNet>,
    /// Name of the certificate, with [`ORDINAL`] in it.
    name: String,
    pub(crate) groups: Vec<String>,
    /// Lifetime of a certificate in seconds.
    pub(crate) life: i64,
    /// UDP port, unless the request names another.
    pub(crate) port: NonZeroU16,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct LighthousesFile {
    account: String,
    network: String,
    #[serde(default = "default_name")]
    name: String,
    #[serde(default = "default_groups")]
    groups: Vec<String>,
    #[serde(default = "default_life")]
    life: String,
    #[serde(default = "default_port")]
    port: NonZeroU16,
}

fn default_name() -> String {
    format!("lighthouse-{ORDINAL}")
}

fn default_groups() -> Vec<String> {
    vec!["lighthouse".to_owned()]
}

fn default_life() -> String {
    "24h".to_owned()
}

fn default_port() -> NonZeroU16 {
    NonZeroU16::new(4242).unwrap_or(NonZeroU16::MIN)
}

impl LighthousesFile {
    pub(super) fn check(self, with_kubernetes: bool, findings: &mut Findings) -> LighthousePolicy {
        if !with_kubernetes {
            findings.add("lighthouses", "a pod speaks for itself only with a \"kubernetes\" section");
        }
        findings.account("lighthouses", &self.account);
        findings.name("lighthouses", &self.name, ORDINAL, MAX_DIGITS);
        findings.groups("lighthouses", &self.groups);
        let (range, first) = match (self.network.parse::<IpNet>(), self.network.parse::<IpAddr>()) {
            (Ok(range), _) => {
                let range = range.trunc();
                // Small ranges have no network address.
                let first = if address::is_usable(range.addr(), range) { 0 } else { 1 };
                (Some(range), address::after(range.addr(), first).unwrap_or_else(|| range.addr()))
            }
            (_, Ok(first)) => (None, first),
            _ => {
                findings.add("lighthouses.network", format!("{:?} is no network and no address", self.network));
                (None, IpAddr::from([0, 0, 0, 0]))
            }
        };
        LighthousePolicy {
            account: self.account,
            first: address::with_prefix_of(first, range.unwrap_or_else(|| first.into())),
            range,
            name: self.name,
            groups: self.groups,
            life: findings.life("lighthouses.life", &self.life),
            port: self.port,
        }
    }
}

impl LighthousePolicy {
    /// Name of the certificate of the pod with this ordinal.
    pub(crate) fn name(&self, ordinal: u32) -> String {
        self.name.replacen(ORDINAL, &ordinal.to_string(), 1)
    }

    /// Overlay address of the pod with this ordinal, with the length of the overlay prefix; `None` if there is none.
    pub(crate) fn network(&self, ordinal: u32) -> Option<IpNet> {
        let address = address::after(self.first.addr(), ordinal).filter(|_| ordinal < MAX_LIGHTHOUSES)?;
        let is_in_range = self.range.is_none_or(|range| range.contains(&address) && address::is_usable(address, range));
        let network = address::with_prefix_of(address, self.first);
        (is_in_range && network.contains(&self.first.addr()) && address::is_usable(address, network.trunc()))
            .then_some(network)
    }

    /// Whether a lighthouse could have this overlay address.
    pub(crate) fn has(&self, address: IpAddr) -> bool {
        (0..MAX_LIGHTHOUSES).any(|ordinal| self.network(ordinal).is_some_and(|network| network.addr() == address))
    }

    /// Takes the length of the overlay prefix that the addresses are in, and checks that nobody else gets them.
    pub(super) fn settle(&mut self, policy: &Policy, findings: &mut Findings) {
        let key = "lighthouses.network";
        let first = self.first.addr();
        let pods = policy.pods.iter().flat_map(|pods| &pods.overlay);
        let overlays: Vec<&IpNet> = pods.chain(&policy.hosts.overlay).collect();
        match overlays.iter().find(|overlay| overlay.contains(&first)) {
            Some(overlay) if self.range.is_none_or(|range| overlay.contains(&range)) => {
                self.first = address::with_prefix_of(first, **overlay);
            }
            Some(overlay) => findings.add(key, format!("it is larger than the overlay {overlay}")),
            None if overlays.is_empty() && self.range.is_some() => {}
            None => findings.add(
                key,
                "it is in no prefix of pods.overlay or hosts.overlay: pods and hosts ask only lighthouses of a network \
                 of their own",
            ),
        }
        // A first address is followed by those that are kept free after it.
        let reserved = policy.pods.iter().flat_map(|pods| &pods.reserved).find(|reserved| reserved.contains(&first));
        self.range = self.range.or_else(|| reserved.copied());
        let wanted = self.range.unwrap_or_else(|| first.into());
        let is_kept_free = |pools: &[IpNet], reserved: &[IpNet]| {
            !pools.iter().any(|pool| pool.contains(&wanted) || wanted.contains(pool))
                || reserved.iter().any(|reserved| reserved.contains(&wanted))
        };
        if let Some(pods) = &policy.pods
            && !is_kept_free(&pods.overlay, &pods.reserved)
        {
            findings.add(key, format!("pods could get its addresses: put {wanted} into pods.reserved"));
        }
        if !is_kept_free(&policy.hosts.pool, &policy.hosts.reserved) {
            findings.add(key, format!("hosts could get its addresses: put {wanted} into hosts.reserved"));
        }
        for fixed in policy.hosts.lighthouses.keys().filter(|address| self.has(**address)) {
            findings.add(&format!("hosts.lighthouses.{fixed}"), "it belongs to a pod, by lighthouses.network");
        }
    }
}

const ORDINAL: &str = "{ordinal}";
/// Decimal digits of an ordinal.
const MAX_DIGITS: usize = 2;
/// Hosts ask all of them.
const MAX_LIGHTHOUSES: u32 = 32;

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(network: &str, pods: &str) -> Result<LighthousePolicy, String> {
        let text = format!(
            r#"{{"kubernetes": {{"node_account": "n/a"}}, "pods": {{"overlay": ["10.42.0.0/16"] {pods}}},
            "lighthouses": {{"account": "nebula-system/nebula-lighthouse", "network": "{network}"}}}}"#
        );
        let policy = Policy::parse(&text).map_err(|error| error.to_string())?;
        Ok(policy.lighthouses.unwrap())
    }

    fn networks(policy: &LighthousePolicy, ordinals: &[u32]) -> Vec<String> {
        let shown =
            |ordinal: &u32| policy.network(*ordinal).map_or_else(|| "-".to_owned(), |network| network.to_string());
        ordinals.iter().map(shown).collect()
    }

    #[test]
    fn name_and_address_follow_from_the_ordinal_and_end_with_the_range() {
        let range = policy("10.42.255.0/29", r#", "reserved": ["10.42.255.0/24"]"#).unwrap();
        assert_eq!(
            networks(&range, &[0, 1, 5, 6, u32::MAX]),
            ["10.42.255.1/16", "10.42.255.2/16", "10.42.255.6/16", "-", "-"]
        );
        assert_eq!(range.name(11), "lighthouse-11");
        assert!(range.has([10, 42, 255, 6].into()) && !range.has([10, 42, 255, 7].into()));
        let first = policy("10.42.255.250", r#", "reserved": ["10.42.255.248/29"]"#).unwrap();
        assert_eq!(networks(&first, &[0, 4, 5]), ["10.42.255.250/16", "10.42.255.254/16", "-"]);
    }

    #[test]
    fn addresses_that_somebody_else_could_get_or_nobody_would_ask_are_refused() {
        let error = |network: &str, pods: &str| policy(network, pods).unwrap_err();
        assert!(error("10.42.255.0/24", "").contains("pods.reserved"));
        assert!(error("10.42.255.0/24", r#", "reserved": ["10.42.255.0/25"]"#).contains("pods.reserved"));
        assert!(error("10.43.255.0/24", "").contains("in no prefix"));
        assert!(error("10.43.255.1", "").contains("in no prefix"));
        assert!(error("x", "").contains("no network"));
    }

    #[test]
    fn every_mistake_in_the_section_is_named() {
        let text = r#"{"lighthouses": {"account": "x", "network": "10.0.0.0/8", "name": "lh", "groups": ["{a}"], "life": "x"},
            "hosts": {"pool": ["10.1.0.0/16"], "lighthouses": {"10.0.0.2": ["a:1"]}}}"#;
        let error = Policy::parse(text).unwrap_err().to_string();
        for key in
            ["lighthouses: a pod", "account", "name", "groups", "life", "hosts.reserved", "hosts.lighthouses.10.0.0.2"]
        {
            assert!(error.contains(key), "{key}: {error}");
        }
        assert!(Policy::parse(r#"{"lighthouses": {"account": "a/b", "network": "10.0.0.0/8", "port": 0}}"#).is_err());
    }
}
