//! The lighthouses of a pod: those that the chain's entry names, and those that the CA announces.

use std::net::IpAddr;

use ipnet::IpNet;
use nebula_cert::issuance::Lighthouses;
use nebula_config::{Settings, StaticHosts, usable_lighthouses};

/// What the chain's entry says, to which announcements are added.
#[derive(Debug)]
pub(crate) struct Configured {
    hosts: StaticHosts,
    lighthouses: Vec<IpAddr>,
}

impl Configured {
    pub(crate) fn of(settings: &Settings) -> Self {
        Self { hosts: settings.static_hosts.clone(), lighthouses: settings.lighthouses.clone() }
    }

    /// Puts what the CA announced last into `settings`; what the entry says has the last word. `own` are the networks
    /// of the pod's certificate. Returns whether anything changed.
    pub(crate) fn add(&self, announced: Lighthouses, own: &[IpNet], settings: &mut Settings) -> bool {
        // A lighthouse asks no other.
        if settings.am_lighthouse {
            return false;
        }
        let (mut hosts, mut lighthouses) = (self.hosts.clone(), self.lighthouses.clone());
        for (address, endpoints) in usable_lighthouses(announced, own) {
            let endpoints = || endpoints.iter().filter_map(|endpoint| endpoint.parse().ok()).collect();
            hosts.entries.entry(address).or_insert_with(endpoints);
            if !lighthouses.contains(&address) {
                lighthouses.push(address);
            }
        }
        let differs = (&hosts, &lighthouses) != (&settings.static_hosts, &settings.lighthouses);
        (settings.static_hosts, settings.lighthouses) = (hosts, lighthouses);
        differs
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nebula_config::Value;

    fn announced(list: &[(&str, &str)]) -> Lighthouses {
        list.iter().map(|(address, endpoint)| (address.parse().unwrap(), vec![(*endpoint).to_owned()])).collect()
    }

    fn settings(nebula: serde_json::Value) -> Settings {
        Settings::read_for_pod(&Value::from(&nebula)).unwrap()
    }

    #[test]
    fn announced_lighthouses_are_added_moved_and_withdrawn_beside_the_configured_one() {
        let mut settings = settings(serde_json::json!({
            "static_host_map": {"10.42.0.1": ["192.0.2.1:4242"]}, "lighthouse": {"hosts": ["10.42.0.1"]}}));
        let configured = Configured::of(&settings);
        let own: Vec<IpNet> = vec!["10.42.7.7/16".parse().unwrap()];
        let both =
            announced(&[("10.42.0.1", "203.0.113.9:1"), ("10.42.0.2", "192.0.2.2:4242"), ("10.9.0.1", "1.2.3.4:5")]);
        assert!(configured.add(both.clone(), &own, &mut settings));
        assert!(!configured.add(both, &own, &mut settings), "nothing is new");
        let endpoint = |settings: &Settings, of: &str| {
            settings.static_hosts.endpoints(&Default::default())[&of.parse::<IpAddr>().unwrap()][0].to_string()
        };
        assert_eq!(endpoint(&settings, "10.42.0.1"), "192.0.2.1:4242", "the entry has the last word");
        assert_eq!(endpoint(&settings, "10.42.0.2"), "192.0.2.2:4242");
        let addresses = |list: &[&str]| -> Vec<IpAddr> { list.iter().map(|text| text.parse().unwrap()).collect() };
        assert_eq!(settings.lighthouses, addresses(&["10.42.0.1", "10.42.0.2"]), "another network's is left out");
        assert!(configured.add(announced(&[("10.42.0.2", "192.0.2.3:4242")]), &own, &mut settings));
        assert_eq!(endpoint(&settings, "10.42.0.2"), "192.0.2.3:4242", "it moved");
        assert!(configured.add(Lighthouses::new(), &own, &mut settings));
        assert_eq!(settings.lighthouses, addresses(&["10.42.0.1"]), "it was withdrawn");
    }

    #[test]
    fn a_pod_that_is_a_lighthouse_asks_no_other() {
        let mut settings =
            settings(serde_json::json!({"lighthouse": {"am_lighthouse": true}, "listen": {"port": 4242}}));
        let own: Vec<IpNet> = vec!["10.42.7.7/16".parse().unwrap()];
        let added = Configured::of(&settings).add(announced(&[("10.42.0.2", "192.0.2.2:4242")]), &own, &mut settings);
        assert!(!added && settings.lighthouses.is_empty());
    }
}
