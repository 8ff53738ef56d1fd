//! Applies for one pod's certificates: with the node's proof, with the pod's own, or with the certificate it has.

use std::time::Duration;

use nebula_cert::{Identity, UnixTime, issuance};
use nebula_cni_plugin::launch::LaunchSpec;

use crate::ca_client::{self, CaClient, Issued, Prover, Refusal};
use crate::handoff::Delivery;
use crate::handoff::server::{HandoffServer, Nobody};

/// Requests certificates with the proofs that this pod has.
#[derive(Clone)]
pub(crate) struct Enrolment {
    client: CaClient,
    pod: issuance::Pod,
    /// Flow with an init container.
    init: Option<HandoffServer>,
    /// Whether the pod shall have a provisional certificate, and had none yet: one, so that a pod whose init container
    /// never comes, or has gone, does not live on them.
    wants_provisional: bool,
    /// Whether init gets the key.
    delivers_key: bool,
    present: Option<Box<Identity>>,
    renewal_key: Option<String>,
}

/// The outcome of a request.
pub(crate) enum Outcome {
    Issued(Box<Issued>),
    /// For the time until the pod has shown its token.
    Provisional(Box<Issued>),
    /// The CA gives no such certificate, whatever the pod's own token will get.
    NoProvisional(String),
    /// Nothing to prove with yet.
    NotYet(String),
    /// The CA decided so.
    Refused(Refusal),
    /// The CA did not decide.
    Failed(String),
}

impl Enrolment {
    pub(crate) fn new(spec: &LaunchSpec, client: CaClient, init: Option<HandoffServer>) -> Self {
        let pod = issuance::Pod {
            namespace: spec.target.pod.namespace.clone(),
            name: spec.target.pod.name.clone(),
            uid: spec.target.pod.uid.clone(),
            address: spec.target.pod_address,
        };
        Self {
            client,
            pod,
            init,
            wants_provisional: spec.provisional,
            delivers_key: spec.deliver_key,
            present: None,
            renewal_key: None,
        }
    }

    /// Asks, blocking: once, or once for each token that waits, since every program of the pod may show something.
    pub(crate) fn apply(&self, within: Duration, now: UnixTime) -> Outcome {
        let mut round = Vec::new();
        let mut refused = None;
        loop {
            let before = round.len();
            let answer = self.ask(within, now, &mut round);
            let is_last = round.len() == before || round.len() >= MAX_TOKENS_PER_ROUND;
            match (answer, refused.take()) {
                // No further token waited.
                (Outcome::NotYet(_) | Outcome::Provisional(_) | Outcome::NoProvisional(_), Some(cause)) => {
                    return Outcome::Refused(cause);
                }
                (Outcome::Refused(cause), _) if !is_last => refused = Some(cause),
                (answer, _) => return answer,
            }
        }
    }

    fn ask(&self, within: Duration, now: UnixTime, round: &mut Vec<u64>) -> Outcome {
        let mut provers = Vec::new();
        let mut is_provisional = false;
        if let (Some(identity), Some(renewal_key)) = (&self.present, &self.renewal_key)
            && !identity.is_expired(now)
        {
            provers.push(Prover::Holder { identity: identity.clone(), renewal_key: renewal_key.clone() });
        }
        match &self.init {
            None => provers.push(Prover::Node(self.pod.clone())),
            // Init has gone when its pod has a certificate.
            Some(_) if !provers.is_empty() => {}
            Some(init) => match init.token(round) {
                Ok(token) => provers.push(Prover::Pod { token, address: self.pod.address }),
                Err(Nobody) if self.wants_provisional && round.is_empty() => {
                    provers.push(Prover::Provisional(self.pod.clone()));
                    is_provisional = true;
                }
                Err(Nobody) => return Outcome::NotYet(Nobody.to_string()),
            },
        }
        match self.client.request(&provers, within, now) {
            Ok(issued) if is_provisional => Outcome::Provisional(Box::new(issued)),
            Ok(issued) => Outcome::Issued(Box::new(issued)),
            Err(error) if is_provisional && error.is_denied() => Outcome::NoProvisional(error.to_string()),
            Err(error) => {
                let text = error.to_string();
                if let Some(init) = self.init.as_ref().filter(|_| self.present.is_none()) {
                    init.explain(&text);
                }
                match error {
                    ca_client::Error::Denied { code, message } => {
                        Outcome::Refused(Refusal { code: Some(code), message })
                    }
                    ca_client::Error::Unavailable(cause) => Outcome::Failed(cause),
                }
            }
        }
    }

    /// The pod has this certificate now; so has its init container, if it has one.
    pub(crate) fn holds(&mut self, identity: Identity, renewal_key: Option<String>, authorities: String) {
        let first = self.present.is_none();
        self.renewal_key = renewal_key.or_else(|| self.renewal_key.take());
        if let Some(init) = &self.init {
            let certificate = identity.certificates().map(nebula_cert::Certificate::to_pem).collect();
            let key = (first && self.delivers_key).then(|| identity.private_key().to_pem().to_string());
            let delivery = Delivery { certificate, ca: authorities, key };
            if first { init.deliver(delivery) } else { init.renewed(delivery) }
        }
        self.present = Some(Box::new(identity));
    }

    /// The pod has had its provisional certificate, or gets none.
    pub(crate) fn waits_for_init(&mut self) {
        self.wants_provisional = false;
    }

    /// The service's key for renewals changed.
    pub(crate) fn renew_with(&mut self, renewal_key: String) {
        self.renewal_key = Some(renewal_key);
    }
}

// As many as may wait (MAX_CONNECTIONS of the hand-off).
const MAX_TOKENS_PER_ROUND: usize = 8;
