//! How a caller proves its identity: one module per proof (attestation).

pub(crate) mod certificate;
pub(crate) mod lighthouse;
pub(crate) mod node;
pub(crate) mod node_credential;
pub(crate) mod pod;
pub(crate) mod token;

use nebula_cert::UnixTime;

use crate::{
    cluster::{Claims, Cluster, User, one_line},
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

const MAX_TOKEN_LENGTH: usize = 32 * 1024;
