//! `nebula-cni-agent upgrade`: shows how far a new program is on this node, pauses the roll-out, and goes on with it.
//! Works with the files that the agent leaves, so it needs no agent that answers.

use std::io;
use std::time::Duration;

use nebula_cert::visible;
use nebula_cni_contract::agent_api::{FailedUpgrade, UpgradePause, UpgradeState, change_texts};
use nebula_cni_contract::clock::{Clock, Deadline};

use super::files::Files;
use super::plan::{Policy, Request};
use super::state::{Failed, Pause, State};
use crate::host_root::HostRoot;

/// What the agent of this node has noted.
#[must_use]
pub fn status(host: &HostRoot, now: i64) -> State {
    Files::new(host).state(now)
}

/// Asks the agent for something, and waits for a moment until it has done it. Returns whether it has.
///
/// # Errors
/// Returns the file system's error.
pub fn ask(host: &HostRoot, request: Request, clock: &dyn Clock) -> io::Result<bool> {
    let files = Files::new(host);
    files.request(request)?;
    let deadline = Deadline::after(clock, DONE_WITHIN);
    while files.is_requested() {
        if deadline.is_over(clock) {
            return Ok(false);
        }
        clock.sleep(LOOK_AGAIN);
    }
    Ok(true)
}

/// For people.
#[must_use]
pub fn table(state: &State, policy: Policy, now: i64) -> String {
    let document = document(state, policy, now);
    // What was written as JSON can be read again.
    change_texts(&document, &mut |text| visible(text).into_owned()).map(|shown| shown.table()).unwrap_or_default()
}

/// For programs.
#[must_use]
pub fn document(state: &State, policy: Policy, now: i64) -> UpgradeState {
    let paused = state.paused.as_ref();
    let failed = |one: &Failed| FailedUpgrade {
        pod: one.pod.clone(),
        outcome: one.outcome.words().replace(' ', "_"),
        why: one.why.clone(),
    };
    UpgradeState {
        stage: word(state, policy).to_owned(),
        why: stage(state, policy, now),
        program: state.program.clone().map(String::from),
        version: state.version.clone(),
        paused: paused.map(|Pause { by_operator, why, since }| UpgradePause {
            by_operator: *by_operator,
            why: why.clone(),
            since: *since,
        }),
        canaries_passed: state.canaries_passed,
        instances: state.instances,
        outdated: state.outdated,
        upgraded: state.upgraded,
        rolled_back: state.rolled_back,
        under_way: state.under_way.values().map(|one| one.pod.clone()).collect(),
        failed: state.failed.values().map(failed).collect(),
    }
}

fn word(state: &State, policy: Policy) -> &'static str {
    if state.paused.is_some() {
        "paused"
    } else if state.program.is_none() {
        "unknown"
    } else if policy.parallel == 0 {
        "off"
    } else if state.outdated == 0 && state.under_way.is_empty() {
        "current"
    } else if state.waits_for.is_some() {
        "waits"
    } else if state.is_finished {
        "finished"
    } else if state.canaries_passed < policy.canary {
        "canary"
    } else {
        "rolling"
    }
}

/// What the agent does now, and why.
fn stage(state: &State, policy: Policy, now: i64) -> String {
    match (word(state, policy), &state.paused, &state.waits_for) {
        (_, Some(pause), _) => {
            let minutes = now.saturating_sub(pause.since).max(0) / 60;
            format!("paused for {minutes} min: {}", pause.why)
        }
        ("waits", _, Some(why)) => format!("waits for {why}"),
        ("off", ..) => "off (agent.upgrade.parallel is 0): pods get the program when they are made again".to_owned(),
        ("unknown", ..) => "no agent has looked at the instances of this node yet".to_owned(),
        ("current", ..) => "every instance has this program".to_owned(),
        ("finished", ..) => "finished; the others failed, or have no open tunnel".to_owned(),
        ("canary", ..) => "canary".to_owned(),
        _ => format!("at most {} at a time", policy.parallel),
    }
}

/// The agent looks every two seconds, and longer where an instance hangs.
const DONE_WITHIN: Duration = Duration::from_secs(10);
const LOOK_AGAIN: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use nebula_cni_contract::clock::SystemClock;

    use super::super::gate::Before;
    use super::super::program::ProgramId;
    use super::super::state::{Failure, UnderWay};
    use super::*;
    use crate::config::AGENT_DIR;

    fn state() -> State {
        let failed = Failed { pod: "shop/web-0".into(), outcome: Failure::RolledBack, why: "it\ncrashed".into() };
        State {
            program: Some(ProgramId::test(0xab)),
            version: "0.2.0".into(),
            canaries_passed: 1,
            failed: [("c1".to_owned(), failed)].into(),
            under_way: [("c2".to_owned(), UnderWay { pod: "shop/db".into(), before: Before::default() })].into(),
            upgraded: 57,
            rolled_back: 1,
            instances: 100,
            outdated: 43,
            ..State::default()
        }
    }

    #[test]
    fn the_table_has_program_stage_counts_and_the_pods_that_failed() {
        let text = table(&state(), Policy::DEFAULT, 0);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "PROGRAM    abababababab, version 0.2.0");
        assert_eq!(lines[1], "ROLL-OUT   at most 8 at a time");
        assert_eq!(lines[2], "INSTANCES  100: 57 with this program, 43 with another");
        assert_eq!(lines[3], "UPGRADED   57, rolled back 1");
        assert_eq!(lines[5], "POD         UPGRADE          REASON");
        assert_eq!(lines[6], "shop/db     under way");
        assert_eq!(lines[7], "shop/web-0  rolled back      it\\ncrashed");
        assert!(table(&State::default(), Policy::DEFAULT, 0).starts_with("PROGRAM    not known yet\n"));
    }

    #[test]
    fn every_stage_has_a_word_and_a_sentence() {
        let off = Policy { parallel: 0, ..Policy::DEFAULT };
        let pause = Pause { by_operator: false, why: "shop/web-0 was rolled back".into(), since: 60 };
        let waiting = State { waits_for: Some("the condition programs".into()), ..state() };
        for (state, policy, word, sentence) in [
            (State { paused: Some(pause), ..state() }, off, "paused", "paused for 3 min: shop/web-0 was rolled back"),
            (state(), off, "off", "agent.upgrade.parallel is 0"),
            (State::default(), Policy::DEFAULT, "unknown", "no agent has looked"),
            (State { outdated: 0, under_way: [].into(), ..state() }, Policy::DEFAULT, "current", "every instance"),
            (waiting, Policy::DEFAULT, "waits", "waits for the condition programs"),
            (State { is_finished: true, ..state() }, Policy::DEFAULT, "finished", "finished"),
            (State { canaries_passed: 0, ..state() }, Policy::DEFAULT, "canary", "canary"),
            (state(), Policy::DEFAULT, "rolling", "at most 8"),
        ] {
            let document = document(&state, policy, 240);
            assert_eq!(document.stage, word);
            assert!(document.why.contains(sentence), "{document:?}");
            let text = serde_json::to_string(&document).unwrap();
            assert_eq!(text.contains(r#""outcome":"rolled_back""#), !state.failed.is_empty(), "{text}");
            assert!(!text.contains("before"), "{text}");
        }
    }

    #[test]
    fn a_request_waits_for_the_agent_that_takes_it() {
        let dir = tempfile::tempdir().unwrap();
        let host = HostRoot::new(Some(dir.path().canonicalize().unwrap()));
        assert!(ask(&host, Request::Pause, &SystemClock).is_err(), "no agent was ever here");
        fs::create_dir_all(host.resolve(Path::new(AGENT_DIR))).unwrap();
        let files = Files::new(&host);
        let agent = std::thread::spawn(move || {
            while files.requested().is_none() {
                SystemClock.sleep(Duration::from_millis(5));
            }
            files.has_done();
        });
        assert!(ask(&host, Request::Pause, &SystemClock).unwrap());
        agent.join().unwrap();
    }
}
