//! `kubectl nebula policy suggest`: network policies that allow what the pods of a namespace were seen to do, by the
//! agents of all nodes.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Read as _};
use std::path::Path;

use nebula_cni_contract::agent_api::{Lacking, POLICY_SEEN_PATH, PolicySeen};
use nebula_cni_contract::clock::{Clock, SystemClock};
use nebula_cni_contract::seen::Seen;
use nebula_cni_policy::suggest::Suggestion;

use crate::agents::{AgentError, Agents, note_failed};
use crate::cli::PolicySuggest;
use crate::outcome::{Outcome, ToolError};
use crate::shown::Printer;

pub(crate) async fn run(
    agents: &Agents<'_>,
    options: &PolicySuggest,
    printer: &mut Printer<'_>,
) -> Result<Outcome, ToolError> {
    let namespace = agents.cluster.namespace.as_deref().ok_or(ToolError::OneNamespace)?;
    let mut seen = Seen { namespace: namespace.to_owned(), ..Seen::default() };
    for path in &options.with {
        let name = path.display().to_string();
        let text =
            read_answer(path).map_err(|error| ToolError::File { file: name.clone(), reason: error.to_string() })?;
        seen.add(Seen::read(&text, &name, namespace)?);
    }
    let (mut lacking, mut not_asked, mut failed) = (BTreeSet::new(), 0, Vec::new());
    let path = format!("{POLICY_SEEN_PATH}?namespace={namespace}");
    for (node, answer) in agents.ask::<PolicySeen>(&agents.all, "GET", &path).await {
        match answer {
            Ok(answer) if answer.seen.namespace == namespace => {
                seen.add(answer.seen);
                lacking.extend(answer.lacking);
                not_asked = not_asked.max(answer.not_asked);
            }
            Ok(_) => failed.push((node, AgentError::Odd)),
            Err(error) => failed.push((node, error)),
        }
    }
    if failed.len() == agents.all.len() && options.with.is_empty() {
        note_failed(&failed, printer)?;
        return Ok(Outcome::Failed);
    }
    let is_whole = seen.silent.is_empty() && failed.is_empty();
    // Whoever reads the policies later must know what they lack.
    let nodes = failed.iter().map(|(node, error)| format!("node {node}: {}", first_line(error)));
    let silent = std::mem::take(&mut seen.silent);
    seen.silent = silent.iter().cloned().chain(nodes).collect();
    let now = u64::try_from(SystemClock.unix_seconds()).unwrap_or_default();
    let suggestion = Suggestion::of(&seen, options.since.map_or(0, |since| now.saturating_sub(since / 1000)));
    if printer.is_table() {
        printer.text(&suggestion.text(&seen))?;
    } else {
        printer.documents(&[suggestion.document(&seen)])?;
    }
    note_failed(&failed, printer)?;
    for line in silent.iter().take(MOST_LINES) {
        printer.note(line)?;
    }
    if silent.len() > MOST_LINES {
        printer.note(&format!("{} further pods did not say what they saw", silent.len() - MOST_LINES))?;
    }
    if seen.lost > 0 {
        printer.note(&format!("instances have forgotten {} flow(s), which are not in it", seen.lost))?;
    }
    note_wider(&lacking, not_asked, printer)?;
    Ok(if is_whole { Outcome::Fine } else { Outcome::Failed })
}

fn note_wider(lacking: &BTreeSet<Lacking>, not_asked: usize, printer: &mut Printer<'_>) -> Result<(), ToolError> {
    let namespaces: Vec<&str> = lacking.iter().filter_map(|one| one.namespace.as_deref()).collect();
    if !namespaces.is_empty() {
        let more = namespaces.len().saturating_sub(MOST_LINES);
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        let shown = namespaces.into_iter().take(MOST_LINES).collect::<Vec<_>>().join(", ");
        printer.note(&format!(
            "Labels of pods in {shown}{more} are not shown, so these namespaces are allowed as a whole"
        ))?;
    }
    for lacking in lacking.iter().take(MOST_LINES) {
        printer.note(&lacking.to_string())?;
        if let Some(remedy) = lacking.remedy() {
            printer.note(&format!("  with the right to: {remedy}"))?;
        }
    }
    if not_asked > 0 {
        printer.note(&format!(
            "{not_asked} further namespaces are allowed as a whole: an agent asks for no more permissions"
        ))?;
    }
    Ok(())
}

fn first_line(error: &AgentError) -> String {
    error.to_string().lines().next().unwrap_or_default().to_owned()
}

/// What was printed on a node; `-` is the standard input.
fn read_answer(path: &Path) -> io::Result<String> {
    match path.as_os_str() == "-" {
        true => io::read_to_string(io::stdin().take(MAX_FILE)),
        false => io::read_to_string(File::open(path)?.take(MAX_FILE)),
    }
}

const MOST_LINES: usize = 5;
const MAX_FILE: u64 = 64 << 20;
