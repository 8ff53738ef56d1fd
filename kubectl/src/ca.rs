//! The certificate service, asked through the API server's proxy for its Service.

use std::time::Duration;

use nebula_cert::issuance;
use nebula_cert::revocation::{AUDIENCE, FORBIDDEN, RESOURCE, REVOKE_PATH, Request, Revocation, TOKEN_HEADER, VERB};
use nebula_cni_contract::agent_api::Lacking;
use serde_json::Value;
use zeroize::Zeroizing;

use crate::cli::Place;
use crate::cluster::{Cluster, ClusterError, may_send_again};
use crate::identity::{Account, Role};

/// The service, and a token for it.
pub(crate) struct CaService<'a> {
    cluster: &'a Cluster,
    system_namespace: &'a str,
    account: Account,
    token: Zeroizing<String>,
}

/// Why the service does not do what it is asked for.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CaError {
    /// The API server cannot be reached, or does not answer.
    #[error("{0}")]
    Unreachable(String),
    /// A change was sent, and nobody knows what became of it.
    #[error("{0}\nIt may have been revoked all the same: --dry-run says whether it was")]
    Unknown(String),
    /// The API server refuses to forward.
    #[error(
        "you may not use the API server's proxy to the CA: {message}\nWhoever administers the cluster gives it: kubectl create \
         rolebinding -n {namespace} nebula-kubectl-revoke-YOU --role=nebula-kubectl-revoke --user=YOU"
    )]
    Forbidden {
        /// Of the CA.
        namespace: String,
        /// What it says.
        message: String,
    },
    /// There is no Service for the way to it.
    #[error(
        "there is no Service {namespace}/{SERVICE}, which leads to the CA: is it outside of this cluster? Then revoke with \
         `nebula-ca certificate revoke` there ({message})"
    )]
    NoService {
        /// Of the CA.
        namespace: String,
        /// What the API server says.
        message: String,
    },
    /// The API server, or its way to the CA, fails.
    #[error("the API server cannot forward the request to the CA ({status}): {message}")]
    Proxy {
        /// The HTTP status.
        status: u16,
        /// What it says.
        message: String,
    },
    /// It refuses.
    #[error("the CA refuses: {message}{}", .remedy.as_ref().map(|remedy| format!("\n  with the right to: {remedy}")).unwrap_or_default())]
    Refused {
        /// What it says.
        message: String,
        /// The command that gives the permission that is lacking.
        remedy: Option<String>,
    },
    /// It is of an earlier release.
    #[error("the CA revokes nothing this way: it is of an earlier release than this program ({})", env!("CARGO_PKG_VERSION"))]
    Old,
    /// It says something else.
    #[error("what the CA answers cannot be read; is it of another release? (this one is {})", env!("CARGO_PKG_VERSION"))]
    Odd,
}

impl<'a> CaService<'a> {
    /// Asks for a token of the account for this namespace; `None`: for the whole cluster.
    pub(crate) async fn find(
        cluster: &'a Cluster,
        place: &'a Place,
        namespace: Option<&str>,
    ) -> Result<Self, ClusterError> {
        let (account, token) =
            Account::with_token(cluster, place, namespace, Role::NamespaceOperator, AUDIENCE).await?;
        Ok(Self { cluster, system_namespace: &place.system_namespace, account, token })
    }

    /// Revokes certificates. That is sent once, unless it cannot have arrived; a dry run is only a look.
    pub(crate) async fn revoke(&self, request: &Request) -> Result<Revocation, CaError> {
        let body = serde_json::to_vec(request).map_err(|_| CaError::Odd)?;
        let namespace = self.system_namespace;
        let path = format!("/api/v1/namespaces/{namespace}/services/https:{SERVICE}:{PORT_NAME}/proxy{REVOKE_PATH}");
        let mut left = ATTEMPTS;
        loop {
            left -= 1;
            let token = Some((TOKEN_HEADER, self.token.as_str()));
            let answer = self.cluster.raw("POST", &path, token, body.clone(), MAX_ANSWER).await;
            let (status, bytes) = answer.map_err(|error| match request.dry_run {
                true => CaError::Unreachable(error.to_string()),
                false => CaError::Unknown(error.to_string()),
            })?;
            if (200..300).contains(&status) {
                return serde_json::from_slice(&bytes).map_err(|_| CaError::Odd);
            }
            match self.error(status, &bytes, request) {
                CaError::Proxy { status, message } if left > 0 && may_send_again(status, &message, request.dry_run) => {
                    tokio::time::sleep(AGAIN_AFTER).await;
                }
                CaError::Proxy { status, message } if !request.dry_run && !may_send_again(status, &message, false) => {
                    return Err(CaError::Unknown(CaError::Proxy { status, message }.to_string()));
                }
                error => return Err(error),
            }
        }
    }

    fn error(&self, status: u16, body: &[u8], request: &Request) -> CaError {
        let document: Value = serde_json::from_slice(body).unwrap_or_default();
        let namespace = self.system_namespace.to_owned();
        if document["kind"] == "Status" {
            let message = document["message"].as_str().unwrap_or_default().to_owned();
            return match status {
                403 => CaError::Forbidden { namespace, message },
                404 => CaError::NoService { namespace, message },
                _ => CaError::Proxy { status, message },
            };
        }
        match serde_json::from_value::<issuance::Refusal>(document) {
            Ok(refusal) if refusal.code == "not_found" => CaError::Old,
            Ok(refusal) => {
                let lacking = Lacking {
                    user: self.account.user(),
                    verb: VERB.to_owned(),
                    resource: RESOURCE.to_owned(),
                    namespace: request.which.namespace().map(str::to_owned),
                };
                let remedy = (refusal.code == FORBIDDEN).then(|| lacking.remedy()).flatten();
                CaError::Refused { message: refusal.message, remedy }
            }
            Err(_) => {
                let message = String::from_utf8_lossy(body).trim().chars().take(200).collect();
                CaError::Proxy { status, message }
            }
        }
    }
}

/// The Service in front of the CA, and the name of its port. RBAC limits who may use its proxy by these names.
const SERVICE: &str = "nebula-ca";
const PORT_NAME: &str = "https";
const ATTEMPTS: usize = 3;
const AGAIN_AFTER: Duration = Duration::from_secs(1);
/// A thousand certificates, each with many groups.
const MAX_ANSWER: usize = 16 << 20;

#[cfg(test)]
mod tests {
    use nebula_cert::revocation;
    use nebula_cni_contract::agent_api;

    #[test]
    fn the_ca_and_agents_are_asked_in_the_same_way_with_tokens_that_the_other_does_not_accept() {
        assert_eq!((revocation::GROUP, revocation::TOKEN_HEADER), (agent_api::GROUP, agent_api::TOKEN_HEADER));
        assert_ne!(revocation::AUDIENCE, agent_api::AUDIENCE);
    }
}
