//! Drop-in replacement for Go Nebula's daemon: `nebula -config FILE`.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use nebula_cert::BUILD_NOTE;
use nebula_config::go::flags::{self, Flag, Parsed};
use nebula_config::loaded::{Error, Loaded};
use nebula_enrolment::enrol::Files;
use nebula_enrolment::enrol::up::words;
use nebula_instance::host::daemon::{self, Before};
use nebula_linux::{companion, memory};

fn main() -> ExitCode {
    // Before anything else: a join token among the words can be read by others until it is taken off.
    if let Some(words) = words::take() {
        return words::hand_over(words);
    }
    memory::share_one_heap();
    if std::env::args_os().nth(1).is_some_and(|word| word == "ctl") {
        return match companion::execute("nebula-ctl", std::env::args_os().skip(2)) {
            Ok(never) => match never {},
            Err(error) => {
                eprintln!("nebula: {error}");
                ExitCode::from(NO_DAEMON)
            }
        };
    }
    let flags = match flags::parse(std::env::args().skip(1), FLAGS) {
        Ok(flags) => flags,
        Err(flags::Error::Help) => {
            eprint!("{}", usage());
            return ExitCode::SUCCESS;
        }
        Err(error) => {
            eprint!("{error}\n{}", usage());
            return ExitCode::from(2);
        }
    };
    if flags.is_set("version") {
        // Scripts read the first line, which has Go's format.
        print(concat!("Version: ", env!("CARGO_PKG_VERSION"), "\n", "Compatible with: Go Nebula 1.11\n"));
        print(BUILD_NOTE);
        return ExitCode::SUCCESS;
    }
    if flags.is_set("help") {
        eprint!("{}", usage());
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
    match run(&path, &flags) {
        Ok(()) => ExitCode::SUCCESS,
        Err(Error::BeforeLog(text)) => {
            print(&text);
            ExitCode::FAILURE
        }
        Err(Error::Reported) => ExitCode::FAILURE,
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

fn run(path: &Path, flags: &Parsed) -> Result<(), Error> {
    // Before any file is opened.
    let before = Before::take();
    let loaded = Loaded::read(path, |folder| drop(Files::new(folder).complete()))?;
    if flags.is_set("test") { loaded.test(flags.is_set("strict")) } else { daemon::serve(loaded, before) }
}

/// As `nebula-ctl` says that no daemon answers.
const NO_DAEMON: u8 = 3;

/// `config.yaml` or `config.yml` in the folder of the program.
fn default_config() -> Result<PathBuf, String> {
    let program =
        std::env::current_exe().map_err(|error| format!("failed to find the program's own path: {error}\n"))?;
    let folder = program.parent().unwrap_or_else(|| Path::new("/"));
    let candidates = [folder.join("config.yaml"), folder.join("config.yml")];
    match candidates.iter().find(|path| path.exists()) {
        Some(found) => Ok(found.clone()),
        None => {
            let [first, second] = candidates;
            Err(format!("no default config found at {} or {}\n", first.display(), second.display()))
        }
    }
}

fn usage() -> String {
    flags::usage("nebula", FLAGS) + OTHER_COMMANDS
}

const OTHER_COMMANDS: &str = "Other commands:
  nebula up
    \tEnrol this host with a certificate service and start the daemon; `nebula up -help`
  nebula ctl
    \tAsk the running daemon: status, peers, doctor, why and more; `nebula ctl --help`
";

fn print(text: &str) {
    // A closed standard output is not an error.
    let _ = std::io::stdout().write_all(text.as_bytes());
}

const FLAGS: &[Flag] = &[
    Flag { name: "config", takes_value: true, help: "Path to either a file or directory to load configuration from" },
    Flag {
        name: "test",
        takes_value: false,
        help: "Test the config and print the end result. Non zero exit indicates a faulty config",
    },
    Flag { name: "strict", takes_value: false, help: "With -test: whatever is worth a warning is an error" },
    Flag { name: "version", takes_value: false, help: "Print version" },
    Flag { name: "help", takes_value: false, help: "Print command line usage" },
];
