//! Drop-in replacement for Go Nebula's daemon: `nebula -config FILE`.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use nebula_instance::daemon::{Error, Loaded};
use nebula_instance::go_flags::{self, Flag};

fn main() -> ExitCode {
    let flags = match go_flags::parse(std::env::args().skip(1), FLAGS) {
        Ok(flags) => flags,
        Err(go_flags::Error::Help) => {
            eprint!("{}", go_flags::usage("nebula", FLAGS));
            return ExitCode::SUCCESS;
        }
        Err(error) => {
            eprint!("{error}\n{}", go_flags::usage("nebula", FLAGS));
            return ExitCode::from(2);
        }
    };
    if flags.is_set("version") {
        print(concat!("Version: ", env!("CARGO_PKG_VERSION"), "\n"));
        return ExitCode::SUCCESS;
    }
    if flags.is_set("help") {
        eprint!("{}", go_flags::usage("nebula", FLAGS));
        return ExitCode::SUCCESS;
    }
    let path = match flags.value("config").filter(|path| !path.is_empty()).map_or_else(default_config, |p| Ok(p.into()))
    {
        Ok(path) => path,
        Err(message) => {
            print(&message);
            return ExitCode::FAILURE;
        }
    };
    match run(&path, flags.is_set("test")) {
        Ok(()) => ExitCode::SUCCESS,
        Err(Error::BeforeLog(text)) => {
            print(&text);
            ExitCode::FAILURE
        }
        Err(Error::Running(error)) => {
            tracing::error!(error, "Error while running");
            ExitCode::from(2)
        }
        Err(Error::Start { message, cause }) => {
            tracing::error!(error = cause, "{message}");
            ExitCode::FAILURE
        }
        Err(other) => {
            tracing::error!(error = %other, "Failed to start");
            ExitCode::FAILURE
        }
    }
}

fn run(path: &Path, test: bool) -> Result<(), Error> {
    let loaded = Loaded::read(path)?;
    if test { loaded.test() } else { loaded.serve() }
}

/// `config.yaml` or `config.yml` beside the program.
fn default_config() -> Result<PathBuf, String> {
    let program =
        std::env::current_exe().map_err(|error| format!("failed to find the program's own path: {error}\n"))?;
    let folder = program.parent().unwrap_or(Path::new("/"));
    let candidates = [folder.join("config.yaml"), folder.join("config.yml")];
    match candidates.iter().find(|path| path.exists()) {
        Some(found) => Ok(found.clone()),
        None => {
            let [first, second] = candidates;
            Err(format!("no default config found at {} or {}\n", first.display(), second.display()))
        }
    }
}

fn print(text: &str) {
    // Nobody is left to tell when standard output is closed.
    let _ = std::io::stdout().write_all(text.as_bytes());
}

const FLAGS: &[Flag] = &[
    Flag { name: "config", takes_value: true, help: "Path to either a file or directory to load configuration from" },
    Flag {
        name: "test",
        takes_value: false,
        help: "Test the config and print the end result. Non zero exit indicates a faulty config",
    },
    Flag { name: "version", takes_value: false, help: "Print version" },
    Flag { name: "help", takes_value: false, help: "Print command line usage" },
];
