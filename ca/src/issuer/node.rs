//! What the agent of a node proves: which node it is, and which pods are there.

use std::net::IpAddr;

use nebula_cert::{
    UnixTime,
    issuance::{NodeCredential, Pod},
};

use super::{Issuer, Rules};
use crate::{pod::PodFacts, proof::node, refusal::Refusal};

impl Issuer {
    /// The pod that a node vouches for.
    pub(super) fn vouched(
        &self,
        rules: &Rules,
        token: &str,
        pod: &Pod,
        source: IpAddr,
        now: UnixTime,
    ) -> Result<PodFacts, Refusal> {
        if let Some((cluster, settings)) = rules.kubernetes() {
            return node::vouch(cluster, settings, &self.renewal_key, token, pod, now);
        }
        self.check_node_token(token)?;
        node::check_pod(pod)?;
        Ok(PodFacts { node: Some(node_at(source)), is_vouched_by_node: true, ..PodFacts::described(pod) })
    }

    /// The node whose agent presents `token`.
    pub(crate) fn node(&self, token: &str, source: IpAddr, now: UnixTime) -> Result<String, Refusal> {
        let rules = self.rules();
        if let Some((cluster, settings)) = rules.kubernetes() {
            return node::agent(cluster, settings, token, now);
        }
        self.check_node_token(token)?;
        Ok(node_at(source))
    }

    /// A credential for the node whose agent presents `token`, for the time in which the agent is away.
    pub(crate) fn node_credential(&self, token: &str, now: UnixTime) -> Result<NodeCredential, Refusal> {
        let rules = self.rules();
        let (cluster, settings) = rules.kubernetes().ok_or(Refusal::NodeCredentialsDisabled)?;
        let made = node::credential(cluster, settings, token, now)?;
        let credential = made.to_text(&self.renewal_key)?;
        Ok(NodeCredential { node: made.node, credential, not_after: made.until })
    }

    pub(super) fn check_node_token(&self, token: &str) -> Result<(), Refusal> {
        let expected = self.node_token.as_ref().ok_or(Refusal::NodeProofDisabled)?;
        if expected.matches(token) { Ok(()) } else { Err(Refusal::BadNodeToken) }
    }

    /// A node may release a pod of its own: one that the API server shows there, or one that no longer exists and that
    /// the ledger has for the node. Returns the node to which the pod's certificates must belong if only the ledger
    /// knows it.
    pub(super) fn check_gone_or_vouched(
        &self,
        rules: &Rules,
        token: &str,
        pod: &Pod,
        source: IpAddr,
        now: UnixTime,
    ) -> Result<Option<String>, Refusal> {
        let Some((cluster, settings)) = rules.kubernetes() else {
            self.check_node_token(token)?;
            node::check_pod(pod)?;
            return Ok(Some(node_at(source)));
        };
        let node = node::agent(cluster, settings, token, now)?;
        node::check_pod(pod)?;
        match cluster.pod(&pod.namespace, &pod.name)? {
            Some(found) if found.is(&pod.uid) && found.spec.node_name == node => Ok(None),
            Some(found) if found.is(&pod.uid) => {
                Err(Refusal::PodOnOtherNode { pod: format!("{}/{}", pod.namespace, pod.name), node })
            }
            _ => Ok(Some(node)),
        }
    }
}

/// Name for a node that is known only by the address its proof comes from.
pub(super) fn node_at(source: IpAddr) -> String {
    format!("at {}", source.to_canonical())
}
