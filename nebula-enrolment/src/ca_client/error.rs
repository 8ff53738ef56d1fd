//! Why a request to the CA service failed, and whether another attempt could succeed.

use nebula_cni_contract::launch::CaAccess;
use rustls::CertificateError;

use super::pinned::PinError;

/// Why a request failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The CA refused the request; retrying soon is pointless.
    #[error("{message} ({code})")]
    Denied {
        /// Stable reason.
        code: String,
        /// Which check failed.
        message: String,
    },
    /// A file, the URL or the service's TLS certificate is wrong: every attempt fails until somebody changes it.
    #[error("{0}")]
    Misconfigured(String),
    /// The CA could not be reached, or could not answer.
    #[error("{0}")]
    Unavailable(String),
}

impl Error {
    /// Whether the CA itself refused.
    #[must_use]
    pub fn is_denied(&self) -> bool {
        matches!(self, Self::Denied { .. })
    }

    /// Adds where the answer came from.
    pub(super) fn at(self, url: &str) -> Self {
        match self {
            Self::Unavailable(cause) => Self::Unavailable(format!("{url} {cause}")),
            other => other,
        }
    }

    /// A request to `url` got no answer.
    pub(super) fn no_answer(url: &str, error: &ureq::Error, access: &CaAccess) -> Self {
        match error {
            ureq::Error::Io(error) => match error.get_ref().and_then(|error| error.downcast_ref()) {
                Some(error) => Self::of_tls(url, error, access),
                None => Self::Unavailable(format!("cannot ask {url}: {error}")),
            },
            ureq::Error::Rustls(error) => Self::of_tls(url, error, access),
            ureq::Error::Timeout(_) => Self::Unavailable(format!(
                "cannot ask {url}: {error}; is the service running and reachable from this node?"
            )),
            ureq::Error::Other(cause) if cause.is::<PinError>() => Self::Misconfigured(cause.to_string()),
            ureq::Error::BadUri(_) | ureq::Error::Http(_) | ureq::Error::RequireHttpsOnly(_) | ureq::Error::Tls(_) => {
                Self::Misconfigured(format!("cannot ask {url}: {error}; ca.url must be https://HOST:PORT"))
            }
            _ => Self::Unavailable(format!("cannot ask {url}: {error}")),
        }
    }

    fn of_tls(url: &str, error: &rustls::Error, access: &CaAccess) -> Self {
        let roots = access.tls_ca_file.display();
        let rustls::Error::InvalidCertificate(why) = error else {
            return Self::Unavailable(format!(
                "cannot ask {url}: {error}; is this the address of a nebula-ca service?"
            ));
        };
        Self::Misconfigured(match why {
            CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => {
                let name = access.server_name.clone().unwrap_or_else(|| host(url));
                format!(
                    "the TLS certificate of {url} is not for {name}: set ca.serverName to a name that it has, or run \
                     `nebula-ca tls add-name {name}` on the CA"
                )
            }
            CertificateError::UnknownIssuer | CertificateError::BadSignature => format!(
                "the TLS certificate of {url} does not belong to {roots}: copy the present tls.crt of the CA there, or \
                 find out what else answers at this address"
            ),
            CertificateError::Expired | CertificateError::ExpiredContext { .. } => format!(
                "the TLS certificate of {url} has expired, or the clock of this node is ahead: check the clock, or give \
                 the CA another tls.crt"
            ),
            CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
                format!("the TLS certificate of {url} is not valid yet: check the clocks of this node and of the CA")
            }
            other => format!("the TLS certificate of {url} cannot be accepted: {other}; give the CA another tls.crt"),
        })
    }
}

/// The host of a URL, for messages.
fn host(url: &str) -> String {
    let uri = url.parse::<ureq::http::Uri>().ok();
    uri.and_then(|uri| Some(uri.host()?.to_owned())).unwrap_or_else(|| url.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(error: &ureq::Error) -> Error {
        let access = CaAccess {
            url: "https://10.96.0.7:8443".to_owned(),
            tls_ca_file: "/roots.pem".into(),
            token_file: "/token".into(),
            server_name: None,
        };
        Error::no_answer("https://10.96.0.7:8443/v1/trust", error, &access)
    }

    fn of_certificate(why: CertificateError) -> String {
        // Handshakes report errors wrapped like this.
        let wrapped = std::io::Error::new(std::io::ErrorKind::InvalidData, rustls::Error::InvalidCertificate(why));
        let error = of(&ureq::Error::Io(wrapped));
        assert!(matches!(error, Error::Misconfigured(_)), "{error:?}");
        error.to_string()
    }

    #[test]
    fn a_certificate_that_cannot_be_accepted_is_final_and_says_what_to_do() {
        let text = of_certificate(CertificateError::NotValidForName);
        assert!(text.contains("is not for 10.96.0.7") && text.contains("tls add-name 10.96.0.7"), "{text}");
        assert!(of_certificate(CertificateError::UnknownIssuer).contains("/roots.pem"));
        assert!(of_certificate(CertificateError::Expired).contains("clock"));
        assert!(of_certificate(CertificateError::NotValidYet).contains("clock"));
        assert!(of_certificate(CertificateError::Revoked).contains("tls.crt"));
    }

    #[test]
    fn what_may_pass_is_not_final() {
        let refused = std::io::Error::from(std::io::ErrorKind::ConnectionRefused);
        for error in [ureq::Error::Io(refused), ureq::Error::HostNotFound, ureq::Error::ConnectionFailed] {
            assert!(matches!(of(&error), Error::Unavailable(_)), "{error}");
        }
        assert!(matches!(of(&ureq::Error::BadUri("x".to_owned())), Error::Misconfigured(_)));
    }
}
