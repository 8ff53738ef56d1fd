//! What the agent remembers of a roll-out while it is not running.

use std::collections::BTreeMap;

use nebula_cni_contract::format::Unreadable;
use serde::{Deserialize, Serialize};

use super::gate::{Before, MAX_TEXT};
use super::program::ProgramId;

/// How far the node is. Every part of it is bounded, and checked when it is read.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct State {
    /// The installed program, to which instances are upgraded.
    pub program: Option<ProgramId>,
    /// Its version, as an upgraded instance named it.
    pub version: String,
    /// Whether no further instance is upgraded.
    pub paused: Option<Pause>,
    /// How many canaries kept the program.
    pub canaries_passed: u32,
    /// How many upgrades failed since the last that did not.
    pub failures_in_a_row: u32,
    /// Instances that this program was tried with in vain, by container.
    pub failed: BTreeMap<String, Failed>,
    /// Instances that are being upgraded or watched, by container.
    pub under_way: BTreeMap<String, UnderWay>,
    /// Instances that kept this program.
    pub upgraded: u32,
    /// Instances that got the old program back.
    pub rolled_back: u32,
    /// Whether nothing is left to do.
    pub is_finished: bool,
    /// Instances of the node whose program is known.
    pub instances: usize,
    /// Those of them with another program than the installed one.
    pub outdated: usize,
    /// What the agent waits for before it upgrades an instance.
    pub waits_for: Option<String>,
}

/// Why no further instance is upgraded.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pause {
    /// Whether it was the operator who said so: then it holds for other programs as well.
    pub by_operator: bool,
    /// The reason, for people.
    pub why: String,
    /// When, in seconds since 1970.
    pub since: i64,
}

/// An instance that does not get the installed program.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failed {
    /// `namespace/name`.
    pub pod: String,
    /// What it has instead.
    pub outcome: Failure,
    /// Why.
    pub why: String,
}

/// What a failed upgrade left.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Failure {
    /// The plugin refused, and the instance went on all the time.
    NotUpgraded,
    /// The instance has the old program.
    RolledBack,
    /// That failed too.
    NotRolledBack,
}

impl Failure {
    /// For people.
    #[must_use]
    pub fn words(self) -> &'static str {
        match self {
            Self::NotUpgraded => "not upgraded",
            Self::RolledBack => "rolled back",
            Self::NotRolledBack => "not rolled back",
        }
    }
}

/// An instance that is being upgraded.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnderWay {
    /// `namespace/name`.
    pub pod: String,
    /// What it was before.
    pub before: Before,
}

impl State {
    /// What replaces a file that cannot be read: it may have held a pause.
    #[must_use]
    pub fn unreadable(why: &str, now: i64) -> Self {
        let why = format!("the file of the roll-out's state cannot be read: {why}");
        let paused = Pause { by_operator: false, why: why.chars().take(MAX_TEXT).collect(), since: now };
        Self { paused: Some(paused), ..Self::default() }
    }

    /// Reads the text of the file.
    ///
    /// # Errors
    /// Says what is wrong with it, or that a newer agent wrote it.
    pub fn parse(bytes: &[u8]) -> Result<Self, String> {
        let Format { format } = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
        if format.is_some_and(|found| found > FORMAT) {
            let found = format.unwrap_or_default();
            return Err(Unreadable::Newer { found: found.into(), known: FORMAT }.to_string());
        }
        let state: Self = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
        state.check()?;
        Ok(state)
    }

    /// The text of the file.
    ///
    /// # Errors
    /// None that is known.
    pub fn text(&self) -> serde_json::Result<Vec<u8>> {
        serde_json::to_vec(&Versioned { format: FORMAT, state: self })
    }

    fn check(&self) -> Result<(), String> {
        let pause = self.paused.iter().map(|pause| &pause.why);
        let failed = self.failed.iter().flat_map(|(container, failed)| [container, &failed.pod, &failed.why]);
        let under_way = self.under_way.iter().flat_map(|(container, one)| [container, &one.pod]);
        let mut texts = pause.chain(failed).chain(under_way).chain([&self.version]).chain(&self.waits_for);
        // Four bytes a character. What is written here is shorter.
        if texts.any(|text| text.len() > MAX_STATE_TEXT) {
            return Err("a text is too long".to_owned());
        }
        if self.failed.len() > MAX_FAILED || self.under_way.len() > MAX_UNDER_WAY {
            return Err("it has too many instances".to_owned());
        }
        if !self.under_way.values().all(|one| one.before.is_valid()) {
            return Err("an instance has too many peers".to_owned());
        }
        Ok(())
    }

    /// Begins with another program. What the operator said stays, and so does a pause of which nobody knows with which
    /// program it began.
    pub fn begin(&mut self, program: ProgramId) {
        let is_known = self.program.is_some();
        let paused = self.paused.take().filter(|pause| pause.by_operator || !is_known);
        let (instances, outdated) = (self.instances, self.outdated);
        *self = Self { program: Some(program), paused, instances, outdated, ..Self::default() };
    }

    /// Goes on after a pause. After failures everything is tried again, beginning with a canary.
    pub fn resume(&mut self) {
        self.paused = None;
        if self.failures_in_a_row > 0 || !self.failed.is_empty() {
            (self.failures_in_a_row, self.canaries_passed, self.is_finished) = (0, 0, false);
            self.failed.clear();
        }
    }
}

/// The file's key `version` is that of the program.
#[derive(Deserialize)]
struct Format {
    #[serde(default)]
    format: Option<u32>,
}

#[derive(Serialize)]
struct Versioned<'a> {
    format: u32,
    #[serde(flatten)]
    state: &'a State,
}

/// Format of the file. One without is of the first.
const FORMAT: u32 = 1;
/// A container's id and a pod's name are shorter as well.
const MAX_STATE_TEXT: usize = 4 * MAX_TEXT;
/// More than a node has pods.
const MAX_FAILED: usize = 1_000;
/// As many upgrades as may run at a time.
pub const MAX_UNDER_WAY: usize = 64;

#[cfg(test)]
mod tests {
    use std::path::Path;

    use nebula_cni_contract::recorded::hold;

    use super::*;

    fn paused(by_operator: bool) -> State {
        let pause = Pause { by_operator, why: "w".into(), since: 7 };
        let failed = Failed { pod: "shop/web".into(), outcome: Failure::RolledBack, why: "it crashed".into() };
        State {
            program: Some(ProgramId::test(1)),
            paused: Some(pause),
            canaries_passed: 1,
            failures_in_a_row: u32::from(!by_operator),
            failed: if by_operator { BTreeMap::new() } else { [("c1".to_owned(), failed)].into() },
            ..State::default()
        }
    }

    #[test]
    fn what_is_written_is_read_and_keys_of_other_releases_do_no_harm() {
        let state = paused(false);
        let mut value: serde_json::Value = serde_json::from_slice(&state.text().unwrap()).unwrap();
        assert_eq!(value["format"], 1);
        assert_eq!(State::parse(value.to_string().as_bytes()).unwrap(), state);
        value["later"] = 7.into();
        value.as_object_mut().unwrap().remove("is_finished");
        assert_eq!(State::parse(value.to_string().as_bytes()).unwrap(), state);
    }

    #[test]
    fn the_state_of_each_release_is_read_and_keeps_its_keys_and_a_newer_one_pauses_the_roll_out() {
        let documents = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/documents");
        let states = hold::<State>(&documents, env!("CARGO_PKG_VERSION"), "upgrade.json").unwrap();
        assert!(states.iter().all(|state| state.check().is_ok()));
        let newer = State::parse(br#"{"format":2,"paused":null,"nodes":[]}"#).unwrap_err();
        assert_eq!(newer, "it was written by a newer program (format 2, this one knows 1)");
        assert!(State::unreadable(&newer, 7).paused.is_some_and(|pause| pause.why.ends_with(&newer)));
    }

    #[test]
    fn a_file_that_cannot_be_trusted_pauses_the_roll_out() {
        let failed = serde_json::json!({"pod": "a/b", "outcome": "rolled_back", "why": ""});
        let many: serde_json::Map<_, _> = (0..1_001).map(|n| (n.to_string(), failed.clone())).collect();
        let peers: Vec<String> = (0..100).map(|n| n.to_string()).collect();
        for bad in [
            serde_json::json!({"program": "../../etc/passwd"}),
            serde_json::json!({"upgraded": -1}),
            serde_json::json!({"waits_for": "x".repeat(5_000)}),
            serde_json::json!({"failed": many}),
            serde_json::json!({"failed": {"c": {"pod": "a/b", "outcome": "exploded", "why": ""}}}),
            serde_json::json!({"under_way": {"c": {"pod": "a/b", "before": {"peers": peers}}}}),
            serde_json::json!("text"),
        ] {
            assert!(State::parse(bad.to_string().as_bytes()).is_err(), "{bad}");
        }
        let why = State::parse(b"{").unwrap_err();
        let state = State::unreadable(&why, 7);
        assert!(state.paused.is_some_and(|pause| pause.why.contains("cannot be read")));
    }

    #[test]
    fn another_program_ends_the_pause_after_a_failure_and_not_that_of_the_operator() {
        let mut state = paused(false);
        state.begin(ProgramId::test(2));
        assert_eq!(state, State { program: Some(ProgramId::test(2)), ..State::default() });
        let mut state = paused(true);
        state.begin(ProgramId::test(2));
        assert!(state.paused.is_some() && state.canaries_passed == 0);
        let mut damaged = State::unreadable("torn", 7);
        damaged.begin(ProgramId::test(2));
        assert!(damaged.paused.is_some(), "until an operator resumes, or the program after this one");
        damaged.begin(ProgramId::test(3));
        assert!(damaged.paused.is_none());
    }

    #[test]
    fn to_resume_after_a_failure_is_to_begin_again_with_a_canary() {
        let mut state = paused(false);
        state.resume();
        assert!(state.paused.is_none() && state.failed.is_empty() && state.canaries_passed == 0);
        let mut state = paused(true);
        state.resume();
        assert!(state.paused.is_none() && state.canaries_passed == 1, "nothing had failed");
    }
}
