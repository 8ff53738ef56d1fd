//! The node credential (`nebula_cert::issuance::NodeCredential`): obtained from the CA with the agent's token and
//! kept beside it, so that pods can start while the agent is away and its token is worth nothing.

use std::path::Path;
use std::time::Duration;

use nebula_cert::issuance::{MAX_BODY, NODE_CREDENTIAL_PATH, NodeCredential, Refusal};
use tokio::sync::watch;
use zeroize::Zeroizing;

use crate::ca::{CaError, Target};
use crate::config::{AGENT_DIR, NODE_CREDENTIAL_FILE, TLS_CA_FILE, TOKEN_FILE};
use crate::durable;
use crate::host_root::HostRoot;
use crate::node::Node;
use crate::readiness::Part;

/// Why there is no other credential. An earlier one stays.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NodeCredentialError {
    /// A file of the agent cannot be used.
    #[error("cannot use {path}: {source}")]
    File {
        /// Which one.
        path: &'static str,
        /// Why.
        source: std::io::Error,
    },
    /// The TLS roots are unusable.
    #[error(transparent)]
    Roots(#[from] CaError),
    /// The CA does not answer.
    #[error("cannot ask the CA at {url} for a node credential: {cause}")]
    Unavailable {
        /// Where.
        url: String,
        /// Why.
        cause: String,
    },
    /// It refuses.
    #[error("the CA gives no node credential: {message} ({code})")]
    Refused {
        /// Its stable code.
        code: String,
        /// Its explanation.
        message: String,
    },
}

/// Renews the credential each hour and, since another agent may have been here before, at the start.
pub async fn keep(node: &Node, mut target: watch::Receiver<Option<Target>>) {
    let Node { config, readiness, retirement, .. } = node;
    let mut shown = None;
    loop {
        let known = target.borrow_and_update().clone();
        let pause = match known.filter(|_| readiness.is_good(Part::Credentials) && !retirement.has_begun()) {
            None => SOON,
            Some(target) => {
                let host = config.host_root.clone();
                let renewed = tokio::task::spawn_blocking(move || renew(&target, &host)).await;
                let (failure, pause) = match renewed {
                    Ok(Ok(())) => (None, RENEW_EVERY),
                    Ok(Err(error @ NodeCredentialError::Refused { .. })) => (Some(error.to_string()), REFUSED),
                    Ok(Err(error)) => (Some(error.to_string()), RETRY),
                    Err(error) => (Some(error.to_string()), RETRY),
                };
                if let Some(error) = failure.as_ref().filter(|_| failure != shown) {
                    tracing::warn!(error, "if this agent goes away now, pods of this node do not start meanwhile");
                }
                shown = failure;
                pause
            }
        };
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            // A configured address never changes: its sender is gone.
            Ok(()) = target.changed() => {}
        }
    }
}

/// Obtains a credential and keeps it where instances look for it. Blocks.
///
/// # Errors
/// See [`NodeCredentialError`].
pub fn renew(target: &Target, host: &HostRoot) -> Result<(), NodeCredentialError> {
    let at = |path: &str| host.resolve(Path::new(path));
    let unusable = |path| move |source| NodeCredentialError::File { path, source };
    let token = durable::read_bounded(&at(TOKEN_FILE), MAX_TOKEN).map(Zeroizing::new).map_err(unusable(TOKEN_FILE))?;
    let bearer = Zeroizing::new(format!("Bearer {}", String::from_utf8_lossy(token.trim_ascii())));
    let unavailable = |cause: String| NodeCredentialError::Unavailable { url: target.url.clone(), cause };
    let request = target.agent(&at(TLS_CA_FILE))?.post(target.request_url(NODE_CREDENTIAL_PATH));
    let sent = request.header("authorization", bearer.as_str()).send_empty();
    let mut response = sent.map_err(|error| unavailable(error.to_string()))?;
    let status = response.status().as_u16();
    let body = response.body_mut().with_config().limit(MAX_BODY as u64).read_to_vec().map(Zeroizing::new);
    let body = body.map_err(|error| unavailable(error.to_string()))?;
    if status != 200 {
        return Err(match serde_json::from_slice::<Refusal>(&body) {
            Ok(Refusal { code, message }) => NodeCredentialError::Refused { code, message },
            Err(_) => unavailable(format!("status {status} without a reason; is that the CA?")),
        });
    }
    let made: NodeCredential = serde_json::from_slice(&body).map_err(|error| unavailable(error.to_string()))?;
    let credential = Zeroizing::new(made.credential);
    if credential.is_empty() || !credential.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err(unavailable("its credential has a form that no CA gives".to_owned()));
    }
    // Only the directory is resolved: a link in place of the file is replaced, not followed.
    let file = host.resolve(Path::new(AGENT_DIR)).join(Path::new(NODE_CREDENTIAL_FILE).file_name().unwrap_or_default());
    if let Some(dir) = file.parent() {
        durable::remove_stale(dir, |name| file.file_name().is_some_and(|file| file == name));
    }
    durable::replace(&file, 0o600, &mut credential.as_bytes(), |_| Ok(())).map_err(unusable(NODE_CREDENTIAL_FILE))
}

/// Much less than the life of a credential, most of which is left when the agent goes.
const RENEW_EVERY: Duration = Duration::from_secs(3600);
const RETRY: Duration = Duration::from_secs(60);
/// A CA of an earlier release, or a policy that somebody must correct: each attempt is in the CA's log.
const REFUSED: Duration = Duration::from_secs(600);
const SOON: Duration = Duration::from_secs(1);
const MAX_TOKEN: u64 = 256 << 10;

#[cfg(test)]
mod tests {
    use nebula_cni_contract::launch::CaAccess;

    use super::*;

    #[test]
    fn instances_look_for_it_where_it_is_kept() {
        assert_eq!(CaAccess::credential_beside(Path::new(TOKEN_FILE)), Path::new(NODE_CREDENTIAL_FILE));
    }
}
