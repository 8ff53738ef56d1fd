//! The marker of an uninstallation, by which a running agent learns that it must put nothing back.
//!
//! An uninstallation holds a shared lock on the marker and refreshes it while it works, so an agent can see from the
//! lock whether an uninstallation is running. An uninstallation that receives a signal to stop removes the marker. An
//! interrupted one leaves it, and may be tried again: by kubelet within five minutes, by an operator at any time. So
//! an agent that sees a marker change while it runs stays retired. Only one that was started later, with a marker
//! that stays as it was, takes it for a leftover: it belongs to a new installation. It waits until an interrupted
//! uninstallation would have been tried again. One that ended and had to leave the plugin on the node says so in the
//! marker, and a new installation begins at once.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use nebula_cni_contract::clock::{Clock, SystemClock};

use crate::config::{AGENT_DIR, TOKEN_FILE};
use crate::host_root::HostRoot;
use crate::readiness::Standing;

/// An uninstallation that is under way, as long as this value lives.
#[derive(Debug)]
pub(crate) struct Marker {
    path: PathBuf,
    file: File,
}

impl Marker {
    /// Begins an uninstallation, or goes on with one.
    ///
    /// # Errors
    /// Returns the file system's error.
    pub(crate) fn set(host: &HostRoot) -> io::Result<Self> {
        let path = path(host);
        if let Some(dir) = path.parent() {
            fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
        }
        loop {
            let file = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(&path)?;
            // An agent holds it for a moment only.
            file.lock_shared()?;
            let marker = Self { path: path.clone(), file };
            if marker.is_at_its_path() {
                // An earlier one may have ended here.
                marker.file.set_len(0)?;
                marker.refresh();
                return Ok(marker);
            }
        }
    }

    /// Says that the uninstallation goes on.
    pub(crate) fn refresh(&self) {
        // The lock says so too; this matters only after an interruption.
        let _ = self.file.set_modified(time(SystemClock.unix_seconds()));
    }

    /// Says that the uninstallation has ended and nobody will go on with it, though not all could be removed. An
    /// agent that is started later belongs to a new installation; one that runs already stays retired.
    ///
    /// # Errors
    /// Returns the file system's error.
    pub(crate) fn end(&self) -> io::Result<()> {
        (&self.file).write_all(ENDED)?;
        self.refresh();
        Ok(())
    }

    /// Gives the node back to its agent, unless another uninstallation is under way.
    pub(crate) fn cancel(self) {
        if self.file.try_lock().is_ok() && self.is_at_its_path() {
            // An agent waits some minutes for a marker that stays.
            let _ = fs::remove_file(&self.path);
        }
    }

    /// Whether no agent removed the file between its opening and its locking.
    fn is_at_its_path(&self) -> bool {
        let id = |file: fs::Metadata| (file.dev(), file.ino());
        let named = fs::metadata(&self.path).map(id);
        named.is_ok_and(|named| self.file.metadata().map(id).is_ok_and(|open| open == named))
    }
}

impl Drop for Marker {
    fn drop(&mut self) {
        // Closing is not enough: a child of this process may have been forked meanwhile, and holds the file until it is
        // another program.
        let _ = self.file.unlock();
    }
}

/// Path of the marker.
#[must_use]
pub(crate) fn path(host: &HostRoot) -> PathBuf {
    host.resolve(Path::new(MARKER))
}

/// Tells a running agent whether it may still put things back; cheap to clone.
#[derive(Debug, Clone)]
pub struct Retirement {
    host: HostRoot,
    state: Arc<Mutex<State>>,
}

#[derive(Debug)]
struct State {
    /// When the marker that was there at the start of this agent was last refreshed.
    found: Option<SystemTime>,
    why: Option<Why>,
}

/// Why an agent puts nothing back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Why {
    /// An uninstallation works now.
    UnderWay,
    /// One was under way while this agent ran.
    Before,
    /// One was interrupted before this agent was started; for so many seconds it may still go on.
    Interrupted(u64),
}

impl Retirement {
    /// For the node at `host`, when the agent starts.
    #[must_use]
    pub fn new(host: HostRoot) -> Self {
        let found = fs::metadata(path(&host)).and_then(|file| file.modified()).ok();
        Self { host, state: Arc::new(Mutex::new(State { found, why: None })) }
    }

    /// Whether an uninstallation has begun. It stays so once it is complete, as long as this agent runs: its pod is
    /// deleted only afterwards.
    #[must_use]
    pub fn has_begun(&self) -> bool {
        self.look(SystemClock.unix_seconds())
    }

    /// What the agent waits for, if an uninstallation has begun.
    #[must_use]
    pub fn standing(&self) -> Standing {
        let text = match self.state.lock().unwrap_or_else(PoisonError::into_inner).why {
            None | Some(Why::UnderWay) => "an uninstallation is under way on this node".to_owned(),
            Some(Why::Before) => {
                "an uninstallation was under way on this node; this agent installs nothing until it is restarted"
                    .to_owned()
            }
            Some(Why::Interrupted(left)) => format!(
                "an earlier uninstallation of this node was interrupted; unless it goes on, the agent begins in {left} s"
            ),
        };
        Standing::bad(text).advice(CANCEL)
    }

    fn look(&self, now: i64) -> bool {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let before = state.why;
        state.why = match self.judge(&state, now) {
            Ok(why) => why,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                before.filter(|why| !self.is_cancelled(*why)).map(|_| Why::Before)
            }
            // Without an answer nothing is put back, and nothing learnt.
            Err(_) => return true,
        };
        if state.why.is_none() {
            state.found = None;
        }
        if let (None, Some(Why::Interrupted(_))) = (state.why, before) {
            tracing::warn!(
                "an earlier uninstallation of this node was interrupted and did not go on; it is installed again"
            );
        }
        state.why.is_some()
    }

    /// Whether it was the operator who removed the marker. An uninstallation removes the token before, and the
    /// directory with it.
    fn is_cancelled(&self, why: Why) -> bool {
        let left = if matches!(why, Why::Interrupted(_)) { AGENT_DIR } else { TOKEN_FILE };
        self.host.resolve(Path::new(left)).exists()
    }

    fn judge(&self, state: &State, now: i64) -> io::Result<Option<Why>> {
        let path = path(&self.host);
        let mut file = File::open(&path)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Ok(Some(Why::UnderWay)),
            Err(TryLockError::Error(error)) => return Err(error),
        }
        let mut text = Vec::with_capacity(ENDED.len());
        (&mut file).take(ENDED.len() as u64).read_to_end(&mut text)?;
        let marker = Marker { path, file };
        let at = marker.file.metadata()?.modified()?;
        if state.found != Some(at) || matches!(state.why, Some(Why::UnderWay | Why::Before)) {
            return Ok(Some(Why::Before));
        }
        let age = time(now).duration_since(at).unwrap_or_default();
        if (age < MAY_GO_ON && text != ENDED) || !marker.is_at_its_path() {
            return Ok(Some(Why::Interrupted(MAY_GO_ON.saturating_sub(age).as_secs())));
        }
        // Nobody else holds the lock now.
        fs::remove_file(&marker.path)?;
        Ok(None)
    }
}

fn time(unix_seconds: i64) -> SystemTime {
    UNIX_EPOCH + Duration::from_secs(unix_seconds.try_into().unwrap_or_default())
}

/// How to change one's mind.
const CANCEL: &str = "to keep Nebula on this node, remove /run/nebula-cni/agent/uninstalling";
const MARKER: &str = "/run/nebula-cni/agent/uninstalling";
/// Contents of the marker of an uninstallation that has ended.
const ENDED: &[u8] = b"ended\n";
/// Longer than kubelet ever waits before it starts a failed container again.
const MAY_GO_ON: Duration = Duration::from_secs(360);

#[cfg(test)]
mod tests {
    use super::*;

    fn host() -> (tempfile::TempDir, HostRoot) {
        let dir = tempfile::tempdir().unwrap();
        let host = HostRoot::new(Some(dir.path().canonicalize().unwrap()));
        (dir, host)
    }

    fn soon() -> i64 {
        SystemClock.unix_seconds()
    }

    fn later() -> i64 {
        SystemClock.unix_seconds() + 600
    }

    #[test]
    fn a_new_agent_waits_for_an_interrupted_uninstallation_and_then_takes_the_node() {
        let (_dir, host) = host();
        drop(Marker::set(&host).unwrap());
        let agent = Retirement::new(host.clone());
        assert!(agent.look(soon()));
        let text = format!("{:?}", agent.standing());
        assert!(text.contains("was interrupted") && text.contains("begins in 3"), "{text}");
        assert!(!agent.look(later()));
        assert!(!path(&host).exists() && !agent.look(soon()), "for good");
    }

    #[test]
    fn a_new_agent_takes_the_node_at_once_after_an_uninstallation_that_ended_with_something_left() {
        let (_dir, host) = host();
        let before = Retirement::new(host.clone());
        let marker = Marker::set(&host).unwrap();
        marker.end().unwrap();
        assert!(Retirement::new(host.clone()).look(soon()), "it still holds the lock");
        drop(marker);
        assert!(before.look(soon()) && before.look(later()), "the one that was uninstalled");
        let next = Retirement::new(host.clone());
        assert!(!next.look(soon()) && !path(&host).exists());
        // A later one that is interrupted counts again, and so does one that goes on after an end.
        Marker::set(&host).unwrap().end().unwrap();
        drop(Marker::set(&host).unwrap());
        assert!(next.look(soon()) && Retirement::new(host.clone()).look(soon()));
    }

    #[test]
    fn an_uninstallation_that_works_is_never_undone_however_long_it_takes() {
        let (_dir, host) = host();
        let marker = Marker::set(&host).unwrap();
        let agent = Retirement::new(host.clone());
        assert!(agent.look(later()) && format!("{:?}", agent.standing()).contains("is under way"));
        drop(marker);
        assert!(agent.look(later()), "this agent saw it at work, so it is the one that is being uninstalled");
        assert!(path(&host).exists());
        assert!(!Retirement::new(host).look(later()), "a new installation");
    }

    #[test]
    fn one_that_goes_on_before_the_time_is_over_keeps_the_agent_retired() {
        let (_dir, host) = host();
        let set = |age: u64| {
            let marker = Marker::set(&host).unwrap();
            marker.file.set_modified(time(soon()) - Duration::from_secs(age)).unwrap();
        };
        set(300);
        let agent = Retirement::new(host.clone());
        assert!(agent.look(soon()));
        set(0);
        assert!(agent.look(later()) && agent.look(later()));
        assert!(path(&host).exists());
        // Two at a time, as the operator's beside that of the chart.
        let both = [Marker::set(&host).unwrap(), Marker::set(&host).unwrap()];
        assert!(Retirement::new(host.clone()).look(later()));
        let [first, second] = both;
        first.cancel();
        assert!(path(&host).exists(), "the other goes on");
        second.cancel();
        assert!(!path(&host).exists());
    }

    #[test]
    fn the_operator_may_cancel_an_interrupted_one_at_once_and_one_that_completes_counts() {
        for is_complete in [false, true] {
            let (_dir, host) = host();
            drop(Marker::set(&host).unwrap());
            let agent = Retirement::new(host.clone());
            assert!(agent.look(soon()));
            fs::remove_file(path(&host)).unwrap();
            if is_complete {
                fs::remove_dir(host.resolve(Path::new(AGENT_DIR))).unwrap();
            }
            assert_eq!(agent.look(soon()), is_complete);
        }
    }

    #[test]
    fn a_clock_that_was_set_back_only_makes_it_wait() {
        let (_dir, host) = host();
        drop(Marker::set(&host).unwrap());
        assert!(Retirement::new(host.clone()).look(7) && Retirement::new(host.clone()).look(-7));
        assert!(path(&host).exists());
    }
}
