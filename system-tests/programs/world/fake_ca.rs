//! A CA service for one host, or for the pods of one node, without a ledger, in the process of the test: it needs no
//! privileges and no other program.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use aws_lc_rs::digest::{SHA256, digest};
use nebula_cert::issuance::{Proof, Reply, Request, Trust};
use nebula_cert::{Certificate, Curve, HostKey, JoinToken, SigningKey, Template, public_key_from_pem};
use nebula_linux::clock::unix_now;
use rustls::pki_types::PrivateKeyDer;
use rustls::server::ParsedCertificate;
use rustls::{ServerConfig, ServerConnection, StreamOwned};

pub(crate) const OVERLAY: &str = "10.97.0.0/16";
/// The only proof that it takes for pods.
pub(crate) const NODE_CREDENTIAL: &str = "nebula-node-credential.x.y";
const ADDRESS: &str = "10.97.0.9/16";

/// A CA service of one token, which goes to the first key, or to the one it is bound to.
pub(crate) struct Ca {
    pub(crate) token: JoinToken,
    /// PEM of its TLS certificate.
    pub(crate) tls: String,
    pub(crate) connections: Arc<Mutex<usize>>,
    /// Fingerprints that it blocks.
    pub(crate) blocked: Arc<Mutex<Vec<String>>>,
}

/// TLS of a server at 127.0.0.1, and its certificate, which nobody else has signed.
pub(crate) fn server_tls() -> (Arc<ServerConfig>, rcgen::Certificate) {
    let key = rcgen::KeyPair::generate().unwrap();
    let certificate = rcgen::CertificateParams::new(["127.0.0.1".to_owned()]).unwrap().self_signed(&key).unwrap();
    let key = PrivateKeyDer::try_from(key.serialize_der()).unwrap();
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    let config = config.with_no_client_auth().with_single_cert(vec![certificate.der().clone()], key).unwrap();
    (Arc::new(config), certificate)
}

struct Desk {
    key: SigningKey,
    certificate: Certificate,
    /// The only public key that the token is good for, once that is known.
    owner: Mutex<Option<[u8; 32]>>,
    blocked: Arc<Mutex<Vec<String>>>,
}

impl Ca {
    pub(crate) fn new(bound: Option<&HostKey>) -> Self {
        let (config, tls) = server_tls();
        let spki = ParsedCertificate::try_from(tls.der()).unwrap().subject_public_key_info();
        let fingerprint = digest(&SHA256, &spki).as_ref().try_into().unwrap();
        let key = SigningKey::generate(Curve::Curve25519).unwrap();
        let certificate = Template::new("ca", unix_now() - 60..=unix_now() + 600).self_sign(&key).unwrap();
        let blocked = Arc::<Mutex<Vec<String>>>::default();
        let owner = Mutex::new(bound.map(HostKey::sha256));
        let desk = Arc::new(Desk { key, certificate, owner, blocked: Arc::clone(&blocked) });

        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("https://{}", listener.local_addr().unwrap());
        let token = JoinToken::new(&url, fingerprint, "nebula-enrol-secret", &[OVERLAY.parse().unwrap()]).unwrap();
        let token = match bound {
            Some(key) => token.bound_to(key),
            None => token,
        };
        let connections = Arc::new(Mutex::new(0));
        let counted = Arc::clone(&connections);
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                *counted.lock().unwrap() += 1;
                let (config, desk) = (Arc::clone(&config), Arc::clone(&desk));
                std::thread::spawn(move || desk.serve(config, stream));
            }
        });
        Self { token, tls: tls.pem(), connections, blocked }
    }
}

impl Desk {
    fn serve(&self, config: Arc<ServerConfig>, stream: TcpStream) {
        let mut stream = StreamOwned::new(ServerConnection::new(config).unwrap(), stream);
        let (mut heard, mut piece) = (Vec::new(), [0; 4096]);
        while let Ok(length @ 1..) = stream.read(&mut piece) {
            heard.extend_from_slice(&piece[..length]);
            let text = String::from_utf8_lossy(&heard);
            let Some((_, body)) = text.split_once("\r\n\r\n") else { continue };
            let (status, body) = match serde_json::from_str(body) {
                Ok(request) => self.answer(&request),
                Err(_) if text.starts_with("GET /v1/trust ") => (200, self.trust()),
                Err(_) => continue,
            };
            let answer = format!("HTTP/1.1 {status} x\r\ncontent-length: {}\r\n\r\n{body}", body.len());
            let _ = stream.write_all(answer.as_bytes());
            heard.clear();
        }
    }

    fn trust(&self) -> String {
        let (ca, blocklist) = (self.certificate.to_pem(), self.blocked.lock().unwrap().clone());
        let (renewal_key, lighthouses) = Default::default();
        serde_json::to_string(&Trust { ca, blocklist, renewal_key, lighthouses }).unwrap()
    }

    fn answer(&self, request: &Request) -> (u16, String) {
        let mut is_host = false;
        match &request.proof {
            Proof::Token { token } => {
                assert_eq!(token, "nebula-enrol-secret");
                is_host = true;
            }
            Proof::Node { token, .. } if token == NODE_CREDENTIAL => {}
            Proof::Node { token, .. } => {
                let code = if token == "expired" { "node_credential_expired" } else { "token_rejected" };
                return (401, format!(r#"{{"code": "{code}", "message": "no more"}}"#));
            }
            _ => panic!("{:?}", request.proof),
        }
        let (_, public_key) = public_key_from_pem(request.public_key.as_bytes()).unwrap();
        let key: [u8; 32] = digest(&SHA256, &public_key).as_ref().try_into().unwrap();
        if is_host && *self.owner.lock().unwrap().get_or_insert(key) != key {
            return (409, r#"{"code": "token_used", "message": "the token is another host's"}"#.to_owned());
        }
        let networks = vec![ADDRESS.parse().unwrap()];
        let template = Template { networks, public_key, ..Template::new("host", unix_now() - 5..=unix_now() + 60) };
        let certificate = template.sign(&self.certificate, &self.key).unwrap().to_pem();
        let (blocklist, lighthouses) = Default::default();
        let reply = Reply { certificate, ca: self.certificate.to_pem(), blocklist, renewal_key: None, lighthouses };
        (200, serde_json::to_string(&reply).unwrap())
    }
}
