//! Programs that are installed beside this one: `nebula-ctl` and `nebula-enrol` beside `nebula`.

use std::convert::Infallible;
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// A companion program could not be started.
#[derive(Debug, thiserror::Error)]
#[error(
    "cannot run {}: {source}; it belongs beside {}, or into PATH, and the packages nebula-overlay and nebula-proxy have it there",
    program.display(), own_name()
)]
pub struct NotRun {
    /// Where it was looked for; only its name if `PATH` was searched.
    pub program: PathBuf,
    /// The system's error.
    #[source]
    pub source: std::io::Error,
}

/// The program `name` in the folder of the running one; only the name, for a search of `PATH`, if it is not there.
#[must_use]
pub fn find(name: &str) -> PathBuf {
    let beside = std::env::current_exe().ok().map(|program| program.with_file_name(name));
    beside.filter(|path| path.exists()).unwrap_or_else(|| name.into())
}

/// Replaces this process by the program `name`.
///
/// # Errors
/// Returns an error if the program cannot be executed; does not return otherwise.
pub fn execute(name: &str, arguments: impl IntoIterator<Item = OsString>) -> Result<Infallible, NotRun> {
    execute_with(name, arguments, Stdio::inherit())
}

/// Like [`execute`], with another standard input.
///
/// # Errors
/// The same as [`execute`].
pub fn execute_with(
    name: &str,
    arguments: impl IntoIterator<Item = OsString>,
    input: Stdio,
) -> Result<Infallible, NotRun> {
    let program = find(name);
    let source = Command::new(&program).args(arguments).stdin(input).exec();
    Err(NotRun { program, source })
}

fn own_name() -> String {
    let own = std::env::current_exe().ok();
    own.map_or_else(|| "this program".to_owned(), |own| own.display().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_program_is_named_with_its_place_and_package() {
        assert_eq!(find("nebula-nowhere"), PathBuf::from("nebula-nowhere"));
        let refused = execute("nebula-nowhere", []).map(|_| ()).unwrap_err().to_string();
        let own = std::env::current_exe().unwrap().display().to_string();
        for part in ["cannot run nebula-nowhere", "beside ", &own, "nebula-overlay"] {
            assert!(refused.contains(part), "{refused}");
        }
    }
}
