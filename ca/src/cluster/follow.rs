//! Follows pods and nodes at the API server, each kind by a list and then watches, so that [`Occupancy`] is as the
//! API server shows it. Nothing is asked for a single address: the API server would look at all pods for each.

use std::{
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use hyper::body::Body as _;
use kube::Client;
use serde::{Deserialize, de::DeserializeOwned};
use tokio::{
    sync::watch,
    task::JoinSet,
    time::{Instant, timeout},
};

use super::{
    ClusterError, Pod,
    occupancy::{Node, Occupancy},
    request::{self, Ask, message_of, unreachable, url_encoded},
};

/// What is followed, with the tasks that do it.
pub(super) struct Followed {
    shared: Arc<Shared>,
    /// Dropped with this value.
    _tasks: Mutex<JoinSet<()>>,
}

struct Shared {
    occupancy: Mutex<Occupancy>,
    standing: watch::Sender<[Standing; 2]>,
}

/// How one kind is followed.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Standing {
    /// All of it was read once.
    is_known: bool,
    /// Since when it is not followed any more, and what the API server says.
    lost: Option<(Instant, Lost)>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Lost {
    Forbidden,
    Unreachable,
}

/// A kind of objects.
trait Kind: DeserializeOwned + Send {
    const NUMBER: usize;
    const PATH: &'static str;
    const WHAT: &'static str;

    fn put(&self, all: &mut Occupancy);
    fn remove(&self, all: &mut Occupancy);
    /// Replaces all of this kind by those of `new`.
    fn replace(all: &mut Occupancy, new: Occupancy);
}

impl Kind for Pod {
    const NUMBER: usize = 0;
    const PATH: &'static str = "/api/v1/pods";
    const WHAT: &'static str = "pods";

    fn put(&self, all: &mut Occupancy) {
        all.put_pod(self);
    }

    fn remove(&self, all: &mut Occupancy) {
        all.remove_pod(self);
    }

    fn replace(all: &mut Occupancy, new: Occupancy) {
        all.replace_pods(new);
    }
}

impl Kind for Node {
    const NUMBER: usize = 1;
    const PATH: &'static str = "/api/v1/nodes";
    const WHAT: &'static str = "nodes";

    fn put(&self, all: &mut Occupancy) {
        all.put_node(self);
    }

    fn remove(&self, all: &mut Occupancy) {
        all.remove_node(self);
    }

    fn replace(all: &mut Occupancy, new: Occupancy) {
        all.replace_nodes(new);
    }
}

impl Followed {
    /// Begins to follow. Must be called within a runtime.
    pub(super) fn start(client: &Client) -> Self {
        let shared = Arc::new(Shared { occupancy: Mutex::default(), standing: watch::Sender::default() });
        let mut tasks = JoinSet::new();
        tasks.spawn(follow::<Pod>(Arc::clone(&shared), client.clone()));
        tasks.spawn(follow::<Node>(Arc::clone(&shared), client.clone()));
        Self { shared, _tasks: Mutex::new(tasks) }
    }

    /// What is known, once that is everything.
    pub(super) async fn occupancy(&self) -> Result<MutexGuard<'_, Occupancy>, ClusterError> {
        let mut standing = self.shared.standing.subscribe();
        let is_forbidden = |kind: &Standing| kind.lost.is_some_and(|(_, lost)| lost == Lost::Forbidden);
        let known = standing.wait_for(|all| all.iter().all(|kind| kind.is_known) || all.iter().any(is_forbidden));
        let all = match timeout(KNOWN_WITHIN, known).await {
            Ok(Ok(all)) => *all,
            Ok(Err(_)) | Err(_) => *self.shared.standing.borrow(),
        };
        for kind in all {
            match kind.lost {
                Some((since, lost)) if !kind.is_known || since.elapsed() > BELIEVED_FOR => return Err(lost.into()),
                None if !kind.is_known => return Err(ClusterError::Timeout),
                _ => {}
            }
        }
        Ok(self.shared.occupancy())
    }
}

impl From<Lost> for ClusterError {
    fn from(lost: Lost) -> Self {
        match lost {
            Lost::Forbidden => Self::Status {
                status: 403,
                what: "WATCH pods and nodes",
                message: "the CA needs the verbs list and watch on both, to know who has which address".to_owned(),
            },
            Lost::Unreachable => Self::Unreachable("pods and nodes cannot be followed".to_owned()),
        }
    }
}

impl Shared {
    fn occupancy(&self) -> MutexGuard<'_, Occupancy> {
        // Each change is complete before the lock is given back.
        self.occupancy.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_followed<K: Kind>(&self) {
        self.standing.send_if_modified(|all| {
            let now = Standing { is_known: true, lost: None };
            std::mem::replace(&mut all[K::NUMBER], now) != now
        });
    }

    /// Returns whether that is news.
    fn is_lost<K: Kind>(&self, error: &ClusterError) -> bool {
        let is_forbidden = matches!(error, ClusterError::Status { status: 401 | 403, .. });
        let lost = if is_forbidden { Lost::Forbidden } else { Lost::Unreachable };
        self.standing.send_if_modified(|all| {
            let kind = &mut all[K::NUMBER];
            let is_news = kind.lost.is_none_or(|(_, before)| before != lost);
            if is_news {
                kind.lost = Some((kind.lost.map_or_else(Instant::now, |(since, _)| since), lost));
            }
            is_news
        })
    }
}

/// Follows one kind for ever.
async fn follow<K: Kind>(shared: Arc<Shared>, client: Client) {
    loop {
        if let Err(error) = list_and_watch::<K>(&shared, &client).await
            && shared.is_lost::<K>(&error)
        {
            tracing::warn!(%error, kind = K::WHAT, "cannot follow who has which address; no new address is certified after a while");
        }
        tokio::time::sleep(RETRY_AFTER).await;
    }
}

/// Returns when everything has to be read again.
async fn list_and_watch<K: Kind>(shared: &Shared, client: &Client) -> Result<(), ClusterError> {
    let mut version = list::<K>(shared, client).await?;
    shared.is_followed::<K>();
    loop {
        match watch::<K>(shared, client, version).await? {
            Some(last) => version = last,
            None => return Ok(()),
        }
        shared.is_followed::<K>();
        // Whatever ends watches early is not asked without a pause.
        tokio::time::sleep(REOPEN_AFTER).await;
    }
}

/// Reads everything; returns the version of the list.
async fn list<K: Kind>(shared: &Shared, client: &Client) -> Result<String, ClusterError> {
    #[derive(Deserialize)]
    #[serde(bound = "K: Kind")]
    struct List<K> {
        #[serde(default)]
        metadata: ListMetadata,
        #[serde(default = "Vec::new")]
        items: Vec<K>,
    }
    #[derive(Default, Deserialize)]
    #[serde(default, rename_all = "camelCase")]
    struct ListMetadata {
        r#continue: String,
        resource_version: String,
    }
    let (mut all, mut next) = (Occupancy::default(), String::new());
    for _ in 0..MAX_PAGES {
        let path = format!("{}?limit={PAGE}&continue={}", K::PATH, url_encoded(&next));
        let page: List<K> = request::answer(client, K::WHAT, Ask::get(path)).await?.ok_or(ClusterError::Timeout)?;
        page.items.iter().for_each(|item| item.put(&mut all));
        next = page.metadata.r#continue;
        if next.is_empty() {
            K::replace(&mut shared.occupancy(), all);
            return Ok(page.metadata.resource_version);
        }
    }
    Err(ClusterError::TooLong(K::WHAT))
}

/// Takes changes over until the API server ends the watch; returns the version to go on with, or `None` if it knows
/// that one no more.
async fn watch<K: Kind>(shared: &Shared, client: &Client, mut version: String) -> Result<Option<String>, ClusterError> {
    let path = format!(
        "{}?watch=true&allowWatchBookmarks=true&timeoutSeconds={WATCH_SECONDS}&resourceVersion={}",
        K::PATH,
        url_encoded(&version)
    );
    let response = timeout(SILENT_FOR, client.send(Ask::get(path).into_http()?)).await;
    let response = response.map_err(|_| ClusterError::Timeout)?.map_err(|error| unreachable(&error))?;
    let status = response.status().as_u16();
    let mut body = response.into_body();
    let mut bytes = Vec::new();
    loop {
        let frame = timeout(SILENT_FOR, std::future::poll_fn(|context| Pin::new(&mut body).poll_frame(context)));
        let Some(frame) = frame.await.map_err(|_| ClusterError::Timeout)? else { break };
        let frame = frame.map_err(|error| ClusterError::Unreachable(super::one_line(&error.to_string())))?;
        bytes.extend_from_slice(frame.data_ref().map(|data| &data[..]).unwrap_or_default());
        if bytes.len() > MAX_EVENT_BYTES {
            return Err(ClusterError::TooLong(K::WHAT));
        }
        if status != 200 {
            continue;
        }
        while let Some(end) = bytes.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = bytes.drain(..=end).collect();
            if line.trim_ascii().is_empty() {
                continue;
            }
            match take_over::<K>(shared, &line)? {
                Some(last) => version = last,
                None => return Ok(None),
            }
        }
    }
    match status {
        200 => Ok(Some(version)),
        410 => Ok(None),
        status => Err(ClusterError::Status { status, what: K::WHAT, message: message_of(&bytes) }),
    }
}

/// Takes one event over; returns the version of its object, or `None` if the watch is over.
fn take_over<K: Kind>(shared: &Shared, line: &[u8]) -> Result<Option<String>, ClusterError> {
    #[derive(Deserialize)]
    struct Event<'a> {
        r#type: String,
        #[serde(borrow)]
        object: &'a serde_json::value::RawValue,
    }
    #[derive(Default, Deserialize)]
    #[serde(default)]
    struct Versioned {
        metadata: VersionedMetadata,
    }
    #[derive(Default, Deserialize)]
    #[serde(default, rename_all = "camelCase")]
    struct VersionedMetadata {
        resource_version: String,
    }
    let malformed = |error| ClusterError::Malformed { what: K::WHAT, error };
    let event: Event<'_> = serde_json::from_slice(line).map_err(malformed)?;
    let object = || serde_json::from_str::<K>(event.object.get()).map_err(malformed);
    match event.r#type.as_str() {
        "ADDED" | "MODIFIED" => object()?.put(&mut shared.occupancy()),
        "DELETED" => object()?.remove(&mut shared.occupancy()),
        "BOOKMARK" => {}
        _ => return Ok(None),
    }
    let versioned: Versioned = serde_json::from_str(event.object.get()).map_err(malformed)?;
    Ok(Some(versioned.metadata.resource_version))
}

const PAGE: u32 = 500;
const MAX_PAGES: usize = 600;
/// So long the API server keeps a watch open, and a little longer it may be silent. A connection that died without a
/// word is noticed after that.
const WATCH_SECONDS: u64 = 60;
const SILENT_FOR: Duration = Duration::from_secs(75);
/// A pod in etcd may have 1.5 MB, and a page of the network may have several events.
const MAX_EVENT_BYTES: usize = 16 << 20;
/// Shorter than the time that callers give us.
const KNOWN_WITHIN: Duration = Duration::from_secs(4);
/// How long the last known state is used after the connection was lost. A pod that starts in this time is also looked
/// up by its name.
const BELIEVED_FOR: Duration = Duration::from_secs(30);
const REOPEN_AFTER: Duration = Duration::from_millis(200);
const RETRY_AFTER: Duration = Duration::from_secs(1);
