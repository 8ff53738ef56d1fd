//! `kubectl nebula doctor`: what is wrong on the nodes and in pods' instances, why, and what to do.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use nebula_cni_contract::agent_api::{DOCTOR_PATH, Finding, Findings};

use crate::agents::{AgentError, Agents, remarks};
use crate::cli::Place;
use crate::cluster::{Cluster, ClusterError};
use crate::identity::Role;
use crate::outcome::{Outcome, ToolError};
use crate::shown::{Printer, shown};

/// What is looked at: everything, the pods of a namespace, or one of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Scope {
    namespace: Option<String>,
    pod: Option<String>,
}

impl Scope {
    /// Without a pod and a namespace on the command line, everything is looked at.
    pub(crate) fn of(cluster: &mut Cluster, place: &Place, pod: Option<&str>) -> Result<Self, ClusterError> {
        let Some(pod) = pod else { return Ok(Self::of_namespace(place.namespace.as_deref())) };
        let pod = Some(cluster.narrow(pod)?);
        Ok(Self { namespace: cluster.namespace.clone(), pod })
    }

    /// The pods of a namespace, or everything.
    pub(crate) fn of_namespace(namespace: Option<&str>) -> Self {
        Self { namespace: namespace.map(str::to_owned), pod: None }
    }

    pub(crate) fn role(&self) -> Role {
        if self.namespace.is_some() { Role::Viewer } else { Role::ClusterViewer }
    }

    pub(crate) fn path(&self) -> String {
        match (&self.namespace, &self.pod) {
            (Some(namespace), Some(pod)) => format!("{DOCTOR_PATH}?namespace={namespace}&pod={pod}"),
            (Some(namespace), None) => format!("{DOCTOR_PATH}?namespace={namespace}"),
            (None, _) => DOCTOR_PATH.to_owned(),
        }
    }
}

/// What agents found, and which of them did not answer.
struct Examined {
    /// Errors first, each with its node.
    findings: Vec<Finding>,
    failed: Vec<(String, AgentError)>,
    pods: usize,
    left_out: usize,
}

async fn examine(agents: &Agents<'_>, scope: &Scope) -> Examined {
    let mut examined = Examined { findings: Vec::new(), failed: Vec::new(), pods: 0, left_out: 0 };
    for (node, answer) in agents.ask::<Findings>(&agents.all, "GET", &scope.path()).await {
        match answer {
            Ok(found) => {
                let with_node = |finding: Finding| Finding { node: Some(node.clone()), ..finding };
                examined.findings.extend(found.findings.into_iter().map(with_node));
                examined.pods = examined.pods.saturating_add(found.pods);
                examined.left_out = examined.left_out.saturating_add(found.left_out);
            }
            Err(error) => examined.failed.push((node, error)),
        }
    }
    examined.findings.sort();
    examined
}

pub(crate) async fn run(agents: &Agents<'_>, scope: &Scope, printer: &mut Printer<'_>) -> Result<Outcome, ToolError> {
    let examined = examine(agents, scope).await;
    let answered = agents.all.len().saturating_sub(examined.failed.len());
    if printer.is_table() {
        let visible: Vec<Finding> = examined.findings.iter().map(shown).collect::<Result<_, _>>()?;
        let mut text = table(&visible, printer.is_wide());
        let gap = if text.is_empty() { "" } else { "\n" };
        let _ = writeln!(
            text,
            "{gap}{} of {} agents answer; {} pods were looked at, and {} findings are above.",
            answered,
            agents.all.len(),
            examined.pods,
            visible.len()
        );
        printer.text(&text)?;
    } else {
        printer.documents(&examined.findings)?;
    }
    if examined.left_out > 0 {
        printer.note(&format!("{} further findings are left out: name a namespace or a pod", examined.left_out))?;
    }
    for line in remarks(examined.failed.iter().map(|(node, error)| (node.as_str(), error))) {
        printer.note(&line)?;
    }
    let mut is_whole = examined.failed.is_empty() && examined.left_out == 0;
    if let (Some(namespace), Some(pod), 0) = (&scope.namespace, &scope.pod, examined.pods) {
        printer.note(&format!(
            "{namespace}/{pod}: no such pod has a tunnel, or should have one, as far as the agents answer"
        ))?;
        is_whole = false;
    }
    let has_findings = !examined.findings.is_empty();
    Ok(Outcome::findings(has_findings).and(if is_whole { Outcome::Fine } else { Outcome::Failed }))
}

/// A line for each finding, those that nodes share together, and what to do below it. All texts are printed as they
/// are.
fn table(findings: &[Finding], is_wide: bool) -> String {
    let mut nodes: BTreeMap<Finding, Vec<&str>> = BTreeMap::new();
    for finding in findings {
        let alike = Finding { node: None, ..finding.clone() };
        nodes.entry(alike).or_default().extend(finding.node.as_deref());
    }
    let most = if is_wide { usize::MAX } else { MOST_NODES };
    let rows: Vec<(&Finding, String)> = nodes.iter().map(|(finding, nodes)| (finding, some(nodes, most))).collect();
    let width = |text: fn(&Finding) -> &str| rows.iter().map(|(one, _)| text(one).chars().count()).max().unwrap_or(0);
    let (about, code) = (width(|one| &one.about).max("ABOUT".len()), width(|one| &one.code).max("CODE".len()));
    let node = rows.iter().map(|(_, nodes)| nodes.chars().count()).max().unwrap_or(0).max("NODE".len());
    let mut text = String::new();
    if !rows.is_empty() {
        let _ = writeln!(text, "{:<8}  {:node$}  {:about$}  {:code$}  CAUSE", "SEVERITY", "NODE", "ABOUT", "CODE");
    }
    for (finding, nodes) in &rows {
        let Finding { about: of, code: name, cause, remedy, severity, .. } = finding;
        let _ = writeln!(text, "{:<8}  {nodes:node$}  {of:about$}  {name:code$}  {cause}", severity.word());
        if !remedy.is_empty() {
            let _ = writeln!(text, "{:<8}  -> {remedy}", "");
        }
    }
    text
}

fn some(nodes: &[&str], most: usize) -> String {
    let more = nodes.len().saturating_sub(most);
    let shown = nodes.iter().take(most).copied().collect::<Vec<_>>().join(",");
    if more > 0 { format!("{shown} and {more} more") } else { shown }
}

const MOST_NODES: usize = 3;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_several_nodes_have_is_one_line_with_what_to_do_below() {
        let ca =
            |node: &str| Finding { node: Some(node.into()), ..Finding::error("node", "ca", "is away", "look at it") };
        let other = Finding { node: Some("n2".into()), ..Finding::warning("shop/web", "old_settings", "mtu", "") };
        let findings: Vec<_> = ["n1", "n2", "n3", "n4", "n5"].map(ca).into_iter().chain([other]).collect();
        let text = table(&findings, false);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0].split_whitespace().collect::<Vec<_>>(), ["SEVERITY", "NODE", "ABOUT", "CODE", "CAUSE"]);
        assert!(lines[1].starts_with("ERROR     n1,n2,n3 and 2 more  node      ca            is away"), "{text}");
        assert_eq!(lines[2], "          -> look at it");
        assert!(lines[3].starts_with("warning   n2 ") && lines.len() == 4, "{text}");
        assert!(table(&findings, true).contains("n1,n2,n3,n4,n5  "));
        assert_eq!(table(&[], false), "");
    }
}
