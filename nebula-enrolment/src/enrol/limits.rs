//! Which networks a host lets its CA service give it. A certificate makes routes: without limits, whoever controls the
//! service takes the host's LAN, its gateway or all of its traffic.

use std::fmt::Write as _;

use ipnet::IpNet;
use nebula_cert::Certificate;
use nebula_linux::used_networks::Used;

/// What a certificate may have at the first enrolment. Renewals may change nothing of it.
#[derive(Debug, Clone, Default)]
pub struct Limits {
    /// The networks of the join token, in which all addresses must be; empty: not known.
    pub overlay: Vec<IpNet>,
    /// Networks that the user named, which are accepted whatever they are.
    pub accepted: Vec<IpNet>,
    /// What this machine uses already.
    pub used: Vec<Used>,
}

/// Why networks are refused, and what the user can do about it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NotAccepted {
    /// Not in the networks of the join token.
    #[error(
        "the CA service gave the address {address}, which is not in {overlay}, for which the join token was made: nothing \
         was changed here; ask whoever made the token"
    )]
    Outside {
        /// Address with its prefix length.
        address: IpNet,
        /// The networks of the token.
        overlay: String,
    },
    /// They would take something of this machine, or make it a gateway.
    #[error(
        "{findings}. Nothing was changed here. If it shall be so, name these networks: -accept-networks {networks}"
    )]
    Unnamed {
        /// What is wrong with each network.
        findings: String,
        /// All of them, as the option takes them.
        networks: String,
    },
}

impl Limits {
    /// Checks the networks in which a host would be, before it asks for a certificate.
    ///
    /// # Errors
    /// Returns an error if the user has to name some of them.
    pub fn check_overlay(&self, overlay: &[IpNet]) -> Result<(), NotAccepted> {
        self.check(overlay, &[])
    }

    /// Checks what a certificate would make of this machine.
    ///
    /// # Errors
    /// Returns an error if an address is outside of the join token's networks, or the user has to name some networks.
    pub fn check_certificate(&self, certificate: &Certificate) -> Result<(), NotAccepted> {
        let is_within = |network: &&IpNet| self.overlay.iter().any(|overlay| overlay.contains(&network.trunc()));
        if !self.overlay.is_empty()
            && let Some(address) = certificate.networks().iter().find(|network| !is_within(network))
        {
            return Err(NotAccepted::Outside { address: *address, overlay: list(&self.overlay) });
        }
        self.check(certificate.networks(), certificate.unsafe_networks())
    }

    fn check(&self, networks: &[IpNet], behind: &[IpNet]) -> Result<(), NotAccepted> {
        let mut findings = Vec::new();
        let own = networks.iter().filter_map(|network| Some((network.trunc(), self.objection(network.trunc())?)));
        let behind = behind.iter().map(|network| (network.trunc(), GATEWAY.to_owned()));
        for (network, objection) in own.chain(behind) {
            if !self.is_accepted(network) {
                findings.push((network, objection));
            }
        }
        if findings.is_empty() {
            return Ok(());
        }
        let mut text = String::from("this host does not take ");
        for (at, (network, objection)) in findings.iter().enumerate() {
            let _ = write!(text, "{}{network}: it {objection}", if at == 0 { "" } else { "; " });
        }
        let networks: Vec<IpNet> = findings.into_iter().map(|(network, _)| network).collect();
        Err(NotAccepted::Unnamed { findings: text, networks: list(&networks) })
    }

    fn is_accepted(&self, network: IpNet) -> bool {
        self.accepted.iter().any(|accepted| accepted.contains(&network))
    }

    /// What is wrong with a network of the overlay.
    fn objection(&self, network: IpNet) -> Option<String> {
        if let Some((_, what)) = SPECIAL.iter().find(|(special, _)| parsed(special).contains(&network)) {
            return Some((*what).to_owned());
        }
        if !PRIVATE.iter().any(|private| parsed(private).contains(&network)) {
            return Some(match network.prefix_len() {
                0..=1 => "would take the place of the default route".to_owned(),
                _ => "is not only private address space".to_owned(),
            });
        }
        let used = self.used.iter().filter(|used| overlap(used.network, network));
        // The narrowest says most.
        let used = used.max_by_key(|used| used.network.prefix_len())?;
        Some(format!("overlaps {}, {}", used.network, used.what))
    }
}

fn overlap(one: IpNet, other: IpNet) -> bool {
    one.contains(&other) || other.contains(&one)
}

fn parsed(network: &str) -> IpNet {
    network.parse().unwrap_or_default()
}

/// Networks as the options of commands take them.
pub(super) fn list(networks: &[IpNet]) -> String {
    networks.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
}

const GATEWAY: &str = "would be reached by other hosts through this one (unsafe networks of the certificate)";
/// Whatever else is in there, an overlay is not.
const SPECIAL: &[(&str, &str)] = &[
    ("127.0.0.0/8", "is loopback"),
    ("::1/128", "is loopback"),
    ("169.254.0.0/16", "is link-local"),
    ("fe80::/10", "is link-local"),
    ("224.0.0.0/4", "is multicast"),
    ("ff00::/8", "is multicast"),
];
/// Where an overlay may be without being named: private address space, that of carriers, and unique local addresses.
const PRIVATE: &[&str] = &["10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "fc00::/7"];

#[cfg(test)]
mod tests {
    use nebula_cert::{Curve, PrivateKey, SigningKey, Template};

    use super::*;

    fn networks(texts: &[&str]) -> Vec<IpNet> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    fn certificate(of: &[&str], behind: &[&str]) -> Certificate {
        let key = SigningKey::generate(Curve::Curve25519).unwrap();
        let template = Template::new("ca", 0..=1_000);
        let ca = template.clone().self_sign(&key).unwrap();
        let public_key = PrivateKey::generate(Curve::Curve25519).unwrap().public_key();
        let (networks, unsafe_networks) = (networks(of), networks(behind));
        Template { name: "host".into(), networks, unsafe_networks, public_key, ..template }.sign(&ca, &key).unwrap()
    }

    /// A host in a LAN, with containers, a VPN and a name server behind its gateway.
    fn limits(accepted: &[&str]) -> Limits {
        let used = [
            ("127.0.0.1/32", "an address of lo"),
            ("192.168.1.7/32", "an address of eth0"),
            ("192.168.1.0/24", "the route by eth0"),
            ("192.168.1.1/32", "a gateway by eth0"),
            ("172.17.0.0/16", "the route by docker0"),
            ("10.8.0.0/16", "the route by tun0"),
            ("10.53.0.53/32", "a name server"),
            ("fd11::/64", "the route by eth0"),
        ];
        let used = used.map(|(network, what)| Used { network: network.parse().unwrap(), what: what.to_owned() });
        Limits { overlay: Vec::new(), accepted: networks(accepted), used: used.to_vec() }
    }

    #[test]
    fn no_certificate_takes_the_hosts_routes_gateway_or_lan_without_being_named() {
        for (network, said) in [
            ("0.0.0.2/1", "default route"),
            ("128.0.0.1/1", "default route"),
            ("1.0.0.1/2", "not only private"),
            ("::1/1", "default route"),
            ("2001:db8::1/32", "not only private"),
            ("8.8.8.8/32", "not only private"),
            ("10.0.0.1/7", "not only private"),
            ("127.0.0.53/32", "loopback"),
            ("127.9.0.1/8", "loopback"),
            ("169.254.169.254/32", "link-local"),
            ("fe80::1/64", "link-local"),
            ("224.0.0.251/24", "multicast"),
            ("192.168.1.1/32", "192.168.1.1/32, a gateway by eth0"),
            ("192.168.1.7/32", "192.168.1.7/32, an address of eth0"),
            ("192.168.1.130/25", "192.168.1.0/24, the route by eth0"),
            ("192.168.5.1/16", "a gateway by eth0"),
            ("172.17.3.1/24", "172.17.0.0/16, the route by docker0"),
            ("10.0.0.1/8", "10.53.0.53/32, a name server"),
            ("10.53.0.53/32", "a name server"),
            ("fd11::7/128", "fd11::/64, the route by eth0"),
        ] {
            let certificate = certificate(&[network], &[]);
            let refused = limits(&[]).check_certificate(&certificate).unwrap_err().to_string();
            assert!(refused.contains(said), "{network}: {refused}");
            let shown = certificate.networks()[0].trunc().to_string();
            assert!(refused.ends_with(&format!("-accept-networks {shown}")), "{refused}");
            limits(&[&shown]).check_certificate(&certificate).unwrap();
            let overlay = networks(&[network]);
            assert!(limits(&[]).check_overlay(&overlay).is_err(), "{network}: before anything is asked");
        }
        for good in ["10.42.0.9/16", "100.100.0.9/22", "192.168.100.9/24", "172.31.0.1/16", "fd42::9/64"] {
            limits(&[]).check_certificate(&certificate(&[good], &[])).unwrap();
        }
    }

    #[test]
    fn a_host_becomes_a_gateway_only_for_networks_that_are_named() {
        let gateway = certificate(&["10.42.0.9/16"], &["192.168.1.0/24", "0.0.0.0/0"]);
        let refused = limits(&[]).check_certificate(&gateway).unwrap_err().to_string();
        assert!(refused.contains("through this one") && refused.ends_with(" 0.0.0.0/0,192.168.1.0/24"), "{refused}");
        let refused = limits(&["192.168.0.0/16"]).check_certificate(&gateway).unwrap_err().to_string();
        assert!(refused.ends_with("-accept-networks 0.0.0.0/0"), "{refused}");
        limits(&["192.168.1.0/24", "0.0.0.0/0"]).check_certificate(&gateway).unwrap();
    }

    #[test]
    fn what_is_outside_of_the_join_tokens_networks_is_refused_even_if_it_is_named() {
        let within = |overlay: &[&str], accepted: &[&str]| Limits { overlay: networks(overlay), ..limits(accepted) };
        let limits = within(&["10.42.0.0/16", "fd42::/64"], &["0.0.0.0/0", "::/0"]);
        limits.check_certificate(&certificate(&["10.42.3.9/16", "fd42::9/64"], &[])).unwrap();
        limits.check_certificate(&certificate(&["10.42.3.9/24"], &[])).unwrap();
        for other in ["10.43.0.9/16", "10.42.0.9/15", "fd42::9/63", "192.168.1.1/32"] {
            let refused = limits.check_certificate(&certificate(&[other], &[])).unwrap_err();
            assert!(matches!(refused, NotAccepted::Outside { .. }), "{other}: {refused}");
            assert!(refused.to_string().contains("10.42.0.0/16,fd42::/64"), "{refused}");
        }
    }

    #[test]
    fn the_lists_are_networks() {
        let all = SPECIAL.iter().map(|(network, _)| *network).chain(PRIVATE.iter().copied());
        for text in all {
            assert_eq!(text.parse::<IpNet>().map(|network| network.trunc().to_string()), Ok(text.to_owned()));
        }
    }
}
