//! Which tests failed, and why: collected from the output of the test binaries, so that the end of a long log says it.

use std::sync::Mutex;

use crate::schedule::lock;

/// Longest text that is kept of a line, in bytes, and the most failures and panics that are kept of a part.
const LONGEST: usize = 300;
const MOST: usize = 100;

/// What one part printed about failures.
#[derive(Default)]
pub(crate) struct Failures(Mutex<Seen>);

#[derive(Default)]
struct Seen {
    failed: Vec<String>,
    /// Thread, place, and the first line of the message.
    panics: Vec<(String, String, Option<String>)>,
}

impl Failures {
    /// Reads a line of output.
    pub(crate) fn read(&self, line: &[u8]) {
        let line = String::from_utf8_lossy(&line[..line.len().min(LONGEST)]);
        let mut seen = lock(&self.0);
        if let Some((_, _, message @ None)) = seen.panics.last_mut() {
            *message = Some(line.trim().to_owned());
        } else if let Some(test) = failed_test(&line)
            && seen.failed.len() < MOST
        {
            seen.failed.push(test.to_owned());
        } else if let Some((thread, place)) = panic(&line)
            && seen.panics.len() < MOST
        {
            seen.panics.push((thread.to_owned(), place.to_owned(), None));
        }
    }

    /// A line for each test that failed. The panic of a thread with another name than its test is not found.
    pub(crate) fn lines(&self) -> Vec<String> {
        let seen = lock(&self.0);
        let why = |test: &str| seen.panics.iter().find(|(thread, ..)| thread == test);
        let line = |test: &String| match why(test) {
            Some((_, place, message)) => format!("{test}: {place}: {}", message.as_deref().unwrap_or_default()),
            None => test.clone(),
        };
        seen.failed.iter().map(line).collect()
    }
}

/// The test that failed, by its line with or without `--quiet`.
fn failed_test(line: &str) -> Option<&str> {
    line.strip_suffix(" --- FAILED")
        .or_else(|| line.strip_suffix(" ... FAILED")?.strip_prefix("test "))
        .filter(|test| !test.contains(' '))
}

/// Thread and place in the first line that a panic prints.
fn panic(line: &str) -> Option<(&str, &str)> {
    let (thread, rest) = line.strip_prefix("thread '")?.split_once('\'')?;
    Some((thread, rest.split_once(" panicked at ")?.1.strip_suffix(':')?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_test_has_the_place_and_the_message_of_its_panic() {
        let quiet =
            "thread 'x::one' (27771) panicked at src/x.rs:2:9:\nleft is 1\nstack backtrace:\nx::one --- FAILED\n";
        let usual = "test x::two ... FAILED\ntest x::three ... ok\n---- x::two stdout ----\n\nthread 'x::two' panicked at src/y.rs:3:1:\nno\n";
        let failures = Failures::default();
        quiet.lines().chain(usual.lines()).for_each(|line| failures.read(line.as_bytes()));
        assert_eq!(failures.lines(), ["x::one: src/x.rs:2:9: left is 1", "x::two: src/y.rs:3:1: no"]);
    }

    #[test]
    fn a_panic_that_failed_no_test_and_words_that_look_like_a_failure_are_left_out() {
        let failures = Failures::default();
        for line in
            ["thread 'worker' panicked at src/x.rs:1:1:", "test a b ... FAILED", "test result: FAILED. 1 passed"]
        {
            failures.read(line.as_bytes());
        }
        failures.read(b"x::alone --- FAILED");
        assert_eq!(failures.lines(), ["x::alone"]);
    }

    #[test]
    fn endless_output_is_not_kept() {
        let failures = Failures::default();
        for n in 0..2 * MOST {
            failures.read(format!("thread 'x::n{n}' panicked at a:1:").as_bytes());
            failures.read("y".repeat(10 * LONGEST).as_bytes());
            failures.read(format!("x::n{n} --- FAILED").as_bytes());
        }
        let lines = failures.lines();
        assert_eq!(lines.len(), MOST);
        assert!(lines.iter().all(|line| line.len() < LONGEST + 50));
    }
}
