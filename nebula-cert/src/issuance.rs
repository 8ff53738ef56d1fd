//! Messages between an instance and the CA service: JSON over HTTPS.
//!
//! | Call | Body | Answer |
//! | --- | --- | --- |
//! | `POST` [`CERTIFICATE_PATH`] | [`Request`] | [`Reply`] |
//! | `POST` [`RELEASE_PATH`] | [`Release`] | [`Released`] |
//! | `GET` [`TRUST_PATH`] | | [`Trust`], or status 304 if the caller has it |
//!
//! Every refusal is a [`Refusal`]. A status of 408, 425, 429 or 5xx may pass: ask again later. Any other 4xx is final
//! for this proof. The public key is the only key material that travels.
//!
//! # Following the trust
//! The answer has an entity tag. With it in `If-None-Match`, `GET /v1/trust?wait=50` is answered as soon as the trust
//! differs, and with 304 when it did not within that many seconds (at most [`MAX_WAIT_SECONDS`]). A service that has too
//! many callers waiting answers 304 at once, with the seconds to stay away in `Retry-After`.

use std::collections::BTreeMap;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use crate::{Certificate, Error, PrivateKey, UnixTime, public_key_from_pem};

/// Path of requests for a certificate.
pub const CERTIFICATE_PATH: &str = "/v1/certificate";
/// Path on which a certificate that is not needed any more is given back.
pub const RELEASE_PATH: &str = "/v1/release";
/// Path of the trust bundle (`GET`, with an entity tag to poll cheaply).
pub const TRUST_PATH: &str = "/v1/trust";
/// Longest request body the service accepts, in bytes.
pub const MAX_BODY: usize = 64 * 1024;
/// Longest reply body a caller must accept, in bytes: a long blocklist is part of it.
pub const MAX_REPLY: usize = 4 * 1024 * 1024;
/// Longest time in seconds for which a call of [`TRUST_PATH`] may wait for a change.
pub const MAX_WAIT_SECONDS: u64 = 50;
/// By how many seconds the time in a [`Proof::Certificate`] may differ from the service's clock.
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
    /// A node vouches for one of its pods, with the node's own token: the service-account token of its agent, or
    /// without Kubernetes the secret in `node.token`.
    Node {
        /// The node's secret.
        token: String,
        /// The pod.
        pod: Pod,
    },
    /// As [`Proof::Node`], until the pod can speak for itself: gives a provisional certificate, if the service's policy
    /// has one. It is the same name and address with little else, and no proof for another certificate.
    Provisional {
        /// The node's secret.
        token: String,
        /// The pod.
        pod: Pod,
    },
    /// A pod speaks for itself, with its own service-account token, bound to the pod and meant for the CA.
    Pod {
        /// The pod's token.
        token: String,
        /// Primary address of the pod.
        address: IpAddr,
    },
    /// The holder of a certificate asks for the next one, or releases it: the tag shows that it holds the key.
    Certificate {
        /// PEM of the present certificate.
        certificate: String,
        /// When the tag was made, in seconds since 1970.
        time: UnixTime,
        /// [`PrivateKey::possession_tag`] over [`possession_message`] for the service's [`Reply::renewal_key`], lower-case
        /// hex.
        tag: String,
    },
}

impl Proof {
    /// A [`Proof::Certificate`]: for [`CERTIFICATE_PATH`] over the `public_key` of the request, for [`RELEASE_PATH`]
    /// over none.
    ///
    /// `renewal_key` is the PEM that the service gave, `key` the private key of `certificate`.
    ///
    /// # Errors
    /// `renewal_key` is not of the curve of `key`.
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

/// What a tag of [`Proof::Certificate`] is made over. A tag for one use, key or certificate is none for another.
#[must_use]
pub fn possession_message(certificate: &Certificate, public_key: Option<&str>, time: UnixTime) -> Vec<u8> {
    let fingerprint = certificate.fingerprint();
    match public_key {
        Some(public_key) => format!("renew\n{fingerprint}\n{time}\n{public_key}"),
        None => format!("release\n{fingerprint}\n{time}\n"),
    }
    .into_bytes()
}

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
    /// Primary address of the pod from the CNI result, for address mode `derive`.
    pub address: IpAddr,
}

/// Successful reply body.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Reply {
    /// PEM of the signed certificate (one per version issued).
    pub certificate: String,
    /// PEM bundle of the CAs to trust.
    pub ca: String,
    /// Blocked fingerprints, lower-case hex.
    #[serde(default)]
    pub blocklist: Vec<String>,
    /// PEM of the public key for which a [`Proof::Certificate`] is made. None: this service takes no such proof.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub renewal_key: Option<String>,
    /// As [`Trust::lighthouses`].
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub lighthouses: Lighthouses,
}

/// Overlay addresses of lighthouses, with the underlay endpoints (`HOST:PORT`) of each.
pub type Lighthouses = BTreeMap<IpAddr, Vec<String>>;

/// Body of [`RELEASE_PATH`]: with a [`Proof::Certificate`] that certificate ends, with a [`Proof::Node`] or
/// [`Proof::Pod`] all certificates of the pod do. They are blocked until they expire.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Release {
    /// The holder that releases it.
    pub proof: Proof,
}

/// Answer to a [`Release`]; the same again when it is repeated.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Released {
    /// Fingerprints of the certificates that ended now, lower-case hex.
    pub fingerprints: Vec<String>,
}

/// Reply body of [`TRUST_PATH`]: whom to trust from now on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Trust {
    /// PEM bundle of the CAs to trust.
    pub ca: String,
    /// Blocked fingerprints, lower-case hex.
    pub blocklist: Vec<String>,
    /// As [`Reply::renewal_key`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub renewal_key: Option<String>,
    /// Lighthouses of the network. Empty: the service announces none.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub lighthouses: Lighthouses,
}

/// Error reply body, with an HTTP status of 4xx or 5xx.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Refusal {
    /// Stable machine-readable reason, for example `unknown_token`.
    pub code: String,
    /// One line for people: which check failed and what to do. Never a secret.
    pub message: String,
}

impl std::fmt::Debug for Proof {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Token { .. } => f.write_str("Token(redacted)"),
            Self::Node { pod, .. } => write!(f, "Node(redacted, {pod:?})"),
            Self::Provisional { pod, .. } => write!(f, "Provisional(redacted, {pod:?})"),
            Self::Pod { address, .. } => write!(f, "Pod(redacted, {address})"),
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
    fn answers_of_a_service_without_a_renewal_key_are_understood() {
        let trust: Trust = serde_json::from_str(r#"{"ca": "x", "blocklist": []}"#).unwrap();
        assert_eq!(trust.renewal_key, None);
        let reply: Reply = serde_json::from_str(r#"{"certificate": "c", "ca": "x", "later": 1}"#).unwrap();
        assert_eq!(reply.renewal_key, None);
    }
}
