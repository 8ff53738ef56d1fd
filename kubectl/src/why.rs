//! `kubectl nebula why`: why a pod does not reach another one, by what the agents of both nodes know.

use nebula_cni_contract::agent_api::{WHY_PATH, WhyFacts};
use nebula_cni_contract::why::{Document, Question};

use crate::agents::{Agents, Heard, note_failed, note_hidden};
use crate::cli::Why;
use crate::outcome::{Outcome, ToolError};
use crate::shown::Printer;

pub(crate) async fn run(agents: &Agents<'_>, options: &Why, printer: &mut Printer<'_>) -> Result<Outcome, ToolError> {
    let path = Agents::flow_path(WHY_PATH, &options.from, &options.to);
    let nodes = |WhyFacts { facts, .. }: &WhyFacts| {
        [Some(&facts.source), facts.destination()].into_iter().flatten().map(|pod| pod.node.clone()).collect()
    };
    let Some(heard) = agents.ask_both_nodes(&path, nodes, printer).await? else { return Ok(Outcome::Failed) };
    let Heard { first: WhyFacts { mut facts, lacking }, others, failed } = heard;
    for (node, answer) in others {
        if answer.facts.is_about(&facts) {
            facts.add(answer.facts);
        } else {
            printer.note(&format!("{node}: the endpoints of the Service have just changed; ask again"))?;
        }
    }
    let document = Document::of(facts);
    if printer.is_table() {
        let lines = document.report.text();
        let lines: String = lines.lines().map(|line| format!("{}\n", nebula_cert::visible(line))).collect();
        printer.text(&lines)?;
    } else {
        printer.documents(&[&document])?;
    }
    note_failed(&failed, printer)?;
    note_hidden(lacking.as_ref(), printer)?;
    Ok(match (&document.report.cause, document.report.is_whole()) {
        (Some(_), _) => Outcome::Findings,
        (None, true) => Outcome::Fine,
        (None, false) => Outcome::Failed,
    })
}

/// An end of a flow, for the command line.
pub(crate) fn source(text: &str) -> Result<String, String> {
    Question::parse(text, "a/b").map(|_| text.to_owned()).map_err(|error| error.to_string())
}

/// What is sent to, for the command line.
pub(crate) fn target(text: &str) -> Result<String, String> {
    Question::parse("a/b", text).map(|_| text.to_owned()).map_err(|error| error.to_string())
}
