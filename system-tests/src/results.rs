//! What is printed at the end: a line for each part and each job.

use std::time::Duration;

use crate::schedule::{Finished, Outcome, Place};

/// Tests that passed and failed, by a line in which a test binary says how it ended.
pub(crate) fn counts(line: &[u8]) -> Option<(u32, u32)> {
    let words = std::str::from_utf8(line).ok()?.strip_prefix("test result: ")?;
    let before =
        |word: &str| words.split(' ').zip(words.split(' ').skip(1)).find(|(_, next)| *next == word)?.0.parse().ok();
    Some((before("passed;")?, before("failed;")?))
}

/// How a part ended whose commands ended so: one that ran no test failed, and so did one whose tests all passed and a
/// command not.
pub(crate) fn judge(commands_are_ok: bool, passed: u32, failed: u32) -> (bool, u32) {
    let is_ok = commands_are_ok && passed > 0 && failed == 0;
    (is_ok, if is_ok { 0 } else { failed.max(1) })
}

pub(crate) fn part_line(part: &Finished) -> String {
    let Outcome { passed, failed, .. } = part.outcome;
    format!("{:<8} {passed:4} passed {failed:3} failed  {}  {}", part.name, times(part), word(part.outcome))
}

pub(crate) fn job_line(job: &Finished) -> String {
    let beside = if job.place == Place::Idle { ", beside the tests" } else { "" };
    format!("{:<12} {}  {}{beside}", job.name, times(job), word(job.outcome))
}

pub(crate) fn sum_line(name: &str, wall: Duration, cpu: Duration) -> String {
    format!("{name:<12} {}", minutes(wall, cpu))
}

fn times(one: &Finished) -> String {
    minutes(one.wall, one.outcome.cpu)
}

fn minutes(wall: Duration, cpu: Duration) -> String {
    format!("{:5.1} min {:5.1} min of CPU", wall.as_secs_f64() / 60.0, cpu.as_secs_f64() / 60.0)
}

const fn word(outcome: Outcome) -> &'static str {
    if outcome.is_ok { "ok" } else { "FAILED" }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_counts_are_those_of_a_result_line_only() {
        let line =
            b"test result: FAILED. 12 passed; 3 failed; 4 ignored; 0 measured; 5 filtered out; finished in 0.10s";
        assert_eq!(counts(line), Some((12, 3)));
        for other in [&b"running 4 tests"[..], b"said: test result: ok. 1 passed; 0 failed;", b"test result: ", b"\xff"]
        {
            assert_eq!(counts(other), None);
        }
    }

    #[test]
    fn a_part_without_tests_and_one_whose_command_failed_are_failed() {
        assert_eq!(judge(true, 4, 0), (true, 0));
        assert_eq!(judge(true, 0, 0), (false, 1));
        assert_eq!(judge(false, 4, 0), (false, 1));
        assert_eq!(judge(false, 4, 3), (false, 3));
        assert_eq!(judge(true, 4, 2), (false, 2));
    }

    #[test]
    fn lines_have_result_time_and_cpu_time_in_columns() {
        let outcome = Outcome { is_ok: true, passed: 23, failed: 0, cpu: Duration::from_secs(78) };
        let mut one = Finished {
            name: "cri".to_owned(),
            outcome,
            wall: Duration::from_secs(630),
            place: Place::Main,
            inner: Vec::new(),
        };
        assert_eq!(part_line(&one), "cri        23 passed   0 failed   10.5 min   1.3 min of CPU  ok");
        assert_eq!(job_line(&one), "cri           10.5 min   1.3 min of CPU  ok");
        one.place = Place::Idle;
        one.outcome.is_ok = false;
        assert_eq!(job_line(&one), "cri           10.5 min   1.3 min of CPU  FAILED, beside the tests");
        assert_eq!(sum_line("all of these", one.wall, outcome.cpu), "all of these  10.5 min   1.3 min of CPU");
    }
}
