//! Whether this node's gateway runs and renews its certificate, by its metrics.

use std::net::SocketAddr;
use std::time::Duration;

use serde_json::{Map, Value};

use crate::node::Node;
use crate::readiness::{Part, Standing};
use crate::status;

/// Asks the gateway four times a minute. Returns at once where there is none, or none that can be asked.
pub(crate) async fn watch(node: &Node) {
    let readiness = &node.readiness;
    let Some(template) = &node.config.gateway else {
        return readiness.set(Part::Gateway, Standing::good("this node has no gateway (network.primary.enabled)"));
    };
    let Some(address) = listens_at(template) else {
        let unknown = "its configuration names no address and port for metrics (stats.listen), so nobody asks it";
        return readiness.set(Part::Gateway, Standing::good(unknown));
    };
    // Good until it is known to be bad: it starts after the agent, which writes its configuration.
    readiness.set(Part::Gateway, Standing::good("is asked for the first time"));
    let mut silent = 0;
    loop {
        let url = format!("http://{address}{}", path(template));
        let asked = tokio::task::spawn_blocking(move || status::get(&url).map_err(|error| error.to_string()));
        let answer = asked.await.unwrap_or_else(|error| Err(error.to_string()));
        silent = if answer.is_ok() { 0 } else { silent + 1 };
        if let Some(standing) = judge(address, &answer, silent) {
            readiness.set(Part::Gateway, standing);
        }
        tokio::time::sleep(EVERY).await;
    }
}

fn listens_at(template: &Map<String, Value>) -> Option<SocketAddr> {
    let address: SocketAddr = template.get("stats")?.get("listen")?.as_str()?.parse().ok()?;
    Some(status::reachable(address))
}

fn path(template: &Map<String, Value>) -> &str {
    template.get("stats").and_then(|stats| stats.get("path")).and_then(Value::as_str).unwrap_or("/metrics")
}

/// `silent` rounds in a row had no answer; `None`: as before.
fn judge(address: SocketAddr, answer: &Result<String, String>, silent: u32) -> Option<Standing> {
    let text = match answer {
        Ok(text) => text,
        Err(_) if silent < SILENT_ROUNDS => return None,
        Err(error) => {
            let what = format!("this node's gateway does not answer at http://{address}: {error}");
            return Some(Standing::bad(what).advice(
                "pods without a tunnel of their own do not reach those of other nodes; look at the containers \"enrol\" and \
                 \"nebula\" of the pod nebula-gateway of this node: kubectl get pods -A -o wide -l \
                 app.kubernetes.io/name=nebula-gateway, then kubectl logs",
            ));
        }
    };
    let (Some(hosts), Some(left)) = (value(text, "hostmap_main_hosts"), value(text, "certificate_ttl_seconds")) else {
        return Some(Standing::bad(format!("what answers at http://{address} is no nebula: it has not its metrics")));
    };
    let is_failing = value(text, "certificate_renewal_failing_seconds").is_some_and(|seconds| seconds >= FAILING);
    if left <= 0.0 || is_failing {
        let what = if left <= 0.0 { "has expired" } else { "is not renewed" };
        return Some(Standing::bad(format!("the certificate of this node's gateway {what}")).advice(
            "the log of nebula-gateway on this node says why: does the CA answer, and is the account still in its policy?",
        ));
    }
    // Without figures that change by the minute, each of which would be news.
    let tunnels = if hosts > 0.0 { "and has tunnels" } else { "without any tunnel so far" };
    Some(Standing::good(format!("answers at http://{address}, {tunnels}")))
}

/// Of the first metric whose name ends so.
fn value(text: &str, name: &str) -> Option<f64> {
    text.lines().find_map(|line| {
        let (metric, value) = line.split_once(' ')?;
        metric.ends_with(name).then(|| value.trim().parse().ok())?
    })
}

const EVERY: Duration = Duration::from_secs(15);
/// A minute: longer than an update of the DaemonSet leaves a node without its gateway.
const SILENT_ROUNDS: u32 = 4;
/// Seconds of attempts that fail: longer than the CA takes to start again.
const FAILING: f64 = 300.0;

#[cfg(test)]
mod tests {
    use super::*;

    const METRICS: &str = "# HELP nebula_hostmap_main_hosts Overlay addresses with a tunnel.\n\
                           # TYPE nebula_hostmap_main_hosts gauge\nnebula_hostmap_main_hosts 2\n\
                           nebula_certificate_ttl_seconds 3600\n";

    fn at() -> SocketAddr {
        "127.0.0.1:4244".parse().unwrap()
    }

    #[test]
    fn a_gateway_that_answers_is_good_and_one_that_is_silent_is_not() {
        let good = judge(at(), &Ok(METRICS.to_owned()), 0).unwrap();
        assert!(good.ok && good.reason.ends_with("and has tunnels"), "{good:?}");
        let alone = judge(at(), &Ok(METRICS.replace("hosts 2", "hosts 0")), 0).unwrap();
        assert!(alone.ok && alone.reason.ends_with("without any tunnel so far"), "{alone:?}");
        let refused = Err("Connection refused".to_owned());
        assert_eq!(judge(at(), &refused, SILENT_ROUNDS - 1), None, "it may be updated");
        let silent = judge(at(), &refused, SILENT_ROUNDS).unwrap();
        assert!(!silent.ok && silent.reason.contains("Connection refused"), "{silent:?}");
    }

    #[test]
    fn a_certificate_that_ends_and_another_program_are_told_apart() {
        let expired = judge(at(), &Ok(METRICS.replace("3600", "-1")), 0).unwrap();
        assert!(!expired.ok && expired.reason.contains("has expired"), "{expired:?}");
        let failing = |seconds: u32| {
            let text = format!("{METRICS}nebula_certificate_renewal_failing_seconds {seconds}\n");
            judge(at(), &Ok(text), 0).unwrap()
        };
        assert!(failing(299).ok);
        assert!(!failing(300).ok && failing(300).reason.contains("is not renewed"), "{:?}", failing(300));
        for text in ["", "<html>", "nebula_hostmap_main_hosts two\nnebula_certificate_ttl_seconds 1"] {
            let foreign = judge(at(), &Ok(text.to_owned()), 0).unwrap();
            assert!(!foreign.ok && foreign.reason.contains("is no nebula"), "{foreign:?}");
        }
    }

    #[test]
    fn the_address_is_that_of_its_configuration() {
        let template = |listen: &str| serde_json::json!({"stats": {"listen": listen}}).as_object().cloned().unwrap();
        assert_eq!(listens_at(&template("127.0.0.1:4244")), Some(at()));
        assert_eq!(listens_at(&template("0.0.0.0:4244")), Some(at()));
        assert_eq!(listens_at(&template("somewhere")), None);
        assert_eq!(listens_at(&Map::new()), None);
    }
}
