//! What is built once for all parts: the programs of the release, and the test binaries.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};

use crate::process::{Ended, Lines, Processes};
use crate::schedule::lock;

/// The release build. Another build may hold the lock of its folder for minutes, so cargo is asked once.
pub(crate) struct Release {
    arguments: Vec<String>,
    processes: Arc<Processes>,
    state: Mutex<State>,
}

enum State {
    NotBuilt,
    Building(JoinHandle<()>),
    Built,
}

impl Release {
    pub(crate) const fn new(arguments: Vec<String>, processes: Arc<Processes>) -> Self {
        Self { arguments, processes, state: Mutex::new(State::NotBuilt) }
    }

    /// Begins to build, at the lowest priority; what it prints is printed again by `finish`.
    pub(crate) fn start(&self) {
        let mut state = lock(&self.state);
        if matches!(*state, State::NotBuilt) {
            let command = self.command(&["nice", "-n", "19"]);
            let processes = Arc::clone(&self.processes);
            *state = State::Building(thread::spawn(move || {
                let nobody: Lines = Arc::new(|_: &[u8]| {});
                let _ = processes.run(command, &nobody);
            }));
        }
    }

    /// Waits until all is built. What failed to build is tried again for each part, so that each shows why.
    pub(crate) fn finish(&self, run: &mut dyn FnMut(Command) -> bool, lines: &Lines) -> bool {
        let mut state = lock(&self.state);
        if matches!(*state, State::Built) {
            return true;
        }
        if let State::Building(build) = std::mem::replace(&mut *state, State::NotBuilt) {
            if !build.is_finished() {
                lines(b"waiting for the release build");
            }
            let _ = build.join();
        }
        let is_built = run(self.command(&[]));
        if is_built {
            *state = State::Built;
        }
        is_built
    }

    fn command(&self, before: &[&str]) -> Command {
        let words = before.iter().copied().chain(["cargo", "build"]).chain(self.arguments.iter().map(String::as_str));
        command(words)
    }
}

/// A test binary, and the folder in which cargo would run it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TestBinary {
    pub(crate) name: String,
    pub(crate) folder: PathBuf,
    pub(crate) path: PathBuf,
}

/// Reads the test binaries from what cargo says with `--message-format json-render-diagnostics`.
pub(crate) fn test_binary(line: &str) -> Option<TestBinary> {
    let field = |name: &str| {
        let behind = line.split_once(&format!("\"{name}\":\""))?.1;
        behind.split_once('"').map(|(value, _)| value)
    };
    if !line.starts_with("{\"reason\":\"compiler-artifact\"") || !line.contains("\"kind\":[\"test\"]") {
        return None;
    }
    Some(TestBinary {
        name: field("name")?.to_owned(),
        folder: Path::new(field("manifest_path")?).parent()?.to_owned(),
        path: field("executable")?.into(),
    })
}

/// The test binaries that parts run without cargo, which would wait minutes for a job beside that builds.
pub(crate) struct TestBinaries {
    arguments: Vec<String>,
    found: Mutex<Vec<TestBinary>>,
}

impl TestBinaries {
    pub(crate) fn new(features: &[String], names: &[String]) -> Self {
        let mut arguments: Vec<_> =
            ["test", "-q", "--no-run", "--message-format", "json-render-diagnostics"].map(str::to_owned).into();
        arguments.extend_from_slice(features);
        arguments.extend(names.iter().flat_map(|name| ["--test".to_owned(), name.clone()]));
        Self { arguments, found: Mutex::new(Vec::new()) }
    }

    #[cfg(test)]
    pub(crate) const fn with(found: Vec<TestBinary>) -> Self {
        Self { arguments: Vec::new(), found: Mutex::new(found) }
    }

    /// Builds them all if that was not done.
    pub(crate) fn get(
        &self,
        name: &str,
        processes: &Processes,
        lines: &Lines,
    ) -> Result<(TestBinary, Option<Ended>), String> {
        let mut found = lock(&self.found);
        let mut ended = None;
        if found.is_empty() {
            let told = Arc::new(Mutex::new(Vec::new()));
            let (to, others) = (Arc::clone(&told), Arc::clone(lines));
            let sorted: Lines = Arc::new(move |line: &[u8]| match std::str::from_utf8(line) {
                Ok(text) if text.starts_with("{\"reason\":") => lock(&to).extend(test_binary(text)),
                _ => others(line),
            });
            let words = std::iter::once("cargo").chain(self.arguments.iter().map(String::as_str));
            let build = processes.run(command(words), &sorted).map_err(|error| format!("cargo: {error}"))?;
            if !build.is_ok {
                return Err("the tests do not compile".to_owned());
            }
            found.append(&mut lock(&told));
            ended = Some(build);
        }
        let binary = found.iter().find(|binary| binary.name == name).cloned();
        binary.map(|binary| (binary, ended)).ok_or_else(|| format!("there is no binary of tests named {name}"))
    }
}

/// A command of these words, the first of which is the program.
pub(crate) fn command<'a>(words: impl IntoIterator<Item = &'a str>) -> Command {
    let mut words = words.into_iter();
    let mut command = Command::new(words.next().unwrap_or_default());
    command.args(words);
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_test_binary_is_told_from_other_artefacts() {
        let line = |kind: &str, executable: &str| {
            format!(
                "{{\"reason\":\"compiler-artifact\",\"package_id\":\"path+file:///r/s#a@0.1.0\",\"manifest_path\":\"/r/s/Cargo.toml\",\
                 \"target\":{{\"kind\":[\"{kind}\"],\"crate_types\":[\"bin\"],\"name\":\"programs\",\"src_path\":\"/r/s/p/main.rs\",\"test\":true}},\
                 \"filenames\":[],\"executable\":{executable},\"fresh\":true}}"
            )
        };
        let expected =
            TestBinary { name: "programs".to_owned(), folder: "/r/s".into(), path: "/r/t/programs-1".into() };
        assert_eq!(test_binary(&line("test", "\"/r/t/programs-1\"")), Some(expected));
        assert_eq!(test_binary(&line("bin", "\"/r/t/programs\"")), None);
        assert_eq!(test_binary(&line("test", "null")), None);
        assert_eq!(test_binary("{\"reason\":\"build-finished\",\"success\":true}"), None);
    }

    #[test]
    fn a_release_build_that_failed_is_tried_again_and_one_that_is_done_is_not() {
        let release = Release::new(vec![], Arc::new(Processes::default()));
        let nobody: Lines = Arc::new(|_: &[u8]| {});
        let mut calls = 0;
        for (is_built, calls_then) in [(false, 1), (true, 2), (true, 2)] {
            let answer = release.finish(
                &mut |_| {
                    calls += 1;
                    is_built
                },
                &nobody,
            );
            assert_eq!((answer, calls), (is_built, calls_then));
        }
    }
}
