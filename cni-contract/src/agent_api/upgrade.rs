//! How far an upgrade of the instances of a node is.

use std::fmt::Write as _;

use serde::{Deserialize, Serialize};

/// How far an upgrade of the instances of a node is.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct UpgradeState {
    /// In one word, such as `current`, `rolling` or `paused`.
    pub stage: String,
    /// In a sentence.
    pub why: String,
    /// SHA-256 of the installed program, in hexadecimal digits.
    pub program: Option<String>,
    /// Its version, as an upgraded instance named it.
    pub version: String,
    /// Why no further instance is upgraded.
    pub paused: Option<UpgradePause>,
    /// How many canaries kept the program.
    pub canaries_passed: u32,
    /// Instances whose program is known.
    pub instances: usize,
    /// Those of them with another program than the installed one.
    pub outdated: usize,
    /// Instances that kept the program.
    pub upgraded: u32,
    /// Instances that got the old program back.
    pub rolled_back: u32,
    /// Pods whose instances are being upgraded, as `namespace/name`.
    pub under_way: Vec<String>,
    /// Instances that do not get the program.
    pub failed: Vec<FailedUpgrade>,
}

/// Why no further instance is upgraded.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct UpgradePause {
    /// Whether it was the operator who said so.
    pub by_operator: bool,
    /// The reason, for people.
    pub why: String,
    /// When, in seconds since 1970.
    pub since: i64,
}

/// An instance that does not get the installed program.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct FailedUpgrade {
    /// `namespace/name`.
    pub pod: String,
    /// What it has instead, in words that are joined by `_`.
    pub outcome: String,
    /// Why.
    pub why: String,
}

impl UpgradeState {
    /// Enough digits of the program to tell programs apart, and its version.
    #[must_use]
    pub fn program_words(&self) -> String {
        let short = |program: &String| program.chars().take(SHORT).collect::<String>();
        match (&self.program, self.version.as_str()) {
            (None, _) => "not known yet".to_owned(),
            (Some(program), "") => short(program),
            (Some(program), version) => format!("{}, version {version}", short(program)),
        }
    }

    /// For people. All texts are printed as they are.
    #[must_use]
    pub fn table(&self) -> String {
        let mut text = format!("PROGRAM    {}\nROLL-OUT   {}\n", self.program_words(), self.why);
        let current = self.instances.saturating_sub(self.outdated);
        let _ = writeln!(
            text,
            "INSTANCES  {}: {current} with this program, {} with another",
            self.instances, self.outdated
        );
        let _ = writeln!(text, "UPGRADED   {}, rolled back {}", self.upgraded, self.rolled_back);
        let failed = self.failed.iter().map(|one| (&one.pod, one.outcome.replace('_', " "), one.why.as_str()));
        let rows: Vec<_> = self.under_way.iter().map(|pod| (pod, "under way".to_owned(), "")).chain(failed).collect();
        let widest = rows.iter().map(|(pod, ..)| pod.chars().count()).max().unwrap_or_default().max("POD".len());
        if !rows.is_empty() {
            let _ = writeln!(text, "\n{:widest$}  {:<15}  REASON", "POD", "UPGRADE");
        }
        for (pod, what, why) in rows {
            let line = format!("{pod:widest$}  {what:<15}  {why}");
            let _ = writeln!(text, "{}", line.trim_end());
        }
        text
    }
}

const SHORT: usize = 12;
