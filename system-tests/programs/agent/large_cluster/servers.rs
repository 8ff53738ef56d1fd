//! A fake API server and a fake CA in the test's own process. The API server lists its objects in pages and tells
//! watches of changes; the CA has nothing but the directory of those who have certificates, and the two answers that
//! agents ask for besides. Neither checks who asks.

use std::collections::BTreeMap;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

use nebula_cert::directory::{DIRECTORY_PATH, Directory, Member, PAGE_BYTES};
use rustls::{ServerConfig, ServerConnection, StreamOwned};
use serde_json::{Value, json};

use crate::world;

type Stream = BufReader<StreamOwned<ServerConnection, TcpStream>>;

/// What a client asked.
pub(super) struct Request {
    method: String,
    path: String,
    query: BTreeMap<String, String>,
    /// It wants objects without specification and status.
    of_metadata: bool,
    body: Vec<u8>,
}

/// Answers requests in threads of a network namespace.
pub(super) trait Server: Send + Sync + 'static {
    /// Whether the connection can be used again.
    fn answer(&self, request: &Request, stream: &mut Stream) -> io::Result<bool>;
}

/// Serves at this port of the loopback address of `namespace`.
pub(super) fn start(namespace: String, port: u16, tls: &Arc<ServerConfig>, server: Arc<impl Server>) {
    let (ready, listening) = std::sync::mpsc::channel();
    let tls = Arc::clone(tls);
    thread::spawn(move || {
        world::enter(&namespace);
        let listener = TcpListener::bind(("127.0.0.1", port)).unwrap();
        ready.send(()).unwrap();
        for stream in listener.incoming().map_while(Result::ok) {
            let (tls, server) = (Arc::clone(&tls), Arc::clone(&server));
            // How a connection ends is not part of the test.
            thread::spawn(move || drop(converse(tls, stream, &*server)));
        }
    });
    listening.recv().unwrap();
}

fn converse(tls: Arc<ServerConfig>, stream: TcpStream, server: &impl Server) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut stream = BufReader::new(StreamOwned::new(ServerConnection::new(tls).unwrap(), stream));
    while let Some(request) = Request::read(&mut stream)? {
        if !server.answer(&request, &mut stream)? {
            break;
        }
    }
    Ok(())
}

impl Request {
    fn read(stream: &mut Stream) -> io::Result<Option<Self>> {
        let mut line = String::new();
        if stream.read_line(&mut line)? == 0 {
            return Ok(None);
        }
        let mut words = line.split(' ').map(str::to_owned);
        let (method, target) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
        let (mut length, mut of_metadata) = (0, false);
        loop {
            let mut header = String::new();
            stream.read_line(&mut header)?;
            let Some((key, value)) = header.trim().split_once(": ") else { break };
            match key.to_ascii_lowercase().as_str() {
                "content-length" => length = value.parse().unwrap(),
                "accept" => of_metadata = value.contains("as=PartialObjectMetadata"),
                _ => {}
            }
        }
        let mut body = vec![0; length];
        stream.read_exact(&mut body)?;
        let (path, query) = target.split_once('?').unwrap_or((&target, ""));
        let pairs = query.split('&').filter_map(|pair| pair.split_once('='));
        let query = pairs.map(|(key, value)| (key.to_owned(), value.replace("%3D", "="))).collect();
        Ok(Some(Self { method, path: path.to_owned(), query, of_metadata, body }))
    }

    fn number(&self, key: &str) -> Option<u64> {
        self.query.get(key)?.parse().ok()
    }
}

fn respond(stream: &mut Stream, status: u16, body: &str) -> io::Result<bool> {
    let length = body.len();
    let head = format!("HTTP/1.1 {status} x\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n");
    let stream = stream.get_mut();
    stream.write_all(head.as_bytes())?;
    stream.write_all(body.as_bytes())?;
    stream.flush()?;
    Ok(true)
}

/// A fake API server.
#[derive(Default)]
pub(super) struct FakeApi {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    version: u64,
    collections: BTreeMap<&'static str, Vec<Arc<Object>>>,
    /// What watches are told: version, collection and object.
    changes: Vec<(u64, &'static str, Arc<Object>)>,
}

/// An object as it is sent, whole and without specification and status.
struct Object {
    whole: String,
    metadata: String,
    node: String,
}

impl Object {
    fn new(mut object: Value, version: u64) -> Arc<Self> {
        object["metadata"]["resourceVersion"] = version.to_string().into();
        let metadata =
            json!({"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": object["metadata"]});
        let node = object["spec"]["nodeName"].as_str().unwrap_or_default().to_owned();
        Arc::new(Self { whole: object.to_string(), metadata: metadata.to_string(), node })
    }

    fn text(&self, request: &Request) -> &str {
        if request.of_metadata { &self.metadata } else { &self.whole }
    }

    fn is_asked_for(&self, request: &Request) -> bool {
        let selector = request.query.get("fieldSelector").and_then(|selector| selector.strip_prefix("spec.nodeName="));
        selector.is_none_or(|node| node == self.node)
    }
}

impl FakeApi {
    /// Adds objects to the collection with this path, before anybody asks.
    pub(super) fn fill(&self, collection: &'static str, objects: impl IntoIterator<Item = Value>) {
        let mut state = self.state();
        state.version += 1;
        let version = state.version;
        state
            .collections
            .entry(collection)
            .or_default()
            .extend(objects.into_iter().map(|object| Object::new(object, version)));
    }

    /// Replaces an object, and tells watches of it.
    pub(super) fn replace(&self, collection: &'static str, index: usize, object: Value) {
        let mut state = self.state();
        state.version += 1;
        let version = state.version;
        let object = Object::new(object, version);
        state.collections.get_mut(collection).unwrap()[index] = Arc::clone(&object);
        state.changes.push((version, collection, object));
        self.changed.notify_all();
    }

    /// Bytes of all objects of a collection.
    pub(super) fn bytes(&self, collection: &str) -> usize {
        self.state().collections[collection].iter().map(|object| object.whole.len()).sum()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    fn list(&self, request: &Request) -> Option<String> {
        let state = self.state();
        let all = state.collections.get(request.path.as_str())?;
        let all: Vec<_> = all.iter().filter(|object| object.is_asked_for(request)).collect();
        let from = request.number("continue").unwrap_or_default() as usize;
        let until = request.number("limit").map_or(all.len(), |limit| all.len().min(from + limit as usize));
        let items: Vec<&str> = all[from..until].iter().map(|object| object.text(request)).collect();
        let rest = if until < all.len() { until.to_string() } else { String::new() };
        let metadata = json!({"resourceVersion": state.version.to_string(), "continue": rest});
        let kind = if request.of_metadata { "PartialObjectMetadataList" } else { "List" };
        let version = if request.of_metadata { "meta.k8s.io/v1" } else { "v1" };
        Some(format!(
            r#"{{"kind":"{kind}","apiVersion":"{version}","metadata":{metadata},"items":[{}]}}"#,
            items.join(",")
        ))
    }

    fn watch(&self, request: &Request, stream: &mut Stream) -> io::Result<bool> {
        let stream = stream.get_mut();
        stream.write_all(b"HTTP/1.1 200 x\r\ncontent-type: application/json\r\nconnection: close\r\n\r\n")?;
        stream.flush()?;
        let until = Instant::now() + Duration::from_secs(request.number("timeoutSeconds").unwrap_or(300));
        let mut known = request.number("resourceVersion").unwrap_or_default();
        while Instant::now() < until {
            let mut state = self.state();
            if state.version == known {
                state = self.changed.wait_timeout(state, until.saturating_duration_since(Instant::now())).unwrap().0;
            }
            let is_news = |(version, collection, object): &&(u64, &str, Arc<Object>)| {
                *version > known && *collection == request.path && object.is_asked_for(request)
            };
            let news = state.changes.iter().filter(is_news);
            let text: String = news
                .map(|(_, _, object)| format!("{{\"type\":\"MODIFIED\",\"object\":{}}}\n", object.text(request)))
                .collect();
            known = state.version;
            drop(state);
            stream.write_all(text.as_bytes())?;
            stream.flush()?;
        }
        Ok(false)
    }
}

impl Server for FakeApi {
    fn answer(&self, request: &Request, stream: &mut Stream) -> io::Result<bool> {
        if request.query.get("watch").is_some_and(|watch| watch == "true") {
            return self.watch(request, stream);
        }
        if request.method == "POST" {
            return respond(stream, 201, &String::from_utf8_lossy(&request.body));
        }
        let found = match request.path.as_str() {
            "/version" | "/apis/discovery.k8s.io/v1" => Some("{}".to_owned()),
            _ => self.list(request),
        };
        match found {
            Some(found) => respond(stream, 200, &found),
            None => {
                let status =
                    json!({"kind": "Status", "status": "Failure", "code": 404, "reason": "NotFound", "message": ""});
                respond(stream, 404, &status.to_string())
            }
        }
    }
}

/// The directory of a fake CA, whose members stay.
pub(super) struct FakeDirectory {
    pages: Vec<Directory>,
}

const VERSION: &str = "fake-1";

impl FakeDirectory {
    /// In pages as the CA makes them.
    pub(super) fn new(members: impl IntoIterator<Item = Member>) -> Self {
        let page =
            || Directory { version: VERSION.to_owned(), full: true, pods: Vec::new(), gone: Vec::new(), next: None };
        let (mut pages, mut bytes) = (vec![page()], 0);
        for member in members {
            bytes += serde_json::to_string(&member).unwrap().len();
            let next = format!("{:04x}", pages.len());
            pages.last_mut().unwrap().pods.push(member);
            if bytes > PAGE_BYTES {
                pages.last_mut().unwrap().next = Some(next);
                pages.push(page());
                bytes = 0;
            }
        }
        Self { pages }
    }
}

impl Server for FakeDirectory {
    fn answer(&self, request: &Request, stream: &mut Stream) -> io::Result<bool> {
        match request.path.as_str() {
            "/readyz" => respond(stream, 200, "{}"),
            DIRECTORY_PATH if request.query.contains_key("since") => {
                thread::sleep(Duration::from_secs(request.number("wait").unwrap_or_default()));
                let (pods, gone, next) = (Vec::new(), Vec::new(), None);
                let nothing = Directory { version: VERSION.to_owned(), full: false, pods, gone, next };
                respond(stream, 200, &serde_json::to_string(&nothing).unwrap())
            }
            DIRECTORY_PATH => {
                let page = request.query.get("from").map_or(0, |from| usize::from_str_radix(from, 16).unwrap());
                respond(stream, 200, &serde_json::to_string(&self.pages[page]).unwrap())
            }
            _ => respond(stream, 404, r#"{"code": "not_found", "message": "this CA is a fake"}"#),
        }
    }
}
