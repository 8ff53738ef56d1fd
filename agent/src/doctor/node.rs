//! Findings about the node itself.

use nebula_cni_contract::agent_api::{Finding, PartState, UpgradeState};

/// The parts that are not as they must be, and upgrades that went wrong.
pub(crate) fn of_node(parts: &[PartState], upgrade: &UpgradeState) -> Vec<Finding> {
    let mut findings: Vec<_> = parts.iter().filter(|part| !part.ok).map(of_part).collect();
    if let Some(pause) = upgrade.paused.as_ref().filter(|pause| !pause.by_operator) {
        let cause = format!("no further instance gets the installed program: {}", pause.why);
        let remedy =
            "kubectl nebula upgrade status names the instances that did not keep it; upgrade resume tries them again.";
        findings.push(Finding::warning(Finding::NODE, "upgrade_paused", cause, remedy));
    }
    let failed = upgrade.failed.iter().map(|one| {
        let cause = format!("its instance does not keep the installed program: {}", one.why);
        let remedy = "It goes on with the program from before. kubectl nebula upgrade resume tries it again.";
        let code = if one.outcome == NOT_ROLLED_BACK { "not_rolled_back" } else { "not_upgraded" };
        Finding::warning(&one.pod, code, cause, if one.outcome == NOT_ROLLED_BACK { MAKE_AGAIN } else { remedy })
    });
    findings.extend(failed);
    findings
}

fn of_part(part: &PartState) -> Finding {
    let code = part.name.replace('-', "_");
    let remedy = if part.advice.is_empty() { AGENT_GOES_ON } else { &part.advice };
    if part.is_required {
        Finding::error(Finding::NODE, &code, &part.reason, remedy)
    } else {
        Finding::warning(Finding::NODE, &code, &part.reason, remedy)
    }
}

const NOT_ROLLED_BACK: &str = "not_rolled_back";
const MAKE_AGAIN: &str = "If the pod has no connections, delete it: its controller recreates it.";
const AGENT_GOES_ON: &str = "The agent tries again by itself. If this stays, its log says more.";

#[cfg(test)]
mod tests {
    use nebula_cni_contract::agent_api::{FailedUpgrade, Severity, UpgradePause};

    use super::*;

    #[test]
    fn parts_that_are_bad_and_upgrades_that_failed_are_findings_and_all_else_is_none() {
        let part = |name: &str, ok, is_required| PartState {
            name: name.to_owned(),
            ok,
            is_required,
            reason: format!("{name} says so"),
            advice: String::new(),
        };
        let parts = [part("programs", true, true), part("self-test", false, true), part("flow-export", false, false)];
        let pause = UpgradePause { by_operator: true, ..UpgradePause::default() };
        let well = UpgradeState { paused: Some(pause.clone()), ..UpgradeState::default() };
        let found = of_node(&parts, &well);
        let codes: Vec<_> = found.iter().map(|found| (found.code.as_str(), found.severity)).collect();
        assert_eq!(codes, [("self_test", Severity::Error), ("flow_export", Severity::Warning)], "{found:?}");
        assert_eq!((found[0].about.as_str(), found[0].remedy.as_str()), ("node", AGENT_GOES_ON));
        let failed =
            |outcome: &str| FailedUpgrade { pod: "shop/web".into(), outcome: outcome.into(), why: "it died".into() };
        let paused = Some(UpgradePause { by_operator: false, why: "3 failures".into(), ..pause });
        let failed = vec![failed("rolled_back"), failed(NOT_ROLLED_BACK)];
        let found = of_node(&[], &UpgradeState { paused, failed, ..UpgradeState::default() });
        let codes: Vec<_> = found.iter().map(|found| (found.about.as_str(), found.code.as_str())).collect();
        assert_eq!(codes, [("node", "upgrade_paused"), ("shop/web", "not_upgraded"), ("shop/web", "not_rolled_back")]);
    }
}
