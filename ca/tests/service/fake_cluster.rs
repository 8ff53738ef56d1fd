//! A fake API server made of recorded answers. Its token reviews are those of a real server of that release; pods and
//! nodes are recorded as well, and changed where a test is about the change.

use std::{
    collections::{HashMap, HashSet},
    fs,
    io::{BufRead, BufReader, Read, Write},
    net::{TcpListener, TcpStream},
    path::PathBuf,
    sync::{Arc, Mutex},
    thread,
    time::Duration,
};

use base64::{Engine, prelude::BASE64_STANDARD};
use rustls::{
    ServerConfig, ServerConnection, StreamOwned,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
};
use serde_json::{Value, json};
use tempfile::TempDir;

/// The recorded releases: one that reports the node of a token, and one that does not.
pub(crate) const RELEASES: [&str; 2] = ["1.36.2", "1.20.2"];

/// The server's behaviour.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mood {
    Well,
    /// Normal, but delayed by a fifth of a second.
    Slow,
    /// Answers 500 to everything.
    Failing,
    /// Answers 403 to everything: the CA's own account is not allowed to ask.
    Forbidding,
    /// Accepts the request and never answers.
    Silent,
    /// Answers with more than anybody should read.
    Endless,
    /// Answers 200 with something that is not JSON.
    Garbled,
}

pub(crate) struct FakeCluster {
    state: Arc<Mutex<State>>,
    cases: Vec<Value>,
    directory: TempDir,
}

struct State {
    mood: Mood,
    /// Review answers by token and audience.
    reviews: HashMap<(String, String), (u16, Value)>,
    /// Objects by path.
    objects: HashMap<String, Value>,
    /// What became of them, for watches: path, kind of change and object. The number of changes is the version.
    changes: Vec<(String, &'static str, Value)>,
    asked: Vec<String>,
    /// User, verb, resource and namespace of what is allowed; an empty namespace: in all.
    permissions: HashSet<[String; 4]>,
    /// The status of every answer about permissions, if it is no answer.
    access_status: Option<u16>,
}

impl State {
    fn put(&mut self, path: &str, object: Value) {
        let kind = if self.objects.contains_key(path) { "MODIFIED" } else { "ADDED" };
        self.changes.push((path.to_owned(), kind, object.clone()));
        self.objects.insert(path.to_owned(), object);
    }

    /// A list of all objects whose path has this part.
    fn list(&self, part: &str) -> String {
        let items: Vec<&Value> =
            self.objects.iter().filter(|(path, _)| path.contains(part)).map(|(_, object)| object).collect();
        json!({"metadata": {"resourceVersion": self.changes.len().to_string()}, "items": items}).to_string()
    }
}

impl FakeCluster {
    pub(crate) fn start(release: &str) -> Self {
        let recorded = format!("{}/../ca/tests/recorded/api-{release}.jsonl", env!("CARGO_MANIFEST_DIR"));
        let cases: Vec<Value> =
            fs::read_to_string(recorded).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let mut reviews = HashMap::new();
        for case in cases.iter().filter(|case| case["path"].as_str().unwrap().ends_with("tokenreviews")) {
            let spec = &case["request"]["spec"];
            if let (Some(token), Some([audience])) =
                (spec["token"].as_str(), spec["audiences"].as_array().map(Vec::as_slice))
            {
                let status = u16::try_from(case["status"].as_u64().unwrap()).unwrap();
                // The first recording of a token was made before anything was deleted.
                let key = (token.to_owned(), audience.as_str().unwrap().to_owned());
                reviews.entry(key).or_insert_with(|| (status, case["response"].clone()));
            }
        }
        let state = Arc::new(Mutex::new(State {
            mood: Mood::Well,
            reviews,
            objects: HashMap::new(),
            changes: Vec::new(),
            asked: Vec::new(),
            permissions: HashSet::new(),
            access_status: None,
        }));
        let cluster = Self { state, cases, directory: tempfile::tempdir().unwrap() };
        cluster.set_pod("p2", &cluster.recorded("get pod as node")["response"].clone());
        cluster.listen();
        cluster
    }

    /// The recorded case with this name.
    pub(crate) fn recorded(&self, case: &str) -> &Value {
        self.cases.iter().find(|found| found["case"] == case).unwrap_or_else(|| panic!("no case {case}"))
    }

    /// The token that a case is about.
    pub(crate) fn token(&self, case: &str) -> String {
        self.recorded(case)["request"]["spec"]["token"].as_str().unwrap().to_owned()
    }

    /// The token of pod p2, which runs on `test-node` as account `app` of namespace `shop` and is the node agent here.
    pub(crate) fn agent_token(&self) -> String {
        self.token("review: good, pod on a node")
    }

    /// Answers reviews of the token as in another case.
    pub(crate) fn review_as(&self, token: &str, case: &str) {
        let (status, response) = (201, self.recorded(case)["response"].clone());
        self.state().reviews.insert((token.to_owned(), AUDIENCE.to_owned()), (status, response));
    }

    /// Adds a token that is reviewed like the agent's, with changes to the values of `extra`.
    pub(crate) fn add_token(&self, token: &str, extra: &[(&str, &str)]) {
        let mut response = self.recorded("review: good, pod on a node")["response"].clone();
        for (name, value) in extra {
            response["status"]["user"]["extra"][format!("authentication.kubernetes.io/{name}")] = json!([value]);
        }
        self.state().reviews.insert((token.to_owned(), AUDIENCE.to_owned()), (201, response));
    }

    /// Adds the token of a user, for this audience only.
    pub(crate) fn add_user(&self, token: &str, user: &str, audience: &str) {
        let user = json!({"username": user, "uid": "u", "groups": ["system:authenticated"], "extra": {"k": ["v"]}});
        let review = json!({"status": {"authenticated": true, "audiences": [audience], "user": user}});
        self.state().reviews.insert((token.to_owned(), audience.to_owned()), (201, review));
    }

    /// As a RoleBinding does; an empty namespace is that of a ClusterRoleBinding.
    pub(crate) fn allow(&self, user: &str, verb: &str, resource: &str, namespace: &str) {
        self.state().permissions.insert([user, verb, resource, namespace].map(str::to_owned));
    }

    /// Answers with that status whether somebody may do something.
    pub(crate) fn refuse_access_reviews(&self, status: Option<u16>) {
        self.state().access_status = status;
    }

    /// The data of the ConfigMap `shop/nebula-trust`.
    pub(crate) fn config_map(&self) -> Option<Value> {
        self.state().objects.get(CONFIG_MAP).map(|object| object["data"].clone())
    }

    pub(crate) fn set_config_map(&self, data: &Value) {
        self.state().objects.insert(CONFIG_MAP.to_owned(), json!({"data": data}));
    }

    /// Adds a pod with that name and UID, otherwise like the recorded one, on `test-node`.
    pub(crate) fn add_pod(&self, name: &str, uid: &str, change: impl FnOnce(&mut Value)) {
        let mut pod = self.recorded("get pod as node")["response"].clone();
        pod["metadata"]["name"] = name.into();
        pod["metadata"]["uid"] = uid.into();
        change(&mut pod);
        self.set_pod(name, &pod);
    }

    /// The same in another namespace.
    pub(crate) fn add_pod_in(&self, namespace: &str, name: &str, uid: &str, change: impl FnOnce(&mut Value)) {
        let mut pod = self.recorded("get pod as node")["response"].clone();
        for (field, value) in [("namespace", namespace), ("name", name), ("uid", uid)] {
            pod["metadata"][field] = value.into();
        }
        change(&mut pod);
        self.state().put(&format!("/api/v1/namespaces/{namespace}/pods/{name}"), pod);
    }

    pub(crate) fn change_pod(&self, name: &str, change: impl FnOnce(&mut Value)) {
        let (mut state, path) = (self.state(), pod_path(name));
        let mut pod = state.objects[&path].clone();
        change(&mut pod);
        state.put(&path, pod);
    }

    pub(crate) fn delete_pod(&self, name: &str) {
        let (mut state, path) = (self.state(), pod_path(name));
        let pod = state.objects.remove(&path).unwrap();
        state.changes.push((path, "DELETED", pod));
    }

    pub(crate) fn set_node(&self, ranges: &[&str]) {
        let node = json!({"metadata": {"name": "test-node"}, "spec": {"podCIDR": ranges[0], "podCIDRs": ranges}});
        self.state().put(NODE, node);
    }

    /// Makes `test-node` with that UID, or makes it anew.
    pub(crate) fn make_node(&self, uid: &str) {
        self.state().put(NODE, json!({"metadata": {"name": "test-node", "uid": uid}}));
    }

    pub(crate) fn delete_node(&self) {
        let mut state = self.state();
        let node = state.objects.remove(NODE).unwrap();
        state.changes.push((NODE.to_owned(), "DELETED", node));
    }

    /// What became of the token: its pod is gone.
    pub(crate) fn revoke_token(&self, token: &str) {
        self.state().reviews.retain(|(known, _), _| known != token);
    }

    pub(crate) fn be(&self, mood: Mood) {
        self.state().mood = mood;
    }

    /// How many requests it has received.
    pub(crate) fn asked(&self) -> usize {
        self.state().asked.len()
    }

    /// How many requests it has received whose path has this part.
    pub(crate) fn asked_for(&self, part: &str) -> usize {
        self.state().asked.iter().filter(|path| path.contains(part)).count()
    }

    pub(crate) fn kubeconfig(&self) -> PathBuf {
        self.directory.path().join("kubeconfig")
    }

    fn set_pod(&self, name: &str, pod: &Value) {
        self.state().put(&pod_path(name), pod.clone());
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    fn listen(&self) {
        let made = rcgen::generate_simple_self_signed(vec!["127.0.0.1".to_owned()]).unwrap();
        let chain = vec![CertificateDer::from_pem_slice(made.cert.pem().as_bytes()).unwrap()];
        let key = PrivateKeyDer::from_pem_slice(made.signing_key.serialize_pem().as_bytes()).unwrap();
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let config = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
        let config = Arc::new(config.with_no_client_auth().with_single_cert(chain, key).unwrap());
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let kubeconfig = format!(
            "apiVersion: v1\nkind: Config\ncurrent-context: c\n\
             clusters: [{{name: c, cluster: {{server: 'https://{}', certificate-authority-data: {}}}}}]\n\
             contexts: [{{name: c, context: {{cluster: c, user: u}}}}]\nusers: [{{name: u, user: {{token: ca-token}}}}]\n",
            listener.local_addr().unwrap(),
            BASE64_STANDARD.encode(made.cert.pem()),
        );
        fs::write(self.kubeconfig(), kubeconfig).unwrap();
        let state = Arc::clone(&self.state);
        thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let (state, config) = (Arc::clone(&state), Arc::clone(&config));
                thread::spawn(move || {
                    let connection = ServerConnection::new(config).unwrap();
                    // Callers come and go; how a connection ends is not under test.
                    let _ = serve(StreamOwned::new(connection, stream), &state);
                });
            }
        });
    }
}

fn serve(stream: StreamOwned<ServerConnection, TcpStream>, state: &Mutex<State>) -> std::io::Result<()> {
    let mut stream = BufReader::new(stream);
    loop {
        let mut line = String::new();
        if stream.read_line(&mut line)? == 0 {
            return Ok(());
        }
        let mut words = line.split(' ');
        let (method, path) = (words.next().unwrap().to_owned(), words.next().unwrap().to_owned());
        let (mut length, mut is_authorized) = (0, false);
        loop {
            let mut header = String::new();
            stream.read_line(&mut header)?;
            let Some((name, value)) = header.trim().split_once(": ") else { break };
            match name.to_lowercase().as_str() {
                "content-length" => length = value.parse().unwrap(),
                "authorization" => is_authorized = value == "Bearer ca-token",
                _ => {}
            }
        }
        let mut body = vec![0; length];
        stream.read_exact(&mut body)?;
        assert!(is_authorized, "{method} {path} came without credentials");
        let mood = {
            let mut state = state.lock().unwrap();
            if !path.contains("watch=true") {
                state.asked.push(format!("{method} {path}"));
            }
            state.mood
        };
        if path.contains("watch=true") && mood == Mood::Well {
            return watch(stream.get_mut(), state, &path);
        }
        let failure = json!({"kind": "Status", "status": "Failure", "message": "secret detail of the server"});
        let (status, body) = match mood {
            Mood::Well => answer(state, &method, &path, &body),
            Mood::Slow => {
                thread::sleep(Duration::from_millis(200));
                answer(state, &method, &path, &body)
            }
            Mood::Failing => (500, failure.to_string()),
            Mood::Forbidding => (403, failure.to_string()),
            Mood::Garbled => (200, "<html>".to_owned()),
            Mood::Endless => (200, " ".repeat(17 << 20)),
            Mood::Silent => {
                thread::sleep(Duration::from_secs(20));
                return Ok(());
            }
        };
        let head =
            format!("HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n", body.len());
        stream.get_mut().write_all(head.as_bytes())?;
        stream.get_mut().write_all(body.as_bytes())?;
        stream.get_mut().flush()?;
    }
}

/// Tells what changes until nobody listens. A watch that is open does not notice moods.
fn watch(stream: &mut impl Write, state: &Mutex<State>, path: &str) -> std::io::Result<()> {
    let part = if path.starts_with("/api/v1/nodes") { "/nodes/" } else { "/pods/" };
    let mut seen: usize = path.rsplit_once("resourceVersion=").unwrap().1.parse().unwrap();
    write!(stream, "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n")?;
    stream.flush()?;
    loop {
        let (news, count) = {
            let state = state.lock().unwrap();
            let news = state.changes[seen..].iter().filter(|(path, ..)| path.contains(part));
            (news.map(|(_, kind, object)| (*kind, object.clone())).collect::<Vec<_>>(), state.changes.len())
        };
        for (kind, mut object) in news {
            object["metadata"]["resourceVersion"] = count.to_string().into();
            let line = format!("{}\n", json!({"type": kind, "object": object}));
            write!(stream, "{:x}\r\n{line}\r\n", line.len())?;
        }
        stream.flush()?;
        seen = count;
        thread::sleep(Duration::from_millis(10));
    }
}

fn answer(state: &Mutex<State>, method: &str, path: &str, body: &[u8]) -> (u16, String) {
    let mut state = state.lock().unwrap();
    if method == "POST" && path == "/apis/authentication.k8s.io/v1/tokenreviews" {
        let review: Value = serde_json::from_slice(body).unwrap();
        let key = (
            review["spec"]["token"].as_str().unwrap().to_owned(),
            review["spec"]["audiences"][0].as_str().unwrap().to_owned(),
        );
        let unknown = (201, json!({"status": {"user": {}, "error": "invalid bearer token"}}));
        let (status, response) = state.reviews.get(&key).unwrap_or(&unknown);
        return (*status, response.to_string());
    }
    if method == "POST" && path == "/apis/authorization.k8s.io/v1/subjectaccessreviews" {
        if let Some(status) = state.access_status {
            return (status, json!({"kind": "Status", "status": "Failure", "message": "no"}).to_string());
        }
        let review: Value = serde_json::from_slice(body).unwrap();
        let (spec, wanted) = (&review["spec"], &review["spec"]["resourceAttributes"]);
        // What the review of the token said of the user comes with it.
        assert_eq!((&spec["uid"], &spec["groups"][0]), (&json!("u"), &json!("system:authenticated")), "{review}");
        assert_eq!((&spec["extra"]["k"][0], &wanted["group"]), (&json!("v"), &json!("nebula-cni")), "{review}");
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        let mut asked = [&spec["user"], &wanted["verb"], &wanted["resource"], &wanted["namespace"]].map(text);
        let is_of_namespace = state.permissions.contains(&asked);
        asked[3].clear();
        let is_allowed = is_of_namespace || state.permissions.contains(&asked);
        return (201, json!({"status": {"allowed": is_allowed}}).to_string());
    }
    for (start, part) in [("/api/v1/pods?", "/pods/"), ("/api/v1/nodes?", "/nodes/")] {
        if path.starts_with(start) {
            return (200, state.list(part));
        }
    }
    if method == "PATCH" {
        assert_eq!(path, format!("{CONFIG_MAP}?fieldManager=nebula-ca&force=true"));
        let applied: Value = serde_json::from_slice(body).unwrap();
        let object = state.objects.entry(CONFIG_MAP.to_owned()).or_insert_with(|| json!({"data": {}}));
        for (key, value) in applied["data"].as_object().unwrap() {
            object["data"][key] = value.clone();
        }
        return (200, object.to_string());
    }
    match state.objects.get(path) {
        Some(object) => (200, object.to_string()),
        None => (404, json!({"kind": "Status", "status": "Failure", "code": 404}).to_string()),
    }
}

fn pod_path(name: &str) -> String {
    format!("/api/v1/namespaces/shop/pods/{name}")
}

const NODE: &str = "/api/v1/nodes/test-node";
const CONFIG_MAP: &str = "/api/v1/namespaces/shop/configmaps/nebula-trust";

/// Audience of the recorded tokens.
pub(crate) const AUDIENCE: &str = "aud.example";
