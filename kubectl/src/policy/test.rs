//! `kubectl nebula policy test`: what the network policies at both ends of a flow say, by the agents of both nodes.

use nebula_cni_contract::agent_api::{POLICY_TEST_PATH, PolicyTested};
use nebula_cni_contract::policy_test::{self, Document, End, Outcome as Verdict};
use nebula_cni_contract::why::BadQuestion;

use crate::agents::{Agents, Heard, note_failed, note_hidden};
use crate::cli::PolicyTest;
use crate::cluster::Cluster;
use crate::identity::Role;
use crate::outcome::{Outcome, ToolError};
use crate::shown::{Printer, shown};

pub(crate) async fn run(
    agents: &Agents<'_>,
    options: &PolicyTest,
    printer: &mut Printer<'_>,
) -> Result<Outcome, ToolError> {
    let path = Agents::flow_path(POLICY_TEST_PATH, &options.from, &options.to);
    let nodes = |PolicyTested { tested, .. }: &PolicyTested| {
        [Some(&tested.source), tested.target.destination()].into_iter().flatten().map(|pod| pod.node.clone()).collect()
    };
    let Some(heard) = agents.ask_both_nodes(&path, nodes, printer).await? else { return Ok(Outcome::Failed) };
    let Heard { first: PolicyTested { mut tested, lacking }, others, failed } = heard;
    for (node, answer) in others {
        if answer.tested.is_about(&tested) {
            tested.add(answer.tested);
        } else {
            printer.note(&format!("{node}: pods or endpoints have just changed; ask again"))?;
        }
    }
    let document = Document::of(tested);
    if printer.is_table() {
        printer.text(&shown(&document)?.tested.text(&options.from, &options.to))?;
    } else {
        printer.documents(&[&document])?;
    }
    note_failed(&failed, printer)?;
    note_hidden(lacking.as_ref(), printer)?;
    Ok(match document.outcome {
        Verdict::Allowed => Outcome::Fine,
        Verdict::Refused => Outcome::Findings,
        Verdict::Undecided => Outcome::Failed,
    })
}

impl PolicyTest {
    /// Looks at the namespace of the source from now on, unless another one was named. Returns who may do it.
    pub(crate) fn narrow(&self, cluster: &mut Cluster, has_namespace: bool) -> Role {
        match End::parse(&self.from) {
            Ok(End::Pod { namespace, .. }) => {
                cluster.look_at(&namespace, has_namespace);
                Role::Viewer
            }
            // An address may be anybody's.
            _ => Role::ClusterViewer,
        }
    }
}

/// An end of a flow, for the command line.
pub(crate) fn source(text: &str) -> Result<String, String> {
    read(text, policy_test::question(text, "a/b"))
}

/// What is sent to, for the command line.
pub(crate) fn target(text: &str) -> Result<String, String> {
    read(text, policy_test::question("a/b", text))
}

fn read<T>(text: &str, read: Result<T, BadQuestion>) -> Result<String, String> {
    read.map(|_| text.to_owned()).map_err(|error| error.to_string())
}
