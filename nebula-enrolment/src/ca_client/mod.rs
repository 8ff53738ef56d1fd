//! Client of the CA service: short blocking HTTPS calls on a thread of their own.

pub(crate) mod answers;
pub mod backoff;
mod error;
mod files;
pub mod life_cycle;
mod pinned;
mod service;
pub mod trust_watch;

use std::net::IpAddr;
use std::num::NonZeroU16;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use nebula_cert::client;
use nebula_cert::issuance::{
    self, ASKER_HEADER, Asker, CERTIFICATE_PATH, MAX_REPLY, MAX_WAIT_SECONDS, Pod, Proof, Reply, Request, TRUST_PATH,
};
use nebula_cert::{CaPool, Curve, Identity, JoinToken, PrivateKey, UnixTime};
use nebula_cni_contract::launch::{CaAccess, is_refusal_of_token};
use nebula_linux::clock::unix_now;
use nebula_linux::netns::NamespaceExecutor;
use rustls::crypto::aws_lc_rs::default_provider;
use ureq::tls::TlsConfig;
use ureq::unversioned::resolver::DefaultResolver;
use ureq::unversioned::transport::{Connector as _, TcpConnector};
use zeroize::{Zeroize, Zeroizing};

pub use self::answers::{Unusable, accept};
pub use self::error::Error;
use self::files::HeldFile;
use self::pinned::{Pin, PinnedConnector};

/// Sends requests to one CA service from one network namespace.
#[derive(Debug, Clone)]
pub struct CaClient {
    access: CaAccess,
    place: NamespaceExecutor,
    /// An agent whose open connection the next request for the trust bundle can reuse.
    kept: Arc<Mutex<Option<ureq::Agent>>>,
    held: Held,
    /// What the service must show instead of a certificate of `access`.
    pin: Option<Arc<Pin>>,
    /// Who asks for the trust bundle.
    asker: Arc<Mutex<Holder>>,
}

/// What a holder of a certificate needs to say who it is.
#[derive(Debug, Default)]
struct Holder {
    identity: Option<Identity>,
    /// PEM of the service's public key for that.
    renewal_key: Option<String>,
}

/// Files opened while that was permitted, for later, when their paths cannot be opened any more.
#[derive(Debug, Clone, Default)]
struct Held {
    token: Option<HeldFile>,
    /// Beside the token, if it was there.
    credential: Option<HeldFile>,
    roots: Option<HeldFile>,
}

/// The proof of identity that a request carries.
#[derive(Clone)]
pub enum Prover {
    /// The node vouches for the pod with the node token from the token file.
    Node(Pod),
    /// Like [`Prover::Node`], for a provisional certificate.
    Provisional(Pod),
    /// The pod proves its own identity.
    Pod {
        /// Its service-account token.
        token: Zeroizing<String>,
        /// Its primary address.
        address: IpAddr,
        /// Its address of the other family, if it has one.
        other_address: Option<IpAddr>,
    },
    /// The lighthouse pod whose service-account token is in the token file.
    Lighthouse {
        /// UDP port of its Nebula; `None`: the one in the service's policy.
        port: Option<NonZeroU16>,
    },
    /// The gateway pod whose service-account token is in the token file.
    Gateway,
    /// The host that the one-time token in the token file is for.
    Host,
    /// The host that this one-time token is for.
    Invited(Zeroizing<String>),
    /// The holder of a certificate requests its successor.
    Holder {
        /// The present certificate and its key.
        identity: Box<Identity>,
        /// PEM of the service's public key for this proof.
        renewal_key: String,
    },
}

/// What the CA issued, verified as far as possible here.
#[derive(Debug, Clone)]
pub struct Issued {
    /// The certificate and the key made for it.
    pub identity: Identity,
    /// CAs and blocklist in force from now on.
    pub trust: CaPool,
    /// Public key for [`Prover::Holder`]; `None` if the service does not accept that proof.
    pub renewal_key: Option<String>,
    /// The answer as received.
    pub reply: Reply,
}

/// The answer to a request for the trust bundle.
#[derive(Debug, Clone)]
pub struct TrustAnswer {
    /// `None` if nothing changed.
    pub news: Option<TrustNews>,
    /// The delay that the service asked for before the next request.
    pub retry_after: Option<Duration>,
}

/// The new trust.
#[derive(Debug, Clone)]
pub struct TrustNews {
    /// CAs and blocklist.
    pub trust: CaPool,
    /// Identifies this version; sent with the next request.
    pub etag: String,
    /// See [`Issued::renewal_key`].
    pub renewal_key: Option<String>,
    /// The answer as received.
    pub answer: issuance::Trust,
}

/// The CA refused the request, or issued something other than requested.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// The CA's stable reason code; `None` if this program refused.
    pub code: Option<String>,
    /// Which check failed.
    pub message: String,
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.code {
            Some(code) => write!(f, "{} ({code})", self.message),
            None => f.write_str(&self.message),
        }
    }
}

impl CaClient {
    /// Creates a client that connects from `place`; nothing is read or sent yet.
    #[must_use]
    pub fn new(access: CaAccess, place: NamespaceExecutor) -> Self {
        Self { access, place, kept: Arc::default(), held: Held::default(), pin: None, asker: Arc::default() }
    }

    /// Creates a client for the service of a join token, which must show the key that the token names.
    #[must_use]
    pub fn pinned(join: &JoinToken) -> Self {
        let (tls_ca_file, token_file) = Default::default();
        let access = CaAccess { url: join.url().to_owned(), tls_ca_file, token_file, server_name: None };
        Self { pin: Some(Arc::new(Pin::new(join))), ..Self::new(access, NamespaceExecutor::Here) }
    }

    /// The certificate of the pinned key as PEM, once the service has shown it.
    #[must_use]
    pub fn shown_certificate(&self) -> Option<String> {
        self.pin.as_ref()?.shown()
    }

    /// Opens the files of this client, because the program is about to switch to a user that may not. Opens the token
    /// only if it will be used.
    ///
    /// # Errors
    /// Returns an error if a file cannot be opened.
    pub fn hold_files(&mut self, with_token: bool) -> Result<(), Error> {
        let open = |what, path: &Path| HeldFile::open(path).map_err(|error| unreadable(what, path, &error));
        let token = with_token.then(|| open("token_file", &self.access.token_file)).transpose()?;
        let credential = token.as_ref().and_then(|_| HeldFile::open(&self.credential_file()).ok());
        let roots = Some(open("tls_ca_file", &self.access.tls_ca_file)?);
        self.held = Held { token, credential, roots };
        Ok(())
    }

    /// Whether a file was replaced by one that this program may not read any more.
    #[must_use]
    pub fn has_stale_files(&self) -> bool {
        let is_stale = |held: &Option<HeldFile>, path: &Path| held.as_ref().is_some_and(|held| held.is_stale(path));
        is_stale(&self.held.token, &self.access.token_file) || is_stale(&self.held.roots, &self.access.tls_ca_file)
    }

    /// Asks for the trust bundle as the holder of this certificate from now on, once the service has said how: it then
    /// knows that this holder hears of changes.
    pub fn ask_as(&self, identity: Identity) {
        self.asker().identity = Some(identity);
    }

    fn asker(&self) -> MutexGuard<'_, Holder> {
        self.asker.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a new key in memory and requests a certificate for it, trying `provers` in order until one is not refused.
    /// Takes at most about `timeout` for each.
    ///
    /// # Errors
    /// Returns an error if the CA refused, or there is no usable answer.
    pub fn request(&self, provers: &[Prover], timeout: Duration, now: UnixTime) -> Result<Issued, Error> {
        let mut result = Err(Error::Unavailable("there is nothing to prove who asks".to_owned()));
        for prover in provers {
            result = self.request_by(prover, timeout, now);
            if !matches!(result, Err(Error::Denied { .. })) {
                break;
            }
        }
        result
    }

    /// Where the token of the node is refused, its agent may be away: then the node credential may do.
    fn request_by(&self, prover: &Prover, timeout: Duration, now: UnixTime) -> Result<Issued, Error> {
        let result = self.request_in_turn(prover, timeout, now);
        let (code, message) = match &result {
            Err(Error::Denied { code, message }) if prover.is_of_node() && is_refusal_of_token(code) => (code, message),
            _ => return result,
        };
        let Some(by_credential) = self.by_node_credential() else { return result };
        match by_credential.request_in_turn(prover, timeout, now) {
            // Another token is what helps.
            Err(Error::Denied { code: other, message: also }) if is_refusal_of_credential(&other) => {
                let message = format!("{message}; nor does the node credential help: {also} ({other})");
                Err(Error::Denied { code: code.clone(), message })
            }
            result => result,
        }
    }

    /// This client with the node credential for a token; `None` if there is none.
    fn by_node_credential(&self) -> Option<Self> {
        let (token_file, token) = (self.credential_file(), self.held.credential.clone());
        files::read(&token_file, token.as_ref()).ok()?;
        let (access, held) =
            (CaAccess { token_file, ..self.access.clone() }, Held { token, credential: None, ..self.held.clone() });
        Some(Self { access, held, ..self.clone() })
    }

    fn credential_file(&self) -> PathBuf {
        CaAccess::credential_beside(&self.access.token_file)
    }

    fn request_in_turn(&self, prover: &Prover, timeout: Duration, now: UnixTime) -> Result<Issued, Error> {
        // The refusal reveals that this CA signs for the other curve; nearly all use the first one.
        match self.request_with(Curve::USUAL, prover, timeout, now) {
            Err(Error::Denied { code, .. }) if code == "wrong_curve" => {
                self.request_with(Curve::P256, prover, timeout, now)
            }
            result => result,
        }
    }

    fn request_with(&self, curve: Curve, prover: &Prover, timeout: Duration, now: UnixTime) -> Result<Issued, Error> {
        let key =
            PrivateKey::generate(curve).map_err(|error| Error::Unavailable(format!("cannot make a key: {error}")))?;
        self.request_for(key, prover, timeout, now).map(|(issued, _)| issued)
    }

    /// Requests a certificate for `key` once; also returns the answer as received.
    ///
    /// # Errors
    /// Returns an error if the CA refused, or there is no usable answer.
    pub fn request_for(
        &self,
        key: PrivateKey,
        prover: &Prover,
        timeout: Duration,
        now: UnixTime,
    ) -> Result<(Issued, Reply), Error> {
        let body = self.body(&key, prover, now)?;
        let (url, agent) = (service::url(&self.access, CERTIFICATE_PATH), self.agent()?);
        let (status, answer) = self.there({
            let (url, agent, access) = (url.clone(), agent.clone(), self.access.clone());
            move || {
                let request_url = service::request_url(&access, CERTIFICATE_PATH);
                let request = agent.post(&request_url).config().timeout_global(Some(timeout)).build();
                let sent = request.header("content-type", "application/json").send(&body[..]);
                let no_answer = |error: ureq::Error| Error::no_answer(&url, &error, &access);
                let mut response = sent.map_err(no_answer)?;
                Ok((response.status().as_u16(), read_body(&mut response).map_err(no_answer)?))
            }
        })?;
        self.keep(agent);
        let reply = answers::read(status, &answer).map_err(|error| error.at(&url))?;
        let issued = accept(&reply, key, now)
            .map_err(|cause| Error::Unavailable(format!("unusable answer from {url}: {cause}")))?;
        Ok((issued, reply))
    }

    /// Requests the trust bundle. With the `etag` of an earlier answer, a service that supports long polling holds the
    /// request until there is news, for at most `wait`. Requests share one connection as long as it lasts.
    ///
    /// # Errors
    /// Returns an error if there is no usable answer.
    pub fn trust(&self, etag: Option<&str>, wait: Duration, timeout: Duration) -> Result<TrustAnswer, Error> {
        let wait = if etag.is_some() { wait.as_secs().min(MAX_WAIT_SECONDS) } else { 0 };
        let path = match wait {
            0 => TRUST_PATH.to_owned(),
            seconds => format!("{TRUST_PATH}?wait={seconds}"),
        };
        let url = service::url(&self.access, &path);
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner).take();
        let agent = kept.map_or_else(|| self.agent(), Ok)?;
        let (status, headers, answer) = self.there({
            let (url, agent, access) = (url.clone(), agent.clone(), self.access.clone());
            let etag = etag.map(str::to_owned);
            let asker = self.asker().said(unix_now());
            move || {
                let within = timeout + Duration::from_secs(wait);
                let request_url = service::request_url(&access, &path);
                let request = agent.get(&request_url).config().timeout_global(Some(within)).build();
                let request = etag.into_iter().fold(request, |request, etag| request.header("if-none-match", etag));
                let request = asker.into_iter().fold(request, |request, asker| request.header(ASKER_HEADER, asker));
                let no_answer = |error: ureq::Error| Error::no_answer(&url, &error, &access);
                let mut response = request.call().map_err(no_answer)?;
                let header = |name: &str| {
                    let value = response.headers().get(name).and_then(|value| value.to_str().ok());
                    value.filter(|value| value.len() <= MAX_HEADER_BYTES).map(str::to_owned)
                };
                let headers = (header("etag"), header("retry-after"));
                Ok((response.status().as_u16(), headers, read_body(&mut response).map_err(no_answer)?))
            }
        })?;
        let retry_after = headers.1.and_then(|seconds| seconds.parse().ok()).map(Duration::from_secs);
        if retry_after.is_none() {
            self.keep(agent);
        }
        if status == 304 {
            return Ok(TrustAnswer { news: None, retry_after });
        }
        let answer: issuance::Trust = answers::read(status, &answer).map_err(|error| error.at(&url))?;
        let trust = answers::trust(&answer)
            .map_err(|cause| Error::Unavailable(format!("unusable answer from {url}: {cause}")))?;
        let (etag, renewal_key) = (headers.0.unwrap_or_default(), answer.renewal_key.clone());
        self.asker().renewal_key.clone_from(&renewal_key);
        Ok(TrustAnswer { news: Some(TrustNews { trust, etag, renewal_key, answer }), retry_after })
    }

    /// Keeps the agent of a successful call. After a failure none is kept, so the next request reads the root
    /// certificates again.
    fn keep(&self, agent: ureq::Agent) {
        *self.kept.lock().unwrap_or_else(PoisonError::into_inner) = Some(agent);
    }

    /// Runs `call` in the network namespace of this client.
    fn there<T: Send + 'static>(&self, call: impl FnOnce() -> Result<T, Error> + Send + 'static) -> Result<T, Error> {
        self.place.run("ca-client", call).unwrap_or_else(|error| Err(Error::Unavailable(error.to_string())))
    }

    fn body(&self, key: &PrivateKey, prover: &Prover, now: UnixTime) -> Result<Zeroizing<Vec<u8>>, Error> {
        let public_key = key.public_pem();
        let proof = match prover {
            Prover::Node(pod) => Proof::Node { token: self.token()?, pod: pod.clone() },
            Prover::Provisional(pod) => Proof::Provisional { token: self.token()?, pod: pod.clone() },
            Prover::Pod { token, address, other_address } => {
                let token = token.trim().to_owned();
                Proof::Pod { token, address: *address, other_address: *other_address }
            }
            Prover::Lighthouse { port } => Proof::Lighthouse { token: self.token()?, port: *port },
            Prover::Gateway => Proof::Gateway { token: self.token()? },
            Prover::Host => Proof::Token { token: self.token()? },
            Prover::Invited(token) => Proof::Token { token: token.to_string() },
            Prover::Holder { identity, renewal_key } => {
                let key = identity.private_key();
                Proof::of_certificate(identity.primary(), key, renewal_key, Some(&public_key), now)
                    .map_err(|error| Error::Unavailable(format!("cannot prove the present certificate: {error}")))?
            }
        };
        let mut request = Request { public_key, proof };
        let body = serde_json::to_vec(&request);
        match &mut request.proof {
            Proof::Node { token, .. }
            | Proof::Provisional { token, .. }
            | Proof::Token { token }
            | Proof::Lighthouse { token, .. }
            | Proof::Gateway { token }
            | Proof::Pod { token, .. } => token.zeroize(),
            Proof::Certificate { .. } => {}
        }
        body.map(Zeroizing::new).map_err(|error| Error::Unavailable(format!("cannot write the request: {error}")))
    }

    /// Read again for each request, because node tokens are rotated.
    fn token(&self) -> Result<String, Error> {
        let path = &self.access.token_file;
        let token =
            files::read(path, self.held.token.as_ref()).map_err(|error| unreadable("token_file", path, &error))?;
        match token.trim() {
            "" => Err(Error::Misconfigured(format!(
                "the token file {} is empty: it must hold the node's token (`node.token` of the CA)",
                path.display()
            ))),
            token => Ok(token.to_owned()),
        }
    }

    /// Builds an agent that trusts only the given roots.
    fn agent(&self) -> Result<ureq::Agent, Error> {
        if let Some(pin) = &self.pin {
            let connector = ().chain(TcpConnector::default()).chain(PinnedConnector(Arc::clone(pin)));
            return Ok(ureq::Agent::with_parts(config(TlsConfig::default()), connector, DefaultResolver::default()));
        }
        let path = &self.access.tls_ca_file;
        let pem =
            files::read(path, self.held.roots.as_ref()).map_err(|error| unreadable("tls_ca_file", path, &error))?;
        let useless = |why: client::RootsError| {
            let path = path.display();
            Error::Misconfigured(format!("ca.tls_ca_file {path}: {why}; copy tls.crt of the CA there"))
        };
        let roots = client::roots(pem.as_bytes()).map_err(useless)?;
        let place = self.access.server_name.as_ref().map(|_| self.access.url.as_str());
        Ok(client::agent(config(client::tls(roots, Arc::new(default_provider()))), place))
    }
}

impl Holder {
    /// The header with who asks, if that can be said. Whoever cannot say it is answered all the same.
    fn said(&self, now: UnixTime) -> Option<String> {
        let (identity, renewal_key) = (self.identity.as_ref()?, self.renewal_key.as_ref()?);
        let asker = Asker::new(identity.primary(), identity.private_key(), renewal_key, now);
        asker.ok().map(|asker| asker.to_string())
    }
}

fn config(tls: TlsConfig) -> ureq::config::Config {
    client::config(tls, concat!("nebula-cni-instance/", env!("CARGO_PKG_VERSION")))
        .input_buffer_size(INPUT_BUFFER_BYTES)
        .output_buffer_size(OUTPUT_BUFFER_BYTES)
        .max_idle_connections(1)
        .timeout_connect(Some(CONNECT_TIMEOUT))
        .build()
}

fn unreadable(what: &str, path: &Path, error: &std::io::Error) -> Error {
    Error::Misconfigured(format!(
        "cannot read ca.{what} {}: {error}; put the file there, or correct its path in the chain's entry",
        path.display()
    ))
}

impl Prover {
    /// Whether the node's token proves it.
    fn is_of_node(&self) -> bool {
        matches!(self, Self::Node(_) | Self::Provisional(_))
    }
}

impl std::fmt::Debug for Prover {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Node(pod) => write!(f, "Node({pod:?})"),
            Self::Provisional(pod) => write!(f, "Provisional({pod:?})"),
            Self::Pod { address, .. } => write!(f, "Pod(redacted, {address})"),
            Self::Lighthouse { port } => write!(f, "Lighthouse({port:?})"),
            Self::Gateway => f.write_str("Gateway"),
            Self::Host => f.write_str("Host"),
            Self::Invited(_) => f.write_str("Invited(redacted)"),
            Self::Holder { .. } => f.write_str("Holder(redacted)"),
        }
    }
}

/// Whether the CA refuses the node credential itself, or does not know any.
fn is_refusal_of_credential(code: &str) -> bool {
    is_refusal_of_token(code) || ["node_credential_rejected", "node_credential_expired", "node_gone"].contains(&code)
}

fn read_body(response: &mut ureq::http::Response<ureq::Body>) -> Result<Vec<u8>, ureq::Error> {
    response.body_mut().with_config().limit(MAX_REPLY as u64).read_to_vec()
}

const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
const MAX_HEADER_BYTES: usize = 256;
// The buffers live as long as the connection; the library's default is 128 KiB each. Longer bodies are read in pieces,
// but the head of an answer must fit. A request with a body takes space of that size from the input buffer for itself.
const INPUT_BUFFER_BYTES: usize = 10 << 10;
const OUTPUT_BUFFER_BYTES: usize = 4 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_token_names_the_file() {
        let access = CaAccess {
            url: "https://127.0.0.1:1/".to_owned(),
            tls_ca_file: "/nonexistent/roots.pem".into(),
            token_file: "/nonexistent/node.token".into(),
            server_name: None,
        };
        let mut client = CaClient::new(access, NamespaceExecutor::Here);
        let error = client.token().unwrap_err();
        assert!(error.to_string().contains("/nonexistent/node.token"), "{error}");
        let error = client.agent().unwrap_err();
        assert!(error.to_string().contains("/nonexistent/roots.pem"), "{error}");
        assert!(matches!(client.hold_files(true), Err(Error::Misconfigured(_))));
    }
}
