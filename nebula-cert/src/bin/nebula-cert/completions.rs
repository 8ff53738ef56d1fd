//! `nebula-cert completions`: a completion script for a shell.

use std::io::Write as _;

use anyhow::Context as _;
use clap_complete::Shell;

#[derive(clap::Args)]
pub(crate) struct Flags {
    /// Whose script: for bash, source it in ~/.bashrc.
    shell: Shell,
}

pub(crate) fn run(flags: &Flags, mut commands: clap::Command) -> anyhow::Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(flags.shell, &mut commands, "nebula-cert", &mut script);
    std::io::stdout().write_all(&script).context("error while writing to stdout")
}
