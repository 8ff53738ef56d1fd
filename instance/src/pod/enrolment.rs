//! Requests one pod's certificates: with the node's proof, with the pod's own token, or with the current certificate.

use std::net::IpAddr;
use std::time::Duration;

use nebula_cert::{Identity, UnixTime, issuance};
use nebula_cni_contract::launch::LaunchSpec;
use nebula_enrolment::ca_client::{self, CaClient, Issued, Prover, Refusal};

use crate::handoff::Delivery;
use crate::handoff::server::{HandoffServer, Nobody};

/// Requests certificates with the proofs that this pod has.
#[derive(Clone)]
pub(crate) struct Enrolment {
    client: CaClient,
    pod: issuance::Pod,
    /// Server for the init container, in the flow that has one.
    init: Option<HandoffServer>,
    /// Whether to request a provisional certificate. It is requested only once, so that a pod whose init container
    /// never appears, or has already exited, does not live on provisional certificates.
    wants_provisional: bool,
    present: Option<Box<Identity>>,
    renewal_key: Option<String>,
}

/// The outcome of a request.
pub(crate) enum Outcome {
    Issued(Box<Issued>),
    /// A certificate for the time until the pod has shown its token.
    Provisional(Box<Issued>),
    /// The CA refuses a provisional certificate, which says nothing about what the pod's own token will get.
    NoProvisional(String),
    /// There is no proof yet to send with a request.
    NotYet(String),
    /// The CA refused.
    Refused(Refusal),
    /// The CA service cannot be used as configured.
    Misconfigured(String),
    /// The CA did not decide, or could not be reached.
    Failed(String),
}

impl Enrolment {
    pub(crate) fn new(spec: &LaunchSpec, client: CaClient, init: Option<HandoffServer>) -> Self {
        let pod = issuance::Pod {
            namespace: spec.target.pod.namespace.clone(),
            name: spec.target.pod.name.clone(),
            uid: spec.target.pod.uid.clone(),
            address: spec.target.pod_address,
            other_address: other_address(spec),
        };
        Self { client, pod, init, wants_provisional: spec.provisional, present: None, renewal_key: None }
    }

    /// Sends a request and blocks until the outcome. After a refusal it goes on to the next waiting token, since any
    /// program of the pod may present one.
    pub(crate) fn apply(&self, within: Duration, now: UnixTime) -> Outcome {
        let mut round = Vec::new();
        let mut refused = None;
        loop {
            let before = round.len();
            let answer = self.ask(within, now, &mut round);
            let is_last = round.len() == before || round.len() >= MAX_TOKENS_PER_ROUND;
            match (answer, refused.take()) {
                // No other token was waiting.
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
            // The init container has exited once its pod has a certificate.
            Some(_) if !provers.is_empty() => {}
            Some(init) => match init.token(round) {
                Ok(token) => {
                    let issuance::Pod { address, other_address, .. } = self.pod;
                    provers.push(Prover::Pod { token, address, other_address });
                }
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
                    ca_client::Error::Misconfigured(cause) => Outcome::Misconfigured(cause),
                    ca_client::Error::Unavailable(cause) => Outcome::Failed(cause),
                }
            }
        }
    }

    /// Records the pod's new certificate, and passes it to the init container if there is one.
    pub(crate) fn holds(&mut self, identity: Identity, renewal_key: Option<String>, authorities: String) {
        self.renewal_key = renewal_key.or_else(|| self.renewal_key.take());
        if let Some(init) = &self.init {
            let certificate = identity.certificates().map(nebula_cert::Certificate::to_pem).collect();
            let delivery = Delivery { certificate, ca: authorities };
            init.deliver(delivery);
        }
        self.present = Some(Box::new(identity));
    }

    /// Serves the pod's init container in place of the previous instance.
    pub(crate) fn take_over(&self) {
        self.init.iter().for_each(HandoffServer::begin);
    }

    /// Stops requesting a provisional certificate: the pod has had one, or gets none.
    pub(crate) fn waits_for_init(&mut self) {
        self.wants_provisional = false;
    }

    /// Replaces the service's renewal key.
    pub(crate) fn renew_with(&mut self, renewal_key: String) {
        self.renewal_key = Some(renewal_key);
    }
}

/// The pod's address of the other family.
fn other_address(spec: &LaunchSpec) -> Option<IpAddr> {
    let Some(capture) = &spec.capture else { return spec.target.other_address };
    capture.sources.iter().copied().find(|source| source.is_ipv4() != spec.target.pod_address.is_ipv4())
}

// As many as can wait at once (`MAX_CONNECTIONS` of the hand-off).
const MAX_TOKENS_PER_ROUND: usize = 8;
