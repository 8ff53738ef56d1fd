//! Revocation by people: what `kubectl nebula revoke` asks the CA service for, and what the service answers.
//!
//! `POST` [`REVOKE_PATH`] with a [`Request`] is answered with a [`Revocation`], or with a
//! [`Refusal`](crate::issuance::Refusal). [`TOKEN_HEADER`] carries a token for [`AUDIENCE`] whose user may [`VERB`] the
//! [`RESOURCE`] of [`GROUP`] in the namespace of the pod, or in the whole cluster.

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use crate::{Fingerprint, UnixTime, is_visible};

/// Path for revoking certificates.
pub const REVOKE_PATH: &str = "/v1/revoke";
/// Carries the token: the API server drops `Authorization` where it forwards a request.
pub const TOKEN_HEADER: &str = "x-nebula-token";
/// Whom a token must be for.
pub const AUDIENCE: &str = "nebula-ca-operator";
/// API group of the permission. No API server has resources in it.
pub const GROUP: &str = "nebula-cni";
/// Resource of the permission.
pub const RESOURCE: &str = "certificates";
/// Verb of the permission.
pub const VERB: &str = "delete";
/// Code of the refusal of a user who lacks the permission.
pub const FORBIDDEN: &str = "not_permitted";
/// An answer lists at most this number of certificates.
pub const MAX_LISTED: usize = 1_000;
const MAX_REASON_CHARS: usize = 200;
const MAX_NAME_BYTES: usize = 253;

/// Request body.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Request {
    /// Which certificates to revoke.
    pub which: Which,
    /// Why, for the audit log.
    pub reason: String,
    /// Whether to refuse every further certificate to the pods that hold these.
    #[serde(default)]
    pub keep_out: bool,
    /// Whether to change nothing, and only say what would be revoked.
    #[serde(default)]
    pub dry_run: bool,
}

/// Which certificates to revoke.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub enum Which {
    /// All of a pod.
    Pod {
        /// Its namespace.
        namespace: String,
        /// Its name.
        name: String,
    },
    /// A single one.
    Fingerprint {
        /// In hex.
        fingerprint: String,
        /// Only if it is of a pod in this namespace; `None`: whoever it is of, which needs the permission for the whole
        /// cluster.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        namespace: Option<String>,
    },
    /// All of a host.
    Host {
        /// Its name.
        name: String,
    },
}

/// What is wrong with a [`Request`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BadRequest {
    /// The reason.
    #[error("the reason must be 1 to {MAX_REASON_CHARS} characters on one line, all of them visible")]
    Reason,
    /// A name of a namespace, pod or host.
    #[error("a name must be 1 to {MAX_NAME_BYTES} characters, all of them visible")]
    Name,
    /// The fingerprint.
    #[error("a fingerprint is 64 hex digits")]
    Fingerprint,
    /// A host is to be kept out.
    #[error("only pods can be kept out: a host needs another token to come back")]
    KeepOut,
}

impl Request {
    /// Checks what the service demands of every request.
    ///
    /// # Errors
    /// Returns the first mistake.
    pub fn check(&self) -> Result<(), BadRequest> {
        let is_name = |text: &String| (1..=MAX_NAME_BYTES).contains(&text.len()) && text.chars().all(is_visible);
        let is_reason = !self.reason.trim().is_empty()
            && self.reason.chars().count() <= MAX_REASON_CHARS
            && self.reason.chars().all(is_visible);
        match &self.which {
            _ if !is_reason => Err(BadRequest::Reason),
            Which::Pod { namespace, name } if !is_name(namespace) || !is_name(name) => Err(BadRequest::Name),
            Which::Fingerprint { namespace: Some(namespace), .. } if !is_name(namespace) => Err(BadRequest::Name),
            Which::Fingerprint { fingerprint, .. } if fingerprint.parse::<Fingerprint>().is_err() => {
                Err(BadRequest::Fingerprint)
            }
            Which::Host { name } if !is_name(name) => Err(BadRequest::Name),
            Which::Host { .. } if self.keep_out => Err(BadRequest::KeepOut),
            _ => Ok(()),
        }
    }
}

impl Which {
    /// The namespace for which the permission is needed; `None`: the whole cluster.
    #[must_use]
    pub fn namespace(&self) -> Option<&str> {
        match self {
            Self::Pod { namespace, .. } => Some(namespace),
            Self::Fingerprint { namespace, .. } => namespace.as_deref(),
            Self::Host { .. } => None,
        }
    }
}

impl std::fmt::Display for Which {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Pod { namespace, name } => write!(f, "pod {namespace}/{name}"),
            Self::Fingerprint { fingerprint, namespace: None } => write!(f, "certificate {fingerprint}"),
            Self::Fingerprint { fingerprint, namespace: Some(namespace) } => {
                write!(f, "certificate {fingerprint} in namespace {namespace}")
            }
            Self::Host { name } => write!(f, "host {name}"),
        }
    }
}

/// Reply body.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Revocation {
    /// Whether nothing was changed.
    pub dry_run: bool,
    /// Who asked, as the API server knows the token's user.
    pub user: String,
    /// Those that were not revoked before first; at most [`MAX_LISTED`].
    pub certificates: Vec<RevokedCertificate>,
    /// How many there are in all.
    pub total: usize,
    /// How many of them were not revoked before.
    pub new: usize,
    /// Who refuses them, and when.
    pub spread: Spread,
}

/// A certificate that is revoked, or would be.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RevokedCertificate {
    /// Who holds it, such as `pod shop/web`.
    pub subject: String,
    /// Its name.
    pub name: String,
    /// Its overlay addresses.
    pub networks: Vec<IpNet>,
    /// Its groups.
    pub groups: Vec<String>,
    /// In lower-case hex.
    pub fingerprint: String,
    /// Its last second.
    pub not_after: UnixTime,
    /// Since when it has been revoked, if it was before this request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revoked: Option<UnixTime>,
    /// How its holder gets another one.
    pub next: Next,
}

/// How the holder of a revoked certificate gets another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Next {
    /// It asks for one, for another key, and gets it as long as its node vouches for it.
    AnotherCertificate,
    /// Not at all: the pod is kept out. One that replaces it has another UID, and gets its own.
    KeptOut,
    /// With another token.
    NewToken,
    /// A later release knows how.
    #[serde(other)]
    Unknown,
}

/// When others refuse what is revoked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spread {
    /// Seconds until every replica of the service publishes it. Those that follow the service hear of it then.
    pub published_within: i64,
    /// How many others hold valid certificates.
    pub others: usize,
    /// How many of those do not follow the service, as far as it knows.
    pub unaware: usize,
    /// When the last of those hears of it; `None` if there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_hears_by: Option<UnixTime>,
    /// The last second of the certificates: nobody accepts them later.
    pub ends: UnixTime,
    /// Whether replicas have callers of their own, which are among the unaware here.
    pub is_partial: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(which: Which) -> Request {
        Request { which, reason: "the key leaked".to_owned(), keep_out: false, dry_run: false }
    }

    fn pod() -> Which {
        Which::Pod { namespace: "shop".to_owned(), name: "web".to_owned() }
    }

    #[test]
    fn a_reason_is_one_visible_line_of_bounded_length() {
        let with = |reason: String| Request { reason, ..request(pod()) }.check();
        assert_eq!(with("é".repeat(MAX_REASON_CHARS)), Ok(()));
        let bad = ["", "  ", "a\nb", "a\u{1b}[2J", "a\u{202e}b", &"é".repeat(MAX_REASON_CHARS + 1)];
        assert!(bad.iter().all(|reason| with((*reason).to_owned()) == Err(BadRequest::Reason)));
    }

    #[test]
    fn each_kind_is_checked_and_needs_a_permission_of_its_own() {
        let fingerprint = |text: &str, namespace: Option<&str>| Which::Fingerprint {
            fingerprint: text.to_owned(),
            namespace: namespace.map(str::to_owned),
        };
        let (digits, host) = ("ab".repeat(32), |name: &str| Which::Host { name: name.to_owned() });
        for (which, namespace) in [
            (pod(), Some("shop")),
            (fingerprint(&digits, Some("shop")), Some("shop")),
            (fingerprint(&digits, None), None),
            (host("edge"), None),
        ] {
            assert_eq!((request(which.clone()).check(), which.namespace()), (Ok(()), namespace), "{which}");
        }
        for (which, problem) in [
            (fingerprint("ab", None), BadRequest::Fingerprint),
            (fingerprint(&digits, Some("")), BadRequest::Name),
            (host("a\nb"), BadRequest::Name),
            (host(&"a".repeat(MAX_NAME_BYTES + 1)), BadRequest::Name),
            (Which::Pod { namespace: "shop".to_owned(), name: String::new() }, BadRequest::Name),
        ] {
            assert_eq!(request(which).check(), Err(problem));
        }
        assert_eq!(Request { keep_out: true, ..request(host("edge")) }.check(), Err(BadRequest::KeepOut));
    }

    #[test]
    fn a_request_is_read_strictly_and_an_answer_of_a_later_service_is_understood() {
        let text = r#"{"which":{"type":"pod","namespace":"shop","name":"web"},"reason":"the key leaked"}"#;
        assert_eq!(serde_json::from_str::<Request>(text).unwrap(), request(pod()));
        assert!(serde_json::from_str::<Request>(&text.replace("\"reason\"", "\"force\":true,\"reason\"")).is_err());
        let next = r#""blessing_of_the_moon""#;
        assert_eq!(serde_json::from_str::<Next>(next).unwrap(), Next::Unknown);
    }
}
