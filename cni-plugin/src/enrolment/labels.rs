//! Labels of a pod and its namespace. They are not among what a runtime passes: the program of the instance asks the
//! API server, in a process that is started only where a selector is configured.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::clock::{Clock, Deadline};

/// On the standard input of `nebula-cni-instance --labels`, as JSON.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Question {
    /// Which API server, and with what right.
    pub kubeconfig: PathBuf,
    /// Namespace.
    pub namespace: String,
    /// Pod.
    pub name: String,
    /// Its uid, or empty.
    pub uid: String,
    /// Whether the pod's labels are asked for.
    pub of_pod: bool,
    /// Whether the namespace's labels are asked for.
    pub of_namespace: bool,
    /// Time for an answer.
    pub within_ms: u64,
}

/// On its standard output, as JSON.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Answer {
    /// What was asked for.
    Labels(Labels),
    /// The API server knows no such pod.
    NoSuchPod,
    /// It knows another pod of that name.
    OtherPod {
        /// That one's uid.
        uid: String,
    },
    /// The labels could not be determined; holds the reason.
    Undecided(String),
}

/// What was asked for; the rest is empty.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Labels {
    /// Of the pod.
    pub pod: BTreeMap<String, String>,
    /// Of its namespace.
    pub namespace: BTreeMap<String, String>,
}

/// Source of labels.
pub trait LabelSource {
    /// Asks, and waits for at most the time in the question.
    fn ask(&self, program: &Path, question: &Question, clock: &dyn Clock) -> Answer;
}

/// The program of the instance, run once.
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
    // One that ends early says why.
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
// The program keeps the time itself; this is for one that hangs.
const ANSWER_GRACE: Duration = Duration::from_millis(500);
const MAX_ANSWER: u64 = 4 << 20;
