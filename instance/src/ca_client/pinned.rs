//! The first contact with a CA service whose TLS key alone is known (key pinning). Nothing is sent before the key is
//! verified, and later calls trust only the certificate that the service presents here.

use std::net::{TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::time::Duration;

use aws_lc_rs::digest::{SHA256, digest};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use nebula_cert::JoinToken;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::{CertificateError, ClientConfig, ClientConnection, DigitallySignedStruct, Error, SignatureScheme};

use super::tls;

/// Why the service is not trusted. Nothing was sent to it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PinError {
    /// It cannot be reached, or does not speak TLS.
    #[error("cannot reach the CA service at {url}: {cause}")]
    Unreachable {
        /// Where.
        url: String,
        /// What failed.
        cause: String,
    },
    /// The service holds another key.
    #[error(
        "the service at {0} is not the one that the join token is for: it shows another key, so the token was not sent to \
         it. Somebody may sit in between; or the CA has a new tls.key, then make a new join token"
    )]
    OtherKey(String),
    /// The certificate is for other names.
    #[error("the certificate of {url} is not for {host}: run `nebula-ca tls add-name {host}` on the CA, and try again")]
    OtherName {
        /// Where.
        url: String,
        /// The name in the URL.
        host: String,
    },
}

/// Connects to the service of a join token, verifies that it holds the pinned key, and returns its certificate as PEM.
/// Each step takes at most about `timeout`.
///
/// # Errors
/// Returns an error if the service cannot be reached or cannot be verified.
pub fn certificate(join: &JoinToken, timeout: Duration) -> Result<String, PinError> {
    let url = join.url();
    let unreachable = |cause: String| PinError::Unreachable { url: url.to_owned(), cause };
    let authority = url.trim_start_matches("https://");
    let (host, port) = match authority.rsplit_once(':').filter(|(_, port)| !port.ends_with(']')) {
        Some((host, port)) => (host, port.parse().map_err(|_| unreachable("no such port".to_owned()))?),
        None => (authority, 443_u16),
    };
    let host = host.trim_start_matches('[').trim_end_matches(']');
    let name = ServerName::try_from(host.to_owned()).map_err(|error| unreachable(error.to_string()))?;
    let io = |error: std::io::Error| unreachable(error.to_string());
    let mut last = unreachable("the name has no address".to_owned());
    let mut stream = None;
    for address in (host, port).to_socket_addrs().map_err(io)? {
        match TcpStream::connect_timeout(&address, timeout) {
            Ok(connected) => {
                stream = Some(connected);
                break;
            }
            Err(error) => last = io(error),
        }
    }
    let mut stream = stream.ok_or(last)?;
    stream.set_read_timeout(Some(timeout)).map_err(io)?;
    stream.set_write_timeout(Some(timeout)).map_err(io)?;
    let provider = Arc::new(tls::provider());
    let verifier = Arc::new(Pin { fingerprint: *join.fingerprint(), provider: Arc::clone(&provider) });
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| unreachable(error.to_string()))?
        .dangerous()
        .with_custom_certificate_verifier(verifier)
        .with_no_client_auth();
    let mut connection =
        ClientConnection::new(Arc::new(config), name).map_err(|error| unreachable(error.to_string()))?;
    while connection.is_handshaking() {
        if let Err(error) = connection.complete_io(&mut stream) {
            let refusal = error.get_ref().and_then(|error| error.downcast_ref::<Error>());
            return Err(match refusal {
                Some(Error::General(cause)) if cause == OTHER_KEY => PinError::OtherKey(url.to_owned()),
                // It presents a copy of the certificate, but signs with another key.
                Some(Error::InvalidCertificate(CertificateError::BadSignature)) => PinError::OtherKey(url.to_owned()),
                Some(Error::InvalidCertificate(
                    CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
                )) => PinError::OtherName { url: url.to_owned(), host: host.to_owned() },
                _ => io(error),
            });
        }
    }
    let shown = connection.peer_certificates().and_then(<[_]>::first);
    Ok(pem(shown.ok_or_else(|| unreachable("it shows no certificate".to_owned()))?))
}

/// Accepts a server that holds the pinned key and has a certificate for the name that later calls use.
#[derive(Debug)]
struct Pin {
    fingerprint: [u8; 32],
    provider: Arc<CryptoProvider>,
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
            return Err(Error::General(OTHER_KEY.to_owned()));
        }
        rustls::client::verify_server_name(&certificate, name)?;
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
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        shown: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, shown, signature, &self.provider.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

fn pem(der: &[u8]) -> String {
    let encoded = BASE64_STANDARD.encode(der);
    let lines: Vec<_> = encoded.as_bytes().chunks(64).map(String::from_utf8_lossy).collect();
    format!("-----BEGIN CERTIFICATE-----\n{}\n-----END CERTIFICATE-----\n", lines.join("\n"))
}

const OTHER_KEY: &str = "another key than the pinned one";

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::net::{SocketAddr, TcpListener};

    use rustls::pki_types::PrivateKeyDer;

    use super::*;

    /// A TLS server for one client, with a certificate for `name`; returns what it received.
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
        let config = rustls::ServerConfig::builder_with_provider(Arc::new(tls::provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_cert_resolver(Arc::new(rustls::sign::SingleCertAndKey::from(certified)));
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let heard = std::thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            let connection = rustls::ServerConnection::new(Arc::new(config)).unwrap();
            let mut heard = Vec::new();
            let _ = rustls::StreamOwned::new(connection, stream).read_to_end(&mut heard);
            heard
        });
        Server { address, fingerprint, pem: certificate.pem(), heard }
    }

    fn ask(server: &Server, fingerprint: [u8; 32]) -> Result<String, PinError> {
        let url = format!("https://{}", server.address);
        certificate(&JoinToken::new(&url, fingerprint, "secret").unwrap(), Duration::from_secs(5))
    }

    #[test]
    fn the_certificate_of_the_pinned_key_is_learnt_and_nothing_is_said() {
        let server = server("127.0.0.1", false);
        let learnt = ask(&server, server.fingerprint).unwrap();
        assert_eq!(learnt.replace(['\r', '\n'], ""), server.pem.replace(['\r', '\n'], ""));
        assert_eq!(server.heard.join().unwrap(), b"");
    }

    #[test]
    fn another_key_is_refused_and_hears_nothing() {
        let server = server("127.0.0.1", false);
        let refused = ask(&server, [7; 32]).unwrap_err();
        assert!(matches!(refused, PinError::OtherKey(_)), "{refused}");
        assert_eq!(server.heard.join().unwrap(), b"");
    }

    #[test]
    fn who_shows_the_certificate_without_holding_its_key_is_refused() {
        let server = server("127.0.0.1", true);
        let refused = ask(&server, server.fingerprint).unwrap_err();
        assert!(matches!(refused, PinError::OtherKey(_)), "{refused}");
        assert_eq!(server.heard.join().unwrap(), b"");
    }

    #[test]
    fn a_certificate_for_another_name_says_how_to_add_this_one() {
        let server = server("ca.example", false);
        let refused = ask(&server, server.fingerprint).unwrap_err().to_string();
        assert!(refused.contains("nebula-ca tls add-name 127.0.0.1"), "{refused}");
    }

    #[test]
    fn nobody_there_is_said() {
        let join = JoinToken::new("https://127.0.0.1:1", [0; 32], "secret").unwrap();
        let refused = certificate(&join, Duration::from_secs(5)).unwrap_err().to_string();
        assert!(refused.contains("cannot reach the CA service at https://127.0.0.1:1"), "{refused}");
    }
}
