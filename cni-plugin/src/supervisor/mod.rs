//! Keeps one instance per pod alive after the plugin is gone (service manager).

use std::io;
use std::path::Path;

pub mod cgroup;
pub mod direct;
pub mod launcher;
mod notify;
pub mod process;

pub use direct::Direct;
pub use process::Process;

use crate::host::{Clock, Deadline};
use crate::record::Files;

/// Starts and stops instances.
pub trait Supervisor {
    /// Starts `instance` for an attachment whose launch contract is written, and waits until it says it is ready.
    /// `started` learns the process before any code of the instance runs: if it fails, or if the caller dies before
    /// it returns, no instance stays behind.
    ///
    /// # Errors
    /// See [`StartFailure`]; the instance may still run, so stop it.
    fn start(
        &self,
        instance: &Path,
        files: &Files,
        clock: &dyn Clock,
        deadline: Deadline,
        started: &mut dyn FnMut(Process) -> io::Result<()>,
    ) -> Result<(), StartFailure>;

    /// Whether this very process still runs.
    fn is_alive(&self, process: Process) -> bool;

    /// Instances of an attachment that run without a readable record of them.
    fn find(&self, files: &Files) -> Vec<Process>;

    /// Ends a process and waits until it is gone.
    ///
    /// # Errors
    /// It is still there.
    fn stop(&self, process: Process, clock: &dyn Clock) -> Result<(), String>;

    /// Removes what was made around the attachment's instance, once it is gone.
    fn clean_up(&self, files: &Files, clock: &dyn Clock);
}

/// Why an instance is not ready.
#[derive(Debug, thiserror::Error)]
pub enum StartFailure {
    /// It could not be started.
    #[error("cannot start the instance: {0}")]
    Spawn(#[source] io::Error),
    /// It was started but could not be written down.
    #[error("cannot record the instance: {0}")]
    Record(#[source] io::Error),
    /// It ended by itself.
    #[error("the instance ended ({status}) before it was ready")]
    Ended {
        /// How it ended.
        status: String,
        /// Its last STATUS and its last line on stderr.
        said: String,
    },
    /// It did not get ready in time.
    #[error("the instance was not ready in time")]
    Deadline {
        /// Its last STATUS, or else its last line on stderr.
        said: String,
    },
}
