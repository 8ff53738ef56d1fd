//! `nebula-cni-agent pods`: the pods of this node that have a tunnel, as their instances describe themselves.

use std::fmt::Write as _;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::thread;

use nebula_cert::{json_line, visible};
use nebula_cni_contract::agent_api::{PodState, change_texts};
use nebula_cni_contract::instance_status::{self, Status};
use nebula_cni_plugin::attachment::record::{self, Found, Record};
use serde_json::Value;

use crate::host_root::HostRoot;

/// Why there is nothing to show.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PodStatusError {
    /// The records cannot be read.
    #[error("cannot list the pods of this node in {}: {source}", .path.display())]
    Records {
        /// Their folder.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// No such pod.
    #[error(
        "no pod {name} with a tunnel on this node; `nebula-cni-agent pods` lists those that have one, and `kubectl get \
         pod -o wide` says on which node a pod is"
    )]
    Unknown {
        /// As it was asked for.
        name: String,
    },
    /// Its instance does not answer.
    #[error("the instance of pod {name} does not answer: {problem}")]
    Silent {
        /// As it was asked for.
        name: String,
        /// Why.
        problem: String,
    },
}

/// Asks the instances of all pods that have a record in the state directory, which is named as the node names it.
/// Blocks.
///
/// # Errors
/// Returns an error if the records cannot be listed.
pub fn of_node(host: &HostRoot, state_dir: &Path) -> Result<Vec<PodState>, PodStatusError> {
    of_namespace(host, state_dir, None)
}

/// As [`of_node`], of the pods of one namespace if there is one.
pub(crate) fn of_namespace(
    host: &HostRoot,
    state_dir: &Path,
    namespace: Option<&str>,
) -> Result<Vec<PodState>, PodStatusError> {
    let (mut records, mut pods) = records(host, state_dir)?;
    if let Some(namespace) = namespace {
        records.retain(|(_, record)| record.target.pod.namespace == namespace);
        // Whose the others are, nobody knows.
        pods.clear();
    }
    pods.extend(ask_all(&records, |(network, record)| ask(host, network, record)));
    pods.sort_by(|a, b| (&a.pod, &a.network).cmp(&(&b.pod, &b.network)));
    Ok(pods)
}

/// Asks something of the instances of some pods at a time: one that hangs takes two seconds. Blocks.
pub(crate) fn ask_all<R: Sync, T: Send>(records: &[R], ask: impl Fn(&R) -> T + Sync) -> Vec<T> {
    let (mut answers, ask) = (Vec::with_capacity(records.len()), &ask);
    for some in records.chunks(PARALLEL) {
        thread::scope(|scope| {
            let asked: Vec<_> = some.iter().map(|record| scope.spawn(move || ask(record))).collect();
            answers.extend(asked.into_iter().filter_map(|asked| asked.join().ok()));
        });
    }
    answers
}

/// Records of attachments, each with the name of its network.
type Records = Vec<(String, Box<Record>)>;

/// The records in the state directory, each with the name of its network, and the pods whose records cannot be used.
pub(crate) fn records(host: &HostRoot, state_dir: &Path) -> Result<(Records, Vec<PodState>), PodStatusError> {
    let folder = host.resolve(state_dir);
    let failed = |source| PodStatusError::Records { path: folder.clone(), source };
    let networks = match fs::read_dir(&folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok((Vec::new(), Vec::new())),
        other => other.map_err(failed)?,
    };
    let (mut records, mut pods) = (Vec::new(), Vec::new());
    for network in networks {
        let network = network.map_err(failed)?.file_name();
        let Some(network) = network.to_str() else { continue };
        // The folders of the agent and of the cluster table have no record.
        for path in record::list(&folder, network).unwrap_or_default() {
            let network = network.to_owned();
            match Record::load(&path) {
                Ok(Found::Record(record)) => records.push((network, record)),
                Ok(Found::Foreign(why)) => {
                    let pod = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
                    let problem = Some(format!("its record cannot be used: {why}"));
                    pods.push(PodState { pod, network, problem, ..PodState::default() });
                }
                _ => {}
            }
        }
    }
    Ok((records, pods))
}

/// One line for each pod.
#[must_use]
pub fn table(pods: &[PodState], now: i64) -> String {
    if pods.is_empty() {
        return "No pod of this node has a tunnel.\n".to_owned();
    }
    let shown = |pod: &PodState| change_texts(pod, &mut |text| visible(text).into_owned());
    // A pod that was written as JSON can be read again.
    PodState::table(&pods.iter().filter_map(|pod| shown(pod).ok()).collect::<Vec<_>>(), now)
}

/// All that the instance of one pod says, as JSON.
///
/// # Errors
/// Returns an error if there is no such pod, or its instance does not answer.
pub fn document(pods: &[PodState], name: &str) -> Result<String, PodStatusError> {
    // A value that was parsed can be printed.
    answering(pods, name).map(|pod| json_line(format!("{:#}", pod.status)))
}

/// How one pod stands, and what network policies said about its flows.
///
/// # Errors
/// As [`document`].
pub fn described(pods: &[PodState], name: &str, now: i64) -> Result<String, PodStatusError> {
    let pod = answering(pods, name)?;
    let mut text = table(std::slice::from_ref(pod), now);
    let Ok(status) = serde_json::from_value::<Status>(pod.status.clone()) else { return Ok(text) };
    if status.policy_verdicts.is_empty() {
        text.push_str("\nNo network policy was asked about its flows.\n");
        return Ok(text);
    }
    let widest = status.policy_verdicts.iter().map(|row| visible(&row.policy).len()).max().unwrap_or_default().max(6);
    let _ = writeln!(
        text,
        "\n{:<9}  {:<13}  {:<widest$}  {:>10}  {:>10}  {:>10}",
        "DIRECTION", "TIER", "POLICY", "ALLOWED", "DENIED", "WOULD_DENY"
    );
    for row in &status.policy_verdicts {
        let [direction, tier, policy] = [&row.direction, &row.tier, &row.policy].map(|text| visible(text));
        let _ = writeln!(
            text,
            "{direction:<9}  {tier:<13}  {policy:<widest$}  {:>10}  {:>10}  {:>10}",
            row.allowed, row.denied, row.would_deny
        );
    }
    Ok(text)
}

fn answering<'a>(pods: &'a [PodState], name: &str) -> Result<&'a PodState, PodStatusError> {
    let pod = pods.iter().find(|pod| pod.pod == name);
    let pod = pod.ok_or_else(|| PodStatusError::Unknown { name: name.to_owned() })?;
    match &pod.problem {
        Some(problem) => Err(PodStatusError::Silent { name: name.to_owned(), problem: problem.clone() }),
        None => Ok(pod),
    }
}

fn ask(host: &HostRoot, network: &str, record: &Record) -> PodState {
    let answer = instance_status::document(&host.resolve(&record.status_socket))
        .and_then(|bytes| serde_json::from_slice(&bytes).map_err(io::Error::from));
    let (status, problem) = match answer {
        Ok(status) => (status, None),
        // The system says of a deadline that something is temporarily unavailable.
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => (Value::Null, Some(HANGS.to_owned())),
        Err(error) => (Value::Null, Some(error.to_string())),
    };
    let pod = &record.target.pod;
    let (pod, network) = (format!("{}/{}", pod.namespace, pod.name), network.to_owned());
    PodState { pod, network, status, problem, ..PodState::default() }
}

const PARALLEL: usize = 16;
/// The problem of a pod whose instance takes the question and does not answer: it hangs, or somebody stopped it.
pub(crate) const HANGS: &str = "its instance does not answer in time";

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::os::unix::net::UnixListener;

    use super::*;

    fn pod(name: &str, status: Value) -> PodState {
        PodState { pod: name.to_owned(), network: "pods".to_owned(), status, ..PodState::default() }
    }

    #[test]
    fn the_table_has_state_certificate_tunnels_and_what_is_wrong() {
        let running = serde_json::json!({"state": "running", "overlay": ["10.244.1.7/16"], "tunnels": [{}, {}],
            "certificate": {"not_after": 10_000}});
        let waiting = serde_json::json!({"state": "waiting", "last_error": "the CA\nrefused"});
        let silent = PodState { problem: Some("Connection refused".to_owned()), ..pod("shop/z", Value::Null) };
        let text = table(&[pod("shop/web-0", running), pod("shop/db", waiting), silent], 2800);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "POD         STATE        CERTIFICATE  TUNNELS  OVERLAY");
        assert_eq!(lines[1], "shop/web-0  running      for 2 h            2  10.244.1.7/16");
        assert!(lines[2].starts_with("shop/db     waiting      none "), "{text}");
        assert_eq!(lines[3].trim(), "-> the CA\\nrefused");
        assert_eq!(lines[4], "shop/z      no answer    Connection refused");
        assert_eq!(table(&[], 0), "No pod of this node has a tunnel.\n");
    }

    #[test]
    fn a_pod_that_is_not_here_is_told_from_one_that_does_not_answer() {
        let silent = PodState { problem: Some("Connection refused".to_owned()), ..pod("shop/db", Value::Null) };
        let pods = [pod("shop/web", serde_json::json!({"state": "running"})), silent];
        assert!(document(&pods, "shop/web").unwrap().contains(r#""state": "running""#));
        assert!(document(&pods, "shop/db").unwrap_err().to_string().contains("does not answer: Connection refused"));
        assert!(document(&pods, "shop/other").unwrap_err().to_string().starts_with("no pod shop/other with a tunnel"));
    }

    #[test]
    fn the_status_of_one_pod_has_the_verdicts_on_its_flows() {
        let verdicts = serde_json::json!([
            {"direction": "ingress", "tier": "NetworkPolicy", "policy": "shop/web", "allowed": 12, "denied": 3},
            {"direction": "egress", "tier": "none", "policy": "no\npolicy", "would_deny": 7}]);
        let judged = serde_json::json!({"state": "running", "overlay": ["10.244.1.7/16"], "policy_verdicts": verdicts});
        let pods = [pod("shop/web", judged), pod("shop/db", serde_json::json!({"state": "running"}))];
        let text = described(&pods, "shop/web", 0).unwrap();
        let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(lines[1][..2], ["shop/web", "running"]);
        assert_eq!(lines[3], ["DIRECTION", "TIER", "POLICY", "ALLOWED", "DENIED", "WOULD_DENY"]);
        assert_eq!(lines[4], ["ingress", "NetworkPolicy", "shop/web", "12", "3", "0"]);
        assert_eq!(lines[5], ["egress", "none", "no\\npolicy", "0", "0", "7"]);
        assert_eq!(lines.len(), 6, "{text}");
        assert!(described(&pods, "shop/db", 0).unwrap().ends_with("No network policy was asked about its flows.\n"));
        assert!(matches!(described(&pods, "shop/x", 0), Err(PodStatusError::Unknown { .. })));
    }

    #[test]
    fn every_record_of_the_node_is_asked() {
        let dir = tempfile::tempdir().unwrap();
        let (state_dir, socket) = (dir.path().join("state"), dir.path().join("socket"));
        assert!(of_node(&HostRoot::default(), &state_dir).unwrap().is_empty());
        let network = state_dir.join("pods");
        fs::create_dir_all(&network).unwrap();
        let record = |uid: &str, socket: &Path| {
            serde_json::json!({"version": Record::VERSION, "state": "running", "status_socket": socket, "process": null,
                "network": "pods", "container_id": uid, "ifname": "eth0", "device": "nebula0",
                "netns": "/run/netns/x", "netns_id": [4, 9], "pod_address": "10.244.1.7",
                "pod": {"namespace": "shop", "name": uid, "uid": uid}})
        };
        fs::write(network.join("a.json"), record("web", &socket).to_string()).unwrap();
        fs::write(network.join("b.json"), record("gone", &dir.path().join("none")).to_string()).unwrap();
        fs::write(network.join("c.json"), "{").unwrap();
        fs::write(network.join("d-eth0.json"), r#"{"version":2}"#).unwrap();
        let hung = dir.path().join("hung");
        fs::write(network.join("e.json"), record("hung", &hung).to_string()).unwrap();
        let _nobody_accepts = UnixListener::bind(&hung).unwrap();
        let listener = UnixListener::bind(&socket).unwrap();
        let instance = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            stream.write_all(br#"{"state": "running", "trouble": {"lost_peers": []}}"#).unwrap();
        });
        let pods = of_node(&HostRoot::default(), &state_dir).unwrap();
        instance.join().unwrap();
        let names: Vec<&str> = pods.iter().map(|pod| pod.pod.as_str()).collect();
        assert_eq!(names, ["d-eth0", "shop/gone", "shop/hung", "shop/web"]);
        assert!(pods[0].problem.as_ref().unwrap().contains("by a newer program"), "{pods:?}");
        assert!(pods[1].problem.is_some() && pods[3].status["trouble"]["lost_peers"].is_array());
        assert_eq!(pods[2].problem.as_deref(), Some("its instance does not answer in time"));
    }
}
