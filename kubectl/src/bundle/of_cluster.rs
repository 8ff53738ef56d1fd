//! What the API server says: workloads and pods of Nebula, its configuration, events, and the last lines of logs. No
//! Secret is asked for, and of ConfigMaps only those of Nebula's own names.

use futures_util::{StreamExt, stream};
use serde_json::{Value, json};

use super::contents::{Contents, text_of};
use crate::cluster::{Cluster, ClusterError, is_name};
use crate::outcome::ToolError;
use crate::shown::Printer;

pub(super) async fn collect(
    cluster: &Cluster,
    system: &str,
    contents: &mut Contents,
    printer: &mut Printer<'_>,
) -> Result<(), ToolError> {
    printer.note("asking the API server about workloads, configuration and events")?;
    if let Some(version) = get(cluster, "/version", "kubernetes/version.json", contents).await {
        contents.document("kubernetes/version.json", &version);
    }
    let mut workloads = Vec::new();
    for (kind, name) in WORKLOADS {
        let path = format!("/apis/apps/v1/namespaces/{system}/{kind}/{name}");
        workloads.extend(get(cluster, &path, "kubernetes/workloads.jsonl", contents).await.as_ref().map(workload));
    }
    contents.documents("kubernetes/workloads.jsonl", &workloads);
    for name in CONFIG_MAPS {
        let (path, file) =
            (format!("/api/v1/namespaces/{system}/configmaps/{name}"), format!("kubernetes/config-{name}.txt"));
        if let Some(map) = get(cluster, &path, &file, contents).await {
            contents.text(&file, &config_map(&map));
        }
    }
    events(cluster, system, contents).await;
    let path = format!("/api/v1/namespaces/{system}/pods?labelSelector={NEBULA}");
    let Some(list) = get(cluster, &path, "kubernetes/pods.jsonl", contents).await else { return Ok(()) };
    let pods: Vec<&Value> = list["items"].as_array().into_iter().flatten().collect();
    contents.documents("kubernetes/pods.jsonl", &pods.iter().map(|pod| of_pod(pod)).collect::<Vec<_>>());
    logs(cluster, system, &pods, contents, printer).await
}

async fn get(cluster: &Cluster, path: &str, file: &str, contents: &mut Contents) -> Option<Value> {
    match contents.in_time(cluster.get(path)).await? {
        Ok(value) => Some(value),
        Err(error) => {
            contents.missing(file, &error.to_string());
            None
        }
    }
}

/// What is known of a workload, without the environment and arguments of its containers.
fn workload(object: &Value) -> Value {
    let containers = object["spec"]["template"]["spec"]["containers"].as_array().into_iter().flatten();
    let images: Vec<&Value> = containers.map(|container| &container["image"]).collect();
    json!({"kind": object["kind"], "name": object["metadata"]["name"], "generation": object["metadata"]["generation"],
        "replicas": object["spec"]["replicas"], "images": images, "status": object["status"]})
}

fn config_map(map: &Value) -> String {
    let mut text = String::new();
    for (key, value) in map["data"].as_object().into_iter().flatten() {
        text += &format!("# {key}\n{}\n", text_of(value));
    }
    text
}

fn of_pod(pod: &Value) -> Value {
    let containers = pod["status"]["containerStatuses"].as_array().into_iter().flatten();
    let container = |status: &Value| {
        json!({"name": status["name"], "image": status["image"], "ready": status["ready"],
            "restarts": status["restartCount"], "state": status["state"], "last_state": status["lastState"]})
    };
    json!({"name": pod["metadata"]["name"], "node": pod["spec"]["nodeName"], "created": pod["metadata"]["creationTimestamp"],
        "deleted": pod["metadata"]["deletionTimestamp"], "phase": pod["status"]["phase"], "reason": pod["status"]["reason"],
        "conditions": pod["status"]["conditions"], "containers": containers.map(container).collect::<Vec<_>>()})
}

/// Events in Nebula's namespace, and those that agents wrote where the user looks.
async fn events(cluster: &Cluster, system: &str, contents: &mut Contents) {
    let all = cluster.namespace.as_ref().map_or_else(String::new, |namespace| format!("namespaces/{namespace}/"));
    for (file, path) in [
        ("kubernetes/events-of-nebula.jsonl", format!("/api/v1/namespaces/{system}/events?limit={MOST_EVENTS}")),
        (
            "kubernetes/events-of-agents.jsonl",
            format!("/api/v1/{all}events?fieldSelector={REPORTED}&limit={MOST_EVENTS}"),
        ),
    ] {
        let Some(list) = get(cluster, &path, file, contents).await else { continue };
        let event = |event: &Value| {
            json!({"time": event["eventTime"], "last": event["lastTimestamp"], "count": event["count"], "type": event["type"],
                "reason": event["reason"], "about": event["involvedObject"], "note": event["message"]})
        };
        contents.documents(file, &list["items"].as_array().into_iter().flatten().map(event).collect::<Vec<_>>());
        if !text_of(&list["metadata"]["continue"]).is_empty() {
            contents.missing(file, &format!("events beyond the first {MOST_EVENTS}"));
        }
    }
}

/// A log that is read.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Log {
    file: String,
    path: String,
}

async fn logs(
    cluster: &Cluster,
    system: &str,
    pods: &[&Value],
    contents: &mut Contents,
    printer: &mut Printer<'_>,
) -> Result<(), ToolError> {
    let mut sorted: Vec<&Value> = pods.to_vec();
    sorted.sort_by_key(|pod| worth(pod));
    for pod in sorted.iter().skip(MOST_LOGGED) {
        contents.missing(
            "logs",
            &format!("{}: there are logs of {MOST_LOGGED} pods at most", text_of(&pod["metadata"]["name"])),
        );
    }
    let logs: Vec<Log> =
        sorted.iter().take(MOST_LOGGED).enumerate().flat_map(|(at, pod)| logs_of(system, at, pod)).collect();
    printer.note(&format!("reading {} logs", logs.len()))?;
    let read = stream::iter(&logs).map(async |log: &Log| (log, read(cluster, log).await));
    let over = tokio::time::sleep(contents.left() / 2);
    let mut read = std::pin::pin!(read.buffer_unordered(AT_A_TIME).take_until(over));
    let mut left: Vec<&Log> = logs.iter().collect();
    while let Some((log, read)) = read.next().await {
        left.retain(|other| *other != log);
        match read {
            Ok(text) => contents.text(&log.file, &text),
            Err(error) => contents.missing(&log.file, &error.to_string()),
        }
    }
    for log in left {
        contents.missing(&log.file, "it was not there in the time that there was (--within)");
    }
    Ok(())
}

/// What is worth more comes first: the CA, pods that are not ready, and those that were restarted.
fn worth(pod: &Value) -> (bool, bool, std::cmp::Reverse<u64>, String) {
    let conditions = pod["status"]["conditions"].as_array().into_iter().flatten();
    let is_ready = { conditions }.any(|one| one["type"] == "Ready" && one["status"] == "True");
    let is_agent = pod["metadata"]["labels"]["app.kubernetes.io/name"] == "nebula-cni-agent";
    (is_agent, is_ready, std::cmp::Reverse(restarts(pod)), text_of(&pod["metadata"]["name"]).to_owned())
}

fn restarts(pod: &Value) -> u64 {
    let statuses = pod["status"]["containerStatuses"].as_array().into_iter().flatten();
    statuses.filter_map(|status| status["restartCount"].as_u64()).max().unwrap_or_default()
}

fn logs_of(system: &str, at: usize, pod: &Value) -> Vec<Log> {
    let name = text_of(&pod["metadata"]["name"]);
    let containers =
        pod["spec"]["containers"].as_array().into_iter().flatten().map(|container| text_of(&container["name"]));
    let mut logs = Vec::new();
    for container in containers.filter(|container| is_name(container) && is_name(name)).take(MOST_CONTAINERS) {
        let path = format!(
            "/api/v1/namespaces/{system}/pods/{name}/log?container={container}&timestamps=true&tailLines={LINES}&limitBytes={BYTES}"
        );
        // A tar has room for a hundred characters.
        let cut = |text: &str, most: usize| text.chars().take(most).collect::<String>();
        let file = format!("logs/{at:02}-{}-{}", cut(name, 42), cut(container, 16));
        if restarts(pod) > 0 {
            logs.push(Log { file: format!("{file}.before.log"), path: format!("{path}&previous=true") });
        }
        logs.push(Log { file: format!("{file}.log"), path });
    }
    logs
}

async fn read(cluster: &Cluster, log: &Log) -> Result<String, ClusterError> {
    let (status, bytes) = cluster.raw("GET", &log.path, None, Vec::new(), BYTES + MOST_OF_ERROR).await?;
    let text = String::from_utf8_lossy(&bytes).into_owned();
    if (200..300).contains(&status) {
        return Ok(text);
    }
    let document: Value = serde_json::from_str(&text).unwrap_or_default();
    let (what, message) = ("GET its log".to_owned(), text_of(&document["message"]).to_owned());
    Err(ClusterError::Refused { what, status, message, hint: String::new() })
}

const WORKLOADS: [(&str, &str); 3] =
    [("deployments", "nebula-ca"), ("statefulsets", "nebula-lighthouse"), ("daemonsets", "nebula-cni-agent")];
const CONFIG_MAPS: [&str; 4] = ["nebula-cni-agent", "nebula-ca", "nebula-lighthouse", "nebula-trust"];
/// Label selector: those three.
const NEBULA: &str = "app.kubernetes.io%2Fname%20in%20%28nebula-cni-agent%2Cnebula-ca%2Cnebula-lighthouse%29";
/// Field selector: what agents report.
const REPORTED: &str = "reportingComponent%3Dnebula-cni-agent";
const MOST_EVENTS: usize = 1000;
const MOST_LOGGED: usize = 50;
const MOST_CONTAINERS: usize = 4;
const AT_A_TIME: usize = 8;
const LINES: usize = 2000;
const BYTES: usize = 512 << 10;
const MOST_OF_ERROR: usize = 64 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logs_of_what_is_not_well_come_first_and_hostile_names_lead_nowhere() {
        let pod = |name: &str, app: &str, ready: &str, restarts: u64| {
            json!({"metadata": {"name": name, "labels": {"app.kubernetes.io/name": app}}, "spec": {"containers": [{"name": "c"}]},
                "status": {"conditions": [{"type": "Ready", "status": ready}], "containerStatuses": [{"restartCount": restarts}]}})
        };
        let pods = [
            pod("a", "nebula-cni-agent", "True", 0),
            pod("b", "nebula-cni-agent", "True", 2),
            pod("c", "nebula-cni-agent", "False", 0),
            pod("ca", "nebula-ca", "True", 0),
        ];
        let mut sorted: Vec<&Value> = pods.iter().collect();
        sorted.sort_by_key(|pod| worth(pod));
        assert_eq!(
            sorted.iter().map(|pod| text_of(&pod["metadata"]["name"])).collect::<Vec<_>>(),
            ["ca", "c", "b", "a"]
        );
        let logs = logs_of("nebula-system", 7, &pods[1]);
        assert_eq!(
            logs.iter().map(|log| log.file.as_str()).collect::<Vec<_>>(),
            ["logs/07-b-c.before.log", "logs/07-b-c.log"]
        );
        assert!(logs[0].path.ends_with("&previous=true"), "{logs:?}");
        assert!(logs_of("n", 0, &pod("../secrets/x", "nebula-ca", "True", 0)).is_empty());
        let long = logs_of("n", 0, &pod(&"x".repeat(253), "nebula-ca", "True", 1));
        assert!(long.iter().all(|log| log.file.len() + "nebula-bundle/".len() <= 100), "{long:?}");
    }

    #[test]
    fn of_workloads_and_pods_neither_environment_nor_annotations_are_kept() {
        let secret = json!({"name": "c", "image": "i:1", "env": [{"value": "planted"}], "args": ["planted"]});
        let object = json!({"kind": "Deployment", "metadata": {"name": "nebula-ca", "annotations": {"x": "planted"}},
            "spec": {"replicas": 1, "template": {"spec": {"containers": [secret]}}}, "status": {"readyReplicas": 1}});
        let pod = json!({"metadata": {"name": "p", "annotations": {"x": "planted"}}, "spec": {"containers": [secret]}});
        let text = format!("{}{}", workload(&object), of_pod(&pod));
        assert!(text.contains("i:1") && !text.contains("planted"), "{text}");
    }
}
