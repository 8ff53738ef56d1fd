//! Contradictions in a configuration: settings that fit their types, but with which a node would silently do nothing.

use std::net::IpAddr;
use std::time::Duration;

use ipnet::IpNet;
use nebula_cert::Version;

use super::{Config, MAX_RELAYS};
use crate::firewall::{PortRange, Rule};

/// What [`Config::validate`] found. Its text names every problem.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("invalid configuration: {}", list(.problems))]
pub struct InvalidConfig {
    problems: Vec<ConfigProblem>,
}

impl InvalidConfig {
    /// Every problem, at least one.
    #[must_use]
    pub fn problems(&self) -> &[ConfigProblem] {
        &self.problems
    }
}

fn list(problems: &[ConfigProblem]) -> String {
    problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

/// One problem of a configuration.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigProblem {
    /// [`Config::trust`] is empty.
    #[error("no CA is trusted, so every peer would be refused; add one to `trust`")]
    NoCa,
    /// [`Config::initiating_version`] names a version of which [`Config::identity`] has no certificate.
    #[error("handshakes shall begin with a certificate of version {0:?}, and there is none")]
    NoCertificateOfVersion(Version),
    /// Nothing says where this lighthouse is.
    #[error("the lighthouse {0} has no address; add one to `static_hosts`")]
    LighthouseWithoutAddress(IpAddr),
    /// A node cannot be its own lighthouse.
    #[error("the lighthouse {0} is this node itself")]
    LighthouseIsSelf(IpAddr),
    /// A lighthouse outside of the networks of this node's certificate cannot be reached.
    #[error("the lighthouse {0} is in no network of this node's certificate")]
    LighthouseOutside(IpAddr),
    /// The same for a key of [`Config::static_hosts`].
    #[error("the host {0} of `static_hosts` is in no network of this node's certificate")]
    StaticHostOutside(IpAddr),
    /// A node cannot be its own relay.
    #[error("the relay {0} is this node itself")]
    RelayIsSelf(IpAddr),
    /// A relay uses no relays itself.
    #[error("a node that relays for others cannot be behind relays itself; set either `am_relay` or `relays`")]
    RelayBehindRelays,
    /// Peers read only the first [`MAX_RELAYS`].
    #[error("{0} relays, but peers read only the first {MAX_RELAYS}")]
    TooManyRelays(usize),
    /// A subnet without gateways.
    #[error("the subnet {0} has no gateway")]
    SubnetWithoutGateway(IpNet),
    /// A node cannot be its own gateway.
    #[error("the gateway {gateway} of the subnet {network} is this node itself")]
    GatewayIsSelf {
        /// The subnet.
        network: IpNet,
        /// The gateway.
        gateway: IpAddr,
    },
    /// A rule with a range of ports that contains none.
    #[error("a firewall rule allows the ports {0} to {1}, which are none")]
    EmptyPortRange(u16, u16),
    /// A setting that must be above zero.
    #[error("{0} must be above zero")]
    Zero(&'static str),
}

impl Config {
    /// Looks for contradictions: settings with which a node would start and then silently not work, such as a
    /// lighthouse without an address. [`crate::Engine::new`] and, by default, the driver refuse a configuration that
    /// has any.
    ///
    /// # Errors
    /// Returns everything that was found.
    pub fn validate(&self) -> Result<(), InvalidConfig> {
        let mut problems = Vec::new();
        self.check_identity(&mut problems);
        self.check_lighthouses(&mut problems);
        self.check_relays(&mut problems);
        self.check_subnets(&mut problems);
        self.check_numbers(&mut problems);
        if problems.is_empty() { Ok(()) } else { Err(InvalidConfig { problems }) }
    }

    fn check_identity(&self, problems: &mut Vec<ConfigProblem>) {
        if self.trust.certificates().next().is_none() {
            problems.push(ConfigProblem::NoCa);
        }
        let missing = |version: &Version| self.identity.certificate(*version).is_none();
        problems.extend(self.initiating_version.filter(missing).map(ConfigProblem::NoCertificateOfVersion));
    }

    fn check_lighthouses(&self, problems: &mut Vec<ConfigProblem>) {
        // Lighthouses do not query each other.
        let queried = if self.lighthouse.am_lighthouse { &[][..] } else { &self.lighthouse.hosts };
        for host in queried.iter().copied() {
            if self.is_own_address(host) {
                problems.push(ConfigProblem::LighthouseIsSelf(host));
            } else if !self.is_inside(host) {
                problems.push(ConfigProblem::LighthouseOutside(host));
            } else if self.fixed_endpoints_of(host).is_empty() {
                problems.push(ConfigProblem::LighthouseWithoutAddress(host));
            }
        }
        let outside = self.static_hosts.keys().filter(|host| !self.is_inside(**host));
        problems.extend(outside.map(|host| ConfigProblem::StaticHostOutside(*host)));
    }

    fn check_relays(&self, problems: &mut Vec<ConfigProblem>) {
        let relays = &self.relay.relays;
        if self.relay.am_relay && !relays.is_empty() {
            problems.push(ConfigProblem::RelayBehindRelays);
        }
        if relays.len() > MAX_RELAYS {
            problems.push(ConfigProblem::TooManyRelays(relays.len()));
        }
        let own = relays.iter().filter(|relay| self.is_own_address(**relay));
        problems.extend(own.map(|relay| ConfigProblem::RelayIsSelf(*relay)));
    }

    fn check_subnets(&self, problems: &mut Vec<ConfigProblem>) {
        for route in &self.subnets {
            let network = route.network;
            if route.gateways.is_empty() {
                problems.push(ConfigProblem::SubnetWithoutGateway(network));
            }
            for gateway in route.gateways.iter().map(|gateway| gateway.address) {
                if self.is_own_address(gateway) {
                    problems.push(ConfigProblem::GatewayIsSelf { network, gateway });
                }
            }
        }
    }

    fn check_numbers(&self, problems: &mut Vec<ConfigProblem>) {
        let durations: [(&str, Duration); 3] = [
            ("handshakes.try_interval", self.handshakes.try_interval),
            ("timers.connection_alive_interval", self.timers.connection_alive_interval),
            ("timers.pending_deletion_interval", self.timers.pending_deletion_interval),
        ];
        let zero = durations.into_iter().filter(|(_, duration)| duration.is_zero());
        problems.extend(zero.map(|(name, _)| ConfigProblem::Zero(name)));
        let limits = [
            ("handshakes.retries", self.handshakes.retries as usize),
            ("handshakes.max_pending", self.handshakes.max_pending),
        ];
        problems.extend(limits.into_iter().filter(|(_, limit)| *limit == 0).map(|(name, _)| ConfigProblem::Zero(name)));
        if self.lighthouse.interval.is_some_and(|interval| interval.is_zero()) {
            problems.push(ConfigProblem::Zero("lighthouse.interval"));
        }
        let empty = |rule: &Rule| match rule.port {
            PortRange::Range(first, last) if first > last => Some(ConfigProblem::EmptyPortRange(first, last)),
            PortRange::Range(..) | PortRange::Any | PortRange::Fragment => None,
        };
        problems.extend(self.firewall.inbound.iter().chain(&self.firewall.outbound).filter_map(empty));
    }

    fn is_inside(&self, host: IpAddr) -> bool {
        self.identity.networks().iter().any(|network| network.contains(&host))
    }
}

#[cfg(test)]
mod tests {
    use nebula_cert::{CaPool, Identity};

    use super::super::{Gateway, SubnetRoute};
    use super::*;

    const CERTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/vectors/certs/v2-25519/");

    /// The certificate is for 10.3.0.9/16 and others.
    fn config() -> Config {
        let identity = Identity::read(format!("{CERTS}host-multi.crt"), format!("{CERTS}host-multi.key")).unwrap();
        Config::new(identity, CaPool::from_pem(&std::fs::read(format!("{CERTS}ca.crt")).unwrap()).unwrap())
    }

    fn problems(change: impl FnOnce(&mut Config)) -> Vec<ConfigProblem> {
        let mut config = config();
        change(&mut config);
        config.validate().err().map(|invalid| invalid.problems).unwrap_or_default()
    }

    fn at(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn a_plain_configuration_is_valid() {
        assert_eq!(config().validate(), Ok(()));
    }

    #[test]
    fn a_lighthouse_needs_an_address_in_the_own_network_and_is_another_node() {
        let lighthouse = at("10.3.0.1");
        let hosts = |hosts: &[IpAddr]| {
            let hosts = hosts.to_vec();
            problems(move |config| config.lighthouse.hosts = hosts)
        };
        assert_eq!(hosts(&[lighthouse]), [ConfigProblem::LighthouseWithoutAddress(lighthouse)]);
        assert_eq!(hosts(&[at("10.3.0.9")]), [ConfigProblem::LighthouseIsSelf(at("10.3.0.9"))]);
        assert_eq!(hosts(&[at("192.0.2.1")]), [ConfigProblem::LighthouseOutside(at("192.0.2.1"))]);
        let known = |config: &mut Config, endpoints| {
            config.lighthouse.hosts = vec![lighthouse];
            config.static_hosts.insert(lighthouse, endpoints);
        };
        assert_eq!(problems(|config| known(config, vec!["192.0.2.1:4242".parse().unwrap()])), []);
        let empty = problems(|config| known(config, Vec::new()));
        assert_eq!(empty, [ConfigProblem::LighthouseWithoutAddress(lighthouse)], "an entry without endpoints is none");
    }

    #[test]
    fn everything_is_found_at_once_and_the_text_says_it() {
        let found = |config: &mut Config| {
            config.trust = CaPool::new();
            config.initiating_version = Some(Version::V1);
            config.relay.am_relay = true;
            config.relay.relays = vec![at("10.3.0.9"); 11];
            config.static_hosts.insert(at("10.200.0.1"), Vec::new());
            let (network, own) = ("192.168.7.0/24".parse().unwrap(), vec![Gateway::new(at("fd01:2:3::9"))]);
            config.subnets = vec![SubnetRoute::new(network, Vec::new()), SubnetRoute::new(network, own)];
            config.timers.connection_alive_interval = Duration::ZERO;
            config.handshakes.retries = 0;
            config.lighthouse.interval = Some(Duration::ZERO);
            config.firewall.inbound.push(Rule { port: PortRange::Range(9, 8), ..Rule::any() });
        };
        let all = problems(found);
        for expected in [
            ConfigProblem::NoCa,
            ConfigProblem::NoCertificateOfVersion(Version::V1),
            ConfigProblem::RelayBehindRelays,
            ConfigProblem::TooManyRelays(11),
            ConfigProblem::RelayIsSelf(at("10.3.0.9")),
            ConfigProblem::StaticHostOutside(at("10.200.0.1")),
            ConfigProblem::SubnetWithoutGateway("192.168.7.0/24".parse().unwrap()),
            ConfigProblem::Zero("timers.connection_alive_interval"),
            ConfigProblem::Zero("handshakes.retries"),
            ConfigProblem::Zero("lighthouse.interval"),
            ConfigProblem::EmptyPortRange(9, 8),
        ] {
            assert!(all.contains(&expected), "{expected}");
        }
        let own = |problem: &ConfigProblem| matches!(problem, ConfigProblem::GatewayIsSelf { .. });
        assert!(all.iter().any(own));
        let mut config = config();
        found(&mut config);
        let text = config.validate().unwrap_err().to_string();
        assert!(text.starts_with("invalid configuration: no CA is trusted, so every peer"), "{text}");
        assert!(text.contains("; handshakes.retries must be above zero"), "{text}");
    }
}
