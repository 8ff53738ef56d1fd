//! `kubectl nebula`, a plugin of kubectl: shows how Nebula stands in a cluster. It speaks with the API server only,
//! whose proxy for one Service brings it to the agents of the nodes, and for another one to the CA.
//!
//! - [`cli`]: the command line; [`outcome`]: how a command ends
//! - `cluster`: the API server; `identity`: the ServiceAccount as which agents and the CA are asked; `agents`,
//!   `ca`: ask them
//! - `shown`: tables, JSON and YAML
//! - `status`, `pods`, `flows`, `why`, `policy`, `upgrade`, `check`, `doctor`, `cert`, `bundle`, `page`, `revoke`: the
//!   commands

mod agents;
mod bundle;
mod ca;
mod cert;
pub mod check;
pub mod cli;
mod cluster;
mod doctor;
mod flows;
mod identity;
pub mod outcome;
mod page;
mod pods;
mod policy;
mod revoke;
mod shown;
mod status;
mod upgrade;
mod why;

use std::io::Write;

use self::agents::Agents;
use self::cli::{Cli, Command, Policy, PolicyVerb};
use self::cluster::Cluster;
use self::outcome::{Outcome, ToolError};
use self::shown::Printer;

/// Runs a command. What was asked for goes to `out`, remarks about it to `notes`.
///
/// # Errors
/// Returns why nothing could be shown.
pub async fn run(cli: &Cli, out: &mut impl Write, notes: &mut impl Write) -> Result<Outcome, ToolError> {
    let mut cluster = Cluster::open(&cli.place).await?;
    let mut printer = Printer::new(cli.output, out, notes);
    match &cli.command {
        Command::Check(options) => check::run(&cluster, cli, options, &mut printer).await,
        Command::Status(options) => {
            let agents = Agents::find(&cluster, &cli.place, identity::Role::ClusterViewer).await?;
            status::run(&agents, options, &mut printer).await
        }
        Command::Pods => {
            let agents = Agents::find(&cluster, &cli.place, identity::Role::Viewer).await?;
            pods::run(&agents, &mut printer).await
        }
        Command::Flows(options) => {
            let agents = Agents::find(&cluster, &cli.place, identity::Role::Viewer).await?;
            flows::run(&agents, options, &mut printer).await
        }
        Command::Why(options) => {
            // The account that may look at the pod that sends.
            cluster.look_at(options.namespace(), cli.place.namespace.is_some());
            let agents = Agents::find(&cluster, &cli.place, identity::Role::Viewer).await?;
            why::run(&agents, options, &mut printer).await
        }
        Command::Policy(Policy { verb: PolicyVerb::Test(options) }) => {
            let role = options.narrow(&mut cluster, cli.place.namespace.is_some());
            let agents = Agents::find(&cluster, &cli.place, role).await?;
            policy::test::run(&agents, options, &mut printer).await
        }
        Command::Policy(Policy { verb: PolicyVerb::Suggest(options) }) => {
            let agents = Agents::find(&cluster, &cli.place, identity::Role::Viewer).await?;
            policy::suggest::run(&agents, options, &mut printer).await
        }
        Command::Upgrade(options) => {
            let agents = Agents::find(&cluster, &cli.place, options.role()).await?;
            upgrade::run(&agents, options, &mut printer).await
        }
        Command::Page(options) => page::run(&cluster, &cli.place, options, &mut printer).await,
        Command::Doctor(options) => {
            let scope = doctor::Scope::of(&mut cluster, &cli.place, options.pod.as_deref())?;
            let agents = Agents::find(&cluster, &cli.place, scope.role()).await?;
            doctor::run(&agents, &scope, &mut printer).await
        }
        Command::Cert(options) => {
            let wanted = cert::Wanted::of(&mut cluster, options.pod.as_deref())?;
            let agents = Agents::find(&cluster, &cli.place, identity::Role::Viewer).await?;
            cert::run(&agents, &wanted, &mut printer).await
        }
        Command::Bundle(options) => bundle::run(&cluster, &cli.place, options, &mut printer).await,
        Command::Revoke(options) => revoke::run(&mut cluster, &cli.place, options, &mut printer).await,
    }
}
