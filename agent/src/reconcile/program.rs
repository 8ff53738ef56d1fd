//! Runs the plugin's program on the node, with a deadline.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use serde::Deserialize;

use super::entry::Call;
use crate::host_root::HostRoot;
use crate::{on_host, process};

/// The installed plugin.
#[derive(Debug, Clone)]
pub struct Plugin {
    /// Path of the program, as the node names it.
    pub path: PathBuf,
    /// The node's file system.
    pub host: HostRoot,
}

/// Why the plugin did not do what it was asked for.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProgramError {
    /// It could not be run.
    #[error("cannot run {0}: {1}")]
    Run(PathBuf, #[source] std::io::Error),
    /// It refused, with one of its own codes.
    #[error("{message}")]
    Refused {
        /// One of [`nebula_cni_plugin::reply::code`].
        code: u32,
        /// What it printed.
        message: String,
    },
    /// It failed without an error object.
    #[error("{0}")]
    Failed(String),
}

impl Plugin {
    /// Runs the program with these arguments and, for a CNI verb, with this call; returns what it printed. Blocks.
    ///
    /// # Errors
    /// Returns an error if it fails or is not done within `timeout`; then it has been ended.
    pub fn run(&self, arguments: &[&str], call: Option<&Call>, timeout: Duration) -> Result<String, ProgramError> {
        let failed = |error| ProgramError::Run(self.path.clone(), error);
        let mut command = match self.host.path() {
            None => Command::new(&self.path),
            Some(_) => {
                let mut command = Command::new("/proc/self/exe");
                command.arg(on_host::VERB).arg(&self.path);
                command
            }
        };
        let kept = KEPT.into_iter().filter_map(|name| Some((name, std::env::var_os(name)?)));
        let env = call.into_iter().flat_map(|call| &call.env).map(|(key, value)| (*key, value));
        command.args(arguments).env_clear().envs(kept).envs(env).current_dir("/");
        let stdin = call.map(|call| call.stdin.as_bytes()).unwrap_or_default();
        let ended = process::run(&mut command, stdin, timeout).map_err(failed)?;
        if ended.status.success() {
            return Ok(ended.stdout);
        }
        Err(match serde_json::from_str::<Refusal>(&ended.stdout) {
            Ok(Refusal { code, msg, details }) => {
                let message = [msg, details].into_iter().filter(|text| !text.is_empty()).collect::<Vec<_>>().join(": ");
                ProgramError::Refused { code, message }
            }
            Err(_) => ProgramError::Failed(format!("{} ({}): {}", self.path.display(), ended.status, ended.stderr)),
        })
    }
}

#[derive(Deserialize)]
struct Refusal {
    code: u32,
    msg: String,
    #[serde(default)]
    details: String,
}

/// What the plugin needs to find its helpers and systemd.
const KEPT: [&str; 2] = ["PATH", "DBUS_SYSTEM_BUS_ADDRESS"];

#[cfg(test)]
mod tests {
    use super::*;

    /// A shell in place of the plugin; its first arguments are "-c" and a script.
    fn shell() -> Plugin {
        Plugin { path: "/bin/sh".into(), host: HostRoot::default() }
    }

    const LONG: Duration = Duration::from_secs(20);

    #[test]
    fn output_refusals_and_failures_are_told_apart() {
        let call = Call { env: vec![("CNI_COMMAND", "ADD".into())], stdin: "{}".into() };
        let said = shell().run(&["-c", "cat; echo $0 $CNI_COMMAND $HOME", "attach"], Some(&call), LONG).unwrap();
        assert_eq!(said, "{}attach ADD");
        let refuse = r#"echo '{"code":102,"msg":"refused","details":"ask"}'; exit 1"#;
        let error = shell().run(&["-c", refuse], None, LONG).unwrap_err();
        assert!(matches!(&error, ProgramError::Refused { code: 102, .. }), "{error:?}");
        assert_eq!(error.to_string(), "refused: ask");
        let error = shell().run(&["-c", "echo boom >&2; exit 3"], None, LONG).unwrap_err().to_string();
        assert!(error.contains("boom") && error.contains('3'), "{error}");
        let missing = Plugin { path: "/nonexistent/plugin".into(), host: HostRoot::default() };
        assert!(matches!(missing.run(&[], None, LONG), Err(ProgramError::Run(..))));
    }

    #[test]
    fn a_program_that_hangs_is_ended() {
        let late = shell().run(&["-c", "exec sleep 60"], None, Duration::from_millis(50));
        assert!(matches!(late, Err(ProgramError::Run(_, error)) if error.kind() == std::io::ErrorKind::TimedOut));
    }
}
