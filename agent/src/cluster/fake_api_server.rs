//! A fake API server for tests, and what the agent's parts do there. It keeps objects by path and panics where one is
//! not of the published API; it checks the tests in JSON patches, tells watches what changes, and remembers what it
//! was asked. It knows no permissions, but that a token may be held to its own node.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{Method, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use kube::{Client, Config};
use nebula_cni_contract::clock::SystemClock;
use nebula_cni_contract::labels::{Answer, Question};
use nebula_cni_contract::launch::Pod;
use serde_json::{Value, json};

use super::notice::Notice;
use super::published_types;
use super::queue::ApiQueue;
use super::taint::KEY;
use super::taint_keeper::{self, GRACE, TaintKeeper};
use super::worker;
use crate::metrics::Metrics;
use crate::node::Unenforced;
use crate::policy::watches::DEFINITION;
use crate::readiness::{Part, Readiness, Standing};
use crate::table::member::incarnation;

#[derive(Debug, Clone, Default)]
pub(crate) struct FakeApiServer(Arc<Mutex<Kept>>);

#[derive(Debug, Default)]
struct Kept {
    objects: BTreeMap<String, Value>,
    version: u64,
    /// Changes for watches: version, path, kind of change and object.
    changes: Vec<(u64, String, &'static str, Value)>,
    /// Whether it answers nothing but errors, and ends its watches.
    is_away: bool,
    /// Part of the paths that answer nothing but errors.
    broken: Option<&'static str>,
    /// How often all watches were told that their version is too old.
    expired: usize,
    /// Requests that change something: method, path and body.
    asked: Vec<(String, String, Value)>,
    /// Whether it knows only the older version of evictions, as servers before 1.22.
    is_old: bool,
    /// The only node that may be changed, as the chart's admission policy says it of an agent's token.
    own_node: Option<&'static str>,
}

impl FakeApiServer {
    pub(crate) async fn start(self) -> Client {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let app = Router::new().fallback(answer).with_state(self);
        tokio::spawn(async move { axum::serve(listener, app).await });
        let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
        Client::try_from(Config::new(url.parse().unwrap())).unwrap()
    }

    pub(crate) fn put(&self, path: &str, object: Value) {
        let mut kept = self.0.lock().unwrap();
        kept.store(path, object);
    }

    pub(crate) fn remove(&self, path: &str) {
        self.0.lock().unwrap().delete(path).unwrap();
    }

    pub(crate) fn is_away(&self, is_away: bool) {
        self.0.lock().unwrap().is_away = is_away;
    }

    /// Paths that contain `part` answer nothing but errors, and their watches end.
    pub(crate) fn breaks(&self, part: Option<&'static str>) {
        self.0.lock().unwrap().broken = part;
    }

    /// Tells all watches that their version is too old.
    pub(crate) fn expire(&self) {
        self.0.lock().unwrap().expired += 1;
    }

    fn get(&self, path: &str) -> Option<Value> {
        self.0.lock().unwrap().objects.get(path).cloned()
    }

    /// The changes it was asked for under a path that contains `part`.
    pub(crate) fn asked(&self, part: &str) -> Vec<(String, String, Value)> {
        self.0.lock().unwrap().asked.iter().filter(|(_, path, _)| path.contains(part)).cloned().collect()
    }

    fn pod(&self, name: &str, metadata: Value) {
        let mut pod = json!({"metadata": {"namespace": "shop", "name": name, "uid": format!("uid-{name}")}});
        pod["metadata"].as_object_mut().unwrap().extend(metadata.as_object().unwrap().clone());
        self.put(&format!("/api/v1/namespaces/shop/pods/{name}"), pod);
    }
}

impl Kept {
    fn fails(&self, path: &str) -> bool {
        self.is_away || self.broken.is_some_and(|part| path.contains(part))
    }

    fn store(&mut self, path: &str, mut object: Value) -> Value {
        published_types::hold(path, &object);
        self.version += 1;
        object["metadata"]["resourceVersion"] = self.version.to_string().into();
        let kind = if self.objects.contains_key(path) { "MODIFIED" } else { "ADDED" };
        self.changes.push((self.version, path.to_owned(), kind, object.clone()));
        self.objects.insert(path.to_owned(), object.clone());
        object
    }

    fn delete(&mut self, path: &str) -> Option<Value> {
        let object = self.objects.remove(path)?;
        self.version += 1;
        self.changes.push((self.version, path.to_owned(), "DELETED", object.clone()));
        Some(object)
    }
}

async fn answer(State(server): State<FakeApiServer>, method: Method, uri: Uri, body: Bytes) -> Response {
    if server.0.lock().unwrap().fails(uri.path()) {
        return StatusCode::SERVICE_UNAVAILABLE.into_response();
    }
    let is_defined = || server.0.lock().unwrap().objects.contains_key(DEFINITION);
    if uri.path().ends_with("/clusternetworkpolicies") && !is_defined() {
        let status = json!({"kind": "Status", "status": "Failure", "code": 404, "reason": "NotFound", "message": ""});
        return (StatusCode::NOT_FOUND, status.to_string()).into_response();
    }
    let query = uri.query().unwrap_or_default();
    if query.contains("watch=true") {
        let since = query.split('&').find_map(|pair| pair.strip_prefix("resourceVersion="));
        return watch(server, uri.path().to_owned(), since.map_or(0, |since| since.parse().unwrap()));
    }
    change(&server, &method, &uri, &body).into_response()
}

/// Whether an object with this path is in the folder, or in the folder of the same name of any namespace.
fn is_in(folder: &str, path: &str) -> bool {
    let kind = folder.rsplit('/').next().unwrap();
    path.rsplit_once(&format!("/{kind}/")).is_some_and(|(_, name)| !name.contains('/'))
}

fn watch(server: FakeApiServer, folder: String, since: u64) -> Response {
    let expired = server.0.lock().unwrap().expired;
    let lines =
        futures_util::stream::unfold((server, folder, since, expired), async |(server, folder, mut last, expired)| {
            loop {
                let text: String = {
                    let kept = server.0.lock().unwrap();
                    if kept.fails(&folder) || last == u64::MAX {
                        return None;
                    }
                    if kept.expired != expired {
                        let status = json!({"kind": "Status", "status": "Failure", "code": 410, "reason": "Expired",
                        "message": "too old resource version"});
                        let text = format!("{}\n", json!({"type": "ERROR", "object": status}));
                        drop(kept);
                        return Some((Ok(text), (server, folder, u64::MAX, expired)));
                    }
                    let news =
                        kept.changes.iter().filter(|(version, path, _, _)| *version > last && is_in(&folder, path));
                    let text = news
                        .map(|(_, _, kind, object)| format!("{}\n", json!({"type": kind, "object": object})))
                        .collect();
                    last = kept.version;
                    text
                };
                if !text.is_empty() {
                    return Some((Ok::<_, Infallible>(text), (server, folder, last, expired)));
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        });
    Body::from_stream(lines).into_response()
}

fn change(server: &FakeApiServer, method: &Method, uri: &Uri, body: &Bytes) -> (StatusCode, String) {
    let body: Value = serde_json::from_slice(body).unwrap_or_default();
    let mut kept = server.0.lock().unwrap();
    let path = uri.path().to_owned();
    if *method != Method::GET {
        kept.asked.push((method.to_string(), path.clone(), body.clone()));
    }
    let failed = |status: u16| {
        let status = StatusCode::from_u16(status).unwrap();
        let body = json!({"kind": "Status", "status": "Failure", "code": status.as_u16(), "message": "",
            "reason": if status == StatusCode::NOT_FOUND { "NotFound" } else { "" }});
        (status, body.to_string())
    };
    let good = |value: Value| (StatusCode::OK, value.to_string());
    match *method {
        Method::GET => match kept.objects.get(&path) {
            Some(object) => good(object.clone()),
            None => match path.rsplit('/').next() {
                Some(
                    "pods"
                    | "namespaces"
                    | "nodes"
                    | "leases"
                    | "services"
                    | "endpoints"
                    | "endpointslices"
                    | "networkpolicies"
                    | "clusternetworkpolicies",
                ) => {
                    // Of labels, only whether there are any counts here.
                    let selects = uri.query().is_some_and(|query| query.contains("labelSelector="));
                    let listed = kept.objects.iter().filter(|(object, _)| is_in(&path, object));
                    let items = listed.map(|(_, object)| object);
                    let items: Vec<_> =
                        items.filter(|object| !selects || object["metadata"]["labels"].is_object()).collect();
                    let metadata = json!({"resourceVersion": kept.version.to_string()});
                    good(json!({"kind": "List", "apiVersion": "v1", "metadata": metadata, "items": items}))
                }
                _ => failed(404),
            },
        },
        Method::POST if path.ends_with("/eviction") => {
            let is_known = (body["apiVersion"] == "policy/v1beta1") == kept.is_old;
            if is_known { good(json!({"kind": "Status", "status": "Success"})) } else { failed(400) }
        }
        Method::POST => {
            let path = format!("{path}/{}", body["metadata"]["name"].as_str().unwrap_or("generated"));
            if kept.objects.contains_key(&path) { failed(409) } else { good(kept.store(&path, body)) }
        }
        Method::PUT => {
            let present = kept.objects.get(&path).map(|object| object["metadata"]["resourceVersion"].clone());
            if present.as_ref() != Some(&body["metadata"]["resourceVersion"]) {
                return failed(409);
            }
            good(kept.store(&path, body))
        }
        Method::DELETE => match kept.delete(&path) {
            Some(object) => good(object),
            None => failed(404),
        },
        Method::PATCH if body.is_array() => {
            let Some(mut object) = kept.objects.get(&path).cloned() else { return failed(404) };
            if kept.own_node.is_some_and(|node| object["metadata"]["name"] != node) {
                return failed(403);
            }
            for change in body.as_array().unwrap() {
                let place = change["path"].as_str().unwrap();
                match change["op"].as_str().unwrap() {
                    "test" if object.pointer(place) != Some(&change["value"]) => return failed(422),
                    "test" => {}
                    "remove" => drop(object["spec"].as_object_mut().unwrap().remove("taints")),
                    _ => object["spec"]["taints"] = change["value"].clone(),
                }
            }
            good(kept.store(&path, object))
        }
        // Merge patches and server-side apply: the tests only need what was sent.
        Method::PATCH => good(kept.store(&path, body)),
        _ => failed(405),
    }
}

fn pod(name: &str) -> Pod {
    Pod { namespace: "shop".into(), name: name.into(), uid: format!("uid-{name}") }
}

async fn until(what: &str, done: impl Fn() -> bool) {
    for _ in 0..500 {
        if done() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("not in time: {what}");
}

fn knows(api_queue: &ApiQueue, name: &str) -> Answer {
    let question = Question {
        kubeconfig: "/".into(),
        namespace: "shop".into(),
        name: name.into(),
        uid: format!("uid-{name}"),
        of_pod: true,
        of_namespace: true,
        within_ms: 1,
    };
    api_queue.labels().ask(std::path::Path::new(""), &question, &SystemClock)
}

/// A worker that has heard of all pods of the server.
async fn worker(server: &FakeApiServer) -> (ApiQueue, Arc<Metrics>, Readiness) {
    worker_with(server, &Unenforced::default()).await
}

async fn worker_with(server: &FakeApiServer, unenforced: &Unenforced) -> (ApiQueue, Arc<Metrics>, Readiness) {
    server.put("/api/v1/namespaces/shop", json!({"metadata": {"name": "shop", "labels": {"mesh": "on"}}}));
    server.pod("known", json!({"labels": {"app": "web"}}));
    let client = server.clone().start().await;
    let (metrics, readiness) = (Arc::new(Metrics::new(true)), Readiness::default());
    let api_queue = worker::start(&client, "n1", &metrics, (&readiness, unenforced));
    assert!(matches!(knows(&api_queue, "known"), Answer::Undecided(_)), "nothing is concluded from silence");
    until("the lists", || matches!(knows(&api_queue, "known"), Answer::Labels(_))).await;
    (api_queue, metrics, readiness)
}

#[tokio::test]
async fn labels_come_from_the_pods_and_namespaces_that_are_followed() {
    let server = FakeApiServer::default();
    server.pod("static", json!({"uid": "uid-api", "annotations": {"kubernetes.io/config.mirror": "uid-static"}}));
    server.pod("other", json!({"uid": "uid-new"}));
    let (api_queue, ..) = worker(&server).await;
    let Answer::Labels(labels) = knows(&api_queue, "known") else { panic!() };
    assert_eq!((labels.pod["app"].as_str(), labels.namespace["mesh"].as_str()), ("web", "on"));
    assert_eq!(knows(&api_queue, "missing"), Answer::NoSuchPod);
    assert!(matches!(knows(&api_queue, "static"), Answer::Labels(_)), "a static pod has another uid on its node");
    assert_eq!(knows(&api_queue, "other"), Answer::OtherPod { uid: "uid-new".into() });
}

#[tokio::test]
async fn only_pods_that_come_back_are_evicted_with_their_grace_period_and_few_in_a_minute() {
    for is_old in [false, true] {
        let server = FakeApiServer::default();
        server.0.lock().unwrap().is_old = is_old;
        let owner = json!({"ownerReferences": [{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": "r", "controller": true}]});
        for number in 0..9 {
            server.pod(&format!("p{number}"), owner.clone());
        }
        server.pod("bare", json!({}));
        server.pod(
            "static",
            json!({"annotations": {"kubernetes.io/config.mirror": "x"}, "ownerReferences": [
            {"apiVersion": "v1", "kind": "Node", "name": "n1", "uid": "n", "controller": true}]}),
        );
        let (api_queue, metrics, _) = worker(&server).await;
        for name in ["bare", "static", "unknown", "p0", "p1", "p2", "p3", "p4", "p5", "p6", "p7", "p8"] {
            api_queue.evict(&pod(name));
        }
        until("all are judged", || {
            let text = metrics.text();
            text.contains("{kind=\"evict\",result=\"failed\"} 6") && text.contains("{kind=\"evict\",result=\"done\"} 6")
        })
        .await;
        let version = if is_old { "policy/v1beta1" } else { "policy/v1" };
        let asked: Vec<_> =
            server.asked("/eviction").into_iter().filter(|(.., body)| body["apiVersion"] == version).collect();
        assert_eq!(asked.len(), 6);
        for (number, (method, path, body)) in asked.iter().enumerate() {
            assert_eq!(
                (method.as_str(), path.as_str()),
                ("POST", &*format!("/api/v1/namespaces/shop/pods/p{number}/eviction"))
            );
            assert_eq!(body["deleteOptions"], json!({"preconditions": {"uid": format!("uid-p{number}")}}));
        }
    }
}

#[tokio::test]
async fn events_say_what_to_do_and_are_not_repeated() {
    let server = FakeApiServer::default();
    let (api_queue, metrics, readiness) = worker(&server).await;
    for _ in 0..5 {
        api_queue.report(Notice::crash_looping(&pod("known"), 7, 16));
    }
    api_queue.report(Notice::attached(&pod("known")));
    let chain = Part::Chain;
    readiness.set(chain, Standing::good("there"));
    tokio::time::sleep(Duration::from_millis(50)).await;
    readiness.set(chain, Standing::bad("rewritten 5 times in 30 s").advice("set cni.exclusive=false of cilium"));
    until("three events", || server.asked("/events").len() == 3).await;
    tokio::time::sleep(Duration::from_millis(50)).await;
    let told = server.asked("/events");
    assert_eq!(told.len(), 3, "{told:?}");
    let (method, path, event) = &told[0];
    assert_eq!((method.as_str(), path.as_str()), ("POST", "/apis/events.k8s.io/v1/namespaces/shop/events"));
    assert_eq!(event["reason"], "NebulaInstanceCrashLooping");
    assert_eq!((&event["regarding"]["name"], &event["regarding"]["uid"]), (&json!("known"), &json!("uid-known")));
    assert_eq!((&told[1].2["type"], &told[1].2["reason"]), (&json!("Normal"), &json!("NebulaAttached")));
    let (_, path, event) = &told[2];
    assert!(path.contains("/namespaces/default/") && event["regarding"]["kind"] == "Node", "{event}");
    assert!(event["note"].as_str().unwrap().contains("cni.exclusive=false"), "{event}");
    assert!(metrics.text().contains("nebula_cni_events_total{result=\"done\"} 3"));
}

#[tokio::test]
async fn a_pod_whose_policies_nothing_enforces_is_told_of_once_and_a_pod_of_another_node_is_not() {
    let (server, unenforced) = (FakeApiServer::default(), Unenforced::default());
    let (_api_queue, metrics, _) = worker_with(&server, &unenforced).await;
    for uids in [&["uid-known", "uid-elsewhere"][..], &[], &["uid-known"]] {
        unenforced.set(uids.iter().map(|uid| incarnation(uid)).collect());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    until("an event", || metrics.text().contains("nebula_cni_events_total{result=\"done\"} 1")).await;
    let told = server.asked("/events");
    let [(_, path, event)] = &told[..] else { panic!("one event: {told:?}") };
    assert!(path.contains("/namespaces/shop/") && event["regarding"]["kind"] == "Pod", "{event}");
    assert_eq!((&event["regarding"]["name"], &event["regarding"]["uid"]), (&json!("known"), &json!("uid-known")));
    assert_eq!((&event["type"], &event["reason"]), (&json!("Warning"), &json!("NebulaPolicyNotEnforced")));
    assert!(event["note"].as_str().unwrap().contains("Delete the pod"), "{event}");
}

#[tokio::test]
async fn the_label_of_unprotected_pods_is_set_and_removed() {
    let server = FakeApiServer::default();
    let (api_queue, ..) = worker(&server).await;
    api_queue.label(&pod("known"), true);
    api_queue.label(&pod("known"), false);
    until("both patches", || server.asked("/pods/known").len() == 2).await;
    let asked = server.asked("/pods/known");
    let expected =
        |value: Value| json!({"metadata": {"uid": "uid-known", "labels": {"nebula-cni/unprotected": value}}});
    assert_eq!([&asked[0].2, &asked[1].2], [&expected(json!("true")), &expected(Value::Null)]);
}

const N1: &str = "/api/v1/nodes/n1";

fn node(name: &str, taints: Value) -> Value {
    json!({"metadata": {"name": name}, "spec": {"taints": taints}})
}

#[tokio::test]
async fn the_taint_goes_alone_comes_back_alone_and_goes_for_good() {
    let server = FakeApiServer::default();
    let client = server.clone().start().await;
    let (ours, other) = (json!({"key": KEY, "effect": "NoSchedule"}), json!({"key": "x", "effect": "NoExecute"}));
    server.put(N1, node("n1", json!([ours, other])));
    server.put("/api/v1/nodes/n2", node("n2", json!([ours])));
    server.put(
        "/apis/coordination.k8s.io/v1/namespaces/sys/leases/l1",
        json!({"metadata": {"name": "l1", "labels": {}}, "spec": {}}),
    );
    let taints = |path: &str| server.get(path).unwrap()["spec"]["taints"].clone();
    assert!(taint_keeper::remove(&client, "n1").await.unwrap());
    assert_eq!(taints(N1), json!([other]));
    assert!(!taint_keeper::remove(&client, "n1").await.unwrap());
    assert!(taint_keeper::add(&client, "n1").await.unwrap());
    assert_eq!(taints(N1), json!([other, ours]));
    assert!(!taint_keeper::add(&client, "n1").await.unwrap());
    assert_eq!(taint_keeper::remove_for_good(&client, "sys", None).await.unwrap(), 2);
    assert_eq!((taints(N1), taints("/api/v1/nodes/n2")), (json!([other]), Value::Null));
    assert!(server.get("/apis/coordination.k8s.io/v1/namespaces/sys/leases/l1").is_none());
    assert!(taint_keeper::add(&client, "n2").await.unwrap(), "also where there was no list");
    assert_eq!(taints("/api/v1/nodes/n2"), json!([ours]));
    assert!(taint_keeper::remove(&client, "../n1").await.is_err());
    assert_eq!(taint_keeper::remove(&client, "n9").await.unwrap_err().status(), Some(404));
}

#[tokio::test]
async fn a_ready_agent_frees_its_node_and_only_one_leads() {
    let server = FakeApiServer::default();
    let client = server.clone().start().await;
    for name in ["n1", "n2"] {
        server.put(&format!("/api/v1/nodes/{name}"), node(name, json!([{"key": KEY, "effect": "NoSchedule"}])));
    }
    let keeper = |name: &str, ready: bool| {
        let readiness = Readiness::default();
        for part in Part::ALL.into_iter().filter(|_| ready) {
            readiness.set(part, Standing::good("yes"));
        }
        TaintKeeper { client: client.clone(), node: name.into(), namespace: "sys".into(), readiness, grace: GRACE }
    };
    let tasks = [tokio::spawn(keeper("n1", true).run()), tokio::spawn(keeper("n2", false).run())];
    let leases = "/apis/coordination.k8s.io/v1/namespaces/sys/leases";
    until("the ready node is free", || server.get(N1).unwrap()["spec"]["taints"].is_null()).await;
    until("a leader", || server.get(&format!("{leases}/nebula-cni-agent-leader")).is_some()).await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(server.get(&format!("{leases}/nebula-cni-agent-node-n1")).is_some());
    assert!(server.get(&format!("{leases}/nebula-cni-agent-node-n2")).is_none(), "it is not ready");
    assert_eq!(server.get("/api/v1/nodes/n2").unwrap()["spec"]["taints"][0]["key"], KEY);
    let leads =
        server.asked("/leases").into_iter().filter(|(method, path, _)| method == "POST" && path.ends_with("/leases"));
    assert!(leads.count() >= 1);
    tasks.iter().for_each(tokio::task::JoinHandle::abort);
}

#[tokio::test]
async fn a_taint_that_was_turned_off_goes_from_all_nodes_and_without_a_leader_nothing_is_touched() {
    let server = FakeApiServer::default();
    let client = server.clone().start().await;
    let (ours, other) = (json!({"key": KEY, "effect": "NoSchedule"}), json!({"key": "x", "effect": "NoExecute"}));
    server.put(N1, node("n1", json!([ours, other])));
    assert_eq!(taint_keeper::turn_off(&client, "sys", "n1").await.unwrap(), 0);
    assert_eq!(server.asked(""), [], "nobody turned it on: the taint is somebody else's");
    server.put("/api/v1/nodes/n2", node("n2", json!([ours])));
    let leases = "/apis/coordination.k8s.io/v1/namespaces/sys/leases";
    let agent = json!({"metadata": {"name": "nebula-cni-agent-node-n2", "labels": {}}, "spec": {}});
    server.put(&format!("{leases}/nebula-cni-agent-node-n2"), agent);
    let leader = json!({"metadata": {"name": "nebula-cni-agent-leader"}, "spec": {}});
    server.put(&format!("{leases}/nebula-cni-agent-leader"), leader);
    assert_eq!(taint_keeper::turn_off(&client, "sys", "n1").await.unwrap(), 2);
    let taints = |path: &str| server.get(path).unwrap()["spec"]["taints"].clone();
    assert_eq!((taints(N1), taints("/api/v1/nodes/n2")), (json!([other]), Value::Null));
    let deleted: Vec<_> = server.asked("/leases").into_iter().map(|(_, path, _)| path).collect();
    assert!(deleted.last().unwrap().ends_with("-leader"), "an interrupted attempt is repeated: {deleted:?}");
    assert!(server.get(&format!("{leases}/nebula-cni-agent-node-n2")).is_none());
    let changes = server.asked("").len();
    assert_eq!(taint_keeper::turn_off(&client, "sys", "n1").await.unwrap(), 0);
    assert_eq!(server.asked("").len(), changes);
}

#[tokio::test]
async fn where_agents_are_held_to_their_own_nodes_each_takes_its_taint_away_and_the_last_one_the_lease() {
    let server = FakeApiServer::default();
    let client = server.clone().start().await;
    let leader = "/apis/coordination.k8s.io/v1/namespaces/sys/leases/nebula-cni-agent-leader";
    server.put(leader, json!({"metadata": {"name": "nebula-cni-agent-leader"}, "spec": {}}));
    for name in ["n1", "n2"] {
        server.put(&format!("/api/v1/nodes/{name}"), node(name, json!([{"key": KEY, "effect": "NoSchedule"}])));
    }
    let taints = |name: &str| server.get(&format!("/api/v1/nodes/{name}")).unwrap()["spec"]["taints"].clone();
    server.0.lock().unwrap().own_node = Some("n2");
    assert_eq!(taint_keeper::turn_off(&client, "sys", "n1").await.unwrap_err().status(), Some(403), "not even its own");
    assert_eq!((taints("n1").is_null(), taints("n2").is_null()), (false, true));
    server.put("/api/v1/nodes/n2", node("n2", json!([{"key": KEY, "effect": "NoSchedule"}])));
    server.0.lock().unwrap().own_node = Some("n1");
    assert_eq!(taint_keeper::turn_off(&client, "sys", "n1").await.unwrap(), 1);
    assert_eq!((taints("n1").is_null(), taints("n2").is_null()), (true, false));
    assert!(server.get(leader).is_some(), "n2 still has something to take back");
    server.0.lock().unwrap().own_node = Some("n2");
    assert_eq!(taint_keeper::remove_for_good(&client, "sys", Some("n2")).await.unwrap(), 1);
    assert!(taints("n2").is_null() && server.get(leader).is_none());
}
