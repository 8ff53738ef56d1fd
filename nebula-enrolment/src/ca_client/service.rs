//! The address of the CA service: where requests go, and the name that its TLS certificate must be for.

use nebula_cni_contract::launch::{self, CaAccess};

/// The URL of `path` at the service, as operators know it.
pub(super) fn url(access: &CaAccess, path: &str) -> String {
    format!("{}{path}", access.url.trim_end_matches('/'))
}

/// The URL of `path` for a request: with the name that the certificate must be for.
pub(super) fn request_url(access: &CaAccess, path: &str) -> String {
    launch::request_url(&access.url, access.server_name.as_deref(), path)
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
