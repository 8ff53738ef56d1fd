//! The ConfigMap from which a cluster learns whom to trust: the TLS certificate of this service and the Nebula CAs.
//! Agents and lighthouses mount it, so that nobody has to trust what answers first.

use crate::cluster::{Cluster, ClusterError, ConfigData};

/// What the ConfigMap must say.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct TrustConfigMap<'a> {
    /// PEM of the TLS certificates by which clients know this service. Never more than certificates.
    pub(crate) tls: &'a str,
    /// PEM of the CAs to trust.
    pub(crate) ca: &'a str,
}

impl TrustConfigMap<'_> {
    /// Puts the ConfigMap right if it says something else; returns whether it did.
    pub(crate) fn publish(&self, cluster: &dyn Cluster, namespace: &str, name: &str) -> Result<bool, ClusterError> {
        let wanted = ConfigData::from([("tls.crt", self.tls), ("ca.crt", self.ca)].map(owned));
        let found = cluster.config_map(namespace, name)?.unwrap_or_default();
        if wanted.iter().all(|(key, text)| found.get(key) == Some(text)) {
            return Ok(false);
        }
        cluster.apply_config_map(namespace, name, &wanted).map(|()| true)
    }
}

fn owned((key, text): (&str, &str)) -> (String, String) {
    (key.to_owned(), text.to_owned())
}

/// What an operator has to do about an error.
pub(crate) fn advice(error: &ClusterError, namespace: &str, name: &str) -> String {
    match error {
        ClusterError::Status { status: 401 | 403, .. } => format!(
            "the account of this CA needs a Role in the namespace {namespace} for the resource configmaps with the \
             resourceName {name} and the verbs get, patch and create"
        ),
        ClusterError::Status { status: 404, .. } => format!("is there a namespace {namespace}?"),
        _ => "it is tried again every half minute".to_owned(),
    }
}

/// The certificates of a PEM file, and nothing else that may be in it, such as a key.
pub(crate) fn certificates_in(pem: &str) -> String {
    let mut certificates = String::new();
    let mut is_inside = false;
    for line in pem.lines().map(str::trim) {
        is_inside |= line == BEGIN;
        if is_inside {
            certificates.push_str(line);
            certificates.push('\n');
        }
        is_inside &= line != END;
    }
    certificates
}

const BEGIN: &str = "-----BEGIN CERTIFICATE-----";
const END: &str = "-----END CERTIFICATE-----";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_in_the_certificate_file_is_not_published() {
        let certificate = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
        let key = "-----BEGIN PRIVATE KEY-----\nSECRET\n-----END PRIVATE KEY-----\n";
        let found = certificates_in(&format!("# note\n{key}{certificate}{key}{certificate}\n"));
        assert_eq!(found, format!("{certificate}{certificate}"));
        assert_eq!(certificates_in(key), "");
    }
}
