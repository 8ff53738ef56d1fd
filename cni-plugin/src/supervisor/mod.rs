//! Keeps one instance per pod alive after the plugin is gone (service manager).

use std::io;
use std::path::Path;
use std::time::Duration;

pub mod cgroup;
mod dbus;
pub mod direct;
pub mod heir;
pub mod kind;
pub mod launcher;
mod log;
mod notify;
pub mod process;
pub mod systemd;

pub(crate) use dbus::fuzz as fuzz_dbus;
pub use direct::Direct;
pub use systemd::Systemd;

use self::process::Process;
use crate::attachment::record::Files;
use crate::clock::{Clock, Deadline};
use crate::launch::StartError;

/// What to start.
#[derive(Debug, Clone, Copy)]
pub struct Launch<'a> {
    /// The program.
    pub instance: &'a Path,
    /// The attachment; its launch contract is written.
    pub files: &'a Files,
    /// The pod's network namespace: without it there is nothing to restart.
    pub netns: &'a Path,
    /// Description of the unit, one line.
    pub description: &'a str,
    /// What a start may take.
    pub budget: Duration,
    /// Most bytes of memory that the instance may have.
    pub memory_limit: Option<u64>,
}

/// What is known of an attachment's process when it is to be stopped.
#[derive(Debug, Clone, Copy)]
pub enum Known {
    /// A record: with no process in it there is none that is not a unit.
    Recorded(Option<Process>),
    /// No readable record.
    Nothing,
}

/// Starts and stops instances.
pub trait Supervisor {
    /// Starts an instance and waits until it says it is ready. `started` is called before any code of the instance
    /// runs, with the process if the supervisor knows it by that: if it fails, or if the caller dies before it returns,
    /// no instance stays behind.
    ///
    /// # Errors
    /// See [`StartFailure`]; the instance may still run, so stop it.
    fn start(
        &self,
        launch: &Launch<'_>,
        clock: &dyn Clock,
        deadline: Deadline,
        started: &mut dyn FnMut(Option<Process>) -> io::Result<()>,
    ) -> Result<(), StartFailure>;

    /// As [`Supervisor::start`], for an instance that died: does not wait until it is ready.
    ///
    /// # Errors
    /// It could not be started or recorded.
    fn restart(
        &self,
        launch: &Launch<'_>,
        clock: &dyn Clock,
        started: &mut dyn FnMut(Option<Process>) -> io::Result<()>,
    ) -> Result<(), StartFailure>;

    /// Whether the attachment's instance runs, or is about to run again.
    fn is_alive(&self, files: &Files, process: Option<Process>, clock: &dyn Clock) -> bool;

    /// Ends every instance of an attachment and waits until it is gone.
    ///
    /// # Errors
    /// It is still there.
    fn stop(&self, files: &Files, known: Known, clock: &dyn Clock) -> Result<(), String>;

    /// Removes what was made around the attachment's instance, once it is gone.
    fn clean_up(&self, files: &Files, clock: &dyn Clock);

    /// Whether dead instances come back without anybody asking.
    fn restarts_by_itself(&self) -> bool;

    /// Why the attachment's instance ended, where the supervisor can tell.
    fn why_ended(&self, files: &Files, clock: &dyn Clock) -> Option<String>;
}

const TOO_MUCH_MEMORY: &str = "it was ended because it needed more memory than \"memoryLimitMiB\" allows";

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
        /// Its last STATUS, if that is one of this release.
        error: Option<StartError>,
        /// The text of its last STATUS, and its last line on stderr.
        said: String,
    },
    /// It did not get ready in time.
    #[error("the instance was not ready in time")]
    Deadline {
        /// Its last STATUS, or else its last line on stderr.
        said: String,
    },
}

/// A STATUS as text for people, and the error that it is.
fn read_status(status: String) -> (Option<StartError>, String) {
    match StartError::from_line(&status) {
        Some(error) => (Some(error.clone()), error.to_string()),
        None => (None, status),
    }
}

/// The instance's option for the file of its launch contract.
const LAUNCH_OPTION: &str = "--launch";
