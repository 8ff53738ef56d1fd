//! How a caller proves who it is: one file per proof (attestation).

pub(crate) mod certificate;
pub(crate) mod node;
pub(crate) mod pod;
pub(crate) mod token;

use nebula_cert::UnixTime;

use crate::{
    cluster::{Claims, Cluster, User, one_line},
    refusal::Refusal,
};

/// Whose `token` is, if the API server says that it is a good one for `audience`.
fn review(cluster: &dyn Cluster, audience: &str, token: &str, now: UnixTime) -> Result<User, Refusal> {
    // The API server refuses an empty token as a bad request of ours. Tokens are some thousand characters long.
    if token.trim().is_empty() || token.len() > MAX_TOKEN_LENGTH {
        return Err(Refusal::TokenRejected("it is empty or absurdly long".to_owned()));
    }
    let claims = Claims::of(token);
    let outcome = cluster.review(token.trim(), audience)?;
    if outcome.authenticated {
        // A server that knows nothing of audiences has checked none.
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
