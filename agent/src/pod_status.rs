//! `nebula-cni-agent pods`: the pods of this node that have a tunnel, as their instances describe themselves.

use std::fmt::Write as _;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::thread;

use nebula_cert::{visible, visible_json};
use nebula_cni_contract::instance_status::{self, Status};
use nebula_cni_plugin::attachment::record::{self, Found, Record};
use serde::Serialize;
use serde_json::Value;

use crate::host_root::HostRoot;

/// A pod of this node with a tunnel.
#[derive(Debug, Serialize)]
pub struct Pod {
    /// NAMESPACE/NAME.
    pub pod: String,
    /// Name of the pod's network.
    pub network: String,
    /// The status document of its instance; `null` if that does not answer.
    pub status: Value,
    /// Why the instance does not answer.
    pub problem: Option<String>,
}

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
pub fn of_node(host: &HostRoot, state_dir: &Path) -> Result<Vec<Pod>, PodStatusError> {
    let folder = host.resolve(state_dir);
    let failed = |source| PodStatusError::Records { path: folder.clone(), source };
    let networks = match fs::read_dir(&folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other.map_err(failed)?,
    };
    let mut records = Vec::new();
    for network in networks {
        let network = network.map_err(failed)?.file_name();
        let Some(network) = network.to_str() else { continue };
        // The folders of the agent and of the cluster table have no record.
        let paths = record::list(&folder, network).unwrap_or_default();
        records.extend(paths.iter().filter_map(|path| match Record::load(path) {
            Ok(Found::Record(record)) => Some((network.to_owned(), record)),
            _ => None,
        }));
    }
    let mut pods = Vec::new();
    for some in records.chunks(PARALLEL) {
        // An instance that hangs takes two seconds.
        thread::scope(|scope| {
            let asked: Vec<_> =
                some.iter().map(|(network, record)| scope.spawn(|| ask(host, network, record))).collect();
            pods.extend(asked.into_iter().filter_map(|asked| asked.join().ok()));
        });
    }
    pods.sort_by(|a, b| (&a.pod, &a.network).cmp(&(&b.pod, &b.network)));
    Ok(pods)
}

/// One line for each pod.
#[must_use]
pub fn table(pods: &[Pod], now: i64) -> String {
    if pods.is_empty() {
        return "No pod of this node has a tunnel.\n".to_owned();
    }
    let widest = pods.iter().map(|pod| pod.pod.len()).max().unwrap_or_default();
    let mut text = format!("{:widest$}  {:<11}  {:<11}  {:>7}  OVERLAY\n", "POD", "STATE", "CERTIFICATE", "TUNNELS");
    for pod in pods {
        let Ok(status) = serde_json::from_value::<Status>(pod.status.clone()) else {
            let problem = visible(pod.problem.as_deref().unwrap_or("what it says is no status"));
            let _ = writeln!(text, "{:widest$}  {:<11}  {problem}", pod.pod, "no answer");
            continue;
        };
        let certificate = match status.certificate {
            Some(certificate) if certificate.not_after <= now => "expired".to_owned(),
            Some(certificate) => format!("for {}", span(certificate.not_after - now)),
            None => "none".to_owned(),
        };
        let (state, tunnels, overlay) = (status.state.word(), status.tunnels.len(), status.overlay.join(" "));
        let _ =
            writeln!(text, "{:widest$}  {state:<11}  {certificate:<11}  {tunnels:>7}  {}", pod.pod, visible(&overlay));
        for problem in [status.closed, status.last_error].into_iter().flatten() {
            let _ = writeln!(text, "{:widest$}  -> {}", "", visible(&problem));
        }
    }
    text
}

/// All that the instance of one pod says, as JSON.
///
/// # Errors
/// Returns an error if there is no such pod, or its instance does not answer.
pub fn document(pods: &[Pod], name: &str) -> Result<String, PodStatusError> {
    let pod =
        pods.iter().find(|pod| pod.pod == name).ok_or_else(|| PodStatusError::Unknown { name: name.to_owned() })?;
    match &pod.problem {
        Some(problem) => Err(PodStatusError::Silent { name: name.to_owned(), problem: problem.clone() }),
        // A value that was parsed can be printed.
        None => Ok(format!("{}\n", visible_json(&format!("{:#}", pod.status)))),
    }
}

fn ask(host: &HostRoot, network: &str, record: &Record) -> Pod {
    let answer = instance_status::document(&host.resolve(&record.status_socket))
        .and_then(|bytes| serde_json::from_slice(&bytes).map_err(io::Error::from));
    let (status, problem) = match answer {
        Ok(status) => (status, None),
        Err(error) => (Value::Null, Some(error.to_string())),
    };
    let pod = &record.target.pod;
    Pod { pod: format!("{}/{}", pod.namespace, pod.name), network: network.to_owned(), status, problem }
}

/// A time as its largest unit.
fn span(seconds: i64) -> String {
    const UNITS: [(i64, &str); 3] = [(86_400, "d"), (3600, "h"), (60, "min")];
    let largest = UNITS.iter().find(|(unit, _)| seconds >= 2 * unit);
    largest.map_or_else(|| format!("{seconds} s"), |(unit, name)| format!("{} {name}", seconds / unit))
}

const PARALLEL: usize = 16;

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::os::unix::net::UnixListener;

    use super::*;

    fn pod(name: &str, status: Value) -> Pod {
        Pod { pod: name.to_owned(), network: "pods".to_owned(), status, problem: None }
    }

    #[test]
    fn the_table_has_state_certificate_tunnels_and_what_is_wrong() {
        let running = serde_json::json!({"state": "running", "overlay": ["10.244.1.7/16"], "tunnels": [{}, {}],
            "certificate": {"not_after": 10_000}});
        let waiting = serde_json::json!({"state": "waiting", "last_error": "the CA\nrefused"});
        let silent = Pod { problem: Some("Connection refused".to_owned()), ..pod("shop/z", Value::Null) };
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
        let silent = Pod { problem: Some("Connection refused".to_owned()), ..pod("shop/db", Value::Null) };
        let pods = [pod("shop/web", serde_json::json!({"state": "running"})), silent];
        assert!(document(&pods, "shop/web").unwrap().contains(r#""state": "running""#));
        assert!(document(&pods, "shop/db").unwrap_err().to_string().contains("does not answer: Connection refused"));
        assert!(document(&pods, "shop/other").unwrap_err().to_string().starts_with("no pod shop/other with a tunnel"));
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
        let listener = UnixListener::bind(&socket).unwrap();
        let instance = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            stream.write_all(br#"{"state": "running", "trouble": {"lost_peers": []}}"#).unwrap();
        });
        let pods = of_node(&HostRoot::default(), &state_dir).unwrap();
        instance.join().unwrap();
        let names: Vec<&str> = pods.iter().map(|pod| pod.pod.as_str()).collect();
        assert_eq!(names, ["shop/gone", "shop/web"]);
        assert!(pods[0].problem.is_some() && pods[1].status["trouble"]["lost_peers"].is_array());
    }
}
