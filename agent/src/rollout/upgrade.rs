//! Has the plugin replace the program of one instance, watches the instance, and has the plugin go back if it does not
//! pass the gate.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use nebula_cni_contract::clock::{Clock, SystemClock};
use nebula_cni_contract::instance_status::{InstanceState, Status};
use nebula_cni_plugin::attachment::files::Files;
use nebula_cni_plugin::attachment::record::{Found, Record};
use nebula_cni_plugin::reply::code;
use nebula_cni_plugin::request::Key;
use nebula_cni_plugin::supervisor::is_instance;
use serde::Deserialize;

use super::gate::{Before, Fault, Gate, Sample, Verdict, shortened};
use super::plan::Outcome;
use super::program::{KnownPrograms, ProgramId, resident_kib};
use crate::config::INSTANCE;
use crate::reconcile::program::{Plugin, ProgramError};

/// One instance, and what its program is replaced with.
#[derive(Debug, Clone)]
pub struct Upgrade {
    /// The installed plugin. The program of instances lies beside it.
    pub plugin: Plugin,
    /// The plugin's directory of records, as the node names it.
    pub state_dir: PathBuf,
    /// Which attachment.
    pub key: Key,
    /// The programs that were identified.
    pub programs: Arc<KnownPrograms>,
}

/// Why an instance cannot be seen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Unseen {
    /// Its attachment was removed.
    Gone,
    /// It does not answer.
    Silent(String),
}

/// Where the program of instances is installed, as the agent sees it.
#[must_use]
pub fn installed(plugin: &Plugin) -> PathBuf {
    plugin.host.resolve(&plugin.path.with_file_name(INSTANCE))
}

/// The file of the program that a process runs.
#[must_use]
pub fn program_of(pid: i32) -> PathBuf {
    format!("/proc/{pid}/exe").into()
}

impl Upgrade {
    /// Looks at the instance.
    ///
    /// # Errors
    /// Says whether its pod is gone.
    pub async fn look(&self) -> Result<Sample, Unseen> {
        let this = self.clone();
        let looked = tokio::task::spawn_blocking(move || this.look_now()).await;
        looked.unwrap_or_else(|error| Err(Unseen::Silent(error.to_string())))
    }

    fn look_now(&self) -> Result<Sample, Unseen> {
        let silent = |error: std::io::Error| Unseen::Silent(error.to_string());
        let record = self.record()?;
        let status = Status::ask(&self.plugin.host.resolve(&record.status_socket)).map_err(silent)?;
        let pid = status.pid.filter(|pid| *pid > 0);
        let pid = pid.ok_or_else(|| Unseen::Silent("it does not say which process it is".to_owned()))?;
        let program = self.program_of(&record, pid)?;
        Ok(Sample { pid, program, resident_kib: resident_kib(pid), status })
    }

    /// What process `pid` runs, as which the instance answers. Blocks.
    ///
    /// # Errors
    /// Says why that cannot be told, or that the process is another one.
    pub(super) fn program_now(&self, pid: i32) -> Result<ProgramId, Unseen> {
        self.program_of(&*self.record()?, pid)
    }

    fn program_of(&self, record: &Record, pid: i32) -> Result<ProgramId, Unseen> {
        if !is_instance(record, &self.files(), pid) {
            return Err(Unseen::Silent("another process answers in its place".to_owned()));
        }
        self.programs.identify(&program_of(pid)).map_err(|error| Unseen::Silent(error.to_string()))
    }

    fn files(&self) -> Files {
        Files::new(&self.plugin.host.resolve(&self.state_dir), &self.key)
    }

    fn record(&self) -> Result<Box<Record>, Unseen> {
        match Record::load(&self.files().record()) {
            Ok(Found::Record(record)) => Ok(record),
            Ok(Found::Nothing) => Err(Unseen::Gone),
            Ok(Found::Foreign(_) | Found::Garbage(_)) => Err(Unseen::Silent("its record cannot be read".to_owned())),
            Err(error) => Err(Unseen::Silent(error.to_string())),
        }
    }

    /// Replaces the program of the instance by the installed one, which is `wanted`, and watches it for so long. With
    /// `has_begun` an agent that has ended did the first.
    pub async fn carry_out(&self, before: &Before, wanted: &ProgramId, watch: Duration, has_begun: bool) -> Outcome {
        let reply = match has_begun {
            true => Reply { upgraded: true, pid: None, version: None },
            false => match self.call(false).await {
                Ok(reply) => reply,
                Err(error) => return self.refused(error, wanted).await,
            },
        };
        if !reply.upgraded {
            return Outcome::Unchanged;
        }
        let gate = Gate { wanted: wanted.clone(), pid: reply.pid, watch };
        match self.watch(&gate, before).await {
            Ok(()) => Outcome::Upgraded(shortened(reply.version.as_deref().unwrap_or_default())),
            Err(Ended::Gone) => Outcome::Gone,
            Err(Ended::Fault(Fault::OtherProgram)) if !self.is_installed(wanted).await => {
                Outcome::Postponed("another program was installed meanwhile".to_owned())
            }
            Err(Ended::Fault(fault)) => self.roll_back(fault, wanted).await,
        }
    }

    async fn watch(&self, gate: &Gate, before: &Before) -> Result<(), Ended> {
        let began = SystemClock.now();
        loop {
            tokio::time::sleep(LOOK_AGAIN.min(gate.watch)).await;
            let seen = self.look().await;
            let seen = match &seen {
                Ok(sample) => Ok(sample),
                Err(Unseen::Silent(why)) => Err(why.as_str()),
                Err(Unseen::Gone) => return Err(Ended::Gone),
            };
            match gate.judge(before, seen, SystemClock.now().saturating_duration_since(began)) {
                Verdict::Watch => {}
                Verdict::Keep => return Ok(()),
                Verdict::RollBack(fault) => return Err(Ended::Fault(fault)),
            }
        }
    }

    /// What a call that failed means. Mostly the instance has gone on all the time.
    async fn refused(&self, error: ProgramError, wanted: &ProgramId) -> Outcome {
        let why = error.to_string();
        match error {
            ProgramError::Refused { code: code::TRY_AGAIN, .. } => Outcome::Postponed(why),
            ProgramError::Refused { code: code::UNKNOWN_CONTAINER, .. } => Outcome::Gone,
            ProgramError::Refused { code: code::INSTANCE_LOST, .. } => {
                self.roll_back(Fault::Interrupted(why), wanted).await
            }
            ProgramError::Refused { code: code::INSTANCE_ROLLED_BACK, .. } => {
                Outcome::RolledBack(Fault::Interrupted(why))
            }
            ProgramError::Refused { .. } => Outcome::Refused(why),
            // It ended before it could say anything: the instance may have either program.
            ProgramError::Run(..) | ProgramError::Failed(_) => match self.look().await {
                Ok(sample) if sample.program != *wanted && sample.status.state == InstanceState::Running => {
                    Outcome::Refused(why)
                }
                Err(Unseen::Gone) => Outcome::Gone,
                _ => self.roll_back(Fault::Interrupted(why), wanted).await,
            },
        }
    }

    async fn roll_back(&self, fault: Fault, wanted: &ProgramId) -> Outcome {
        // Its supervisor may have started it with the old program, or starts it now. One that is silent has been
        // waited for.
        if !matches!(fault, Fault::Silent(_)) && self.answer().await.is_ok_and(|sample| sample.program != *wanted) {
            return Outcome::RolledBack(fault);
        }
        let failed = match self.call_back().await {
            Ok(_) => match self.answer().await {
                Ok(sample) if sample.program != *wanted => return Outcome::RolledBack(fault),
                Ok(_) => "it still runs the new program".to_owned(),
                Err(Unseen::Silent(why)) => why,
                Err(Unseen::Gone) => return Outcome::Gone,
            },
            Err(error) => error.to_string(),
        };
        // A pod that ends takes its instance with it, which is no fault of the program.
        match self.look().await {
            Err(Unseen::Gone) => Outcome::Gone,
            Ok(sample) if sample.program != *wanted => Outcome::RolledBack(fault),
            _ => Outcome::NotRolledBack(fault, failed),
        }
    }

    /// Calls the plugin, again where it asks for that: it works on the attachment for something else.
    async fn call_back(&self) -> Result<Reply, ProgramError> {
        let mut tries = 0;
        loop {
            tries += 1;
            match self.call(true).await {
                Err(ProgramError::Refused { code: code::TRY_AGAIN, .. }) if tries < TRIES => {
                    tokio::time::sleep(LOOK_AGAIN).await;
                }
                done => return done,
            }
        }
    }

    /// Waits for a moment until the instance answers.
    async fn answer(&self) -> Result<Sample, Unseen> {
        let mut looks = 1;
        loop {
            match self.look().await {
                Err(Unseen::Silent(_)) if looks < LOOKS => tokio::time::sleep(LOOK_AGAIN).await,
                seen => return seen,
            }
            looks += 1;
        }
    }

    async fn is_installed(&self, wanted: &ProgramId) -> bool {
        let (programs, path) = (Arc::clone(&self.programs), installed(&self.plugin));
        let found = tokio::task::spawn_blocking(move || programs.identify(&path)).await;
        matches!(found, Ok(Ok(found)) if found == *wanted)
    }

    async fn call(&self, to_previous: bool) -> Result<Reply, ProgramError> {
        let this = self.clone();
        let done = tokio::task::spawn_blocking(move || this.call_now(to_previous)).await;
        done.map_err(|error| ProgramError::Failed(error.to_string()))?
    }

    fn call_now(&self, to_previous: bool) -> Result<Reply, ProgramError> {
        let state_dir = self.state_dir.display().to_string();
        let Key { network, container_id, ifname } = &self.key;
        let mut arguments = vec!["upgrade", &state_dir, network, container_id, ifname];
        arguments.extend(to_previous.then_some("--previous"));
        let said = self.plugin.run(&arguments, None, TIMEOUT)?;
        serde_json::from_str(&said)
            .map_err(|error| ProgramError::Failed(format!("the plugin's answer is not understood: {error}")))
    }
}

/// What the plugin prints.
#[derive(Debug, Deserialize)]
struct Reply {
    /// Whether the instance has another program than before.
    upgraded: bool,
    /// Its process.
    #[serde(default)]
    pid: Option<i32>,
    /// The version of its program.
    #[serde(default)]
    version: Option<String>,
}

enum Ended {
    Gone,
    Fault(Fault),
}

/// The plugin takes less, unless processes do not end although they were killed, for which it waits for a minute each.
const TIMEOUT: Duration = Duration::from_secs(180);
const LOOK_AGAIN: Duration = Duration::from_millis(500);
const TRIES: u32 = 5;
/// Until an instance that was restarted answers.
const LOOKS: u32 = 6;

#[cfg(test)]
pub(super) mod tests;
