//! The files of the roll-out beside the agent's others: its state, which outlives the agent, and what an operator asks
//! for. Only root can write them.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::plan::Request;
use super::state::State;
use crate::config::AGENT_DIR;
use crate::durable;
use crate::host_root::HostRoot;

/// Where they are.
#[derive(Debug, Clone)]
pub struct Files {
    folder: PathBuf,
}

impl Files {
    /// On this node.
    #[must_use]
    pub fn new(host: &HostRoot) -> Self {
        Self { folder: host.resolve(Path::new(AGENT_DIR)) }
    }

    /// In another folder, for tests.
    #[cfg(test)]
    pub(super) fn at(folder: PathBuf) -> Self {
        Self { folder }
    }

    /// Reads the state that the last agent left; that of a node without one is empty. One that cannot be read pauses
    /// the roll-out, with `now` as the time.
    #[must_use]
    pub fn state(&self, now: i64) -> State {
        match durable::read_bounded(&self.state_path(), MAX_STATE) {
            Ok(bytes) => State::parse(&bytes).unwrap_or_else(|why| State::unreadable(&why, now)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => State::default(),
            Err(error) => State::unreadable(&error.to_string(), now),
        }
    }

    /// Writes the state.
    ///
    /// # Errors
    /// Returns the file system's error; the state before is still there.
    pub fn save(&self, state: &State) -> io::Result<()> {
        let text = state.text()?;
        durable::replace(&self.state_path(), MODE, &mut text.as_slice(), |_| Ok(()))
    }

    /// Asks the agent for something.
    ///
    /// # Errors
    /// Returns the file system's error.
    pub fn request(&self, request: Request) -> io::Result<()> {
        durable::replace(&self.request_path(), MODE, &mut word(request).as_bytes(), |_| Ok(()))
    }

    /// Whether the agent has not yet done what was asked for last.
    #[must_use]
    pub fn is_requested(&self) -> bool {
        self.request_path().exists() || self.taken_path().exists()
    }

    /// What an operator asks for. It is there until [`Files::has_done`], also for the next agent.
    #[must_use]
    pub fn requested(&self) -> Option<Request> {
        // Out of the way of a later request, which wins.
        match fs::rename(self.request_path(), self.taken_path()) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::warn!(%error, "cannot take what an operator asks the roll-out for");
                return None;
            }
            _ => {}
        }
        let read = durable::read_bounded(&self.taken_path(), MAX_REQUEST);
        let found = match &read {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
            Err(_) => None,
            Ok(bytes) => [Request::Pause, Request::Resume].into_iter().find(|one| word(*one).as_bytes() == bytes),
        };
        if found.is_none() {
            tracing::warn!(file = %self.taken_path().display(), "what is asked of the roll-out is not understood");
            self.has_done();
        }
        found
    }

    /// What was asked for is done, and noted in the state.
    pub fn has_done(&self) {
        if let Err(error) = durable::remove(&self.taken_path()) {
            tracing::warn!(%error, "cannot remove what an operator asked the roll-out for");
        }
    }

    fn state_path(&self) -> PathBuf {
        self.folder.join("upgrade.json")
    }

    fn request_path(&self) -> PathBuf {
        self.folder.join("upgrade-request")
    }

    fn taken_path(&self) -> PathBuf {
        self.folder.join("upgrade-request.taken")
    }
}

fn word(request: Request) -> &'static str {
    match request {
        Request::Pause => "pause\n",
        Request::Resume => "resume\n",
    }
}

const MODE: u32 = 0o600;
/// More than a state with as many instances as it may have.
const MAX_STATE: u64 = 4 << 20;
const MAX_REQUEST: u64 = 16;

#[cfg(test)]
mod tests {
    use super::*;

    fn files() -> (tempfile::TempDir, Files) {
        let dir = tempfile::tempdir().unwrap();
        let files = Files { folder: dir.path().to_owned() };
        (dir, files)
    }

    #[test]
    fn the_state_is_there_for_the_next_agent_and_a_damaged_one_pauses() {
        let (_dir, files) = files();
        assert_eq!(files.state(7), State::default());
        let state = State { upgraded: 7, ..State::default() };
        files.save(&state).unwrap();
        assert_eq!(files.state(7), state);
        for damaged in [b"{\"upgraded\": ".to_vec(), b"\xff".to_vec(), vec![b' '; (4 << 20) + 1]] {
            fs::write(files.state_path(), damaged).unwrap();
            assert!(files.state(7).paused.is_some_and(|pause| pause.since == 7));
        }
        fs::remove_file(files.state_path()).unwrap();
        nix::unistd::mkfifo(&files.state_path(), nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert!(files.state(7).paused.is_some(), "a fifo does not block");
    }

    #[test]
    fn a_request_is_there_until_it_is_done_and_a_later_one_wins() {
        let (_dir, files) = files();
        assert_eq!((files.requested(), files.is_requested()), (None, false));
        files.request(Request::Pause).unwrap();
        assert_eq!(files.requested(), Some(Request::Pause));
        // The agent was killed before it was done.
        assert!(files.is_requested());
        assert_eq!(files.requested(), Some(Request::Pause));
        files.request(Request::Resume).unwrap();
        assert_eq!(files.requested(), Some(Request::Resume));
        files.has_done();
        assert_eq!((files.requested(), files.is_requested()), (None, false));
    }

    #[test]
    fn what_is_not_understood_is_removed() {
        let (_dir, files) = files();
        for bad in ["", "pause", "stop\n", &"pause\n".repeat(1000)] {
            fs::write(files.request_path(), bad).unwrap();
            assert_eq!((files.requested(), files.is_requested()), (None, false), "{bad}");
        }
    }
}
