//! The node agent's program.

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use nebula_agent::on_host;
use nebula_agent::reconcile::command::Keep;

/// Prepares a Kubernetes node for the Nebula CNI plugin, and keeps its pods protected
#[derive(Debug, Parser)]
#[command(name = "nebula-cni-agent", version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Keep the pods of this node protected, with a chain that is installed already
    Keep(Keep),
}

fn main() -> ExitCode {
    let mut arguments = std::env::args_os().skip(1);
    if arguments.next().is_some_and(|verb| verb == on_host::VERB) {
        // Before any thread is started: one of several cannot change its mount namespace.
        return fail(&on_host::run(&arguments.collect::<Vec<_>>()));
    }
    let Command::Keep(keep) = Arguments::parse().command;
    let filter = tracing_subscriber::EnvFilter::try_from_env("NEBULA_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("info"));
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
    // Several libraries bring TLS with them; all are to use this one.
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return fail(&format!("cannot start: {error}")),
    };
    match runtime.block_on(keep.run()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail(&error.to_string()),
    }
}

fn fail(why: &str) -> ExitCode {
    eprintln!("nebula-cni-agent: {why}");
    ExitCode::FAILURE
}
