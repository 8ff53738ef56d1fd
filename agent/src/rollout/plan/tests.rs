//! The roll-out on a node, from one event to the next.

use std::collections::BTreeSet;

use super::*;

const OLD: u8 = 1;
const NEW: u8 = 2;

struct Node {
    rollout: Rollout,
    instances: Vec<Instance>,
    installed: u8,
    start: Instant,
    seconds: u64,
    told: Vec<Told>,
}

fn pod(name: &str) -> Pod {
    Pod { namespace: "shop".into(), name: name.into(), uid: name.into() }
}

fn instance(name: &str, program: u8) -> Instance {
    let program = Some(ProgramId::test(program));
    Instance { container: name.into(), pod: pod(name), program, is_well: true, tunnels: 0 }
}

#[expect(clippy::disallowed_methods, reason = "any moment will do as the first")]
fn node(pods: usize, policy: Policy) -> Node {
    Node {
        rollout: Rollout::new(policy, State::default()),
        instances: (0..pods).map(|n| instance(&format!("web-{n:03}"), OLD)).collect(),
        installed: NEW,
        start: Instant::now(),
        seconds: 0,
        told: Vec::new(),
    }
}

impl Node {
    fn now(&self) -> Instant {
        self.start + Duration::from_secs(self.seconds)
    }

    fn look(&mut self) {
        self.rollout.looked(&ProgramId::test(self.installed), self.instances.clone());
        let told = self.rollout.finish();
        self.told.extend(told);
    }

    fn starts(&mut self) -> Vec<Start> {
        self.look();
        let now = self.now();
        self.rollout.next(now, None, |_| false)
    }

    fn names(&mut self) -> Vec<String> {
        self.starts().into_iter().map(|start| start.container).collect()
    }

    fn end(&mut self, container: &str, outcome: Outcome) {
        if matches!(outcome, Outcome::Upgraded(_)) {
            let one = self.instances.iter_mut().find(|one| one.container == container).unwrap();
            one.program = Some(ProgramId::test(self.installed));
        }
        let now = self.now();
        let told = self.rollout.ended(container, outcome, now, 1_000);
        self.told.extend(told);
    }

    fn upgraded(&mut self, container: &str) {
        self.end(container, Outcome::Upgraded("0.2.0".into()));
    }

    fn is_paused(&self) -> bool {
        self.rollout.state().paused.is_some()
    }

    /// The agent is killed and started again; what it had written is there.
    fn restart(&mut self) {
        let state = State::parse(&serde_json::to_vec(self.rollout.state()).unwrap()).unwrap();
        self.rollout = Rollout::new(self.rollout.policy, state);
    }

    /// Upgrades all pods, each of which ends so; returns how many upgrades there were.
    fn roll(&mut self, outcome: impl Fn(&str) -> Outcome) -> usize {
        let mut count = 0;
        loop {
            let names = self.names();
            if names.is_empty() {
                return count;
            }
            for name in names {
                count += 1;
                self.end(&name, outcome(&name));
            }
        }
    }
}

fn crashed(_: &str) -> Outcome {
    Outcome::RolledBack(Fault::Crashed)
}

#[test]
fn one_canary_is_watched_for_long_and_then_several_pods_at_a_time() {
    let mut node = node(20, Policy::DEFAULT);
    node.instances[7].tunnels = 3;
    let starts = node.starts();
    assert_eq!(starts.len(), 1);
    assert_eq!((starts[0].container.as_str(), starts[0].watch), ("web-007", Duration::from_secs(10)), "it has tunnels");
    assert!(node.starts().is_empty(), "nothing beside the canary");
    node.upgraded("web-007");
    assert_eq!(node.told, [Told::Upgraded(pod("web-007")), Told::CanaryPassed(19)]);
    let starts = node.starts();
    assert_eq!((starts.len(), starts[0].watch), (8, Duration::from_secs(2)));
    node.upgraded(&starts[0].container);
    assert_eq!(node.names().len(), 1, "a free place is taken at once");
}

#[test]
fn a_hundred_pods_are_rolled_within_a_minute() {
    let mut node = node(100, Policy::DEFAULT);
    // A second for the plugin, and the watch.
    let mut running: Vec<(u64, String)> = Vec::new();
    while node.seconds < 60 && node.rollout.state().upgraded < 100 {
        let now = node.seconds;
        let ended: Vec<String> = running.iter().filter(|(end, _)| *end <= now).map(|(_, name)| name.clone()).collect();
        running.retain(|(end, _)| *end > now);
        ended.iter().for_each(|name| node.upgraded(name));
        let starts = node.starts();
        running.extend(starts.into_iter().map(|start| (now + 1 + start.watch.as_secs(), start.container)));
        assert!(running.len() <= 8);
        node.seconds += 1;
    }
    node.look();
    assert!(node.seconds <= 52, "{} s", node.seconds);
    assert_eq!(node.told.last(), Some(&Told::Finished(100, 0)));
    assert!(node.rollout.state().is_finished && node.rollout.finish().is_none(), "told once");
}

#[test]
fn without_a_canary_all_begin_at_once_and_with_parallel_0_none_ever_does() {
    let mut bold = node(5, Policy { canary: 0, parallel: 3, ..Policy::DEFAULT });
    assert_eq!(bold.names().len(), 3);
    let mut off = node(5, Policy { parallel: 0, ..Policy::DEFAULT });
    assert!(off.names().is_empty());
    assert_eq!(off.rollout.state().outdated, 5, "they are counted all the same");
    let mut several = node(5, Policy { canary: 2, ..Policy::DEFAULT });
    let canary = several.names();
    assert_eq!(canary.len(), 1);
    several.upgraded(&canary[0]);
    let second = several.starts();
    assert_eq!((second.len(), second[0].watch), (1, Duration::from_secs(10)));
}

#[test]
fn a_canary_that_is_rolled_back_pauses_the_node_until_the_program_changes() {
    let mut node = node(5, Policy::DEFAULT);
    assert_eq!(node.roll(crashed), 1);
    assert!(node.is_paused());
    assert!(matches!(&node.told[..], [Told::Failed(_, Failure::RolledBack, _), Told::Paused(why)]
        if why.contains("shop/web-000 was rolled back: its instance crashed")));
    node.restart();
    assert!(node.names().is_empty() && node.is_paused(), "remembered");
    node.installed = 3;
    assert_eq!(node.names().len(), 1, "another program begins with a canary");
}

#[test]
fn without_pause_on_failure_others_are_tried_but_no_pod_twice_and_three_in_a_row_pause_anyway() {
    let policy = Policy { pause_on_failure: false, parallel: 2, ..Policy::DEFAULT };
    let mut node = node(10, policy);
    let outcome = |name: &str| match name {
        "web-000" | "web-003" => crashed(name),
        _ => Outcome::Upgraded(String::new()),
    };
    assert_eq!(node.roll(outcome), 10);
    assert!(!node.is_paused() && node.rollout.state().upgraded == 8);
    assert_eq!(node.told.last(), Some(&Told::Finished(8, 2)));
    node.restart();
    assert!(node.names().is_empty(), "a pod that failed is not tried again with the same program");
    let mut node = self::node(10, policy);
    assert_eq!(node.roll(crashed), 3);
    assert!(node.is_paused());
}

#[test]
fn to_resume_tries_everything_again_beginning_with_a_canary() {
    let mut node = node(5, Policy::DEFAULT);
    node.roll(crashed);
    assert_eq!(node.rollout.request(Request::Resume, 0), [Told::Resumed]);
    assert_eq!(node.names(), ["web-000"]);
    node.upgraded("web-000");
    assert_eq!(node.names().len(), 4);
    assert!(node.rollout.request(Request::Resume, 0).is_empty(), "nothing to resume");
}

#[test]
fn the_operators_pause_lets_what_began_end_and_outlives_restart_and_program() {
    let mut node = node(5, Policy::DEFAULT);
    let canary = node.names();
    assert!(matches!(&node.rollout.request(Request::Pause, 7)[..], [Told::Paused(_)]));
    assert!(node.rollout.request(Request::Pause, 8).is_empty(), "told once");
    node.upgraded(&canary[0]);
    assert_eq!(node.rollout.state().upgraded, 1);
    node.restart();
    node.installed = 3;
    assert!(node.names().is_empty() && node.is_paused());
    assert_eq!(node.rollout.state().paused.as_ref().unwrap().since, 7);
    node.rollout.request(Request::Resume, 0);
    assert_eq!(node.names().len(), 1);
}

#[test]
fn a_pod_that_the_plugin_refuses_does_not_pause_unless_three_do() {
    let mut node = node(10, Policy::DEFAULT);
    let refused = |_: &str| Outcome::Refused("of a release that hands nothing over".into());
    assert_eq!(node.roll(refused), 3);
    assert!(node.is_paused() && node.rollout.state().rolled_back == 0);
    let mut one = self::node(10, Policy::DEFAULT);
    let outcome = |name: &str| if name == "web-000" { refused(name) } else { Outcome::Upgraded(String::new()) };
    assert_eq!(one.roll(outcome), 10);
    assert_eq!(one.told.last(), Some(&Told::Finished(9, 1)));
}

#[test]
fn an_instance_that_cannot_be_rolled_back_pauses_in_any_case() {
    let mut node = node(5, Policy { pause_on_failure: false, ..Policy::DEFAULT });
    let outcome = |_: &str| Outcome::NotRolledBack(Fault::Crashed, "no copy of it".into());
    assert_eq!(node.roll(outcome), 1);
    let why = &node.rollout.state().paused.as_ref().unwrap().why;
    assert!(why.contains("crashed") && why.contains("no copy of it"), "{why}");
}

#[test]
fn what_is_postponed_is_tried_later_and_the_node_is_not_finished_before() {
    let mut node = node(1, Policy::DEFAULT);
    let name = node.names().remove(0);
    node.end(&name, Outcome::Postponed("no certificate yet".into()));
    assert!(node.names().is_empty());
    node.seconds += 2;
    assert_eq!(node.names(), [name.as_str()]);
    assert!(node.told.is_empty() && node.rollout.state().failures_in_a_row == 0);
    node.upgraded(&name);
    node.look();
    assert_eq!(node.told.last(), Some(&Told::Finished(1, 0)));
}

#[test]
fn pods_that_are_not_well_or_worked_on_wait_and_unknown_programs_are_left_alone() {
    let mut node = node(3, Policy::DEFAULT);
    node.instances[0].is_well = false;
    node.instances[1].program = None;
    node.look();
    let now = node.now();
    assert!(node.rollout.next(now, None, |container| container == "web-002").is_empty(), "a repair works on it");
    assert_eq!((node.rollout.state().instances, node.rollout.state().outdated), (2, 2));
    assert_eq!(node.names(), ["web-002"]);
    node.upgraded("web-002");
    node.look();
    assert_eq!(node.told.last(), Some(&Told::Finished(1, 1)), "what waits for its certificate follows later");
    node.instances[0].is_well = true;
    assert_eq!(node.names(), ["web-000"]);
}

#[test]
fn nothing_begins_while_the_node_is_not_prepared_and_the_state_says_for_what_it_waits() {
    let mut node = node(3, Policy::DEFAULT);
    node.look();
    let now = node.now();
    assert!(node.rollout.next(now, Some("programs"), |_| false).is_empty());
    assert_eq!(node.rollout.state().waits_for.as_deref(), Some("programs"));
    assert_eq!(node.names().len(), 1);
    assert_eq!(node.rollout.state().waits_for, None);
}

#[test]
fn an_agent_that_was_killed_judges_what_it_began_with_before_anything_else() {
    let mut node = node(5, Policy::DEFAULT);
    let canary = node.names().remove(0);
    let before = Before { pid: 7, open: 3, ..Before::default() };
    node.rollout.began(&canary, before.clone());
    // The plugin had upgraded it, and it does not answer.
    (node.instances[0].program, node.instances[0].is_well) = (None, false);
    node.restart();
    let starts = node.starts();
    assert_eq!((starts.len(), starts[0].container.as_str(), &starts[0].before), (1, canary.as_str(), &Some(before)));
    node.end(&canary, crashed(&canary));
    assert!(node.is_paused() && node.rollout.state().under_way.is_empty());
    // A pod that ended meanwhile is forgotten.
    node.rollout.request(Request::Resume, 0);
    let canary = node.names().remove(0);
    node.rollout.began(&canary, Before::default());
    node.instances.retain(|one| one.container != canary);
    node.restart();
    node.look();
    assert!(node.rollout.state().under_way.is_empty());
}

#[test]
fn an_upgrade_that_ends_after_another_program_was_installed_counts_for_nothing() {
    let mut node = node(3, Policy::DEFAULT);
    let canary = node.names().remove(0);
    node.installed = 3;
    node.look();
    node.end(&canary, crashed(&canary));
    assert!(!node.is_paused() && node.told.is_empty());
    assert_eq!(node.names().len(), 1);
}

#[test]
fn a_pod_that_ends_in_the_middle_is_no_failure() {
    let mut node = node(2, Policy::DEFAULT);
    let canary = node.names().remove(0);
    node.instances.retain(|one| one.container != canary);
    node.end(&canary, Outcome::Gone);
    assert!(node.told.is_empty() && node.rollout.state().instances == 1);
    assert_eq!(node.names().len(), 1, "another canary");
}

#[test]
fn whatever_happens_the_limits_hold() {
    // A walk through many orders of events; the numbers are those of a linear congruence, so that a failure repeats.
    let mut random = 7_u64;
    let mut draw = |most: u64| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) % most
    };
    for _ in 0..300 {
        let policy = Policy {
            canary: u32::try_from(draw(3)).unwrap(),
            parallel: u32::try_from(draw(5)).unwrap(),
            pause_on_failure: draw(2) == 0,
            watch_seconds: 10,
        };
        let mut node = node(12, policy);
        let (mut running, mut failed) = (BTreeSet::new(), BTreeSet::new());
        for _ in 0..60 {
            node.seconds += draw(5);
            let was_paused = node.is_paused();
            let starts = node.names();
            assert!(starts.is_empty() || !was_paused);
            for name in starts {
                assert!(!failed.contains(&name), "{name} was tried twice");
                assert!(running.insert(name), "one at a time on a pod");
            }
            let is_canary = node.rollout.state().canaries_passed < policy.canary;
            let most = if is_canary { policy.parallel.min(1) } else { policy.parallel };
            assert!(running.len() <= most as usize, "{policy:?}");
            if let Some(name) = running.iter().nth(usize::try_from(draw(4)).unwrap()).cloned() {
                running.remove(&name);
                match draw(8) {
                    0 => {
                        failed.insert(name.clone());
                        node.end(&name, Outcome::RolledBack(Fault::Crashed));
                    }
                    1 => {
                        failed.insert(name.clone());
                        node.end(&name, Outcome::Refused("no".into()));
                    }
                    2 => node.end(&name, Outcome::Postponed("later".into())),
                    _ => node.upgraded(&name),
                }
            }
            let state = node.rollout.state();
            assert!(state.failures_in_a_row < MOST_FAILURES || state.paused.is_some());
            assert!(state.rolled_back == 0 || !policy.pause_on_failure || state.paused.is_some());
            assert_eq!(&State::parse(&serde_json::to_vec(state).unwrap()).unwrap(), state);
        }
    }
}
