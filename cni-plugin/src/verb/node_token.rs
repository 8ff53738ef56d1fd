//! The node's credentials, which its agent writes. A token ends with the pod of the agent that wrote it, so the CA
//! refuses it while the agent is replaced, and instances show the node credential beside it. Where there is none yet,
//! or it has expired, the node waits for the next agent's token; and when the node has just booted, there are none.
//! An ADD that meets such a moment waits for the next ones, as long as its time limit allows: it would fail
//! otherwise, and the kubelet waits longer each time before it tries again.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use nebula_cni_contract::clock::{Clock, Deadline};
use nebula_cni_contract::launch::CaAccess;

use crate::reply::{Error, code};

/// The files as they were before a start. They are never changed in place, but replaced by rename.
pub(super) struct NodeToken<'a> {
    ca: &'a CaAccess,
    /// Of the token.
    seen: Option<Version>,
    /// Whether the agent, whose folder they are in, has not written them yet.
    awaits_agent: bool,
}

/// Device, inode, and the time of the last change in seconds and nanoseconds.
type Version = (u64, u64, i64, i64);

impl<'a> NodeToken<'a> {
    /// Remembers which files are there now.
    pub(super) fn of(ca: &'a CaAccess, state_dir: &Path) -> Self {
        let are_there = ca.token_file.exists() && ca.tls_ca_file.exists();
        let awaits_agent = !are_there && ca.token_file.starts_with(state_dir.join(AGENT));
        Self { ca, seen: version(&ca.token_file), awaits_agent }
    }

    /// Whether it makes sense to start again after `error`, because there is another token by now, or one comes in
    /// time.
    pub(super) fn is_replaced_after(&self, error: &Error, clock: &dyn Clock, deadline: Deadline) -> bool {
        let waits = match error.code {
            code::NODE_TOKEN => true,
            code::CA_UNUSABLE => self.awaits_agent,
            // The CA may have another reason to refuse, which a later token does not change.
            code::IDENTITY_DENIED => false,
            _ => return false,
        };
        loop {
            let has_time = deadline.left(clock) > START_TAKES;
            if !has_time || self.is_replaced() {
                return has_time;
            }
            if !waits {
                return false;
            }
            clock.sleep(LOOK_EVERY);
        }
    }

    fn is_replaced(&self) -> bool {
        // The agent writes the roots after the token.
        let now = version(&self.ca.token_file).filter(|_| self.ca.tls_ca_file.exists() || !self.awaits_agent);
        now.is_some() && (self.awaits_agent || now != self.seen)
    }
}

fn version(path: &Path) -> Option<Version> {
    fs::metadata(path).ok().map(|file| (file.dev(), file.ino(), file.ctime(), file.ctime_nsec()))
}

/// Folder of the agent in the state directory.
const AGENT: &str = "agent";
const LOOK_EVERY: Duration = Duration::from_millis(100);
// What is left must be enough to start an instance, and to undo that.
const START_TAKES: Duration = Duration::from_secs(3);

#[cfg(test)]
mod tests {
    use super::*;
    use nebula_cni_contract::clock::SystemClock;

    #[test]
    fn files_that_the_agent_has_not_written_are_waited_for_and_other_ones_are_not() {
        let dir = tempfile::tempdir().unwrap();
        let access = |folder: &str| {
            let file = |name: &str| dir.path().join(folder).join(name);
            CaAccess {
                url: "https://ca".to_owned(),
                tls_ca_file: file("tls.crt"),
                token_file: file("token"),
                server_name: None,
            }
        };
        let error = Error::new(code::CA_UNUSABLE, "no such file");
        let (soon, late) = [4, 1].map(|s| Deadline::after(&SystemClock, Duration::from_secs(s))).into();
        let elsewhere = access("other");
        assert!(!NodeToken::of(&elsewhere, dir.path()).is_replaced_after(&error, &SystemClock, soon), "at once");
        let ours = access("agent");
        let token = NodeToken::of(&ours, dir.path());
        assert!(!token.is_replaced_after(&error, &SystemClock, late), "no time is left");
        fs::create_dir(dir.path().join("agent")).unwrap();
        fs::write(&ours.token_file, "t").unwrap();
        assert!(!token.is_replaced(), "the roots come later");
        fs::write(&ours.tls_ca_file, "r").unwrap();
        assert!(token.is_replaced_after(&error, &SystemClock, soon));
        let denied = Error::new(code::IDENTITY_DENIED, "pod_gone");
        let present = NodeToken::of(&ours, dir.path());
        assert!(!present.is_replaced_after(&denied, &SystemClock, soon), "another token would not help");
        assert!(!present.is_replaced_after(&error, &SystemClock, soon), "they are there and do not work");
    }
}
