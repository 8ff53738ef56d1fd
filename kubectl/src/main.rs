//! `kubectl nebula`: reads the command line, calls the library, prints.

use std::io;
use std::process::ExitCode;

use clap::Parser;
use kubectl_nebula::cli::Cli;
use kubectl_nebula::outcome::Outcome;
use kubectl_nebula::run;
use nebula_cert::visible;

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // Help and the version are no errors.
            let code = if error.use_stderr() { Outcome::USAGE } else { 0 };
            let _ = error.print();
            return ExitCode::from(code);
        }
    };
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let done = match runtime {
        Ok(runtime) => runtime.block_on(run(&cli, &mut io::stdout(), &mut io::stderr())),
        Err(error) => Err(error.into()),
    };
    match done {
        Ok(outcome) => ExitCode::from(outcome.code()),
        Err(error) => {
            let lines = error.to_string();
            eprintln!("kubectl nebula: {}", lines.lines().map(visible).collect::<Vec<_>>().join("\n"));
            ExitCode::from(error.code())
        }
    }
}
