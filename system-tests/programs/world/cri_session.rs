//! Many calls of one runtime through one process of `cri.py`, which takes half a second to start.

use std::cell::RefCell;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use serde_json::Value;

use super::cluster::tool;

/// A client of a runtime. It starts its process with the first call.
pub struct CriSession {
    socket: PathBuf,
    process: RefCell<Option<(Child, ChildStdin, BufReader<ChildStdout>)>>,
}

impl CriSession {
    pub fn new(socket: &Path) -> Self {
        Self { socket: socket.to_owned(), process: RefCell::default() }
    }

    /// Makes a call of `cri.py`; no argument may contain spaces or quotes.
    pub fn call(&self, arguments: &[&str]) -> Result<String, String> {
        let mut process = self.process.borrow_mut();
        let (_, stdin, stdout) = process.get_or_insert_with(|| start(&self.socket));
        writeln!(stdin, "{}", arguments.join(" ")).expect("cri.py reads");
        let mut said = String::new();
        loop {
            let mut line = String::new();
            assert!(stdout.read_line(&mut line).expect("cri.py answers") > 0, "cri.py ended: {said}");
            match line.trim_end().strip_prefix('\u{4}') {
                Some("0") => return Ok(said.trim_end().to_owned()),
                Some(_) => return Err(said),
                None => said += &line,
            }
        }
    }

    /// Creates a pod without containers; see `Runtime::sandbox`.
    pub fn sandbox(&self, namespace: &str, name: &str, attempt: u32) -> Result<Value, String> {
        let (pod, attempt) = (format!("{namespace}/{name}/uid-{name}"), attempt.to_string());
        let said = self.call(&["run-pod", &pod, "--attempt", &attempt])?;
        Ok(serde_json::from_str(&said).expect("cri.py prints JSON"))
    }

    pub fn remove(&self, sandbox: &str) -> Result<(), String> {
        ["stop-pod", "remove-pod"].into_iter().try_for_each(|verb| self.call(&[verb, sandbox]).map(drop))
    }

    /// Ends the process: its connection does not outlive the runtime.
    pub fn close(&self) {
        if let Some((mut child, stdin, _)) = self.process.borrow_mut().take() {
            drop(stdin);
            let _ = child.wait();
        }
    }
}

impl Drop for CriSession {
    fn drop(&mut self) {
        self.close();
    }
}

fn start(socket: &Path) -> (Child, ChildStdin, BufReader<ChildStdout>) {
    let mut child = Command::new("/usr/bin/python3")
        .arg(tool("cri.py"))
        .arg("-s")
        .arg(socket)
        .arg("session")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("cri.py runs");
    let (stdin, stdout) = (child.stdin.take().expect("its input"), child.stdout.take().expect("its output"));
    (child, stdin, BufReader::new(stdout))
}
