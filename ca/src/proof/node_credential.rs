//! The node credential: what a node's agent obtains with its token, so that pods can start while the agent is away. A
//! token of the agent ends with the agent's pod; this one is bound to the Node object, and ends with it or after
//! [`LIFE`].

use base64::{Engine, prelude::BASE64_URL_SAFE_NO_PAD};
use nebula_cert::UnixTime;
use serde::{Deserialize, Serialize};

use crate::{cluster::Cluster, pod::KubernetesPolicy, pod::is_name, proof::certificate::RenewalKey, refusal::Refusal};

/// What a node credential says. The CA signs it for itself, so only services with the same `renewal.key` understand it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct NodeCredential {
    pub(crate) node: String,
    /// UID of the Node object: a node that is made anew under its name is another one.
    uid: String,
    /// The account of the agent that obtained it.
    account: String,
    pub(crate) until: UnixTime,
}

impl NodeCredential {
    /// A credential for the node with this name and UID.
    pub(crate) fn new(node: String, uid: String, settings: &KubernetesPolicy, now: UnixTime) -> Self {
        Self { node, uid, account: settings.node_account.clone(), until: now + LIFE }
    }

    /// Whether `token` claims to be one: service-account tokens never begin so.
    pub(crate) fn is_claimed_by(token: &str) -> bool {
        token.trim().starts_with(PREFIX)
    }

    pub(crate) fn to_text(&self, key: &RenewalKey) -> Result<String, Refusal> {
        let said = serde_json::to_vec(self).map_err(|_| Refusal::Internal)?;
        let tag = key.sign_for_itself(&message(&said)).ok_or(Refusal::Internal)?;
        let [said, tag] = [&said[..], &tag[..]].map(|bytes| BASE64_URL_SAFE_NO_PAD.encode(bytes));
        Ok(format!("{PREFIX}{said}.{tag}"))
    }

    fn read(token: &str, key: &RenewalKey) -> Option<Self> {
        let token = token.trim().strip_prefix(PREFIX).filter(|token| token.len() <= MAX_LENGTH)?;
        let (said, tag) = token.split_once('.')?;
        let [said, tag] = [said, tag].map(|text| BASE64_URL_SAFE_NO_PAD.decode(text).ok());
        let (said, tag) = said.zip(tag)?;
        if !key.has_signed(&message(&said), &tag) {
            return None;
        }
        serde_json::from_slice(&said).ok()
    }

    /// The node that `token` speaks for, if that is still the node for which it was made.
    pub(crate) fn node(
        cluster: &dyn Cluster,
        settings: &KubernetesPolicy,
        key: &RenewalKey,
        token: &str,
        now: UnixTime,
    ) -> Result<String, Refusal> {
        let said = Self::read(token, key).ok_or(Refusal::NodeCredentialRejected)?;
        // One that seems to live longer than any is of a time to which the clock was set back.
        if !(said.until - LIFE - MAX_SKEW..said.until).contains(&now) {
            return Err(Refusal::NodeCredentialExpired);
        }
        if said.account != settings.node_account {
            return Err(Refusal::WrongAccount { account: said.account, expected: settings.node_account.clone() });
        }
        if !is_name(&said.node) || cluster.node_uid(&said.node)? != Some(said.uid) {
            return Err(Refusal::NodeGone(said.node));
        }
        Ok(said.node)
    }
}

/// Sets these texts apart from all others that are signed with the key.
fn message(said: &[u8]) -> Vec<u8> {
    [b"node credential\n", said].concat()
}

const PREFIX: &str = "nebula-node-credential.";
/// In seconds. Long enough for a night in which an upgrade hangs; agents renew theirs each hour.
pub(crate) const LIFE: i64 = 12 * 3600;
/// Of the clocks of two services of one CA, in seconds.
const MAX_SKEW: i64 = 300;
/// A name has at most 253 characters, an account not many more.
const MAX_LENGTH: usize = 4096;

#[cfg(test)]
mod tests {
    use nebula_cert::Curve;

    use super::*;
    use crate::directory::Directory;

    #[test]
    fn only_the_key_that_signed_it_reads_it_and_nothing_in_it_can_be_changed() {
        for curve in [Curve::Curve25519, Curve::P256] {
            let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
            let key = |dir: &tempfile::TempDir| RenewalKey::open(&Directory::new(dir.path()), curve).unwrap();
            let said = NodeCredential { node: "n1".into(), uid: "u".into(), account: "a/b".into(), until: 100 };
            let text = said.to_text(&key(&one)).unwrap();
            assert!(NodeCredential::is_claimed_by(&text) && !NodeCredential::is_claimed_by("eyJhbGciOi.x.y"));
            assert_eq!(NodeCredential::read(&format!("{text}\n"), &key(&one)), Some(said.clone()), "another replica");
            assert_eq!(NodeCredential::read(&text, &key(&two)), None);
            let (head, tag) = text.rsplit_once('.').unwrap();
            let other = NodeCredential { node: "n2".into(), ..said }.to_text(&key(&one)).unwrap();
            let (of_other, _) = other.rsplit_once('.').unwrap();
            let cut = &tag[..tag.len() - 2];
            for bad in [
                format!("{of_other}.{tag}"),
                format!("{head}.{cut}"),
                format!("{head}."),
                head.to_owned(),
                PREFIX.to_owned(),
                format!("{PREFIX}{}", "A".repeat(1 << 20)),
            ] {
                assert_eq!(NodeCredential::read(&bad, &key(&one)), None, "{:.80}", bad);
            }
        }
    }
}
