//! Start-up settings of a service, and the files it reads at the start and at each reload.

use std::{io, net::SocketAddr, sync::Arc};

use rustls::pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject};
use tokio_rustls::TlsAcceptor;
use zeroize::Zeroizing;

use crate::{
    authority::{Authority, AuthorityError},
    cluster::Cluster,
    directory::{CONTROL_SOCKET, DATABASE, Directory, FileError, NODE_TOKEN, POLICY, STORE, TLS_CERTIFICATE, TLS_KEY},
    issuer::Rules,
    pod::KubernetesPolicy,
    policy::{Policy, PolicyError},
    proof::node::NodeToken,
    store::StoreError,
    trust_config_map::certificates_in,
};

/// Start-up settings of a service.
#[derive(Debug)]
pub struct ServerSettings {
    /// Directory with all its files.
    pub directory: Directory,
    /// Address to listen on; port 0 picks a free one.
    pub listen: SocketAddr,
    /// Address for its state in plain HTTP: page, metrics, health.
    pub status_listen: Option<SocketAddr>,
    /// Names that the TLS certificate must have; those that are missing are added at the start.
    pub tls_names: Vec<String>,
    /// Begin an empty ledger, whatever the age of the CA.
    pub new_ledger: bool,
    /// Decrypts an encrypted CA key.
    pub passphrase: Option<Zeroizing<String>>,
}

/// How the service shows itself to callers.
pub(crate) struct Tls {
    pub(crate) acceptor: TlsAcceptor,
    /// PEM of the certificates that it shows.
    pub(crate) certificates: String,
}

/// Why the service did not start.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// A file of the directory cannot be read.
    #[error("the directory is not complete; make it with `nebula-ca init`")]
    File(#[from] FileError),
    /// The CA cannot be used.
    #[error("cannot use the CA")]
    Authority(#[from] AuthorityError),
    /// The policy is not valid.
    #[error("cannot use {POLICY}")]
    Policy(#[from] PolicyError),
    /// The node token is too weak.
    #[error("cannot use {NODE_TOKEN}: {0}")]
    NodeToken(String),
    /// The TLS files are not valid.
    #[error("cannot use {TLS_CERTIFICATE} and {TLS_KEY}: {0}")]
    Tls(String),
    /// The store cannot be opened.
    #[error("cannot use the store ({STORE}, or what {DATABASE} names)")]
    Store(#[from] StoreError),
    /// The API server cannot be used.
    #[error("cannot use the Kubernetes API server: {0}")]
    Kubernetes(String),
    /// The control socket cannot be created.
    #[error("cannot listen on {CONTROL_SOCKET} in the directory (its path must be shorter than 100 bytes)")]
    Control(#[source] io::Error),
    /// The address cannot be used.
    #[error("cannot listen on {address}; is another service using the port?")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// What failed.
        #[source]
        source: io::Error,
    },
}

/// Reads policy and CA. Keeps the connection to the API server if its settings are unchanged.
pub(crate) async fn read_rules(settings: &ServerSettings, present: Option<&Rules>) -> Result<Rules, ServeError> {
    let directory = &settings.directory;
    let passphrase = settings.passphrase.as_ref().map(|passphrase| passphrase.as_str());
    let authority = Authority::read(directory, passphrase)?;
    let policy = Policy::parse(&directory.read(POLICY)?)?;
    policy.check_against(authority.certificate())?;
    let kept = present.filter(|present| present.policy.kubernetes == policy.kubernetes);
    let cluster = match (kept.and_then(|present| present.cluster.clone()), &policy.kubernetes) {
        (_, None) => None,
        (Some(cluster), _) => Some(cluster),
        (None, Some(kubernetes)) => Some(open_cluster(kubernetes).await?),
    };
    if let Some(cluster) = cluster.as_ref().filter(|_| policy.certifies_addresses()) {
        cluster.follow();
    }
    Ok(Rules { authority, policy, cluster })
}

#[cfg(feature = "kubernetes")]
async fn open_cluster(settings: &KubernetesPolicy) -> Result<Arc<dyn Cluster>, ServeError> {
    let server = crate::cluster::ApiServer::open(settings.kubeconfig.as_deref()).await;
    Ok(Arc::new(server.map_err(ServeError::Kubernetes)?))
}

#[cfg(not(feature = "kubernetes"))]
#[allow(clippy::unused_async, reason = "as with the feature")]
async fn open_cluster(_settings: &KubernetesPolicy) -> Result<Arc<dyn Cluster>, ServeError> {
    Err(ServeError::Kubernetes("this build was made without the feature kubernetes".to_owned()))
}

pub(crate) fn read_node_token(directory: &Directory, policy: &Policy) -> Result<Option<NodeToken>, ServeError> {
    if policy.kubernetes.is_some() {
        if directory.has(NODE_TOKEN) {
            tracing::info!("{NODE_TOKEN} is not used: Kubernetes confirms node proofs");
        }
        return Ok(None);
    }
    if !directory.has(NODE_TOKEN) {
        tracing::info!("no {NODE_TOKEN}: node proofs are refused");
        return Ok(None);
    }
    NodeToken::new(&directory.read(NODE_TOKEN)?).map(Some).map_err(|error| ServeError::NodeToken(error.to_string()))
}

pub(crate) fn read_tls(directory: &Directory) -> Result<Tls, ServeError> {
    let tls = |error: String| ServeError::Tls(error);
    let (chain, key) = (directory.read(TLS_CERTIFICATE)?, directory.read(TLS_KEY)?);
    let certificates = certificates_in(&chain);
    let chain = CertificateDer::pem_slice_iter(chain.as_bytes())
        .collect::<Result<Vec<_>, _>>()
        .map_err(|error| tls(format!("bad certificate PEM: {error}")))?;
    let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).map_err(|error| tls(format!("bad key PEM: {error}")))?;
    let mut config = rustls::ServerConfig::builder()
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .map_err(|error| tls(error.to_string()))?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Tls { acceptor: TlsAcceptor::from(Arc::new(config)), certificates })
}
