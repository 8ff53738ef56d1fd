//! The address of the CA service: where requests go, and the name that its TLS certificate must be for.

use nebula_cni_plugin::launch::{self, CaAccess};
use ureq::config::Config;
use ureq::http::Uri;
use ureq::unversioned::resolver::{DefaultResolver, ResolvedSocketAddrs, Resolver};
use ureq::unversioned::transport::{DefaultConnector, NextTimeout};

/// The URL of `path` at the service, as operators know it.
pub(super) fn url(access: &CaAccess, path: &str) -> String {
    format!("{}{path}", access.url.trim_end_matches('/'))
}

/// The URL of `path` for a request: with the name that the certificate must be for.
pub(super) fn request_url(access: &CaAccess, path: &str) -> String {
    launch::request_url(&access.url, access.server_name.as_deref(), path)
}

/// An agent whose requests go to the host of `access`, whatever name they are for.
pub(super) fn agent(access: &CaAccess, config: Config) -> ureq::Agent {
    match access.server_name.as_ref().and_then(|_| access.url.parse().ok()) {
        Some(place) => ureq::Agent::with_parts(config, DefaultConnector::default(), Fixed(place)),
        None => ureq::Agent::new_with_config(config),
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

    fn access(url: &str, name: Option<&str>) -> CaAccess {
        CaAccess {
            url: url.to_owned(),
            tls_ca_file: "/a".into(),
            token_file: "/b".into(),
            server_name: name.map(str::to_owned),
        }
    }

    #[test]
    fn the_name_of_the_certificate_takes_the_place_of_the_host() {
        let of = |url, name| request_url(&access(url, name), "/v1/trust?wait=5");
        assert_eq!(of("https://10.96.0.7:8443/", None), "https://10.96.0.7:8443/v1/trust?wait=5");
        assert_eq!(of("https://10.96.0.7:8443", Some("ca.ns.svc")), "https://ca.ns.svc:8443/v1/trust?wait=5");
        assert_eq!(of("https://ca.example", Some("fd00::1")), "https://[fd00::1]/v1/trust?wait=5");
        assert_eq!(of("https://[fd00::1]:1/x", Some("ca")), "https://ca:1/x/v1/trust?wait=5");
    }
}
