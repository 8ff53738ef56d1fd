//! A CA, the identities it signs, and what the hosts of the examples have in common.

use std::net::{Ipv4Addr, SocketAddr};

use nebula_cert::{CaPool, Certificate, Curve, Error, Identity, PrivateKey, SigningKey, Template};
use nebula_core::Config;
use nebula_core::firewall::Rule;

/// Seconds since the Unix epoch in which everything here is valid.
const VALIDITY: std::ops::RangeInclusive<nebula_cert::UnixTime> = 1_700_000_000..=2_000_000_000;

/// A certificate authority.
#[derive(Debug)]
pub(crate) struct Authority {
    pub(crate) certificate: Certificate,
    key: SigningKey,
}

impl Authority {
    /// A CA with a new key, whose certificate it signs itself.
    pub(crate) fn new(name: &str) -> Result<Self, Error> {
        let key = SigningKey::generate(Curve::Curve25519)?;
        let template = Template { public_key: key.public_key(), ..Template::new(name, VALIDITY) };
        Ok(Self { certificate: template.self_sign(&key)?, key })
    }

    /// What a node needs to trust this CA.
    pub(crate) fn trust(&self) -> Result<CaPool, Error> {
        let mut trust = CaPool::new();
        trust.add(self.certificate.clone())?;
        Ok(trust)
    }

    /// A new key for the host with this overlay address (`10.42.0.1/16`), and a certificate for it.
    pub(crate) fn identity(&self, name: &str, address: &str) -> Result<Identity, Box<dyn std::error::Error>> {
        let key = PrivateKey::generate(Curve::Curve25519)?;
        let template = Template {
            networks: vec![address.parse()?],
            public_key: key.public_key(),
            ..Template::new(name, VALIDITY)
        };
        Ok(Identity::new(vec![template.sign(&self.certificate, &self.key)?], key)?)
    }

    /// Configuration of host `number` (its overlay address is 10.42.0.NUMBER), which knows the endpoint of one other
    /// host and allows everything.
    pub(crate) fn config(&self, number: u8, peer: (u8, SocketAddr)) -> Result<Config, Box<dyn std::error::Error>> {
        let identity = self.identity(&format!("host-{number}"), &format!("10.42.0.{number}/16"))?;
        let mut config = Config::new(identity, self.trust()?);
        config.static_hosts.insert(overlay(peer.0).into(), vec![peer.1]);
        config.firewall.outbound.push(Rule::any());
        config.firewall.inbound.push(Rule::any());
        Ok(config)
    }
}

/// Overlay address of a host.
pub(crate) fn overlay(number: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 42, 0, number)
}

/// A UDP packet between two hosts. The checksums are left out: a kernel or a network card would fill them in.
pub(crate) fn udp_packet(from: u8, to: u8, payload: &[u8]) -> Vec<u8> {
    let udp_length = 8 + payload.len() as u16;
    let mut packet = vec![0x45, 0];
    packet.extend((20 + udp_length).to_be_bytes());
    packet.extend([0, 0, 0, 0, 64, 17, 0, 0]);
    packet.extend(overlay(from).octets());
    packet.extend(overlay(to).octets());
    for field in [1000, 2000, udp_length, 0] {
        packet.extend(field.to_be_bytes());
    }
    packet.extend(payload);
    packet
}
