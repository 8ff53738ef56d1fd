//! Asks the CA service for a certificate (enrolment): one HTTPS call, made blocking on a thread of its own.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use nebula_cert::issuance::{CERTIFICATE_PATH, MAX_REPLY, Pod, Proof, Refusal, Reply, Request};
use nebula_cert::{CaPool, Certificate, Curve, Identity, PrivateKey, UnixTime};
use nebula_cni_plugin::launch::CaAccess;
use ureq::tls::{PemItem, RootCerts, TlsConfig, TlsProvider};
use zeroize::{Zeroize, Zeroizing};

/// Asks one CA service on behalf of one pod or one host.
#[derive(Debug, Clone)]
pub struct CaClient {
    access: CaAccess,
    subject: Subject,
}

/// Whom the certificate is for, and so what the token proves.
#[derive(Debug, Clone)]
enum Subject {
    /// A pod that the holder of the node token vouches for.
    Pod(Pod),
    /// The host that a one-time enrolment token was made for.
    Host,
}

/// What the CA gave, checked as far as that is possible here.
#[derive(Debug, Clone)]
pub struct Issued {
    /// Certificate and the key made for it.
    pub identity: Identity,
    /// CAs and blocklist to believe from now on.
    pub trust: CaPool,
}

/// Why there is no certificate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The CA looked at the request and said no; asking again soon is pointless.
    #[error("{message} ({code})")]
    Denied {
        /// Stable reason.
        code: String,
        /// Which check failed.
        message: String,
    },
    /// The CA could not be asked, or could not answer.
    #[error("{0}")]
    Unavailable(String),
}

impl CaClient {
    /// A client for a pod, with the node's token; nothing is read or sent yet.
    #[must_use]
    pub fn new(access: CaAccess, pod: Pod) -> Self {
        Self { access, subject: Subject::Pod(pod) }
    }

    /// A client for a host, with a one-time enrolment token; nothing is read or sent yet.
    #[must_use]
    pub fn for_host(access: CaAccess) -> Self {
        Self { access, subject: Subject::Host }
    }

    /// Makes a new key in memory and asks once for a certificate of it. Takes at most about `timeout`.
    ///
    /// # Errors
    /// The CA refused, or there is no usable answer.
    pub fn request(&self, timeout: Duration, now: UnixTime) -> Result<Issued, Error> {
        // The answer tells which curve this CA signs for; nearly all use the first.
        match self.request_with(Curve::Curve25519, timeout, now) {
            Err(Error::Denied { code, .. }) if code == "wrong_curve" => self.request_with(Curve::P256, timeout, now),
            result => result,
        }
    }

    fn request_with(&self, curve: Curve, timeout: Duration, now: UnixTime) -> Result<Issued, Error> {
        let key =
            PrivateKey::generate(curve).map_err(|error| Error::Unavailable(format!("cannot make a key: {error}")))?;
        self.request_for(key, timeout, now).map(|(issued, _)| issued)
    }

    /// Asks once for a certificate of `key`; also returns the answer as it came.
    ///
    /// # Errors
    /// The CA refused, or there is no usable answer.
    pub fn request_for(&self, key: PrivateKey, timeout: Duration, now: UnixTime) -> Result<(Issued, Reply), Error> {
        let body = self.body(&key)?;
        let reply = self.post(&body, timeout)?;
        let issued = accept(&reply, key, now)
            .map_err(|cause| Error::Unavailable(format!("unusable answer from {}: {cause}", self.url())))?;
        Ok((issued, reply))
    }

    fn body(&self, key: &PrivateKey) -> Result<Zeroizing<Vec<u8>>, Error> {
        let token = self.token()?;
        let token = token.trim().to_owned();
        let proof = match &self.subject {
            Subject::Pod(pod) => Proof::Node { token, pod: pod.clone() },
            Subject::Host => Proof::Token { token },
        };
        let mut request = Request { public_key: key.public_pem(), proof };
        let body = serde_json::to_vec(&request);
        if let Proof::Node { token, .. } | Proof::Token { token } = &mut request.proof {
            token.zeroize();
        }
        body.map(Zeroizing::new).map_err(|error| Error::Unavailable(format!("cannot write the request: {error}")))
    }

    /// Read anew for each request: node tokens are rotated.
    fn token(&self) -> Result<Zeroizing<String>, Error> {
        let token = read_bounded(&self.access.token_file)
            .map_err(|error| self.unreadable("token_file", &self.access.token_file, &error))?;
        if token.trim().is_empty() {
            return Err(Error::Unavailable(format!("the token file {} is empty", self.access.token_file.display())));
        }
        Ok(token)
    }

    fn post(&self, body: &[u8], timeout: Duration) -> Result<Reply, Error> {
        let agent = self.agent(timeout)?;
        let url = self.url();
        let unavailable = |error: ureq::Error| Error::Unavailable(format!("cannot ask {url}: {}", explain(&error)));
        let mut response =
            agent.post(&url).header("content-type", "application/json").send(body).map_err(unavailable)?;
        let status = response.status().as_u16();
        let limit = MAX_REPLY as u64;
        let body = response.body_mut().with_config().limit(limit).read_to_vec().map_err(unavailable)?;
        read_answer(status, &body).map_err(|error| match error {
            Error::Unavailable(cause) => Error::Unavailable(format!("{url} {cause}")),
            denied => denied,
        })
    }

    fn url(&self) -> String {
        format!("{}{CERTIFICATE_PATH}", self.access.url.trim_end_matches('/'))
    }

    /// Trusts the given roots and nothing else; follows no redirect and no proxy, which could take the token away.
    fn agent(&self, timeout: Duration) -> Result<ureq::Agent, Error> {
        let path = &self.access.tls_ca_file;
        let pem = read_bounded(path).map_err(|error| self.unreadable("tls_ca_file", path, &error))?;
        let mut roots = Vec::new();
        for item in ureq::tls::parse_pem(pem.as_bytes()) {
            match item {
                Ok(PemItem::Certificate(certificate)) => roots.push(certificate),
                Ok(_) => {}
                Err(error) => return Err(Error::Unavailable(format!("{}: not PEM: {error}", path.display()))),
            }
        }
        if roots.is_empty() {
            return Err(Error::Unavailable(format!("{}: no certificate in it", path.display())));
        }
        let tls = TlsConfig::builder()
            .provider(TlsProvider::Rustls)
            .unversioned_rustls_crypto_provider(Arc::new(rustls::crypto::aws_lc_rs::default_provider()))
            .root_certs(RootCerts::Specific(Arc::new(roots)))
            .build();
        let config = ureq::Agent::config_builder()
            .tls_config(tls)
            .https_only(true)
            .http_status_as_error(false)
            .max_redirects(0)
            .proxy(None)
            .user_agent(concat!("nebula-cni-instance/", env!("CARGO_PKG_VERSION")))
            .timeout_connect(Some(timeout.min(CONNECT_WITHIN)))
            .timeout_global(Some(timeout))
            .build();
        Ok(ureq::Agent::new_with_config(config))
    }

    fn unreadable(&self, what: &str, path: &Path, error: &std::io::Error) -> Error {
        Error::Unavailable(format!("cannot read ca.{what} {}: {error}", path.display()))
    }
}

impl Error {
    /// Whether the CA itself decided.
    #[must_use]
    pub fn is_denied(&self) -> bool {
        matches!(self, Self::Denied { .. })
    }
}

fn read_answer(status: u16, body: &[u8]) -> Result<Reply, Error> {
    if (200..300).contains(&status) {
        return serde_json::from_slice(body)
            .map_err(|error| Error::Unavailable(format!("did not answer with a certificate: {error}")));
    }
    let refusal: Option<Refusal> = serde_json::from_slice(body).ok();
    let may_pass = status >= 500 || matches!(status, 408 | 425 | 429);
    match refusal {
        Some(refusal) if may_pass => Err(Error::Unavailable(format!(
            "answered {status}: {} ({})",
            clean(&refusal.message),
            clean(&refusal.code)
        ))),
        Some(refusal) => Err(Error::Denied { code: clean(&refusal.code), message: clean(&refusal.message) }),
        None => Err(Error::Unavailable(format!("answered HTTP {status}; is it the address of a nebula-ca service?"))),
    }
}

/// A certificate that its own CAs do not accept would only fail later, on every peer.
fn accept(reply: &Reply, key: PrivateKey, now: UnixTime) -> Result<Issued, String> {
    let certificates =
        Certificate::bundle_from_pem(reply.certificate.as_bytes()).map_err(|error| format!("certificate: {error}"))?;
    let identity = Identity::new(certificates.clone(), key).map_err(|error| format!("certificate: {error}"))?;
    let mut trust = CaPool::from_pem(reply.ca.as_bytes()).map_err(|error| format!("CA bundle: {error}"))?;
    for fingerprint in &reply.blocklist {
        trust.block(fingerprint.parse().map_err(|_| format!("blocklist: {:?} is no fingerprint", clean(fingerprint)))?);
    }
    for certificate in certificates {
        let times =
            format!("valid {} to {}, the clock here says {now}", certificate.not_before(), certificate.not_after());
        trust
            .verify(certificate, now)
            .map_err(|error| format!("its certificate does not verify: {error} ({times})"))?;
    }
    Ok(Issued { identity, trust })
}

fn explain(error: &ureq::Error) -> String {
    match error {
        ureq::Error::Timeout(_) => format!("{error}; is the service running and reachable from this node?"),
        ureq::Error::Rustls(_) => format!("{error}; does ca.tls_ca_file belong to this service?"),
        _ => error.to_string(),
    }
}

/// What others wrote goes into logs and status lines: one line, of bounded length.
fn clean(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(300).collect()
}

fn read_bounded(path: &PathBuf) -> std::io::Result<Zeroizing<String>> {
    // Reserved at once: growing would leave copies behind.
    let mut text = Zeroizing::new(String::with_capacity(MAX_FILE));
    std::fs::File::open(path)?.take(MAX_FILE as u64).read_to_string(&mut text)?;
    Ok(text)
}

const CONNECT_WITHIN: Duration = Duration::from_secs(3);
const MAX_FILE: usize = 256 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(status: u16, body: &str) -> Error {
        read_answer(status, body.as_bytes()).unwrap_err()
    }

    #[test]
    fn a_refusal_of_the_ca_is_final_and_keeps_its_words() {
        let error = refusal(403, r#"{"code":"outside_pod_networks","message":"10.1.2.3 is in\nno network"}"#);
        assert!(error.is_denied());
        assert_eq!(error.to_string(), "10.1.2.3 is in no network (outside_pod_networks)");
    }

    #[test]
    fn what_may_pass_is_not_a_refusal() {
        for status in [408, 429, 500, 503] {
            assert!(!refusal(status, r#"{"code":"x","message":"y"}"#).is_denied(), "{status}");
        }
        assert!(!refusal(404, "<html>not found</html>").is_denied());
        assert!(!refusal(200, "{}").is_denied());
    }

    #[test]
    fn a_missing_token_names_the_file() {
        let access = CaAccess {
            url: "https://127.0.0.1:1/".to_owned(),
            tls_ca_file: "/nonexistent/roots.pem".into(),
            token_file: "/nonexistent/node.token".into(),
        };
        let pod =
            Pod { namespace: "n".to_owned(), name: "p".to_owned(), uid: "u".to_owned(), address: [10, 0, 0, 1].into() };
        let client = CaClient::new(access, pod);
        assert_eq!(client.url(), "https://127.0.0.1:1/v1/certificate");
        let error = client.token().unwrap_err();
        assert!(error.to_string().contains("/nonexistent/node.token"), "{error}");
        let error = client.agent(Duration::from_secs(1)).unwrap_err();
        assert!(error.to_string().contains("/nonexistent/roots.pem"), "{error}");
    }
}
