//! The protocol between an instance and the CA service: JSON over HTTPS.
//!
//! | Call | Body | Answer |
//! | --- | --- | --- |
//! | `POST` [`CERTIFICATE_PATH`] | [`Request`] | [`Reply`] |
//! | `POST` [`RELEASE_PATH`] | [`Release`] | [`Released`] |
//! | `POST` [`NODE_CREDENTIAL_PATH`] | | [`NodeCredential`] |
//! | `GET` [`TRUST_PATH`] | | [`Trust`], or status 304 if the caller has it |
//! | `GET` [`DIRECTORY_PATH`](crate::directory::DIRECTORY_PATH) | | [`Directory`](crate::directory::Directory) |
//! | `POST` [`REVOKE_PATH`](crate::revocation::REVOKE_PATH) | [`Request`](crate::revocation::Request) | [`Revocation`](crate::revocation::Revocation) |
//!
//! Every refusal is a [`Refusal`]. A status of 408, 425, 429 or 5xx is temporary and may be retried later; any other
//! 4xx is final for this proof. The public key is the only key material that is transmitted.
//!
//! # Following the trust
//! The answer has an entity tag. With that tag in `If-None-Match`, `GET /v1/trust?wait=50` is a long poll: it returns
//! as soon as the trust differs, or 304 if it has not changed within that many seconds (at most [`MAX_WAIT_SECONDS`]).
//! A service with too many waiting callers returns 304 at once, with the seconds to wait before the next call in
//! `Retry-After`.
//!
//! Anybody may ask. A holder of a certificate that says who it is ([`Asker`] in [`ASKER_HEADER`]) is known to hear of
//! changes.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::num::NonZeroU16;

use serde::{Deserialize, Serialize};

use crate::{Certificate, Error, Fingerprint, PrivateKey, UnixTime, public_key_from_pem};

/// Path for requesting a certificate.
pub const CERTIFICATE_PATH: &str = "/v1/certificate";
/// Path for releasing a certificate that is no longer needed.
pub const RELEASE_PATH: &str = "/v1/release";
/// Path at which the agent of a node, whose token is sent as `Authorization: Bearer TOKEN`, obtains a credential for
/// the time in which it is away.
pub const NODE_CREDENTIAL_PATH: &str = "/v1/node-credential";
/// Path of the trust bundle (`GET`, with an entity tag for cheap polling).
pub const TRUST_PATH: &str = "/v1/trust";
/// Maximum length of a request body that the service accepts, in bytes.
pub const MAX_BODY: usize = 64 * 1024;
/// Maximum length of a reply body that a caller must accept, in bytes. A reply can contain a long blocklist.
pub const MAX_REPLY: usize = 4 * 1024 * 1024;
/// Maximum time in seconds that a call of [`TRUST_PATH`] may wait for a change.
pub const MAX_WAIT_SECONDS: u64 = 50;
/// Header with the [`Asker`] of a call of [`TRUST_PATH`].
pub const ASKER_HEADER: &str = "nebula-asker";
/// How far the time in a [`Proof::Certificate`] or an [`Asker`] may differ from the service's clock, in seconds.
pub const CLOCK_TOLERANCE: i64 = 300;

/// Request body.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Request {
    /// PEM of the host's public key (`NEBULA X25519 PUBLIC KEY` or `NEBULA P256 PUBLIC KEY`).
    pub public_key: String,
    /// Proves who the caller is.
    pub proof: Proof,
}

/// How the caller proves who it is.
#[derive(Clone, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub enum Proof {
    /// A one-time enrolment token made by `nebula-ca token`. Name, groups and addresses are bound to the token.
    Token {
        /// The secret.
        token: String,
    },
    /// A node vouches for one of its pods with the node's own token: the service-account token of its agent, a
    /// [`NodeCredential`] or, without Kubernetes, the secret in `node.token`.
    Node {
        /// The node's secret.
        token: String,
        /// The pod.
        pod: Pod,
    },
    /// Like [`Proof::Node`], until the pod can prove its own identity: obtains a provisional certificate, if the
    /// service's policy allows that. Such a certificate has the pod's name and address and little else, and cannot be
    /// used to obtain another one.
    Provisional {
        /// The node's secret.
        token: String,
        /// The pod.
        pod: Pod,
    },
    /// A pod proves its own identity with its service-account token, which is bound to the pod and issued for the CA's
    /// audience.
    Pod {
        /// The pod's token.
        token: String,
        /// Primary address of the pod.
        address: IpAddr,
        /// As [`Pod::other_address`].
        #[serde(default, skip_serializing_if = "Option::is_none")]
        other_address: Option<IpAddr>,
    },
    /// A pod of the lighthouses' StatefulSet proves its own identity with its service-account token. Name and overlay
    /// address follow from its ordinal, and its underlay addresses are those that the API server shows for it.
    Lighthouse {
        /// The pod's token.
        token: String,
        /// UDP port of its Nebula; `None`: the one in the service's policy.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        port: Option<NonZeroU16>,
    },
    /// A pod of the gateways' DaemonSet proves its own identity with its service-account token. It gets the first
    /// address of its node's pod range, and the range behind it.
    Gateway {
        /// The pod's token.
        token: String,
    },
    /// The holder of a certificate renews or releases it; the tag proves possession of the private key.
    Certificate {
        /// PEM of the current certificate.
        certificate: String,
        /// When the tag was made, in seconds since 1970.
        time: UnixTime,
        /// [`PrivateKey::possession_tag`] over [`possession_message`] for the service's [`Reply::renewal_key`], in
        /// lower-case hex.
        tag: String,
    },
}

impl Proof {
    /// Makes a [`Proof::Certificate`]. For [`CERTIFICATE_PATH`] its tag covers the `public_key` of the request, for
    /// [`RELEASE_PATH`] pass `None`.
    ///
    /// `renewal_key` is the PEM that the service sent, `key` the private key of `certificate`.
    ///
    /// # Errors
    /// Returns an error if `renewal_key` is invalid or not on the curve of `key`.
    pub fn of_certificate(
        certificate: &Certificate,
        key: &PrivateKey,
        renewal_key: &str,
        public_key: Option<&str>,
        time: UnixTime,
    ) -> Result<Self, Error> {
        let (_, verifier) = public_key_from_pem(renewal_key.as_bytes())?;
        let tag = key.possession_tag(&verifier, &possession_message(certificate, public_key, time))?;
        let tag = crate::hex::encode(&tag);
        Ok(Self::Certificate { certificate: certificate.to_pem(), time, tag })
    }
}

/// The message that the tag of a [`Proof::Certificate`] covers. It binds the tag to one use, key and certificate.
#[must_use]
pub fn possession_message(certificate: &Certificate, public_key: Option<&str>, time: UnixTime) -> Vec<u8> {
    let fingerprint = certificate.fingerprint();
    match public_key {
        Some(public_key) => format!("renew\n{fingerprint}\n{time}\n{public_key}"),
        None => format!("release\n{fingerprint}\n{time}\n"),
    }
    .into_bytes()
}

/// The holder of a certificate, as it says itself when it asks whom to trust.
#[derive(Clone, PartialEq, Eq)]
pub struct Asker {
    /// Fingerprint of its certificate.
    pub fingerprint: Fingerprint,
    /// When the tag was made, in seconds since 1970.
    pub time: UnixTime,
    /// [`PrivateKey::possession_tag`] over [`Asker::message`] for the service's [`Reply::renewal_key`], in lower-case
    /// hex.
    pub tag: String,
}

impl Asker {
    /// The holder of `certificate` and its `key`; `renewal_key` is the PEM that the service sent.
    ///
    /// # Errors
    /// Returns an error if `renewal_key` is invalid or not on the curve of `key`.
    pub fn new(certificate: &Certificate, key: &PrivateKey, renewal_key: &str, time: UnixTime) -> Result<Self, Error> {
        let (_, verifier) = public_key_from_pem(renewal_key.as_bytes())?;
        let mut asker = Self { fingerprint: certificate.fingerprint(), time, tag: String::new() };
        asker.tag = crate::hex::encode(&key.possession_tag(&verifier, &asker.message())?);
        Ok(asker)
    }

    /// What the tag covers: like no [`possession_message`].
    #[must_use]
    pub fn message(&self) -> Vec<u8> {
        format!("ask\n{}\n{}\n", self.fingerprint, self.time).into_bytes()
    }
}

impl std::fmt::Display for Asker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {} {}", self.fingerprint, self.time, self.tag)
    }
}

impl std::str::FromStr for Asker {
    type Err = MalformedAsker;

    fn from_str(text: &str) -> Result<Self, MalformedAsker> {
        let mut words = text.split(' ');
        let mut word = || words.next().ok_or(MalformedAsker);
        let (fingerprint, time, tag) = (word()?, word()?, word()?.to_owned());
        let fingerprint = fingerprint.parse().map_err(|_| MalformedAsker)?;
        Ok(Self { fingerprint, time: time.parse().map_err(|_| MalformedAsker)?, tag })
    }
}

impl std::fmt::Debug for Asker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Asker({}, {}, redacted)", self.fingerprint, self.time)
    }
}

/// The text is not that of an [`Asker`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not FINGERPRINT TIME TAG")]
pub struct MalformedAsker;

/// A pod as the node describes it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pod {
    /// Kubernetes namespace.
    pub namespace: String,
    /// Pod name.
    pub name: String,
    /// Pod UID.
    pub uid: String,
    /// Primary address of the pod from the CNI result, for the address modes `derive` and `same`.
    pub address: IpAddr,
    /// The pod's address of the other family, if it has one, for address mode `same`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub other_address: Option<IpAddr>,
}

/// Successful reply body.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Reply {
    /// PEM of the signed certificates, one per version issued.
    pub certificate: String,
    /// PEM bundle of the CAs to trust.
    pub ca: String,
    /// Blocked fingerprints, lower-case hex.
    #[serde(default)]
    pub blocklist: Vec<String>,
    /// PEM of the public key for which a [`Proof::Certificate`] is made. `None` if this service does not accept such
    /// proofs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub renewal_key: Option<String>,
    /// As [`Trust::lighthouses`].
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub lighthouses: Lighthouses,
}

/// Overlay addresses of lighthouses, with the underlay endpoints (`HOST:PORT`) of each.
pub type Lighthouses = BTreeMap<IpAddr, Vec<String>>;

/// Body of [`RELEASE_PATH`]. A [`Proof::Certificate`] revokes that certificate, the proofs of pods
/// all certificates of the pod. They are blocked until they expire.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Release {
    /// Proof of the holder.
    pub proof: Proof,
}

/// Reply to a [`Release`]; a repeated release gets the same reply.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Released {
    /// Fingerprints of the revoked certificates, lower-case hex.
    pub fingerprints: Vec<String>,
}

/// Reply body of [`TRUST_PATH`]: the CAs to trust from now on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Trust {
    /// PEM bundle of the CAs to trust.
    pub ca: String,
    /// Blocked fingerprints, lower-case hex.
    pub blocklist: Vec<String>,
    /// The same as [`Reply::renewal_key`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub renewal_key: Option<String>,
    /// Lighthouses of the network. Empty: the service announces none.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub lighthouses: Lighthouses,
}

/// Reply body of [`NODE_CREDENTIAL_PATH`].
#[derive(Clone, Serialize, Deserialize)]
pub struct NodeCredential {
    /// Name of the node.
    pub node: String,
    /// The token of [`Proof::Node`] and [`Proof::Provisional`] for pods of that node. It is good for certificates only:
    /// neither for a [`Release`] nor for another credential. A secret.
    pub credential: String,
    /// When it ends, if the node does not end before.
    pub not_after: UnixTime,
}

/// Error reply body, with an HTTP status of 4xx or 5xx.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Refusal {
    /// Stable machine-readable reason, for example `unknown_token`.
    pub code: String,
    /// One readable line: which check failed and what to do. Never contains a secret.
    pub message: String,
}

impl std::fmt::Debug for NodeCredential {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "NodeCredential(redacted, {}, {})", self.node, self.not_after)
    }
}

impl std::fmt::Debug for Proof {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Token { .. } => f.write_str("Token(redacted)"),
            Self::Node { pod, .. } => write!(f, "Node(redacted, {pod:?})"),
            Self::Provisional { pod, .. } => write!(f, "Provisional(redacted, {pod:?})"),
            Self::Pod { address, .. } => write!(f, "Pod(redacted, {address})"),
            Self::Lighthouse { port, .. } => write!(f, "Lighthouse(redacted, {port:?})"),
            Self::Gateway { .. } => f.write_str("Gateway(redacted)"),
            Self::Certificate { time, .. } => write!(f, "Certificate(redacted, {time})"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Curve, SigningKey, Template};

    fn certificate(key: &PrivateKey) -> Certificate {
        let ca_key = SigningKey::generate(Curve::Curve25519).unwrap();
        let template = Template::new("ca", 0..=1_000);
        let ca = template.clone().self_sign(&ca_key).unwrap();
        let networks = vec!["10.0.0.1/8".parse().unwrap()];
        Template { name: "host".into(), networks, public_key: key.public_key(), ..template }.sign(&ca, &ca_key).unwrap()
    }

    #[test]
    fn a_tag_for_one_use_key_or_time_is_none_for_another() {
        let key = PrivateKey::generate(Curve::Curve25519).unwrap();
        let (certificate, other) = (certificate(&key), certificate(&key));
        let messages = [
            possession_message(&certificate, None, 1),
            possession_message(&certificate, Some(""), 1),
            possession_message(&certificate, Some("a"), 1),
            possession_message(&certificate, Some("a"), 2),
            possession_message(&other, Some("a"), 2),
        ];
        for (at, message) in messages.iter().enumerate() {
            assert!(!messages[..at].contains(message), "{}", String::from_utf8_lossy(message));
        }
    }

    #[test]
    fn a_proof_of_a_certificate_is_one_the_service_can_check() {
        let key = PrivateKey::generate(Curve::Curve25519).unwrap();
        let service = PrivateKey::generate(Curve::Curve25519).unwrap();
        let certificate = certificate(&key);
        let proof = Proof::of_certificate(&certificate, &key, &service.public_pem(), Some("next"), 7).unwrap();
        let json = serde_json::to_string(&proof).unwrap();
        let Proof::Certificate { certificate: pem, time: 7, tag } = serde_json::from_str(&json).unwrap() else {
            panic!("{json}")
        };
        assert_eq!(Certificate::from_pem(pem.as_bytes()).unwrap().fingerprint(), certificate.fingerprint());
        let expected = key.possession_tag(&service.public_key(), &possession_message(&certificate, Some("next"), 7));
        assert_eq!(tag, crate::hex::encode(&expected.unwrap()));
        assert!(!format!("{proof:?}").contains(&tag));
        let p256 = PrivateKey::generate(Curve::P256).unwrap();
        assert!(Proof::of_certificate(&certificate, &key, &p256.public_pem(), None, 7).is_err());
    }

    #[test]
    fn an_asker_is_read_as_it_was_written_and_its_tag_is_good_for_nothing_else() {
        let (key, service) = [(); 2].map(|()| PrivateKey::generate(Curve::Curve25519).unwrap()).into();
        let certificate = certificate(&key);
        let asker = Asker::new(&certificate, &key, &service.public_pem(), 7).unwrap();
        assert_eq!(asker.to_string().parse(), Ok(asker.clone()));
        let tag = crate::hex::decode(&asker.tag).unwrap();
        assert!(service.verifies_possession(&key.public_key(), &asker.message(), &tag));
        for other in [None, Some("")].map(|public_key| possession_message(&certificate, public_key, 7)) {
            assert!(!service.verifies_possession(&key.public_key(), &other, &tag));
        }
        for text in ["", "a b c", &format!("{} 7", asker.fingerprint), &format!("{} x y", asker.fingerprint)] {
            assert_eq!(text.parse::<Asker>(), Err(MalformedAsker), "{text}");
        }
        assert!(!format!("{asker:?}").contains(&asker.tag));
    }

    #[test]
    fn answers_of_a_service_without_a_renewal_key_are_understood() {
        let trust: Trust = serde_json::from_str(r#"{"ca": "x", "blocklist": []}"#).unwrap();
        assert_eq!(trust.renewal_key, None);
        let reply: Reply = serde_json::from_str(r#"{"certificate": "c", "ca": "x", "later": 1}"#).unwrap();
        assert_eq!(reply.renewal_key, None);
    }
}
