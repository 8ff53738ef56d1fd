//! `nebula-cert man`: generates manual pages.

use std::io::Write as _;
use std::path::PathBuf;

use anyhow::Context as _;

#[derive(clap::Args)]
pub(crate) struct Flags {
    /// Existing folder for all pages, nebula-cert.1 and one for each mode; without it the first goes to stdout.
    folder: Option<PathBuf>,
}

pub(crate) fn run(flags: &Flags, commands: clap::Command) -> anyhow::Result<()> {
    if let Some(folder) = &flags.folder {
        return clap_mangen::generate_to(commands, folder)
            .with_context(|| format!("error while writing manual pages: {}", folder.display()));
    }
    let mut page = Vec::new();
    clap_mangen::Man::new(commands).render(&mut page)?;
    std::io::stdout().write_all(&page).context("error while writing to stdout")
}
