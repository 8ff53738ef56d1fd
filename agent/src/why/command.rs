//! `nebula-cni-agent why`.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use nebula_cert::{json_line, visible};
use nebula_cni_contract::why::{Document, Facts, Question};

use super::WhyError;
use crate::cluster::api;
use crate::config::{CONFIG_FILE, Config};
use crate::policy::suggest;

/// Shows why a pod does not reach what it sends to: each link between both, up to the first broken one
///
/// Asks the API server, if there is one, and this node. What only the other node knows is read from its answer.
/// Exits with 0 if nothing is broken, 3 if something is, and 4 if not all could be seen.
#[derive(Debug, Args)]
pub struct Options {
    /// Configuration of the agent
    #[arg(long, default_value = CONFIG_FILE)]
    config: PathBuf,
    /// Name of this node in Kubernetes; default: the environment variable NODE_NAME
    #[arg(long)]
    node: Option<String>,
    /// Also what was printed with --json on another node; - is stdin
    #[arg(long, value_name = "FILE")]
    with: Vec<PathBuf>,
    /// Print JSON: what was found out, and what follows
    #[arg(long)]
    json: bool,
    /// The pod that sends
    #[arg(value_name = "NAMESPACE/POD")]
    from: String,
    /// What it sends to, and the port (without one: a ping): pay/db:5432, pod/pay/db-0:5432, db.pay.svc:53/udp
    #[arg(value_name = "NAMESPACE/NAME[:PORT[/PROTOCOL]]")]
    to: String,
}

impl Options {
    /// Asks and prints. Blocks.
    ///
    /// # Errors
    /// See [`WhyError`].
    pub fn run(&self, runtime: &tokio::runtime::Runtime, out: &mut impl Write) -> Result<ExitCode, WhyError> {
        let config = Config::read(&self.config)?;
        let question = Question::parse(&self.from, &self.to)?;
        let others = self.with.iter().map(|path| other(path)).collect::<Result<Vec<Facts>, _>>()?;
        let node = self.node.clone().or_else(|| std::env::var("NODE_NAME").ok()).unwrap_or_default();
        let client = runtime.block_on(api::open(None));
        let (mut facts, was_asked) = super::of_node(runtime.handle(), client, (&config.host_root, &node), &question)?;
        if !was_asked {
            eprintln!("No API server answers: this is by what the node knows.");
        }
        for (path, other) in self.with.iter().zip(others) {
            if !other.is_about(&facts) {
                let reason = "it is about another flow".to_owned();
                return Err(WhyError::Other { file: path.display().to_string(), reason });
            }
            facts.add(other);
        }
        self.print(facts, out)
    }

    pub(super) fn print(&self, facts: Facts, out: &mut impl Write) -> Result<ExitCode, WhyError> {
        let Document { facts, report } = Document::of(facts);
        let code = match (&report.cause, report.is_whole()) {
            (Some(_), _) => 3,
            (None, true) => 0,
            (None, false) => 4,
        };
        let text = if self.json {
            let document = serde_json::to_string(&Document { facts, report }).map_err(io::Error::from);
            json_line(document.map_err(WhyError::Print)?)
        } else {
            report.text().lines().map(|line| format!("{}\n", visible(line))).collect()
        };
        out.write_all(text.as_bytes()).map_err(WhyError::Print)?;
        Ok(ExitCode::from(code))
    }
}

/// What another node said.
fn other(path: &Path) -> Result<Facts, WhyError> {
    let file = path.display().to_string();
    let failed = |reason: String| WhyError::Other { file: file.clone(), reason };
    let text = suggest::read_answer(path).map_err(|error| failed(error.to_string()))?;
    serde_json::from_str::<Document>(&text).map(|document| document.facts).map_err(|error| failed(error.to_string()))
}
