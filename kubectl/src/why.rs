//! `kubectl nebula why`: why a pod does not reach another one, by what the agents of both nodes know.

use nebula_cni_contract::agent_api::{WHY_PATH, WhyFacts};
use nebula_cni_contract::why::{Document, Question};

use crate::agents::{Agent, AgentError, Agents, remarks};
use crate::cli::Why;
use crate::outcome::{Outcome, ToolError};
use crate::shown::Printer;

pub(crate) async fn run(agents: &Agents<'_>, options: &Why, printer: &mut Printer<'_>) -> Result<Outcome, ToolError> {
    let ends = [("from", &options.from), ("to", &options.to)];
    let query = form_urlencoded::Serializer::new(String::new()).extend_pairs(ends).finish();
    let path = format!("{WHY_PATH}?{query}");
    let Some(first) = first(agents, &path, printer).await? else { return Ok(Outcome::Failed) };
    let (asked, WhyFacts { mut facts, lacking }) = first;
    let nodes = [Some(&facts.source), facts.destination()].into_iter().flatten().map(|pod| pod.node.clone());
    let mut nodes: Vec<String> = nodes.filter(|node| !node.is_empty() && *node != asked).collect();
    nodes.dedup();
    let wanted: Vec<Agent> = agents.all.iter().filter(|agent| nodes.contains(&agent.node)).cloned().collect();
    for node in nodes.iter().filter(|node| !wanted.iter().any(|agent| agent.node == **node)) {
        printer.note(&format!("{node}: no agent of Nebula is on such a node"))?;
    }
    let mut failed = Vec::new();
    for (node, answer) in agents.ask::<WhyFacts>(&wanted, "GET", &path).await {
        match answer {
            Ok(answer) if answer.facts.is_about(&facts) => facts.add(answer.facts),
            Ok(_) => printer.note(&format!("{node}: the endpoints of the Service have just changed; ask again"))?,
            Err(error) => failed.push((node, error)),
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
    for line in remarks(failed.iter().map(|(node, error)| (node.as_str(), error))) {
        printer.note(&line)?;
    }
    if let Some(lacking) = lacking {
        printer.note(&format!("The destination is not shown: {lacking}"))?;
        if let Some(remedy) = lacking.remedy() {
            printer.note(&format!("  with the right to: {remedy}"))?;
        }
    }
    Ok(match (&document.report.cause, document.report.is_whole()) {
        (Some(_), _) => Outcome::Findings,
        (None, true) => Outcome::Fine,
        (None, false) => Outcome::Failed,
    })
}

/// What the first agent that answers knows: also where both pods are.
async fn first(
    agents: &Agents<'_>,
    path: &str,
    printer: &mut Printer<'_>,
) -> Result<Option<(String, WhyFacts)>, ToolError> {
    let mut failed: Vec<(String, AgentError)> = Vec::new();
    for agent in agents.all.iter().take(AT_MOST) {
        for (node, answer) in agents.ask::<WhyFacts>(std::slice::from_ref(agent), "GET", path).await {
            match answer {
                Ok(facts) => return Ok(Some((node, facts))),
                Err(error) => failed.push((node, error)),
            }
        }
        // Others say the same.
        if matches!(failed.last(), Some((_, AgentError::Refused(_, Some(_))))) {
            break;
        }
    }
    for line in remarks(failed.iter().map(|(node, error)| (node.as_str(), error))) {
        printer.note(&line)?;
    }
    Ok(None)
}

/// Any agent knows where both pods are.
const AT_MOST: usize = 5;

/// An end of a flow, for the command line.
pub(crate) fn source(text: &str) -> Result<String, String> {
    Question::parse(text, "a/b").map(|_| text.to_owned()).map_err(|error| error.to_string())
}

/// What is sent to, for the command line.
pub(crate) fn target(text: &str) -> Result<String, String> {
    Question::parse("a/b", text).map(|_| text.to_owned()).map_err(|error| error.to_string())
}
