//! `nebula-cni-agent status`: what the running agent knows, as a table with what to do.

use std::fmt::Write as _;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use nebula_cert::visible;
use nebula_cni_contract::agent_api::{PartState, parts_table};

use crate::readiness::{Part, Standing, Standings, verdict};

/// Why there is no status.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StatusError {
    /// No agent answers.
    #[error(
        "no agent answers at http://{address}: {source}; is it running, and is \"listen\" the same in its agent.json?"
    )]
    NoAnswer {
        /// Where.
        address: SocketAddr,
        /// Why.
        source: Box<ureq::Error>,
    },
    /// Something else answers.
    #[error("what answers at http://{address} is no nebula-cni-agent")]
    Foreign {
        /// Where.
        address: SocketAddr,
    },
}

/// Asks the agent that listens at `address`. Blocks.
///
/// # Errors
/// Returns an error if no agent answers there.
pub fn ask(address: SocketAddr) -> Result<Standings, StatusError> {
    let address = reachable(address);
    let failed = |source| StatusError::NoAnswer { address, source: Box::new(source) };
    let text = get(&format!("http://{address}/status")).map_err(failed)?;
    serde_json::from_str(&text).map_err(|_| StatusError::Foreign { address })
}

/// Where a listener of this node is reached.
pub(crate) fn reachable(mut address: SocketAddr) -> SocketAddr {
    if address.ip().is_unspecified() {
        let own = if address.is_ipv4() { IpAddr::from(Ipv4Addr::LOCALHOST) } else { Ipv6Addr::LOCALHOST.into() };
        address.set_ip(own);
    }
    address
}

/// What a listener of this node says. Blocks.
pub(crate) fn get(url: &str) -> Result<String, ureq::Error> {
    let agent = ureq::Agent::config_builder().timeout_global(Some(TIMEOUT)).proxy(None).max_redirects(0).build();
    let mut answer = ureq::Agent::new_with_config(agent).get(url).call()?;
    answer.body_mut().with_config().limit(MAX_ANSWER).read_to_string()
}

/// A table of all parts, and the verdict.
#[must_use]
pub fn table(standings: &Standings) -> String {
    let shown = |text: &str| visible(text).into_owned();
    let parts: Vec<_> = parts(standings)
        .into_iter()
        .map(|part| PartState { reason: shown(&part.reason), advice: shown(&part.advice), ..part })
        .collect();
    let mut text = parts_table(&parts);
    let ready = if verdict(standings).is_ok() { "ready" } else { "not ready" };
    let _ = writeln!(text, "\nThis node is {ready}.");
    text
}

/// All parts, for other programs.
#[must_use]
pub fn parts(standings: &Standings) -> Vec<PartState> {
    let part = |(part, standing): (&Part, &Standing)| PartState {
        name: part.name().to_owned(),
        ok: standing.ok,
        is_required: part.is_required(),
        reason: standing.reason.clone(),
        advice: standing.advice.clone(),
    };
    standings.iter().map(part).collect()
}

const TIMEOUT: Duration = Duration::from_secs(5);
const MAX_ANSWER: u64 = 256 << 10;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::readiness::Readiness;

    #[test]
    fn the_table_says_what_is_wrong_and_what_to_do() {
        let readiness = Readiness::default();
        readiness.set(Part::Programs, Standing::good("are in /opt/cni/bin"));
        readiness.set(Part::Chain, Standing::bad("no primary").advice("install one"));
        let text = table(&readiness.now());
        assert!(text.contains("programs     ok       are in /opt/cni/bin\n"), "{text}");
        assert!(text.contains("chain        NOT OK   no primary\n                      -> install one\n"), "{text}");
        assert!(text.contains("kubernetes   missing"), "{text}");
        assert!(text.ends_with("This node is not ready.\n"), "{text}");
    }

    #[test]
    fn what_others_said_adds_no_line() {
        let readiness = Readiness::default();
        let said = "the CA said: no\nThis node is ready.\u{202e}";
        readiness.set(Part::Chain, Standing::bad(said).advice(said));
        let text = table(&readiness.now());
        assert_eq!(text.matches("\nThis node is ready.").count(), 0, "{text}");
        assert!(text.chars().all(|c| c == '\n' || nebula_cert::is_visible(c)), "{text}");
    }

    #[test]
    fn no_agent_is_an_error_that_says_where() {
        let error = ask("0.0.0.0:1".parse().unwrap()).unwrap_err().to_string();
        assert!(error.contains("http://127.0.0.1:1"), "{error}");
    }
}
