//! Where a client wants to go: a host of the overlay and a port.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;

/// An overlay address, or a name that somebody in the overlay may know.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Host {
    /// An address.
    Address(IpAddr),
    /// A name, of at most 255 bytes.
    Name(String),
}

/// A host and a port.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Target {
    /// The host.
    pub host: Host,
    /// The port.
    pub port: u16,
}

/// Why a text is no target.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not HOST:PORT, where HOST is an overlay address (IPv6 in brackets) or a name")]
pub struct InvalidTarget;

/// A name of the DNS has at most 253 characters, one in a SOCKS request 255 bytes.
const MAX_NAME: usize = 255;

impl Host {
    /// Reads an address, or a name without blanks and control characters.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        if let Ok(address) = text.parse::<IpAddr>() {
            return Some(Self::Address(address.to_canonical()));
        }
        let fits = (1..=MAX_NAME).contains(&text.len()) && text.chars().all(|c| c.is_ascii_graphic() && c != ':');
        fits.then(|| Self::Name(text.to_owned()))
    }
}

impl From<SocketAddr> for Target {
    fn from(address: SocketAddr) -> Self {
        Self { host: Host::Address(address.ip().to_canonical()), port: address.port() }
    }
}

impl FromStr for Target {
    type Err = InvalidTarget;

    fn from_str(text: &str) -> Result<Self, InvalidTarget> {
        if let Ok(address) = text.parse::<SocketAddr>() {
            return Ok(address.into());
        }
        let (host, port) = text.rsplit_once(':').ok_or(InvalidTarget)?;
        let host = Host::parse(host).ok_or(InvalidTarget)?;
        // An IPv6 address without brackets is ambiguous.
        if matches!(host, Host::Address(IpAddr::V6(_))) {
            return Err(InvalidTarget);
        }
        Ok(Self { host, port: port.parse().map_err(|_| InvalidTarget)? })
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.host {
            Host::Address(address) => SocketAddr::new(*address, self.port).fmt(f),
            Host::Name(name) => write!(f, "{name}:{}", self.port),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_and_names_are_told_apart() {
        for (text, shown) in [
            ("10.42.0.1:80", "10.42.0.1:80"),
            ("[fd42::1]:80", "[fd42::1]:80"),
            ("[::ffff:10.42.0.1]:80", "10.42.0.1:80"),
            ("db.example:5432", "db.example:5432"),
        ] {
            assert_eq!(text.parse::<Target>().unwrap().to_string(), shown);
        }
        for text in ["", ":80", "db", "db:", "db:99999", "fd42::1:80", "a b:80", "a\n:80", "[db]x:y"] {
            assert_eq!(text.parse::<Target>(), Err(InvalidTarget), "{text:?}");
        }
        assert_eq!(Host::parse(&"a".repeat(256)), None);
    }
}
