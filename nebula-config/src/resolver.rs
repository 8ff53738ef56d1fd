//! `resolver.*`: overlay names for the programs of this host. Go Nebula has none of these keys.

use std::net::{IpAddr, SocketAddr};

use super::section::Section;
use super::{Refused, hosts::is_name};

/// How programs of this host resolve the overlay's names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Resolver {
    /// Domain of the overlay's names: lower case, without dots at its ends.
    pub domain: String,
    /// Where the resolver answers.
    pub listen: SocketAddr,
    /// DNS servers of the lighthouses.
    pub servers: Vec<SocketAddr>,
    /// Whether to register it with the host's resolver.
    pub register: bool,
}

impl Resolver {
    /// `Ok(None)` without a domain. `own` are this host's overlay addresses, and `lighthouses` those of the
    /// lighthouses.
    pub(super) fn read(section: &Section<'_>, own: &[IpAddr], lighthouses: &[IpAddr]) -> Result<Option<Self>, Refused> {
        let Some(domain) = domain(section, DOMAIN)? else { return Ok(None) };
        let listen = match section.string(LISTEN) {
            Some(text) => endpoint(LISTEN, &text)?,
            // Without credentials: a pod, which has no resolver.
            None => match own.first() {
                Some(own) => SocketAddr::new(*own, PORT),
                None => return Ok(None),
            },
        };
        let named = section.strings(SERVERS);
        let named = named.iter().enumerate().map(|(index, text)| endpoint(&format!("{SERVERS}.{index}"), text));
        let mut servers = named.collect::<Result<Vec<_>, _>>()?;
        if servers.is_empty() {
            servers.extend(lighthouses.iter().map(|lighthouse| SocketAddr::new(*lighthouse, PORT)));
        }
        if servers.is_empty() || servers.contains(&listen) {
            let cause = if servers.is_empty() {
                "there is no lighthouse to ask; name DNS servers in resolver.servers"
            } else {
                "resolver.listen is one of the servers that it would ask"
            };
            return Err(refuse(DOMAIN, cause));
        }
        Ok(Some(Self { domain, listen, servers, register: section.boolean("resolver.register", true) }))
    }
}

/// The domain at `key`, in lower case; `None` if there is none.
pub(super) fn domain(section: &Section<'_>, key: &str) -> Result<Option<String>, Refused> {
    let Some(text) = section.string(key).filter(|text| !text.is_empty()) else { return Ok(None) };
    let domain = text.strip_suffix('.').unwrap_or(&text).to_ascii_lowercase();
    let is_domain = is_name(&domain)
        && domain.len() <= MAX_DOMAIN_BYTES
        && domain.split('.').all(|label| (1..=63).contains(&label.len()))
        // It would be an address.
        && domain.parse::<IpAddr>().is_err();
    if is_domain { Ok(Some(domain)) } else { Err(refuse(key, &format!("{text:?} is not a domain"))) }
}

fn endpoint(key: &str, text: &str) -> Result<SocketAddr, Refused> {
    let address = text.parse::<IpAddr>().map(|ip| SocketAddr::new(ip, PORT));
    address.or_else(|_| text.parse()).map_err(|_| refuse(key, &format!("{text:?} is not an address, or address:port")))
}

fn refuse(key: &str, cause: &str) -> Refused {
    Refused::new("Unsupported configuration", format!("{key}: {cause}")).at(key)
}

const DOMAIN: &str = "resolver.domain";
const LISTEN: &str = "resolver.listen";
const SERVERS: &str = "resolver.servers";
const PORT: u16 = 53;
/// Leaves room for the longest label and a prefix such as `groups` within the 253 bytes of a name (RFC 1035).
const MAX_DOMAIN_BYTES: usize = 160;

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Option<Resolver>, Refused> {
        let tree = super::super::parse(text).unwrap();
        let addresses = |text: &[&str]| text.iter().map(|text| text.parse().unwrap()).collect::<Vec<_>>();
        Resolver::read(&Section::new(&tree), &addresses(&["10.42.0.7", "fd42::7"]), &addresses(&["10.42.0.1"]))
    }

    #[test]
    fn a_domain_is_enough() {
        assert_eq!(read("{}").unwrap(), None);
        let resolver = read("resolver: {domain: Nebula.Internal.}").unwrap().unwrap();
        assert_eq!(resolver.domain, "nebula.internal");
        assert_eq!(resolver.listen, "10.42.0.7:53".parse().unwrap());
        assert_eq!(resolver.servers, ["10.42.0.1:53".parse().unwrap()]);
        assert!(resolver.register);
    }

    #[test]
    fn addresses_may_have_ports_and_mistakes_are_named() {
        let text =
            "resolver: {domain: n, listen: '127.0.0.9:5353', servers: [10.42.0.2, '[fd42::1]:54'], register: false}";
        let resolver = read(text).unwrap().unwrap();
        assert_eq!(resolver.listen, "127.0.0.9:5353".parse().unwrap());
        assert_eq!(resolver.servers, ["10.42.0.2:53".parse().unwrap(), "[fd42::1]:54".parse().unwrap()]);
        assert!(!resolver.register);
        for (text, key) in [
            ("{domain: 'a..b'}", DOMAIN),
            ("{domain: 'a b'}", DOMAIN),
            ("{domain: 10.42.0.1}", DOMAIN),
            ("{domain: n, listen: lighthouse}", LISTEN),
            ("{domain: n, servers: [10.42.0.1, x]}", "resolver.servers.1"),
            ("{domain: n, listen: 10.42.0.1}", DOMAIN),
        ] {
            assert_eq!(read(&format!("resolver: {text}")).unwrap_err().key, key, "{text}");
        }
    }
}
