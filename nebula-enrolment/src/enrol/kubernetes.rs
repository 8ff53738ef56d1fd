//! Enrolment of a lighthouse, or of the gateway of a node, in Kubernetes: the proof is the service-account token of
//! its pod, for the first certificate and for each renewal. The service finds by the pod its name, its overlay address
//! and where it is reached, so there is nothing to configure. A pod that comes back on another node is announced there.

use std::num::NonZeroU16;
use std::path::PathBuf;
use std::time::Duration;

use nebula_cert::Curve;
use nebula_cni_contract::launch::CaAccess;
use nebula_linux::clock::{now, unix_now};
use nebula_linux::netns::NamespaceExecutor;
use serde::{Deserialize, Serialize};

use super::{Enrolled, Error, Files};
use crate::ca_client::{self, CaClient, Prover};

/// How a pod proves its identity, as remembered for renewals.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Workload {
    /// File with the pod's token. Kubernetes replaces the token, so it is read for each request.
    pub token_file: PathBuf,
    /// File with the TLS certificate of the service, which a ConfigMap keeps up to date.
    pub tls_ca_file: PathBuf,
    /// UDP port of the lighthouse; `None`: the one in the service's policy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub port: Option<NonZeroU16>,
    /// Whether it is the gateway of its node, and no lighthouse.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub gateway: bool,
    /// Name that the TLS certificate of the service must be for; `None`: the host of its URL.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub server_name: Option<String>,
}

/// What a pod is to the network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// A lighthouse.
    Lighthouse {
        /// Its UDP port; `None`: the one in the service's policy.
        port: Option<NonZeroU16>,
    },
    /// The way from and to the pods of its node.
    Gateway,
}

impl Workload {
    pub(super) fn prover(&self) -> Prover {
        if self.gateway { Prover::Gateway } else { Prover::Lighthouse { port: self.port } }
    }
}

/// The URL of the CA service. Kubernetes names a Service in the environment of pods as `tcp://ADDRESS:PORT`
/// (`NEBULA_CA_PORT`; Kubernetes, `pkg/kubelet/envvars`), an IPv6 address in brackets. Any other text is returned as
/// it is.
#[must_use]
pub fn service_url(text: &str) -> String {
    text.strip_prefix("tcp://").map_or_else(|| text.to_owned(), |authority| format!("https://{authority}"))
}

/// Gets a certificate for the pod whose token is in the token file of `access`, and writes its files. Can be run
/// again at any time. Retries for up to `within` while the service does not answer, or does not know the pod's
/// address yet; `on_retry` hears why.
///
/// # Errors
/// Returns an error if a file cannot be read or written, if the CA refuses, or if it did not answer in time.
pub fn enrol(
    access: &CaAccess,
    files: &Files,
    role: Role,
    within: Duration,
    on_retry: impl Fn(&Error),
) -> Result<Enrolled, Error> {
    let CaAccess { token_file, tls_ca_file, server_name, .. } = access.clone();
    let (port, gateway) = match role {
        Role::Lighthouse { port } => (port, false),
        Role::Gateway => (None, true),
    };
    let workload = Workload { token_file, tls_ca_file, port, gateway, server_name };
    files.make_folder()?;
    let (start, mut pause) = (now(), FIRST_PAUSE);
    loop {
        files.complete()?;
        let ask = |curve| {
            let client = CaClient::new(access.clone(), NamespaceExecutor::Here);
            let key = super::key_for(files, curve)?;
            super::issue(&client, files, key, &workload.prover(), None, unix_now(), || {
                files.remember_workload(&access.url, &workload)
            })
        };
        let outcome = match ask(Curve::USUAL) {
            Err(Error::Ca(ca_client::Error::Denied { code, .. })) if code == "wrong_curve" => ask(Curve::P256),
            outcome => outcome,
        };
        match outcome {
            Err(error @ Error::Ca(ca_client::Error::Unavailable(_))) if now() - start + pause < within => {
                on_retry(&error);
                std::thread::sleep(pause);
                pause = (2 * pause).min(LONGEST_PAUSE);
            }
            outcome => return outcome,
        }
    }
}

const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(8);

#[cfg(test)]
mod tests {
    use nebula_cni_contract::launch::ca_address;

    use super::service_url;

    #[test]
    fn a_service_is_found_by_what_kubernetes_says_of_it_in_both_families() {
        let found = |text| ca_address(&service_url(text)).map(|(address, port)| (address.to_string(), port));
        assert_eq!(found("tcp://10.96.0.17:8443"), Some(("10.96.0.17".to_owned(), 8443)));
        assert_eq!(found("tcp://[fd00:10:96::17]:8443"), Some(("fd00:10:96::17".to_owned(), 8443)));
        assert_eq!(service_url("https://ca:8443"), "https://ca:8443");
    }
}
