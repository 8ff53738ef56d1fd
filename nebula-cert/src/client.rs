//! HTTPS clients of a CA service, as our programs have them: they trust the service's own roots only, and follow no
//! redirect and no proxy, which could leak a token.

use std::sync::Arc;

use rustls::crypto::CryptoProvider;
use ureq::{
    Agent,
    config::{Config, ConfigBuilder},
    http::Uri,
    tls::{Certificate, PemItem, RootCerts, TlsConfig, TlsProvider},
    typestate::AgentScope,
    unversioned::{
        resolver::{DefaultResolver, ResolvedSocketAddrs, Resolver},
        transport::{DefaultConnector, NextTimeout},
    },
};

/// Why a text gives no TLS roots.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RootsError {
    /// The key of somebody lies where everybody reads.
    #[error("there is a private key in it")]
    PrivateKey,
    /// It is something else.
    #[error("it is not PEM")]
    NotPem,
    /// It has other PEM only, or none.
    #[error("there is no certificate in it")]
    Empty,
}

/// The TLS roots in PEM text.
///
/// # Errors
/// Returns why it cannot be used.
pub fn roots(pem: &[u8]) -> Result<Vec<Certificate<'static>>, RootsError> {
    let mut roots = Vec::new();
    for item in ureq::tls::parse_pem(pem) {
        match item {
            Ok(PemItem::Certificate(certificate)) => roots.push(certificate),
            Ok(PemItem::PrivateKey(_)) => return Err(RootsError::PrivateKey),
            Ok(_) => {}
            Err(_) => return Err(RootsError::NotPem),
        }
    }
    if roots.is_empty() { Err(RootsError::Empty) } else { Ok(roots) }
}

/// TLS that trusts these roots only.
#[must_use]
pub fn tls(roots: Vec<Certificate<'static>>, provider: Arc<CryptoProvider>) -> TlsConfig {
    TlsConfig::builder()
        .provider(TlsProvider::Rustls)
        .unversioned_rustls_crypto_provider(provider)
        .root_certs(RootCerts::Specific(Arc::new(roots)))
        .build()
}

/// What all clients have in common; each adds its limits of time and memory.
#[must_use]
pub fn config(tls: TlsConfig, user_agent: &'static str) -> ConfigBuilder<AgentScope> {
    Agent::config_builder()
        .tls_config(tls)
        .https_only(true)
        .http_status_as_error(false)
        .max_redirects(0)
        .proxy(None)
        .user_agent(user_agent)
}

/// A client whose requests go to the host of the URL `place`, if there is one, whatever name they are for.
#[must_use]
pub fn agent(config: Config, place: Option<&str>) -> Agent {
    match place.and_then(|place| place.parse().ok()) {
        Some(place) => Agent::with_parts(config, DefaultConnector::default(), Fixed(place)),
        None => Agent::new_with_config(config),
    }
}

/// Resolves every name to the addresses of one host.
#[derive(Debug)]
struct Fixed(Uri);

impl Resolver for Fixed {
    fn resolve(&self, _name: &Uri, config: &Config, timeout: NextTimeout) -> Result<ResolvedSocketAddrs, ureq::Error> {
        DefaultResolver::default().resolve(&self.0, config, timeout)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn roots_are_certificates_in_pem_and_no_key_is_among_them() {
        let certificate = "-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----\n";
        let key = "-----BEGIN PRIVATE KEY-----\nMAA=\n-----END PRIVATE KEY-----\n";
        assert_eq!(roots(certificate.repeat(2).as_bytes()).map(|roots| roots.len()), Ok(2));
        for (text, error) in [
            (String::new(), RootsError::Empty),
            ("-----BEGIN CERTIFICATE-----\n".to_owned(), RootsError::NotPem),
            (format!("{certificate}{key}"), RootsError::PrivateKey),
        ] {
            assert_eq!(roots(text.as_bytes()).map(|roots| roots.len()), Err(error), "{text}");
        }
    }
}
