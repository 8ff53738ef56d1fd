//! Enrolment: a host gets its certificate from the CA service with a one-time token, and renews it later.
//!
//! The key is on disk before the request is sent, so an interrupted enrolment can be run again: the token remains valid
//! for the key it was first used with. The CA's URL and TLS certificate are saved for renewals.

pub mod event;
mod files;
pub mod follow;
pub mod kubernetes;
pub mod limits;
pub mod up;

use std::fmt;
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::time::Duration;

use ipnet::IpNet;
use nebula_cert::issuance::{Reply, Trust};
use nebula_cert::{Certificate, Curve, HostKey, JoinToken, PrivateKey, UnixTime, visible};
use nebula_cni_contract::launch::CaAccess;
use nebula_linux::netns::NamespaceExecutor;
use zeroize::Zeroizing;

pub use self::files::Files;
use self::files::failed;
use self::limits::{Limits, NotAccepted, list};
use crate::ca_client::{self, CaClient, Issued, Prover};

/// A summary of the issued certificate, for the user.
#[derive(Debug)]
pub struct Enrolled {
    /// Name in the certificate.
    pub name: String,
    /// Overlay addresses with their prefix lengths.
    pub networks: Vec<String>,
    /// Groups.
    pub groups: Vec<String>,
    /// Last second of validity.
    pub not_after: UnixTime,
    /// Where the files are.
    pub folder: PathBuf,
    /// Overlay addresses of the enrolment before, in the same folder.
    pub before: Vec<IpNet>,
}

impl fmt::Display for Enrolled {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let groups = if self.groups.is_empty() { "none".to_owned() } else { self.groups.join(", ") };
        let text = format!("enrolled {} as {} (groups: {groups})", self.name, self.networks.join(", "));
        f.write_str(&visible(&text))
    }
}

/// Why enrolment or renewal failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file cannot be read or written.
    #[error("cannot {verb} {}: {source}", path.display())]
    File {
        /// What was tried.
        verb: &'static str,
        /// Which file.
        path: PathBuf,
        /// The system's error.
        #[source]
        source: std::io::Error,
    },
    /// The host already has a certificate.
    #[error("refusing to overwrite {}: remove it to enrol this host again", .0.display())]
    Exists(PathBuf),
    /// The key file left by an earlier run is invalid.
    #[error("{}: {cause}; remove it and enrol again", path.display())]
    Key {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        cause: nebula_cert::Error,
    },
    /// `enrolment.json` is invalid.
    #[error("{}: {cause}; remove it and give -ca-url and -tls-ca again", path.display())]
    Enrolment {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        cause: String,
    },
    /// There is a key of another curve.
    #[error("{} is a key of another curve: remove it to make one of this", .0.display())]
    OtherCurve(PathBuf),
    /// There is no certificate to renew.
    #[error("nothing to renew: {0}")]
    Nothing(nebula_cert::Error),
    /// The service does not accept a certificate as proof.
    #[error("the CA service renews no certificates: enrol this host again with another token")]
    NoRenewal,
    /// The new certificate has other addresses, by which peers know this host, or makes it a gateway.
    #[error("the CA service gave a certificate with {0}, which no renewal may change; the present one stays")]
    OtherNetworks(String),
    /// The join token is good for another key than the one in the folder.
    #[error(
        "this join token is bound to a key, and {} is another one or missing: make the key with `nebula up -prepare` and the \
         same -dir and -name, and a token for what that prints",
        .0.display()
    )]
    BoundToOther(PathBuf),
    /// The certificate would take networks of this machine, or make it a gateway.
    #[error(transparent)]
    Networks(#[from] NotAccepted),
    /// The request to the CA failed.
    #[error(transparent)]
    Ca(#[from] ca_client::Error),
}

/// Enrols this host with the one-time token in the token file of `access`, and writes its files.
///
/// # Errors
/// Returns an error if the folder already has a certificate, a file cannot be read or written, or the CA refuses; or if
/// the certificate is not within `limits`.
pub fn enrol(
    access: &CaAccess,
    files: &Files,
    curve: Curve,
    limits: &Limits,
    now: UnixTime,
) -> Result<Enrolled, Error> {
    check_new(files)?;
    let client = CaClient::new(access.clone(), NamespaceExecutor::Here);
    let key = match read_key(&files.key())? {
        Some(key) => key,
        None => make_key(files, curve)?,
    };
    issue(&client, files, key, &Prover::Host, Some(limits), now, || files.remember(access))
}

/// Like [`enrol`], at the service of a join token, once that service has proven to hold the pinned key.
///
/// # Errors
/// Fails like [`enrol`], or if the token is bound to another key or another service answers; nothing is sent to that
/// one.
pub fn join(token: &JoinToken, files: &Files, limits: &Limits, now: UnixTime) -> Result<Enrolled, Error> {
    let limits = Limits { overlay: token.networks().to_vec(), ..limits.clone() };
    limits.check_overlay(token.networks())?;
    check_new(files)?;
    let key = match token.key() {
        None => key_for(files, token.curve())?,
        Some(bound) => {
            let key = read_key(&files.key())?.filter(|key| HostKey::of(key).sha256() == *bound);
            key.ok_or_else(|| Error::BoundToOther(files.key()))?
        }
    };
    let client = CaClient::pinned(token);
    let prover = Prover::Invited(token.secret().clone());
    issue(&client, files, key, &prover, Some(&limits), now, || {
        // Later clients trust this certificate, which only the holder of the pinned key can use.
        files.remember_shown(token.url(), &client.shown_certificate().unwrap_or_default())
    })
}

/// Makes the key of this host, unless there is one already, and returns its public half: a token that is bound to it is
/// worth nothing to others.
///
/// # Errors
/// Returns an error if the folder already has a certificate or a key of another curve, or a file cannot be read or
/// written.
pub fn prepare(files: &Files, curve: Curve) -> Result<HostKey, Error> {
    check_new(files)?;
    match read_key(&files.key())? {
        Some(key) if key.curve() == curve => Ok(HostKey::of(&key)),
        Some(_) => Err(Error::OtherCurve(files.key())),
        None => Ok(HostKey::of(&make_key(files, curve)?)),
    }
}

fn check_new(files: &Files) -> Result<(), Error> {
    if files.certificate().exists() { Err(Error::Exists(files.certificate())) } else { Ok(()) }
}

/// The key in the folder, or a new one. A CA of this curve cannot have issued a certificate for a key of the other one.
fn key_for(files: &Files, curve: Curve) -> Result<PrivateKey, Error> {
    let present = read_key(&files.key())?.filter(|key| key.curve() == curve);
    present.map_or_else(|| make_key(files, curve), Ok)
}

fn make_key(files: &Files, curve: Curve) -> Result<PrivateKey, Error> {
    files.make_folder()?;
    let key = PrivateKey::generate(curve).map_err(|cause| Error::Key { path: files.key(), cause })?;
    files.write(&files.key(), key.to_pem().as_bytes(), 0o600)?;
    Ok(key)
}

/// Requests the first certificate, for a key that is in the folder. `remember` notes the service for renewals.
fn issue(
    client: &CaClient,
    files: &Files,
    key: PrivateKey,
    prover: &Prover,
    limits: Option<&Limits>,
    now: UnixTime,
    remember: impl FnOnce() -> Result<(), Error>,
) -> Result<Enrolled, Error> {
    let (issued, reply) = client.request_for(key, prover, REQUEST_TIMEOUT, now)?;
    if let Some(limits) = limits {
        limits.check_certificate(issued.identity.primary())?;
    }
    let before = files.networks();
    remember()?;
    files.remember_networks(issued.identity.networks())?;
    write_trust(files, &issued, &reply)?;
    files.write(&files.certificate(), reply.certificate.as_bytes(), 0o644)?;
    Ok(Enrolled { before, ..Enrolled::new(&issued, files.folder()) })
}

/// What [`renew`] did.
#[derive(Debug)]
pub enum Renewal {
    /// Neither certificate nor trust had to change.
    Nothing,
    /// The CA trusts or blocks others than before, or announces other lighthouses.
    Trust,
    /// There is another certificate, and the trust that came with it.
    Certificate(Enrolled),
}

/// Renews the certificate if at most a third of its lifetime is left, or if `always`; otherwise only writes whom the CA
/// trusts: hosts that learn of the next CA, or of a blocked certificate, with their own renewal would learn of it too
/// late. Without `access`, uses the saved CA service.
///
/// # Errors
/// Returns an error if there is no certificate, a file cannot be read or written, or the CA refuses; the present files
/// are kept then.
pub fn renew(access: Option<CaAccess>, files: &Files, always: bool, now: UnixTime) -> Result<Renewal, Error> {
    files.complete()?;
    files.remember_blocklist_dir()?;
    let is_due = always || is_due(files, now)?;
    let access = access.map_or_else(|| files.remembered(), Ok)?;
    let client = CaClient::new(access.clone(), NamespaceExecutor::Here);
    if !is_due {
        let Some((trust, own)) = ask_whom_to_trust(&client, files)? else { return Ok(Renewal::Nothing) };
        let _alone = files.lock()?;
        let differs = files.write_trust(&trust.ca, trust.blocklist, trust.lighthouses, &own)?;
        return Ok(if differs { Renewal::Trust } else { Renewal::Nothing });
    }
    let issued = renew_by(&client, files, REQUEST_TIMEOUT, now)?;
    if files.workload()?.is_none() {
        files.remember(&access)?;
    }
    Ok(Renewal::Certificate(Enrolled::new(&issued, files.folder())))
}

/// Whom the CA trusts, and the networks of this host.
fn ask_whom_to_trust(client: &CaClient, files: &Files) -> Result<Option<(Trust, Vec<IpNet>)>, Error> {
    let identity = files.identity()?;
    let own = identity.networks().to_vec();
    let Some(news) = client.trust(None, Duration::ZERO, REQUEST_TIMEOUT)?.news else { return Ok(None) };
    if news.renewal_key.is_some() {
        // The CA learns how often this host asks, for the answer of `revoke`. If this fails, nothing else does.
        client.ask_as(identity);
        let _ = client.trust(Some(&news.etag), Duration::ZERO, REQUEST_TIMEOUT);
    }
    Ok(Some((news.answer, own)))
}

/// Whether the CA trusts or blocks others than the files say, or announces other lighthouses.
///
/// # Errors
/// Returns an error if there is no certificate, or the CA does not answer.
pub fn trust_differs(files: &Files) -> Result<bool, Error> {
    let client = CaClient::new(files.remembered()?, NamespaceExecutor::Here);
    let asked = ask_whom_to_trust(&client, files)?;
    Ok(asked.is_some_and(|(trust, own)| files.trust_differs(&trust.ca, trust.blocklist, trust.lighthouses, &own)))
}

/// Whether at most a third of the certificate's lifetime is left.
///
/// # Errors
/// Returns an error if there is no certificate.
pub fn is_due(files: &Files, now: UnixTime) -> Result<bool, Error> {
    files.complete()?;
    let identity = files.identity()?;
    let present = identity.primary();
    let (life, left) = (present.not_after() - present.not_before(), present.not_after() - now);
    Ok(left <= life / 3)
}

/// Replaces key, certificate and trust. The proof of identity for the new key is the present certificate, or the token
/// of a pod that enrolled with one.
///
/// # Errors
/// Returns an error if there is no certificate, a file cannot be read or written, or the CA refuses; the present files
/// are kept then.
pub fn renew_by(client: &CaClient, files: &Files, within: Duration, now: UnixTime) -> Result<Issued, Error> {
    // Programs take turns, and each reads what the previous one wrote.
    let _alone = files.lock()?;
    files.complete()?;
    let identity = files.identity()?;
    let made = PrivateKey::generate(identity.curve());
    let key = made.map_err(|cause| Error::Key { path: files.next_key(), cause })?;
    let pem = key.to_pem();
    let present = identity.primary().clone();
    let prover = match files.workload()? {
        Some(workload) => workload.prover(),
        None => {
            let answer = client.trust(None, Duration::ZERO, within)?;
            let renewal_key = answer.news.and_then(|news| news.renewal_key).ok_or(Error::NoRenewal)?;
            Prover::Holder { identity: Box::new(identity), renewal_key }
        }
    };
    let (issued, reply) = client.request_for(key, &prover, within, now)?;
    check_renewal(&present, issued.identity.primary())?;
    files.remember_networks(issued.identity.networks())?;
    files.write(&files.next_key(), pem.as_bytes(), 0o600)?;
    write_trust(files, &issued, &reply)?;
    files.write_pair(reply.certificate.as_bytes())?;
    Ok(issued)
}

/// A renewal has the networks of the certificate before, which the user accepted: others would take more of this
/// machine.
fn check_renewal(present: &Certificate, next: &Certificate) -> Result<(), Error> {
    if present.networks() != next.networks() {
        return Err(Error::OtherNetworks(format!("the addresses {}", list(next.networks()))));
    }
    let mut more = next.unsafe_networks().to_vec();
    more.retain(|network| !present.unsafe_networks().contains(network));
    if more.is_empty() { Ok(()) } else { Err(Error::OtherNetworks(format!("the unsafe networks {}", list(&more)))) }
}

fn write_trust(files: &Files, issued: &Issued, reply: &Reply) -> Result<bool, Error> {
    let networks = issued.identity.networks();
    files.write_trust(&reply.ca, reply.blocklist.clone(), reply.lighthouses.clone(), networks)
}

/// Reads the key left by an earlier run, if any.
fn read_key(path: &Path) -> Result<Option<PrivateKey>, Error> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(failed("read", path)(error)),
    };
    let mut pem = Zeroizing::new(Vec::with_capacity(MAX_KEY_BYTES));
    file.take(MAX_KEY_BYTES as u64).read_to_end(&mut pem).map_err(failed("read", path))?;
    PrivateKey::from_pem(&pem).map(Some).map_err(|cause| Error::Key { path: path.to_owned(), cause })
}

impl Enrolled {
    fn new(issued: &Issued, folder: &Path) -> Self {
        let certificate = issued.identity.primary();
        Self {
            name: certificate.name().to_owned(),
            networks: certificate.networks().iter().map(ToString::to_string).collect(),
            groups: certificate.groups().to_vec(),
            not_after: certificate.not_after(),
            folder: folder.to_owned(),
            before: Vec::new(),
        }
    }

    /// What to say to the user if peers knew this host by other addresses.
    #[must_use]
    pub fn moved(&self) -> Option<String> {
        let before: Vec<String> = self.before.iter().map(ToString::to_string).collect();
        (!before.is_empty() && before != self.networks).then(|| {
            format!(
                "this host was {} before: change what names it by that address (static_host_map, rules of firewalls, gateways)",
                before.join(", ")
            )
        })
    }
}

const REQUEST_TIMEOUT: Duration = Duration::from_secs(15);
const MAX_KEY_BYTES: usize = 4096;

#[cfg(test)]
mod tests {
    use nebula_cert::{SigningKey, Template};

    use super::*;

    #[test]
    fn a_renewal_changes_no_address_and_makes_no_gateway() {
        let certificate = |networks: &[&str], behind: &[&str]| {
            let parsed = |texts: &[&str]| -> Vec<IpNet> { texts.iter().map(|text| text.parse().unwrap()).collect() };
            let key = SigningKey::generate(Curve::Curve25519).unwrap();
            let template = Template::new("ca", 0..=1_000);
            let ca = template.clone().self_sign(&key).unwrap();
            let public_key = PrivateKey::generate(Curve::Curve25519).unwrap().public_key();
            let (networks, unsafe_networks) = (parsed(networks), parsed(behind));
            Template { name: "host".into(), networks, unsafe_networks, public_key, ..template }.sign(&ca, &key).unwrap()
        };
        let present = certificate(&["10.42.0.9/16"], &["192.168.7.0/24"]);
        for good in [&["192.168.7.0/24"][..], &[]] {
            check_renewal(&present, &certificate(&["10.42.0.9/16"], good)).unwrap();
        }
        for (networks, behind, said) in [
            (&["10.42.0.9/1"][..], &["192.168.7.0/24"][..], "10.42.0.9/1"),
            (&["10.42.0.8/16"], &["192.168.7.0/24"], "10.42.0.8/16"),
            (&["10.42.0.9/16", "128.0.0.1/1"], &[], "10.42.0.9/16,128.0.0.1/1"),
            (&["10.42.0.9/16"], &["192.168.7.0/24", "0.0.0.0/0"], "unsafe networks 0.0.0.0/0"),
            (&["10.42.0.9/16"], &["192.168.0.0/16"], "unsafe networks 192.168.0.0/16"),
        ] {
            let refused = check_renewal(&present, &certificate(networks, behind)).unwrap_err().to_string();
            assert!(refused.contains(said), "{refused}");
        }
    }

    #[test]
    fn a_prepared_key_stays_the_same_and_is_of_the_curve_that_is_asked_for() {
        let folder = tempfile::tempdir().unwrap();
        let files = Files::new(&folder.path().join("new"));
        let key = prepare(&files, Curve::Curve25519).unwrap();
        assert_eq!(prepare(&files, Curve::Curve25519).unwrap(), key);
        assert_eq!(HostKey::of(&read_key(&files.key()).unwrap().unwrap()), key);
        assert!(matches!(prepare(&files, Curve::P256), Err(Error::OtherCurve(_))));
        files.write(&files.certificate(), b"", 0o644).unwrap();
        assert!(matches!(prepare(&files, Curve::Curve25519), Err(Error::Exists(_))));
    }

    #[test]
    fn a_token_for_another_key_or_for_networks_that_are_taken_is_not_shown_to_the_service() {
        let folder = tempfile::tempdir().unwrap();
        let files = Files::new(folder.path());
        let token = |networks: &str| {
            // Nobody listens there.
            JoinToken::new("https://127.0.0.1:1", [7; 32], "x", &[networks.parse().unwrap()]).unwrap()
        };
        let other = HostKey::of(&PrivateKey::generate(Curve::Curve25519).unwrap());
        let bound = token("10.42.0.0/16").bound_to(&other);
        assert!(matches!(join(&bound, &files, &Limits::default(), 0), Err(Error::BoundToOther(_))), "there is no key");
        prepare(&files, Curve::Curve25519).unwrap();
        assert!(
            matches!(join(&bound, &files, &Limits::default(), 0), Err(Error::BoundToOther(_))),
            "it is another one"
        );
        let refused = join(&token("0.0.0.0/1"), &files, &Limits::default(), 0);
        assert!(matches!(refused, Err(Error::Networks(_))));
        assert!(matches!(join(&token("10.42.0.0/16"), &files, &Limits::default(), 0), Err(Error::Ca(_))));
    }
}
