//! The TLS identity of the service: one key that clients pin, and a certificate with the names by which they reach it.

use std::{
    collections::BTreeSet,
    fs,
    net::{IpAddr, SocketAddr},
};

use nebula_cert::UnixTime;
use rustls::server::ParsedCertificate;
use rustls_pki_types::{CertificateDer, pem::PemObject};
use sha2::{Digest, Sha256};
use x509_cert::{
    der::Decode,
    ext::pkix::{SubjectAltName, name::GeneralName},
};
use zeroize::Zeroizing;

use crate::{
    directory::{Directory, FileError, TLS_CERTIFICATE, TLS_KEY},
    time,
};

/// What clients see of the service before they send anything.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsIdentity {
    /// Host names and IP addresses in the certificate.
    pub names: Vec<String>,
    /// SHA-256 of the public key (SubjectPublicKeyInfo); certificates for the same key share it.
    pub fingerprint: [u8; 32],
    /// Whether `nebula-ca` created the certificate, and so may replace it.
    is_own: bool,
}

/// Why the TLS certificate was not read or not replaced.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file cannot be read or written.
    #[error(transparent)]
    File(#[from] FileError),
    /// The file holds no certificate.
    #[error("{TLS_CERTIFICATE} holds no certificate that can be read: {0}")]
    Unreadable(String),
    /// The certificate was issued by somebody else.
    #[error("{TLS_CERTIFICATE} was not made by nebula-ca: let its issuer make one with these names")]
    Foreign,
    /// The next certificate cannot be created.
    #[error("cannot make the TLS certificate; are the names host names or IP addresses?")]
    Certificate(#[from] rcgen::Error),
}

impl TlsIdentity {
    /// Reads the identity of a service.
    ///
    /// # Errors
    /// Returns an error if there is none, or it cannot be read.
    pub fn read(directory: &Directory) -> Result<Self, TlsError> {
        let unreadable = |error: &dyn std::fmt::Display| TlsError::Unreadable(error.to_string());
        let pem = directory.read(TLS_CERTIFICATE)?;
        let der = CertificateDer::from_pem_slice(pem.as_bytes()).map_err(|error| unreadable(&error))?;
        let parsed = ParsedCertificate::try_from(&der).map_err(|error| unreadable(&error))?;
        let fingerprint = Sha256::digest(parsed.subject_public_key_info()).into();
        let certificate = x509_cert::Certificate::from_der(&der).map_err(|error| unreadable(&error))?.tbs_certificate;
        let alternative = certificate.get::<SubjectAltName>().map_err(|error| unreadable(&error))?;
        let names = alternative.map(|(_, names)| names.0).unwrap_or_default();
        let is_own = certificate.issuer == certificate.subject && certificate.subject.to_string() == DISTINGUISHED_NAME;
        Ok(Self { names: names.iter().filter_map(shown).collect(), fingerprint, is_own })
    }

    /// Issues a certificate for the same key with these names in addition to the present ones. Clients that trust the
    /// present certificate trust the new one, too: name and key of the issuer are the same. Returns whether anything
    /// changed.
    ///
    /// # Errors
    /// Returns an error, and changes nothing, if somebody else issued the present certificate, a name is invalid, or a
    /// file fails.
    pub fn add_names(&mut self, names: &[String], directory: &Directory, now: UnixTime) -> Result<bool, TlsError> {
        let new: Vec<_> = names.iter().filter(|name| !self.has(name)).collect();
        if new.is_empty() {
            return Ok(false);
        }
        if !self.is_own {
            return Err(TlsError::Foreign);
        }
        let all: Vec<String> = self.names.iter().chain(new).cloned().collect();
        let key = rcgen::KeyPair::from_pem(&directory.read(TLS_KEY)?)?;
        directory.replace(TLS_CERTIFICATE, &certificate(all, &key, now)?, 0o644)?;
        *self = Self::read(directory)?;
        Ok(true)
    }

    /// Whether a client may call the service by this name or address.
    #[must_use]
    pub fn has(&self, name: &str) -> bool {
        let wanted = canonical(name);
        self.names.iter().any(|known| canonical(known) == wanted)
    }

    /// Names by which other machines can reach the service.
    pub fn public_names(&self) -> impl Iterator<Item = &str> {
        let is_local = |name: &str| name == "localhost" || name.parse().is_ok_and(|ip: IpAddr| ip.is_loopback());
        self.names.iter().map(String::as_str).filter(move |name| !is_local(name))
    }

    /// The name by which other machines most likely reach the service: a full host name, else an address, else any
    /// name.
    #[must_use]
    pub fn best_name(&self) -> Option<&str> {
        let is_address = |name: &&str| name.parse::<IpAddr>().is_ok();
        let full = self.public_names().find(|name| name.contains('.') && !is_address(name));
        full.or_else(|| self.public_names().find(is_address)).or_else(|| self.public_names().next())
    }

    /// What is wrong with listening at this address, for clients that verify names.
    #[must_use]
    pub fn problem_at(&self, listen: SocketAddr) -> Option<String> {
        let ip = listen.ip().to_canonical();
        let suggestion = match ip.is_unspecified() {
            true if self.public_names().next().is_some() => return None,
            true => machine_names().into_iter().next().unwrap_or_else(|| "NAME".to_owned()),
            // A host name may resolve to the address; loopback is for this machine only.
            false if self.has(&ip.to_string()) || (ip.is_loopback() && self.has("localhost")) => return None,
            false => ip.to_string(),
        };
        Some(format!(
            "{TLS_CERTIFICATE} is for {} only: a client that calls another name or address refuses this service; add \
             those that clients use: nebula-ca tls add-name {suggestion}",
            self.names.join(", ")
        ))
    }
}

/// Creates a key and a self-signed certificate that clients pin as their only trusted one, both in PEM, certificate
/// first.
pub(crate) fn generate(names: Vec<String>, now: UnixTime) -> Result<(String, Zeroizing<String>), rcgen::Error> {
    let key = rcgen::KeyPair::generate()?;
    Ok((certificate(names, &key, now)?, Zeroizing::new(key.serialize_pem())))
}

fn certificate(names: Vec<String>, key: &rcgen::KeyPair, now: UnixTime) -> Result<String, rcgen::Error> {
    let mut parameters = rcgen::CertificateParams::new(names)?;
    parameters.distinguished_name = rcgen::DistinguishedName::new();
    parameters.distinguished_name.push(rcgen::DnType::CommonName, COMMON_NAME);
    let year = |years: i64| i32::try_from(time::year(now) + years).unwrap_or(9_999).clamp(1_970, 9_999);
    // Clients pin a copy, so an expiry protects nobody: make it long enough not to cause an outage.
    parameters.not_before = rcgen::date_time_ymd(year(-1), 1, 1);
    parameters.not_after = rcgen::date_time_ymd(year(20), 1, 1);
    parameters.extended_key_usages = vec![rcgen::ExtendedKeyUsagePurpose::ServerAuth];
    Ok(parameters.self_signed(key)?.pem())
}

/// Default names for the TLS certificate: those of this machine, and the loopback addresses.
#[must_use]
pub fn default_tls_names() -> Vec<String> {
    let mut names = machine_names();
    names.extend(["localhost", "127.0.0.1", "::1"].map(str::to_owned));
    names
}

/// The host name and the addresses of this machine, most useful first.
fn machine_names() -> Vec<String> {
    let name = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let name = name.trim();
    let is_name = name != "localhost" && !name.is_empty() && rcgen::CertificateParams::new([name.to_owned()]).is_ok();
    let addresses = nix::ifaddrs::getifaddrs().into_iter().flatten().filter_map(|interface| {
        let address = interface.address?;
        let v4 = address.as_sockaddr_in().map(|address| IpAddr::V4(address.ip()));
        v4.or_else(|| address.as_sockaddr_in6().map(|address| IpAddr::V6(address.ip())))
    });
    // A link-local address means nothing to a client on another link.
    let is_of_link = |ip: &IpAddr| match ip {
        IpAddr::V4(ip) => ip.is_link_local(),
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    };
    let addresses: BTreeSet<IpAddr> = addresses.filter(|ip| !ip.is_loopback() && !is_of_link(ip)).collect();
    let names = is_name.then(|| name.to_owned()).into_iter();
    names.chain(addresses.into_iter().take(MAX_ADDRESSES).map(|ip| ip.to_string())).collect()
}

fn shown(name: &GeneralName) -> Option<String> {
    match name {
        GeneralName::DnsName(name) => Some(name.as_str().to_owned()),
        GeneralName::IpAddress(bytes) => {
            let v4 = <[u8; 4]>::try_from(bytes.as_bytes()).map(IpAddr::from);
            let ip = v4.or_else(|_| <[u8; 16]>::try_from(bytes.as_bytes()).map(IpAddr::from)).ok()?;
            Some(ip.to_string())
        }
        _ => None,
    }
}

fn canonical(name: &str) -> String {
    name.parse::<IpAddr>().map_or_else(|_| name.to_ascii_lowercase(), |ip| ip.to_canonical().to_string())
}

const COMMON_NAME: &str = "nebula-ca";
const DISTINGUISHED_NAME: &str = "CN=nebula-ca";
/// A cluster node has an interface for each pod.
const MAX_ADDRESSES: usize = 32;

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: UnixTime = 1_800_000_000;

    fn directory(names: &[&str]) -> (tempfile::TempDir, Directory) {
        let folder = tempfile::tempdir().unwrap();
        let directory = Directory::new(folder.path());
        let (certificate, key) = generate(names.iter().map(ToString::to_string).collect(), NOW).unwrap();
        directory.write_new(TLS_CERTIFICATE, &certificate, 0o644).unwrap();
        directory.write_new(TLS_KEY, &key, 0o600).unwrap();
        (folder, directory)
    }

    #[test]
    fn names_are_added_to_a_certificate_of_the_same_key_that_the_old_one_vouches_for() {
        let (_folder, directory) = directory(&["localhost", "127.0.0.1"]);
        let before = directory.read(TLS_CERTIFICATE).unwrap();
        let mut identity = TlsIdentity::read(&directory).unwrap();
        assert_eq!(identity.names, ["localhost", "127.0.0.1"]);
        let fingerprint = identity.fingerprint;
        let added = ["ca.example".to_owned(), "2001:db8::7".to_owned(), "LOCALHOST".to_owned()];
        assert!(identity.add_names(&added, &directory, NOW).unwrap());
        assert_eq!(identity.names, ["localhost", "127.0.0.1", "ca.example", "2001:db8::7"]);
        assert_eq!(identity.fingerprint, fingerprint, "clients pin the key");
        assert!(!identity.add_names(&added, &directory, NOW).unwrap(), "nothing is new");
        let der = |pem: &str| CertificateDer::from_pem_slice(pem.as_bytes()).unwrap();
        let mut roots = rustls::RootCertStore::empty();
        roots.add(der(&before)).unwrap();
        let new = der(&directory.read(TLS_CERTIFICATE).unwrap());
        let now = rustls_pki_types::UnixTime::since_unix_epoch(std::time::Duration::from_secs(NOW as u64));
        let algorithms = rustls::crypto::aws_lc_rs::default_provider().signature_verification_algorithms.all;
        let parsed = ParsedCertificate::try_from(&new).unwrap();
        rustls::client::verify_server_cert_signed_by_trust_anchor(&parsed, &roots, &[], now, algorithms)
            .expect("a client that trusts the first certificate trusts the second");
    }

    #[test]
    fn a_bad_name_and_a_foreign_certificate_change_nothing() {
        let (_folder, directory) = directory(&["localhost"]);
        let before = directory.read(TLS_CERTIFICATE).unwrap();
        let mut identity = TlsIdentity::read(&directory).unwrap();
        assert!(matches!(identity.add_names(&["né".to_owned()], &directory, NOW), Err(TlsError::Certificate(_))));
        assert_eq!(*directory.read(TLS_CERTIFICATE).unwrap(), *before);
        let key = rcgen::KeyPair::from_pem(&directory.read(TLS_KEY).unwrap()).unwrap();
        let foreign = rcgen::CertificateParams::new(["ca.example".to_owned()]).unwrap().self_signed(&key).unwrap();
        directory.replace(TLS_CERTIFICATE, &foreign.pem(), 0o644).unwrap();
        let mut identity = TlsIdentity::read(&directory).unwrap();
        assert!(matches!(identity.add_names(&["x.example".to_owned()], &directory, NOW), Err(TlsError::Foreign)));
    }

    #[test]
    fn listening_where_no_name_leads_is_a_problem_that_says_what_to_do() {
        let identity = |names: &[&str]| TlsIdentity {
            names: names.iter().map(ToString::to_string).collect(),
            fingerprint: [0; 32],
            is_own: true,
        };
        let problem = |names: &[&str], listen: &str| identity(names).problem_at(listen.parse().unwrap());
        let local = ["localhost", "127.0.0.1", "::1"];
        assert_eq!(problem(&local, "127.0.0.1:8443"), None);
        assert_eq!(problem(&["localhost"], "[::1]:8443"), None);
        assert!(problem(&local, "192.0.2.7:8443").unwrap().contains("nebula-ca tls add-name 192.0.2.7"));
        for everywhere in ["0.0.0.0:8443", "[::]:8443"] {
            assert!(problem(&local, everywhere).unwrap().contains("localhost, 127.0.0.1, ::1 only"));
            assert_eq!(problem(&["ca.example"], everywhere), None);
        }
        assert_eq!(problem(&["192.0.2.7"], "[::ffff:192.0.2.7]:8443"), None);
        assert!(problem(&["ca.example"], "192.0.2.7:8443").is_some());
    }

    #[test]
    fn a_full_name_is_better_than_an_address_and_that_better_than_a_name_of_the_machine() {
        let best = |names: &[&str]| {
            let names = names.iter().map(ToString::to_string).collect();
            TlsIdentity { names, fingerprint: [0; 32], is_own: true }.best_name().map(str::to_owned)
        };
        assert_eq!(best(&["vm", "192.0.2.7", "ca.example", "localhost"]).as_deref(), Some("ca.example"));
        assert_eq!(best(&["vm", "192.0.2.7", "localhost"]).as_deref(), Some("192.0.2.7"));
        assert_eq!(best(&["vm", "127.0.0.1"]).as_deref(), Some("vm"));
        assert_eq!(best(&["localhost", "127.0.0.1", "::1"]), None);
    }

    #[test]
    fn the_names_of_this_machine_can_all_be_in_a_certificate() {
        let names = default_tls_names();
        assert!(names.ends_with(&["localhost", "127.0.0.1", "::1"].map(str::to_owned)), "{names:?}");
        generate(names, NOW).unwrap();
    }
}
