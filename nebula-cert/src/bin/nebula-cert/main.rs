//! `nebula-cert`: generates keys, and signs, prints and verifies certificates, with the flags of the Go tool.

mod arguments;
mod blocklist;
mod bundle;
mod ca;
mod completions;
mod contents;
mod file;
mod hardware;
mod inspect;
mod keygen;
mod man;
mod passphrase;
mod print;
mod qr;
mod renew;
mod sign;
mod verify;

use std::io::Write as _;
use std::process::ExitCode;
use std::time::{Duration, SystemTime};

use clap::{CommandFactory as _, FromArgMatches as _, Parser};

use arguments::Usage;

/// Makes keys, signs, prints and verifies Nebula certificates.
#[derive(Parser)]
#[command(name = "nebula-cert", disable_help_flag = true, disable_help_subcommand = true)]
enum Mode {
    /// Create a self-signed certificate authority.
    Ca(ca::Flags),
    /// Create a key pair for a host; the public key can be passed to `nebula-cert sign`.
    Keygen(keygen::Flags),
    /// Create and sign a certificate for a host.
    Sign(sign::Flags),
    /// Print details about a certificate.
    Print(print::Flags),
    /// Verify that a certificate is not expired and was signed by a trusted authority.
    Verify(verify::Flags),
    /// Sign a certificate of a host again: the same identity, valid from now.
    Renew(renew::Flags),
    /// Show how long the certificates of a folder are still valid; exit code 1 if one needs attention.
    Inspect(inspect::Flags),
    /// Print the fingerprints that block a certificate.
    Blocklist(blocklist::Flags),
    /// Print the script that completes words for a shell.
    Completions(completions::Flags),
    /// Print the manual page, or write that of every mode into a folder.
    Man(man::Flags),
}

fn main() -> ExitCode {
    let words: Result<Vec<String>, _> = std::env::args_os().skip(1).map(|word| word.into_string()).collect();
    let Ok(words) = words else {
        complain("an argument is not UTF-8 text");
        return ExitCode::FAILURE;
    };
    run(&words)
}

fn run(words: &[String]) -> ExitCode {
    let mut help = false;
    let mut words = words.iter();
    let mode = loop {
        let Some(word) = words.next() else {
            if !help {
                complain("No mode was provided\n");
            }
            say_on_stderr(&overview());
            return if help { ExitCode::SUCCESS } else { ExitCode::FAILURE };
        };
        if word == "--" {
            // `--` ends the flags; the mode follows.
            let Some(word) = words.next() else { continue };
            break word;
        }
        let Some(flag) = word.strip_prefix("--").or_else(|| word.strip_prefix('-')) else { break word };
        let (name, value) = flag.split_once('=').map_or((flag, None), |(name, value)| (name, Some(value)));
        if !["version", "h", "help"].contains(&name) {
            complain(&format!("flag provided but not defined: -{}\n", word.trim_start_matches('-')));
            say_on_stderr(&overview());
            return ExitCode::FAILURE;
        }
        match value.map_or(Ok(true), arguments::boolean) {
            Err(_) => {
                complain(&format!("invalid boolean value {:?} for -{name}: parse error", value.unwrap_or_default()));
                return ExitCode::FAILURE;
            }
            Ok(false) => {}
            Ok(true) if name == "version" => return print_version(),
            Ok(true) => help = true,
        }
    };
    let mut commands = Mode::command();
    let Some(command) = commands.find_subcommand_mut(mode) else {
        complain(&format!("unknown mode: {}", hardware::shown(mode)));
        return ExitCode::FAILURE;
    };
    let mut command = arguments::prepare(command.clone());
    if help {
        say_on_stderr(&command.render_long_help().to_string());
        return ExitCode::SUCCESS;
    }
    match execute(mode, &mut command, words.as_slice()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => report(&error, &mut command),
    }
}

fn execute(mode: &str, command: &mut clap::Command, words: &[String]) -> anyhow::Result<()> {
    let words = arguments::from_go_form(command, words);
    let matches = command.try_get_matches_from_mut(words)?;
    match mode {
        "ca" => ca::run(ca::Flags::from_arg_matches(&matches)?, now()),
        "keygen" => keygen::run(&keygen::Flags::from_arg_matches(&matches)?),
        "sign" => sign::run(sign::Flags::from_arg_matches(&matches)?, now()),
        "print" => print::run(&print::Flags::from_arg_matches(&matches)?),
        "renew" => renew::run(&renew::Flags::from_arg_matches(&matches)?, now()),
        "inspect" => inspect::run(&inspect::Flags::from_arg_matches(&matches)?, now()),
        "blocklist" => blocklist::run(&blocklist::Flags::from_arg_matches(&matches)?),
        "completions" => completions::run(&completions::Flags::from_arg_matches(&matches)?, Mode::command()),
        "man" => man::run(&man::Flags::from_arg_matches(&matches)?, Mode::command()),
        _ => verify::run(&verify::Flags::from_arg_matches(&matches)?, now()),
    }
}

/// Prints the error and, for a usage error, the help of the mode.
fn report(error: &anyhow::Error, command: &mut clap::Command) -> ExitCode {
    if let Some(error) = error.downcast_ref::<clap::Error>() {
        if error.kind() == clap::error::ErrorKind::DisplayHelp {
            say_on_stderr(&error.to_string());
            return ExitCode::SUCCESS;
        }
        let help = format!("the flags are listed by: {} -h", command.get_bin_name().unwrap_or_default());
        complain(&format!("{}\n{help}", arguments::complaint(error)));
        return ExitCode::FAILURE;
    }
    complain(&format!("{error:#}"));
    if error.is::<Usage>() {
        say_on_stderr(&command.render_long_help().to_string());
    }
    ExitCode::FAILURE
}

fn overview() -> String {
    let modes = Mode::command().get_subcommands().fold(String::new(), |text, mode| {
        format!("{text}  {:11} {}\n", mode.get_name(), mode.get_about().map(ToString::to_string).unwrap_or_default())
    });
    format!(
        "Usage: nebula-cert <mode> <flags>\n\nModes:\n{modes}\nGlobal flags:\n  -version  Print the version\n  \
         -h, -help Print this text\n\nFor the flags of a mode: nebula-cert <mode> -h\n"
    )
}

fn print_version() -> ExitCode {
    match write!(std::io::stdout(), "Version: {}\n{}", env!("CARGO_PKG_VERSION"), nebula_cert::BUILD_NOTE) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

fn complain(text: &str) {
    say_on_stderr(&format!("Error: {text}\n"));
}

fn say_on_stderr(text: &str) {
    // If stderr is closed, there is nowhere to report it.
    let _ = std::io::stderr().write_all(text.as_bytes());
}

/// Time since 1970.
#[expect(clippy::disallowed_methods, reason = "the one place of this tool that reads the clock")]
fn now() -> Duration {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default()
}
