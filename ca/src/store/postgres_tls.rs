//! TLS to PostgreSQL: the settings in the connection string (sslmode, sslrootcert), and which servers the connection
//! then trusts.

use std::{path::PathBuf, sync::Arc};

use ::postgres::{Client, Config, NoTls, config::SslMode};
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme,
    client::{
        WebPkiServerVerifier,
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    },
    crypto::aws_lc_rs,
    pki_types::{CertificateDer, ServerName, UnixTime, pem::PemObject},
};
use tokio_postgres_rustls::MakeRustlsConnect;
use zeroize::Zeroizing;

use crate::store::StoreError;

/// How connections are protected.
pub(super) enum Protection {
    /// By the network they use: a unix socket, or a network that is protected by other means.
    Network,
    Tls(Box<MakeRustlsConnect>),
}

impl Protection {
    /// Reads a connection string, including the settings that the client library does not support.
    pub(super) fn read(database: &str) -> Result<(Config, Self), StoreError> {
        let bad = |problem: String| StoreError::Postgres(format!("database.url: {problem}"));
        let Wishes { rest, mode, root } = wishes(database.trim()).map_err(bad)?;
        let mut config: Config = rest.parse().map_err(|error: ::postgres::Error| bad(error.to_string()))?;
        let checks_name = match mode.as_deref() {
            None | Some("disable") => {
                if root.is_some() {
                    return Err(bad("sslrootcert has an effect with sslmode=verify-full only".to_owned()));
                }
                config.ssl_mode(SslMode::Disable);
                return Ok((config, Self::Network));
            }
            Some("verify-full") => true,
            // As in libpq with a CA file; without one, `require` would trust any server there.
            Some("verify-ca" | "require") => false,
            Some(other) => {
                return Err(bad(format!("sslmode={other:?}: it is verify-full, verify-ca, require or disable")));
            }
        };
        let root = root.ok_or_else(|| {
            bad("name the file with the authority of the database's certificate in sslrootcert; without it anybody \
                 could answer in its place"
                .to_owned())
        })?;
        let tls =
            client(&root, checks_name).map_err(|problem| bad(format!("sslrootcert {}: {problem}", root.display())))?;
        config.ssl_mode(SslMode::Require);
        Ok((config, Self::Tls(Box::new(MakeRustlsConnect::new(tls)))))
    }

    pub(super) fn connect(&self, config: &Config) -> Result<Client, ::postgres::Error> {
        match self {
            Self::Network => config.connect(NoTls),
            Self::Tls(tls) => config.connect(tls.as_ref().clone()),
        }
    }
}

fn client(root: &PathBuf, checks_name: bool) -> Result<ClientConfig, String> {
    let mut authorities = RootCertStore::empty();
    for certificate in CertificateDer::pem_file_iter(root).map_err(|error| error.to_string())? {
        let added = certificate.map_err(|error| error.to_string()).map(|found| authorities.add(found));
        added?.map_err(|error| error.to_string())?;
    }
    let provider = Arc::new(aws_lc_rs::default_provider());
    let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(authorities), Arc::clone(&provider));
    let verifier = verifier.build().map_err(|error| error.to_string())?;
    let versions = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let config = versions.map_err(|error| error.to_string())?.dangerous();
    let verifier: Arc<dyn ServerCertVerifier> = if checks_name { verifier } else { Arc::new(AnyName(verifier)) };
    Ok(config.with_custom_certificate_verifier(verifier).with_no_client_auth())
}

/// Accepts any certificate that the CAs signed, whatever name is in it.
#[derive(Debug)]
struct AnyName(Arc<WebPkiServerVerifier>);

impl ServerCertVerifier for AnyName {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        // The name is checked last, after everything else was accepted.
        match self.0.verify_server_cert(certificate, intermediates, name, ocsp, now) {
            Err(rustls::Error::InvalidCertificate(
                CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
            )) => Ok(ServerCertVerified::assertion()),
            verdict => verdict,
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.0.verify_tls12_signature(message, certificate, signed)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.0.verify_tls13_signature(message, certificate, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.supported_verify_schemes()
    }
}

/// A parsed connection string.
#[derive(Debug, PartialEq)]
struct Wishes {
    /// The settings for the client library; may contain a password.
    rest: Zeroizing<String>,
    mode: Option<String>,
    root: Option<PathBuf>,
}

impl Wishes {
    /// Takes a setting that is read here; `false` if it is another one.
    fn take(&mut self, key: &str, value: &str) -> bool {
        match key {
            "sslmode" => self.mode = Some(value.to_owned()),
            "sslrootcert" => self.root = Some(value.into()),
            _ => return false,
        }
        true
    }
}

fn wishes(database: &str) -> Result<Wishes, String> {
    let mut wishes = Wishes { rest: Zeroizing::new(String::with_capacity(database.len() + 1)), mode: None, root: None };
    if !(database.starts_with("postgres://") || database.starts_with("postgresql://")) {
        return pairs(database, wishes);
    }
    let (address, query) = database.split_once('?').unwrap_or((database, ""));
    wishes.rest.push_str(address);
    let mut separator = '?';
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
        if key == "sslrootcert" && value.contains('%') {
            return Err("write sslrootcert as it is, without %".to_owned());
        }
        if !wishes.take(key, value) {
            wishes.rest.push(separator);
            wishes.rest.push_str(pair);
            separator = '&';
        }
    }
    Ok(wishes)
}

/// Parses the form `key=value`, with optional quotes around values. Text of any other form is left to the client
/// library, which reports it.
fn pairs(database: &str, mut wishes: Wishes) -> Result<Wishes, String> {
    let mut left = database;
    while !left.is_empty() {
        let Some((key, after)) = left.split_once('=') else {
            wishes.rest.push_str(left);
            break;
        };
        let after = after.trim_start();
        let is_quoted = after.starts_with('\'');
        let (mut escaped, mut value) = (false, Zeroizing::new(String::with_capacity(after.len())));
        let mut end = after.len();
        for (at, c) in after.char_indices().skip(usize::from(is_quoted)) {
            match c {
                _ if escaped => {
                    escaped = false;
                    value.push(c);
                }
                '\\' => escaped = true,
                '\'' if is_quoted => {
                    end = at + 1;
                    break;
                }
                c if c.is_whitespace() && !is_quoted => {
                    end = at;
                    break;
                }
                c => value.push(c),
            }
        }
        if !wishes.take(key.trim(), &value) {
            wishes.rest.push_str(&left[..left.len() - after.len() + end]);
            wishes.rest.push(' ');
        }
        left = after[end..].trim_start();
    }
    Ok(wishes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_of_tls_is_taken_out_and_the_rest_stays() {
        let root = "/etc/pki/db.crt";
        for (text, rest) in [
            (
                "postgres://ca:p%3Fw@db:5433/nebula?sslmode=verify-full&connect_timeout=2&sslrootcert=/etc/pki/db.crt",
                "postgres://ca:p%3Fw@db:5433/nebula?connect_timeout=2",
            ),
            ("postgresql://db/n?sslrootcert=/etc/pki/db.crt&sslmode=verify-full", "postgresql://db/n"),
            (
                r"host=db sslmode = 'verify-full'  password='a \'sslmode=disable\' b' sslrootcert=/etc/pki/db.crt user=ca",
                r"host=db password='a \'sslmode=disable\' b' user=ca ",
            ),
        ] {
            let found = wishes(text).unwrap();
            assert_eq!((found.rest.as_str(), found.mode.as_deref()), (rest, Some("verify-full")), "{text}");
            assert_eq!(found.root, Some(root.into()), "{text}");
            found.rest.parse::<Config>().unwrap();
        }
        for text in ["host=/run/postgresql user=nebula-ca dbname=nebula", "postgres:///nebula"] {
            assert_eq!(wishes(text).unwrap().rest.trim(), text);
        }
        for bad in ["host='", "=", "host", "sslmode", "host=a\\", "postgres://db?=&sslmode"] {
            // Must not panic; whether it is valid is for the library to decide.
            let _ = wishes(bad);
        }
    }

    #[test]
    fn a_protection_that_would_protect_from_nobody_is_refused() {
        let refused = |text: &str| Protection::read(text).err().unwrap().to_string();
        assert!(refused("host=db sslmode=require").contains("sslrootcert"));
        assert!(refused("host=db sslmode=prefer").contains("verify-full, verify-ca, require or disable"));
        assert!(refused("host=db sslrootcert=/x").contains("sslmode=verify-full"));
        assert!(refused("host=db sslmode=verify-full sslrootcert=/nowhere").contains("sslrootcert /nowhere: "));
        assert!(refused("host=db color=red").contains("database.url: "));
        let empty = tempfile::NamedTempFile::new().unwrap();
        let text = format!("host=db sslmode=verify-full sslrootcert={}", empty.path().display());
        assert!(refused(&text).contains("sslrootcert"));
    }
}
