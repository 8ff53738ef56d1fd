//! What operators look at: alert rules and dashboards, held by promtool against what real programs serve.

mod pages;
#[path = "../../../agent/src/metrics/queries.rs"]
#[allow(unreachable_pub, dead_code, reason = "the agent's own tests use more of it")]
mod queries;
mod rules;

use std::io::Write;
use std::process::{Command, Stdio};

use crate::world::peers::peer;

fn promtool() -> Command {
    Command::new(peer("prometheus").join("usr/bin/promtool"))
}

/// Whether promtool finds nothing wrong with a page of metrics; what it says otherwise.
pub(crate) fn check_metrics(page: &str) -> Result<(), String> {
    let mut promtool = promtool();
    promtool.args(["check", "metrics"]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = promtool.spawn().expect("promtool runs");
    child.stdin.take().unwrap().write_all(page.as_bytes()).unwrap();
    let done = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&[done.stdout, done.stderr].concat()).into_owned();
    if done.status.success() { Ok(()) } else { Err(said) }
}
