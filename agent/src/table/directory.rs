//! The CA's directory, followed by long polls: all pages once, then what changes.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nebula_cert::directory::{DIRECTORY_PATH, Directory, MAX_PAGE_BYTES, MAX_WAIT_SECONDS};
use nebula_cert::hex;
use nebula_cert::issuance::Refusal;
use nebula_cni_contract::launch::port_number;
use zeroize::Zeroizing;

use super::facts::{Facts, Input};
use super::kept::Keep;
use super::member::{Member, PodId, addresses, id, incarnation};
use super::seeded::Map;
use crate::ca::{CaError, Target};
use crate::config::{TLS_CA_FILE, TOKEN_FILE};
use crate::durable;
use crate::host_root::HostRoot;

/// Asks one CA. Keeps its connection.
pub struct DirectoryClient {
    target: Target,
    token: PathBuf,
    roots: PathBuf,
    agent: Option<ureq::Agent>,
    /// Version of what was taken over last; `None`: everything is to be read.
    version: Option<String>,
    /// Pages of a full answer that is not complete yet, and the version of the first one.
    reading: Option<(String, Map<PodId, Member>)>,
    cursor: Option<String>,
}

/// An answer, and how long the CA wants to be left alone.
#[derive(Debug)]
pub struct Answer {
    directory: Directory,
    /// Seconds before the next question.
    pub retry_after: Option<Duration>,
}

/// Why the directory cannot be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DirectoryError {
    /// The node's token cannot be read.
    #[error("cannot read the agent's token {path}: {source}")]
    Token {
        /// Where.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The TLS roots are unusable.
    #[error(transparent)]
    Roots(#[from] CaError),
    /// It does not answer.
    #[error("cannot read the directory of the CA at {url}: {source}")]
    Unreachable {
        /// Where.
        url: String,
        /// Why.
        source: Box<ureq::Error>,
    },
    /// It refuses.
    #[error("the CA refuses its directory: {message} ({code})")]
    Refused {
        /// Its stable code.
        code: String,
        /// Its explanation.
        message: String,
    },
    /// It answers something else.
    #[error("the CA's answer is no directory: {0}")]
    Malformed(String),
}

impl DirectoryError {
    /// What the operator can do about it.
    #[must_use]
    pub fn advice(&self) -> &'static str {
        match self {
            Self::Token { .. } => "the agent's pod needs a projected volume with a token for the audience nebula-ca",
            Self::Roots(_) => "the CA writes the ConfigMap nebula-trust when it starts",
            Self::Unreachable { .. } => "is nebula-ca running, and does a network policy keep nodes from it?",
            Self::Refused { code, .. } if code == "not_found" => {
                "upgrade nebula-ca first: this release has no directory"
            }
            Self::Refused { .. } => "kubernetes.node_account in the CA's policy must be the agent's service account",
            Self::Malformed(_) => "is that address the CA's?",
        }
    }
}

impl DirectoryClient {
    /// Knows nothing yet.
    #[must_use]
    pub fn new(target: Target, host: &HostRoot) -> Self {
        let at = |path: &str| host.resolve(Path::new(path));
        let (token, roots) = (at(TOKEN_FILE), at(TLS_CA_FILE));
        Self { target, token, roots, agent: None, version: None, reading: None, cursor: None }
    }

    /// Asks for what comes next; waits for news if everything is known. Blocks for at most about a minute.
    ///
    /// # Errors
    /// See [`DirectoryError`]. The next question reads token and roots again.
    pub fn ask(&mut self) -> Result<Answer, DirectoryError> {
        let unreadable = |source| DirectoryError::Token { path: self.token.clone(), source };
        let token = durable::read_bounded(&self.token, MAX_TOKEN).map(Zeroizing::new).map_err(unreadable)?;
        let token = Zeroizing::new(String::from_utf8_lossy(token.trim_ascii()).into_owned());
        let mut path = DIRECTORY_PATH.to_owned();
        let mut within = ANSWER_WITHIN;
        if let Some(cursor) = &self.cursor {
            let _ = write!(path, "?from={cursor}");
        } else if let Some(version) = &self.version {
            let _ = write!(path, "?wait={MAX_WAIT_SECONDS}&since={version}");
            within += Duration::from_secs(MAX_WAIT_SECONDS);
        }
        let agent = self.agent.take().map_or_else(|| self.target.agent(&self.roots), Ok)?;
        let unreachable =
            |source| DirectoryError::Unreachable { url: self.target.url.clone(), source: Box::new(source) };
        let request = agent.get(self.target.request_url(&path)).config().timeout_global(Some(within)).build();
        let bearer = Zeroizing::new(format!("Bearer {}", *token));
        let mut response = request.header("authorization", bearer.as_str()).call().map_err(unreachable)?;
        let status = response.status().as_u16();
        let retry_after = response.headers().get("retry-after").and_then(|value| value.to_str().ok()?.parse().ok());
        let body = response.body_mut().with_config().limit(MAX_PAGE_BYTES as u64).read_to_vec().map_err(unreachable)?;
        if status != 200 {
            return Err(match serde_json::from_slice::<Refusal>(&body) {
                Ok(Refusal { code, message }) => DirectoryError::Refused { code, message },
                Err(_) => DirectoryError::Malformed(format!("status {status} without a reason")),
            });
        }
        let directory: Directory =
            serde_json::from_slice(&body).map_err(|error| DirectoryError::Malformed(error.to_string()))?;
        if self.reading.as_ref().is_some_and(|(_, all)| all.len() > MAX_MEMBERS) {
            return Err(DirectoryError::Malformed(format!("it has more than {MAX_MEMBERS} members")));
        }
        let is_plain = |text: &str| text.len() <= MAX_VERSION && text.bytes().all(|byte| byte.is_ascii_graphic());
        let is_good = is_plain(&directory.version)
            && directory.next.as_ref().is_none_or(|next| next.len() <= MAX_CURSOR && hex::decode(next).is_some());
        if !is_good {
            return Err(DirectoryError::Malformed("its version or cursor has a form that no CA gives".to_owned()));
        }
        self.agent = Some(agent);
        Ok(Answer { directory, retry_after: retry_after.map(Duration::from_secs) })
    }

    /// Takes an answer over; returns whether the table changes with it.
    pub fn take(&mut self, answer: Answer, facts: &mut Facts) -> bool {
        let Directory { version, full, pods, gone, next } = answer.directory;
        let members = pods.into_iter().map(|pod| {
            // No UID of a pod has a space.
            let is_host = pod.namespace.is_empty() && pod.uid.starts_with("host ");
            let member = Member {
                addresses: addresses(pod.addresses),
                incarnation: incarnation(&pod.uid),
                port_number: port_number(&pod.uid),
                is_host,
            };
            (id(&pod.uid), member)
        });
        if full {
            // What changes while the pages are read comes after the version of the first one.
            let (first, mut all) = self.reading.take().unwrap_or_else(|| (version, Map::default()));
            all.extend(members);
            self.cursor = next;
            if self.cursor.is_some() {
                self.reading = Some((first, all));
                return false;
            }
            self.version = Some(first);
            let has_changed = facts.is_heard(Input::Directory) | (facts.members != all);
            facts.members = all;
            return has_changed;
        }
        let mut has_changed = false;
        for uid in gone {
            has_changed |= facts.members.put(id(&uid), None);
        }
        for (id, member) in members {
            has_changed |= facts.members.put(id, Some(member));
        }
        self.version = Some(version);
        has_changed
    }

    /// Whether pages of a full answer are missing.
    #[must_use]
    pub fn is_reading(&self) -> bool {
        self.cursor.is_some()
    }

    /// Requests an interrupted full answer from its beginning: the next page may be of another state of the CA.
    pub fn failed(&mut self) {
        self.reading = None;
        self.cursor = None;
    }

    /// Reads everything again, in case an earlier state of the CA's ledger was put back.
    pub fn forget(&mut self) {
        self.version = None;
        self.failed();
    }
}

const ANSWER_WITHIN: Duration = Duration::from_secs(15);
/// More than any cluster has pods.
const MAX_MEMBERS: usize = 1_000_000;
const MAX_TOKEN: u64 = 64 << 10;
const MAX_VERSION: usize = 128;
const MAX_CURSOR: usize = 4 << 10;

#[cfg(test)]
mod tests {
    use nebula_cert::directory::Member as Told;

    use super::*;

    fn answer(version: &str, full: bool, pods: &[(&str, &str)], gone: &[&str], next: Option<&str>) -> Answer {
        let told = |(uid, address): &(&str, &str)| Told {
            addresses: vec![address.parse().unwrap()],
            namespace: "shop".to_owned(),
            name: "web".to_owned(),
            service_account: String::new(),
            node: String::new(),
            uid: (*uid).to_owned(),
            until: 0,
        };
        let directory = Directory {
            version: version.to_owned(),
            full,
            pods: pods.iter().map(told).collect(),
            gone: gone.iter().map(|&uid| uid.to_owned()).collect(),
            next: next.map(str::to_owned),
        };
        Answer { directory, retry_after: None }
    }

    fn client() -> DirectoryClient {
        let target = Target { url: "https://127.0.0.1:1".to_owned(), server_name: None };
        DirectoryClient::new(target, &HostRoot::new(Some("/nonexistent".into())))
    }

    #[test]
    fn pages_are_taken_over_together_and_the_first_version_counts() {
        let (mut client, mut facts) = (client(), Facts::default());
        assert!(!client.take(answer("e-7", true, &[("a", "10.0.0.1")], &[], Some("61")), &mut facts));
        assert!(client.is_reading() && facts.members.is_empty() && facts.missing().len() == Input::ALL.len());
        assert!(client.take(answer("e-9", true, &[("b", "10.0.0.2")], &[], None), &mut facts));
        assert_eq!((client.version.as_deref(), facts.members.len()), (Some("e-7"), 2));
        assert!(!facts.missing().contains(&Input::Directory));
        // The same, in one page.
        let both = [("a", "10.0.0.1"), ("b", "10.0.0.2")];
        assert!(!client.take(answer("e-9", true, &both, &[], None), &mut facts));
        assert!(client.take(answer("f-1", true, &both[..1], &[], None), &mut facts), "b is gone");
        assert_eq!(facts.members.len(), 1);
    }

    #[test]
    fn an_interrupted_full_answer_is_requested_from_its_beginning() {
        let (mut client, mut facts) = (client(), Facts::default());
        client.take(answer("e-7", true, &[("a", "10.0.0.1")], &[], Some("61")), &mut facts);
        client.failed();
        assert!(!client.is_reading());
        assert!(client.take(answer("f-1", true, &[("b", "10.0.0.2")], &[], None), &mut facts));
        assert_eq!((client.version.as_deref(), facts.members.len()), (Some("f-1"), 1));
    }

    #[test]
    fn changes_are_those_that_change_something() {
        let (mut client, mut facts) = (client(), Facts::default());
        client.take(answer("e-1", true, &[("a", "10.0.0.1")], &[], None), &mut facts);
        assert!(!client.take(answer("e-2", false, &[("a", "10.0.0.1")], &["x"], None), &mut facts), "a renewal");
        // The address goes from one pod to another.
        assert!(client.take(answer("e-4", false, &[("b", "10.0.0.1")], &["a"], None), &mut facts));
        let members: Vec<_> = facts.members.values().collect();
        let expected = Member {
            addresses: [Some("10.0.0.1".parse().unwrap()), None],
            incarnation: incarnation("b"),
            port_number: port_number("b"),
            is_host: false,
        };
        assert_eq!((members, client.version.as_deref()), (vec![&expected], Some("e-4")));
        client.forget();
        assert_eq!(client.version, None);
    }

    #[test]
    fn an_incarnation_is_the_head_of_the_digest_of_the_uid() {
        // echo -n abc | sha256sum
        assert_eq!(incarnation("abc"), 0xba78_16bf_8f01_cfea);
        assert_ne!(id("abc"), id("abd"));
        let error = client().ask().unwrap_err();
        assert!(matches!(error, DirectoryError::Token { .. }) && !error.advice().is_empty(), "{error}");
    }
}
