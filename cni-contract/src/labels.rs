//! Labels of a pod and its namespace. Runtimes do not pass them, so the instance's program asks the API server for
//! them, in a process of its own that is started only if a selector is configured.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::clock::{Clock, Deadline};

/// What `nebula-cni-instance --labels` reads from standard input, as JSON.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Question {
    /// Kubeconfig with the API server and the credentials.
    pub kubeconfig: PathBuf,
    /// Namespace of the pod.
    pub namespace: String,
    /// Name of the pod.
    pub name: String,
    /// UID of the pod, or empty.
    pub uid: String,
    /// Whether the pod's labels are wanted.
    pub of_pod: bool,
    /// Whether the namespace's labels are wanted.
    pub of_namespace: bool,
    /// Timeout of the answer, in milliseconds.
    pub within_ms: u64,
}

/// What it writes to standard output, as JSON.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Answer {
    /// The labels that were asked for.
    Labels(Labels),
    /// The API server knows no such pod.
    NoSuchPod,
    /// The API server knows another pod of that name.
    OtherPod {
        /// UID of that other pod.
        uid: String,
    },
    /// The labels could not be determined; holds the reason.
    Undecided(String),
}

/// The labels that were asked for; a map nobody asked for is empty.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Labels {
    /// Labels of the pod.
    pub pod: BTreeMap<String, String>,
    /// Labels of its namespace.
    pub namespace: BTreeMap<String, String>,
}

/// Source of labels.
pub trait LabelSource {
    /// Asks for labels and waits for at most the time given in the question.
    fn ask(&self, program: &Path, question: &Question, clock: &dyn Clock) -> Answer;
}

/// The instance's program, run once per question.
#[derive(Debug)]
pub struct Program;

impl LabelSource for Program {
    fn ask(&self, program: &Path, question: &Question, clock: &dyn Clock) -> Answer {
        run(program, question, clock).unwrap_or_else(Answer::Undecided)
    }
}

fn run(program: &Path, question: &Question, clock: &dyn Clock) -> Result<Answer, String> {
    let failed = |e: std::io::Error| format!("{} --labels: {e}", program.display());
    let text = serde_json::to_vec(question).map_err(|e| failed(e.into()))?;
    let mut child = Command::new(program)
        .arg("--labels")
        .env_clear()
        .current_dir("/")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .map_err(failed)?;
    // If the program ends early, its answer says why.
    let _ = child.stdin.take().map(|mut stdin| stdin.write_all(&text));
    let stdout = child.stdout.take();
    let reader = thread::spawn(move || {
        let mut answer = Vec::new();
        stdout.map(|stdout| stdout.take(MAX_ANSWER).read_to_end(&mut answer)).transpose().map(|_| answer)
    });
    let deadline = Deadline::after(clock, Duration::from_millis(question.within_ms) + ANSWER_GRACE);
    while !reader.is_finished() && !deadline.is_over(clock) {
        clock.sleep(ANSWER_POLL_INTERVAL);
    }
    if !reader.is_finished() {
        let _ = child.kill();
    }
    let answer = reader.join().map_err(|_| "no answer".to_owned()).and_then(|answer| answer.map_err(failed));
    let _ = child.kill();
    let _ = child.wait();
    serde_json::from_slice(&answer?).map_err(|_| format!("{} --labels gave no answer in time", program.display()))
}

const ANSWER_POLL_INTERVAL: Duration = Duration::from_millis(2);
// The program enforces the timeout itself; the grace period is for one that hangs.
const ANSWER_GRACE: Duration = Duration::from_millis(500);
const MAX_ANSWER: u64 = 4 << 20;
