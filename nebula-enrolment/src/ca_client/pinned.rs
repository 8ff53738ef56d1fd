//! The first contact with a CA service whose TLS key alone is known (key pinning): one connection, on which nothing is
//! sent before the service has shown that it holds the key. Later clients trust the certificate that it shows here.

use std::sync::{Arc, Mutex, PoisonError};

use aws_lc_rs::digest::{SHA256, digest};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use nebula_cert::JoinToken;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::aws_lc_rs::default_provider;
use rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::{
    CertificateError, ClientConfig, ClientConnection, DigitallySignedStruct, Error, SignatureScheme, StreamOwned,
};
use ureq::unversioned::transport::{
    Buffers, ConnectionDetails, Connector, LazyBuffers, NextTimeout, Transport, TransportAdapter,
};

/// Accepts a server that holds the pinned key and has a certificate for the name that later calls use.
#[derive(Debug)]
pub(super) struct Pin {
    fingerprint: [u8; 32],
    provider: Arc<CryptoProvider>,
    shown: Mutex<Option<CertificateDer<'static>>>,
}

impl Pin {
    /// For the key that a join token names.
    pub(super) fn new(join: &JoinToken) -> Self {
        Self { fingerprint: *join.fingerprint(), provider: Arc::new(default_provider()), shown: Mutex::default() }
    }

    /// The certificate of the service, as PEM, once it has shown it.
    pub(super) fn shown(&self) -> Option<String> {
        self.shown.lock().unwrap_or_else(PoisonError::into_inner).as_ref().map(pem)
    }
}

/// Why the service is not trusted. Nothing was sent to it.
#[derive(Debug, thiserror::Error)]
pub(super) enum PinError {
    /// It holds another key.
    #[error(
        "the service at {0} is not the one that the join token is for: it shows another key, so the token was not sent to \
         it. Somebody may sit in between; or the CA has a new tls.key, then make a new join token"
    )]
    OtherKey(String),
    /// The certificate is for other names.
    #[error("the certificate of {url} is not for {host}: run `nebula-ca tls add-name {host}` on the CA, and try again")]
    OtherName { url: String, host: String },
}

impl PinError {
    /// What a failed handshake with `host` means, if it is one of these.
    fn of(error: &std::io::Error, url: String, host: &str) -> Option<Self> {
        match error.get_ref()?.downcast_ref()? {
            Error::General(cause) if cause == OTHER_KEY => Some(Self::OtherKey(url)),
            Error::InvalidCertificate(
                CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
            ) => Some(Self::OtherName { url, host: host.to_owned() }),
            _ => None,
        }
    }
}

impl ServerCertVerifier for Pin {
    fn verify_server_cert(
        &self,
        shown: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let certificate = ParsedCertificate::try_from(shown)?;
        if digest(&SHA256, &certificate.subject_public_key_info()).as_ref() != self.fingerprint {
            return Err(other_key());
        }
        rustls::client::verify_server_name(&certificate, name)?;
        *self.shown.lock().unwrap_or_else(PoisonError::into_inner) = Some(shown.clone().into_owned());
        Ok(ServerCertVerified::assertion())
    }

    // These signatures prove that the server holds the key, not only the certificate.
    fn verify_tls12_signature(
        &self,
        message: &[u8],
        shown: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(message, shown, signature, &self.provider.signature_verification_algorithms)
            .map_err(|_| other_key())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        shown: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, shown, signature, &self.provider.signature_verification_algorithms)
            .map_err(|_| other_key())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

fn other_key() -> Error {
    Error::General(OTHER_KEY.to_owned())
}

/// PEM of an X.509 certificate.
fn pem(certificate: &CertificateDer<'_>) -> String {
    let encoded = BASE64_STANDARD.encode(certificate);
    let lines: Vec<_> = encoded.as_bytes().chunks(64).map(String::from_utf8_lossy).collect();
    format!("-----BEGIN CERTIFICATE-----\n{}\n-----END CERTIFICATE-----\n", lines.join("\n"))
}

/// Makes TLS connections by [`Pin`] on those of another connector.
#[derive(Debug)]
pub(super) struct PinnedConnector(pub(super) Arc<Pin>);

impl<In: Transport> Connector<In> for PinnedConnector {
    type Out = PinnedTransport<In>;

    fn connect(&self, details: &ConnectionDetails<'_>, chained: Option<In>) -> Result<Option<Self::Out>, ureq::Error> {
        let Some(transport) = chained else { return Ok(None) };
        let config = ClientConfig::builder_with_provider(Arc::clone(&self.0.provider))
            .with_safe_default_protocol_versions()?
            .dangerous()
            .with_custom_certificate_verifier(Arc::clone(&self.0) as Arc<dyn ServerCertVerifier>)
            .with_no_client_auth();
        let host = details.uri.host().unwrap_or_default().trim_start_matches('[').trim_end_matches(']');
        let name = ServerName::try_from(host.to_owned()).map_err(|_| ureq::Error::BadUri(details.uri.to_string()))?;
        let mut connection = ClientConnection::new(Arc::new(config), name)?;
        let mut socket = TransportAdapter::new(transport, Arc::clone(&details.current_time));
        socket.set_timeout(details.timeout);
        while connection.is_handshaking() {
            connection.complete_io(&mut socket).map_err(|error| {
                let url = details.uri.authority().map(|authority| format!("https://{authority}")).unwrap_or_default();
                match PinError::of(&error, url, host) {
                    Some(refused) => ureq::Error::Other(Box::new(refused)),
                    None => error.into(),
                }
            })?;
        }
        let buffers = LazyBuffers::new(details.config.input_buffer_size(), details.config.output_buffer_size());
        Ok(Some(PinnedTransport { buffers, stream: StreamOwned::new(connection, socket) }))
    }
}

/// A connection with a server that holds the pinned key.
pub(super) struct PinnedTransport<In: Transport> {
    buffers: LazyBuffers,
    stream: StreamOwned<ClientConnection, TransportAdapter<In>>,
}

impl<In: Transport> Transport for PinnedTransport<In> {
    fn buffers(&mut self) -> &mut dyn Buffers {
        &mut self.buffers
    }

    fn transmit_output(&mut self, amount: usize, timeout: NextTimeout) -> Result<(), ureq::Error> {
        use std::io::Write;
        self.stream.sock.set_timeout(timeout);
        Ok(self.stream.write_all(&self.buffers.output()[..amount])?)
    }

    fn await_input(&mut self, timeout: NextTimeout) -> Result<bool, ureq::Error> {
        use std::io::Read;
        self.stream.sock.set_timeout(timeout);
        let amount = self.stream.read(self.buffers.input_append_buf())?;
        self.buffers.input_appended(amount);
        Ok(amount > 0)
    }

    fn is_open(&mut self) -> bool {
        self.stream.sock.get_mut().is_open()
    }

    fn is_tls(&self) -> bool {
        true
    }
}

impl<In: Transport> std::fmt::Debug for PinnedTransport<In> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("PinnedTransport")
    }
}

const OTHER_KEY: &str = "another key";

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{SocketAddr, TcpListener};
    use std::time::Duration;

    use nebula_cert::{Curve, PrivateKey};
    use rustls::pki_types::PrivateKeyDer;

    use super::*;
    use crate::ca_client::{self, CaClient, Prover};

    /// A TLS server for one client, with a certificate for `name`, which refuses what it is asked; returns what it
    /// received.
    struct Server {
        address: SocketAddr,
        fingerprint: [u8; 32],
        pem: String,
        heard: std::thread::JoinHandle<Vec<u8>>,
    }

    fn server(name: &str, signs_with_another_key: bool) -> Server {
        let [key, other] = [(), ()].map(|()| rcgen::KeyPair::generate().unwrap());
        let certificate = rcgen::CertificateParams::new([name.to_owned()]).unwrap().self_signed(&key).unwrap();
        let der = certificate.der().clone();
        let spki = ParsedCertificate::try_from(&der).unwrap().subject_public_key_info();
        let fingerprint = digest(&SHA256, &spki).as_ref().try_into().unwrap();
        let signer = if signs_with_another_key { other } else { key };
        let signer = PrivateKeyDer::try_from(signer.serialize_der()).unwrap();
        let signer = rustls::crypto::aws_lc_rs::sign::any_supported_type(&signer).unwrap();
        let certified = rustls::sign::CertifiedKey::new(vec![der], signer);
        let config = rustls::ServerConfig::builder_with_provider(Arc::new(default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_cert_resolver(Arc::new(rustls::sign::SingleCertAndKey::from(certified)));
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let heard = std::thread::spawn(move || {
            // The only client that it takes.
            let (stream, _) = listener.accept().unwrap();
            drop(listener);
            let connection = rustls::ServerConnection::new(Arc::new(config)).unwrap();
            let mut stream = StreamOwned::new(connection, stream);
            let (mut heard, mut piece) = (Vec::new(), [0; 4096]);
            while let Ok(length @ 1..) = stream.read(&mut piece) {
                heard.extend_from_slice(&piece[..length]);
                if heard.ends_with(b"}}") {
                    // What is recorded of an enrolment stays closed when X25519 is broken.
                    let group = stream.conn.negotiated_key_exchange_group().map(|group| group.name());
                    assert_eq!(group, Some(rustls::NamedGroup::X25519MLKEM768));
                    let body = r#"{"code":"unknown_token","message":"no"}"#;
                    let answer = format!("HTTP/1.1 401 x\r\ncontent-length: {}\r\n\r\n{body}", body.len());
                    let _ = stream.write_all(answer.as_bytes());
                }
            }
            heard
        });
        Server { address, fingerprint, pem: certificate.pem(), heard }
    }

    fn join(url: &str, fingerprint: [u8; 32]) -> JoinToken {
        JoinToken::new(url, fingerprint, "secret", &["10.42.0.0/16".parse().unwrap()]).unwrap()
    }

    fn ask(url: &str, fingerprint: [u8; 32]) -> (ca_client::Error, Option<String>) {
        let join = join(url, fingerprint);
        let client = CaClient::pinned(&join);
        let prover = Prover::Invited(join.secret().clone());
        let key = PrivateKey::generate(Curve::Curve25519).unwrap();
        let refused = client.request_for(key, &prover, Duration::from_secs(5), 0).map(|_| ()).unwrap_err();
        (refused, client.shown_certificate())
    }

    fn ask_server(server: &Server, fingerprint: [u8; 32]) -> (ca_client::Error, Option<String>) {
        ask(&format!("https://{}", server.address), fingerprint)
    }

    #[test]
    fn the_holder_of_the_pinned_key_is_asked_on_the_connection_on_which_it_showed_the_key() {
        let server = server("127.0.0.1", false);
        let (refused, learnt) = ask_server(&server, server.fingerprint);
        assert!(refused.is_denied(), "by the service itself: {refused}");
        assert_eq!(learnt.unwrap().replace(['\r', '\n'], ""), server.pem.replace(['\r', '\n'], ""));
        let heard = server.heard.join().unwrap();
        assert!(String::from_utf8_lossy(&heard).contains("\"token\":\"secret\""));
    }

    #[test]
    fn another_key_is_refused_and_hears_nothing() {
        let server = server("127.0.0.1", false);
        let (refused, _) = ask_server(&server, [7; 32]);
        assert!(refused.to_string().contains("shows another key"), "{refused}");
        assert_eq!(server.heard.join().unwrap(), b"");
    }

    #[test]
    fn who_shows_the_certificate_without_holding_its_key_is_refused() {
        let server = server("127.0.0.1", true);
        let (refused, _) = ask_server(&server, server.fingerprint);
        assert!(refused.to_string().contains("shows another key"), "{refused}");
        assert_eq!(server.heard.join().unwrap(), b"");
    }

    #[test]
    fn a_certificate_for_another_name_says_how_to_add_this_one() {
        let server = server("ca.example", false);
        let (refused, _) = ask_server(&server, server.fingerprint);
        assert!(refused.to_string().contains("nebula-ca tls add-name 127.0.0.1"), "{refused}");
        assert_eq!(server.heard.join().unwrap(), b"");
    }

    #[test]
    fn nobody_there_is_said() {
        let (refused, _) = ask("https://127.0.0.1:1", [0; 32]);
        assert!(refused.to_string().contains("cannot ask https://127.0.0.1:1"), "{refused}");
    }
}
