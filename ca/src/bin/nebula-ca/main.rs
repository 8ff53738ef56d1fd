//! `nebula-ca`: which file carries out each command.

mod arguments;
mod certificates;
mod maintenance;
mod print;
mod serve;
mod tokens;

use std::{
    io::{self, Write},
    process::ExitCode,
};

use anyhow::bail;
use clap::Parser;
use nebula_ca::{Command, CommandOutcome, call};
use nebula_cert::visible;

use self::{
    arguments::{AddressVerb, CertificateVerb, Cli, Dir, PolicyVerb, Token, Verb},
    certificates::{list_addresses, list_issued},
    tokens::list_tokens,
};

fn main() -> ExitCode {
    match run(Cli::parse().verb) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // One line with every cause; a broken stderr leaves nobody to tell.
            let _ = writeln!(io::stderr(), "nebula-ca: {}", visible(&format!("{error:#}")));
            ExitCode::FAILURE
        }
    }
}

fn run(verb: Verb) -> anyhow::Result<()> {
    match verb {
        Verb::Init(init) => init.run(),
        Verb::Serve(serve) => serve.run(),
        Verb::Token(Token::Create(create)) => create.run(),
        Verb::Token(Token::List(listing)) => list_tokens(&listing),
        Verb::Token(Token::Revoke(revoke)) => revoke.run(),
        Verb::Certificate(CertificateVerb::List(listing)) => list_issued(&listing),
        Verb::Certificate(CertificateVerb::Show(show)) => show.run(),
        Verb::Certificate(CertificateVerb::Revoke(revoke)) => revoke.run(),
        Verb::Certificate(CertificateVerb::Readmit(readmit)) => readmit.run(),
        Verb::Address(AddressVerb::List(listing)) => list_addresses(&listing),
        Verb::Address(AddressVerb::Release(release)) => release.run(),
        Verb::Rollover(verb) => verb.run(),
        Verb::Tls(verb) => verb.run(),
        Verb::Reload(reload) => reload.run(),
        Verb::Backup(backup) => backup.run(),
        Verb::Restore(restore) => restore.run(),
        Verb::Policy(PolicyVerb::Check(check)) => check.run(),
    }
}

fn ask(dir: &Dir, command: &Command) -> anyhow::Result<CommandOutcome> {
    match call(&dir.open(), command)? {
        CommandOutcome::Failed { message } => bail!(message),
        answer => Ok(answer),
    }
}

const UNEXPECTED: &str = "the running nebula-ca gave the answer to another question; is it of another version?";
