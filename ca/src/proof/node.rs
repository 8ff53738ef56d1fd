//! The node proof: a node vouches for a pod that runs on it. With Kubernetes, the API server confirms both; without, a
//! shared secret stands for the node, and the node's description of the pod is trusted.

use std::net::IpAddr;

use nebula_cert::{UnixTime, issuance::Pod};
use subtle::ConstantTimeEq;

use crate::{
    cluster::{Cluster, User},
    pod::KubernetesPolicy,
    pod::PodFacts,
    pod::{is_name, is_namespace},
    proof::{certificate::RenewalKey, node_credential::NodeCredential, review, token::TokenHash},
    refusal::Refusal,
};

/// Checks a node's proof with the API server: the token belongs to the node agent and is for this service, or is the
/// credential that the agent obtained with such a token, and the pod runs on that node at an address of that node.
pub(crate) fn vouch(
    cluster: &dyn Cluster,
    settings: &KubernetesPolicy,
    key: &RenewalKey,
    token: &str,
    pod: &Pod,
    now: UnixTime,
) -> Result<PodFacts, Refusal> {
    let node = match NodeCredential::is_claimed_by(token) {
        true => NodeCredential::node(cluster, settings, key, token, now)?,
        false => agent(cluster, settings, token, now)?,
    };
    check_pod(pod)?;
    let found = cluster.pod(&pod.namespace, &pod.name)?;
    let found = found.ok_or_else(|| Refusal::PodNotFound(format!("{}/{}", pod.namespace, pod.name)))?;
    if !found.is(&pod.uid) {
        return Err(Refusal::PodUidMismatch { pod: format!("{}/{}", pod.namespace, pod.name), uid: pod.uid.clone() });
    }
    if found.spec.node_name != node {
        let pod = format!("{}/{}", pod.namespace, pod.name);
        return Err(match found.spec.node_name.is_empty() {
            true => Refusal::PodNotScheduled(pod),
            false => Refusal::PodOnOtherNode { pod, node },
        });
    }
    let facts = PodFacts::checked(pod, found, cluster, settings)?;
    Ok(PodFacts { is_vouched_by_node: true, ..facts })
}

/// The name of the node whose agent presents `token`.
pub(crate) fn agent(
    cluster: &dyn Cluster,
    settings: &KubernetesPolicy,
    token: &str,
    now: UnixTime,
) -> Result<String, Refusal> {
    agent_of(cluster, settings, token, now).map(|(_, node)| node)
}

/// A credential for the node whose agent presents `token`. No other credential is enough to obtain one, so a stolen
/// one ends.
pub(crate) fn credential(
    cluster: &dyn Cluster,
    settings: &KubernetesPolicy,
    token: &str,
    now: UnixTime,
) -> Result<NodeCredential, Refusal> {
    let (user, node) = agent_of(cluster, settings, token, now)?;
    let uid = cluster.node_uid(&node)?;
    // A node may have been made anew since the token was.
    match uid.filter(|uid| !uid.is_empty() && user.node_uid().is_none_or(|of_token| of_token == uid)) {
        Some(uid) => Ok(NodeCredential::new(node, uid, settings, now)),
        None => Err(Refusal::NodeGone(node)),
    }
}

/// The account of the agent that presents `token`, and the name of its node.
fn agent_of(
    cluster: &dyn Cluster,
    settings: &KubernetesPolicy,
    token: &str,
    now: UnixTime,
) -> Result<(User, String), Refusal> {
    if NodeCredential::is_claimed_by(token) {
        return Err(Refusal::TokenRejected("a node credential is good for certificates of pods only".to_owned()));
    }
    let user = review(cluster, &settings.audience, token, now)?;
    let account = user.service_account().ok_or_else(|| Refusal::NotAServiceAccount(user.shown()))?;
    if account != settings.node_account() {
        return Err(Refusal::WrongAccount { account: user.shown(), expected: settings.node_account.clone() });
    }
    let node = node_of(cluster, &user, account.0)?;
    Ok((user, node))
}

/// The node of the agent that the token is bound to. Servers before 1.30 only report the bound pod.
fn node_of(cluster: &dyn Cluster, user: &User, namespace: &str) -> Result<String, Refusal> {
    if let Some(node) = user.node() {
        return if is_name(node) { Ok(node.to_owned()) } else { Err(Refusal::TokenNotBound) };
    }
    let (name, uid) = user.bound_pod().ok_or(Refusal::TokenNotBound)?;
    if !is_namespace(namespace) || !is_name(name) {
        return Err(Refusal::TokenNotBound);
    }
    match cluster.pod(namespace, name)? {
        Some(agent) if agent.metadata.uid == uid && !agent.is_over() && is_name(&agent.spec.node_name) => {
            Ok(agent.spec.node_name)
        }
        _ => Err(Refusal::AgentGone(format!("{namespace}/{name}"))),
    }
}

/// The secret that a node must present. Whoever has it can obtain any pod identity that the policy allows.
pub(crate) struct NodeToken(TokenHash);

impl NodeToken {
    pub(crate) fn new(secret: &str) -> Result<Self, TooShort> {
        if secret.trim().len() < MIN_NODE_TOKEN_LENGTH { Err(TooShort) } else { Ok(Self(TokenHash::of(secret))) }
    }

    /// Hashes first, so that the time taken reveals neither the content nor the length.
    pub(crate) fn matches(&self, presented: &str) -> bool {
        self.0.as_bytes().ct_eq(TokenHash::of(presented).as_bytes()).into()
    }
}

/// A node token that is short enough to guess.
#[derive(Debug, thiserror::Error)]
#[error("the node token has fewer than {MIN_NODE_TOKEN_LENGTH} characters; `nebula-ca init` makes one of 256 bits")]
pub(crate) struct TooShort;

/// Checks that a pod's description has the form the Kubernetes API server enforces, so that names built from it are
/// unambiguous and bounded.
pub(crate) fn check_pod(pod: &Pod) -> Result<(), Refusal> {
    let invalid = |field, problem| Err(Refusal::InvalidPod { field, problem });
    if !is_namespace(&pod.namespace) {
        return invalid("namespace", "it must be 1 to 63 of a-z, 0-9 and '-', not starting or ending with '-'");
    }
    if !is_name(&pod.name) {
        return invalid(
            "name",
            "it must be 1 to 253 of a-z, 0-9, '-' and '.', each part starting and ending with a letter or digit",
        );
    }
    let is_uid_byte = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
    if pod.uid.is_empty() || pod.uid.len() > 64 || !pod.uid.bytes().all(is_uid_byte) {
        return invalid("uid", "it must be 1 to 64 letters, digits and '-'");
    }
    let is_unicast = |address: IpAddr| !(address.is_unspecified() || address.is_loopback() || address.is_multicast());
    let address = pod.address.to_canonical();
    if !is_unicast(address) {
        return invalid("address", "it must be the unicast address the primary network gave the pod");
    }
    if let Some(other) = pod.other_address.map(|other| other.to_canonical())
        && (other.is_ipv4() == address.is_ipv4() || !is_unicast(other))
    {
        return invalid("other_address", "it must be the pod's unicast address of the other family");
    }
    Ok(())
}

const MIN_NODE_TOKEN_LENGTH: usize = 32;

#[cfg(test)]
mod tests {
    use super::*;

    fn pod() -> Pod {
        Pod {
            namespace: "default".into(),
            name: "web-5d9f.v2".into(),
            uid: "6b1f1a38-8b1c-4a0e-9b52-0d4f5ad0c0de".into(),
            address: "10.244.0.5".parse().unwrap(),
            other_address: None,
        }
    }

    fn refused_field(pod: &Pod) -> Option<&'static str> {
        match check_pod(pod) {
            Err(Refusal::InvalidPod { field, .. }) => Some(field),
            _ => None,
        }
    }

    #[test]
    fn a_pod_as_kubernetes_makes_it_passes() {
        check_pod(&pod()).unwrap();
        check_pod(&Pod { uid: "d41d8cd98f00b204e9800998ecf8427e".into(), ..pod() }).unwrap();
    }

    #[test]
    fn names_outside_the_kubernetes_rules_are_refused() {
        for bad in ["", "-a", "a-", "A", "a_b", "a b", "ä", "a\n", "a.b", &"a".repeat(64)] {
            assert_eq!(refused_field(&Pod { namespace: bad.into(), ..pod() }), Some("namespace"), "{bad:?}");
        }
        for bad in ["", "a..b", ".a", "a.", "a/b", "a.-b", "../x", &"a".repeat(254)] {
            assert_eq!(refused_field(&Pod { name: bad.into(), ..pod() }), Some("name"), "{bad:?}");
        }
        for bad in ["", "a b", "a/b", &"a".repeat(65)] {
            assert_eq!(refused_field(&Pod { uid: bad.into(), ..pod() }), Some("uid"), "{bad:?}");
        }
    }

    #[test]
    fn addresses_no_pod_can_have_are_refused() {
        for bad in ["0.0.0.0", "127.0.0.1", "224.0.0.1", "::", "::1", "ff02::1", "::ffff:127.0.0.1"] {
            assert_eq!(refused_field(&Pod { address: bad.parse().unwrap(), ..pod() }), Some("address"), "{bad}");
        }
        check_pod(&Pod { other_address: Some("fd00::5".parse().unwrap()), ..pod() }).unwrap();
        for bad in ["10.244.0.6", "::ffff:10.244.0.6", "::", "::1", "ff02::1"] {
            let pod = Pod { other_address: Some(bad.parse().unwrap()), ..pod() };
            assert_eq!(refused_field(&pod), Some("other_address"), "{bad}");
        }
    }

    #[test]
    fn only_the_whole_node_token_matches() {
        let token = NodeToken::new(&format!("{}\n", "x".repeat(43))).unwrap();
        assert!(token.matches(&"x".repeat(43)));
        assert!(!token.matches(&"x".repeat(42)));
        assert!(!token.matches(""));
        assert!(NodeToken::new("short\n").is_err());
    }
}
