//! How a caller proves its identity: one module per proof (attestation).

pub(crate) mod certificate;
pub(crate) mod gateway;
pub(crate) mod lighthouse;
pub(crate) mod node;
pub(crate) mod node_credential;
pub(crate) mod pod;
pub(crate) mod token;

use nebula_cert::UnixTime;

use crate::{
    cluster::{Claims, Cluster, Pod, User, one_line},
    pod::{is_name, is_namespace},
    refusal::Refusal,
};

/// The owner of `token`, if the API server confirms it for `audience`.
pub(crate) fn review(cluster: &dyn Cluster, audience: &str, token: &str, now: UnixTime) -> Result<User, Refusal> {
    // The API server answers an empty token with a bad request. Tokens have a few thousand characters.
    if token.trim().is_empty() || token.len() > MAX_TOKEN_LENGTH {
        return Err(Refusal::TokenRejected("it is empty or absurdly long".to_owned()));
    }
    let claims = Claims::of(token);
    let outcome = cluster.review(token.trim(), audience)?;
    if outcome.authenticated {
        // A server without support for audiences has not checked them.
        return match outcome.audiences.iter().any(|found| found == audience) {
            true => Ok(outcome.user),
            false => Err(Refusal::WrongAudience(audience.to_owned())),
        };
    }
    Err(match claims {
        Some(claims) if !claims.is_for(audience) => Refusal::WrongAudience(audience.to_owned()),
        Some(claims) if claims.has_expired(now) => Refusal::ServiceTokenExpired,
        _ => Refusal::TokenRejected(one_line(&outcome.error)),
    })
}

/// Namespace, name and UID of the pod that a token is bound to, if it is of `account` (`namespace/name`), whose pods
/// alone have this role.
pub(crate) fn bound_pod_of<'a>(
    user: &'a User,
    role: &'static str,
    account: &str,
) -> Result<(&'a str, &'a str, &'a str), Refusal> {
    let (namespace, name) = user.service_account().ok_or_else(|| Refusal::NotAServiceAccount(user.shown()))?;
    if account.split_once('/') != Some((namespace, name)) {
        return Err(Refusal::NotAccountOfRole { role, account: user.shown(), expected: account.to_owned() });
    }
    let (pod, uid) = user.bound_pod().ok_or(Refusal::TokenNotBound)?;
    Ok((namespace, pod, uid))
}

/// The running pod with this name and UID, if it is of `account` (`namespace/name`) and in the network of its node.
pub(crate) fn host_network_pod(
    cluster: &dyn Cluster,
    account: &str,
    namespace: &str,
    name: &str,
    uid: &str,
) -> Result<Pod, Refusal> {
    if !is_namespace(namespace) || !is_name(name) {
        return Err(Refusal::TokenNotBound);
    }
    let shown = format!("{namespace}/{name}");
    let found = cluster.pod(namespace, name)?.ok_or_else(|| Refusal::PodNotFound(shown.clone()))?;
    if found.metadata.uid != uid {
        return Err(Refusal::PodUidMismatch { pod: shown, uid: uid.to_owned() });
    }
    if format!("{namespace}/{}", found.spec.service_account_name) != account {
        return Err(Refusal::ServiceAccountMismatch { pod: shown, account: account.to_owned() });
    }
    if found.is_over() {
        return Err(Refusal::PodOver(shown));
    }
    match found.spec.host_network {
        true => Ok(found),
        false => Err(Refusal::NotHostNetwork(shown)),
    }
}

const MAX_TOKEN_LENGTH: usize = 32 * 1024;
