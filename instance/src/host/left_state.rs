//! What the daemon leaves for its next run when it is stopped in an orderly way: its flows, peers and counters, and no
//! keys. Systemd's descriptor store holds them, in memory, until the next start of the unit or its stop.
//!
//! A process that crashes leaves nothing, and the file of a run is read once: what is older than the last packets would
//! let pass what has ended since.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use nebula_core::handover::State;
use nebula_core::io::Handle;
use nebula_linux::store::{self, Store};
use nebula_linux::{errno, notify};

use crate::handover::channel::{memory_file, read_state, write_state};

/// Has the service manager hold what the node knows; nothing without systemd.
pub(crate) fn leave(handle: &Handle) {
    if !notify::is_systemd() {
        return;
    }
    // Tunnels are about to be closed, so no key is of use; and if this is a stop, nobody comes to erase one.
    let Some(state) = handle.offer() else { return };
    let left = file_of(&state).and_then(|file| store::leave(STATE, file.as_fd()));
    match left {
        Ok(()) => tracing::info!(peers = state.peers(), flows = state.flows(), "The next run may go on with the flows"),
        Err(error) => {
            tracing::warn!(error = errno::text(&error), "The next run will not know the flows of this one");
        }
    }
}

/// Takes what the last run left, if it is of use.
pub(crate) fn take(store: &mut Store) -> Option<State> {
    let file = store.take(STATE).pop()?;
    match read(file) {
        Ok(state) => {
            tracing::info!(peers = state.peers(), flows = state.flows(), "Going on with the flows of the last run");
            Some(state)
        }
        Err(error) => {
            tracing::warn!(error = errno::text(&error), "The flows of the last run are not known");
            None
        }
    }
}

fn file_of(state: &State) -> io::Result<File> {
    let mut file = memory_file()?;
    write_state(&mut file, state)?;
    Ok(file)
}

fn read(file: OwnedFd) -> io::Result<State> {
    let file = File::from(file);
    if !file.metadata()?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no regular file"));
    }
    let state = read_state(file.try_clone()?.into());
    // If this process crashes, the next one must not find it again, whoever still holds it.
    file.set_len(0)?;
    let mut state = state?;
    state.forget_keys();
    Ok(state)
}

/// The name of the file in the store.
pub(crate) const STATE: &str = "state";

#[cfg(test)]
mod tests {
    use std::io::Write;

    use nebula_linux::descriptors::Passed;

    use super::*;

    /// A recorded document of a running node: with peers, flows and keys.
    const DOCUMENT: &[u8] = include_bytes!("../../../tests/vectors/handover/version-1.1");

    fn store(file: impl Into<OwnedFd>) -> Store {
        Store::new(Ok(vec![Passed { name: STATE.to_owned(), file: file.into() }]), &[STATE])
    }

    #[test]
    fn what_the_last_run_left_is_read_once_and_without_keys() {
        let mut file = memory_file().unwrap();
        file.write_all(DOCUMENT).unwrap();
        let held = file.try_clone().unwrap();
        let mut first = store(file);
        let state = take(&mut first).unwrap();
        assert!(state.peers() > 0 && state.flows() > 0 && !state.has_keys());
        assert!(take(&mut first).is_none());
        assert!(take(&mut store(held)).is_none(), "the service manager may hold it a little longer");
        let written = file_of(&state).unwrap();
        assert_eq!(read(written.into()).unwrap().flows(), state.flows());
    }

    #[test]
    fn what_is_no_state_is_left_out() {
        let mut nonsense = memory_file().unwrap();
        nonsense.write_all(b"nonsense").unwrap();
        assert!(take(&mut store(nonsense)).is_none());
        assert!(take(&mut store(File::open("/dev/null").unwrap())).is_none());
        assert!(take(&mut Store::default()).is_none());
    }
}
