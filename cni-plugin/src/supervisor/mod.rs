//! Supervisors, which keep one instance per pod alive after the plugin has exited.

use std::io;
use std::path::Path;
use std::time::Duration;

pub mod cgroup;
mod child;
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

use self::kind::Kind;
use self::process::Process;
use crate::attachment::files::Files;
use crate::attachment::record::Record;
use nebula_cni_contract::clock::{Clock, Deadline};
use nebula_cni_contract::launch::StartError;

/// What to start.
#[derive(Debug, Clone, Copy)]
pub struct Launch<'a> {
    /// The program.
    pub instance: &'a Path,
    /// Files of the attachment; its launch contract must exist.
    pub files: &'a Files,
    /// The pod's network namespace; once it is gone, the instance is not restarted.
    pub netns: &'a Path,
    /// Description of the unit, one line.
    pub description: &'a str,
    /// Time limit of a start.
    pub budget: Duration,
    /// Memory limit of the instance in bytes; `None` for no limit.
    pub memory_limit: Option<u64>,
    /// Number of the process from which the instance takes over.
    pub replaces: Option<i32>,
}

/// What is known about an attachment's process when it is stopped.
#[derive(Debug, Clone, Copy)]
pub enum Known {
    /// There is a record; it names the process unless the instance is a unit or was never started, and a second one if
    /// one of them takes over from the other.
    Recorded([Option<Process>; 2]),
    /// There is no readable record.
    Nothing,
}

/// Starts and stops instances.
pub trait Supervisor {
    /// Starts an instance and waits until it reports that it is ready. `started` is called before any code of the
    /// instance runs, with the process if the supervisor tracks instances by process. If it fails, or if the caller
    /// dies before it returns, no instance is left behind.
    ///
    /// # Errors
    /// See [`StartFailure`]. The instance may still be running, so the caller must stop it.
    fn start(
        &self,
        launch: &Launch<'_>,
        clock: &dyn Clock,
        deadline: Deadline,
        started: &mut dyn FnMut(Option<Process>) -> io::Result<()>,
    ) -> Result<(), StartFailure>;

    /// Starts an instance that died again. Like [`Supervisor::start`], but does not wait until it is ready.
    ///
    /// # Errors
    /// Returns an error if it could not be started or recorded.
    fn restart(
        &self,
        launch: &Launch<'_>,
        clock: &dyn Clock,
        started: &mut dyn FnMut(Option<Process>) -> io::Result<()>,
    ) -> Result<(), StartFailure>;

    /// Tells the attachment's instance, by SIGHUP, to read its launch contract again.
    ///
    /// # Errors
    /// Returns an error if there is none.
    fn reload(&self, files: &Files, process: Option<Process>, clock: &dyn Clock) -> Result<(), String>;

    /// Whether the attachment's instance is running or about to be restarted.
    fn is_alive(&self, files: &Files, process: Option<Process>, clock: &dyn Clock) -> bool;

    /// Waits until process `pid` is the only instance of an attachment. What does not end by itself within `patience`
    /// is killed.
    ///
    /// # Errors
    /// Returns an error if another one is still running.
    fn keep_only(
        &self,
        files: &Files,
        pid: i32,
        processes: [Option<Process>; 2],
        patience: Duration,
        clock: &dyn Clock,
    ) -> Result<(), String>;

    /// Stops every instance of an attachment and waits until it is gone.
    ///
    /// # Errors
    /// Returns an error if an instance is still running.
    fn stop(&self, files: &Files, known: Known, clock: &dyn Clock) -> Result<(), String>;

    /// Removes what was created for the attachment's instance, once that is gone.
    fn clean_up(&self, files: &Files, clock: &dyn Clock);

    /// Whether the supervisor restarts dead instances by itself.
    fn restarts_by_itself(&self) -> bool;

    /// Why the attachment's instance ended, if the supervisor knows.
    fn why_ended(&self, files: &Files, clock: &dyn Clock) -> Option<String>;
}

/// Whether process `pid` is an instance of the attachment of `record`. What an instance says of itself proves nothing.
#[must_use]
pub fn is_instance(record: &Record, files: &Files, pid: i32) -> bool {
    match record.supervisor {
        Kind::Direct => record.processes().into_iter().flatten().any(|one| one.pid == pid && one.is_alive()),
        Kind::Systemd => systemd::unit_of(files, pid).is_ok_and(|unit| unit.is_some()),
    }
}

const TOO_MUCH_MEMORY: &str = "it was ended because it needed more memory than \"memoryLimitMiB\" allows";

/// Why an instance is not ready.
#[derive(Debug, thiserror::Error)]
pub enum StartFailure {
    /// It could not be started.
    #[error("cannot start the instance: {0}")]
    Spawn(#[source] io::Error),
    /// It was started but could not be recorded.
    #[error("cannot record the instance: {0}")]
    Record(#[source] io::Error),
    /// It ended by itself.
    #[error("the instance ended ({status}) before it was ready")]
    Ended {
        /// Exit status, or the result of the systemd job.
        status: String,
        /// Its last STATUS, if that could be parsed.
        error: Option<StartError>,
        /// The text of its last STATUS and, if known, its last line on stderr.
        said: String,
    },
    /// It was not ready in time.
    #[error("the instance was not ready in time")]
    Deadline {
        /// Its last STATUS, or else its last line on stderr if known.
        said: String,
    },
}

/// Splits a STATUS into the error that it encodes, if any, and a readable text.
fn read_status(status: String) -> (Option<StartError>, String) {
    match StartError::from_line(&status) {
        Some(error) => (Some(error.clone()), error.to_string()),
        None => (None, status),
    }
}

/// How unlikely the kernel is to end an instance when the node's memory runs out: as a pod with guaranteed memory, so
/// after all other pods, but before the kubelet and the runtime (-999), which can restart it. Its own limit holds
/// anyway.
const OOM_SCORE_ADJUST: i32 = -997;

/// The instance's command line option for its launch contract.
pub const LAUNCH_OPTION: &str = "--launch";
/// The option with the number of the process from which an instance takes over.
const TAKE_OVER_OPTION: &str = "--take-over";
