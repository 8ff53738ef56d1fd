//! What is wrong on a node and with its pods, why, and what to do about it.

use serde::{Deserialize, Serialize};

/// What an agent finds when it looks at its node, or at the pods of one namespace there.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Findings {
    /// Errors first.
    pub findings: Vec<Finding>,
    /// How many pods were looked at.
    pub pods: usize,
    /// Further findings, for which there was no room.
    #[serde(skip_serializing_if = "is_zero")]
    pub left_out: usize,
}

/// A problem.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(default)]
pub struct Finding {
    /// How bad it is.
    pub severity: Severity,
    /// Name of its node, where there are several.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// [`Finding::NODE`], or `namespace/name` of a pod.
    pub about: String,
    /// Stable name for programs.
    pub code: String,
    /// What is wrong.
    pub cause: String,
    /// What to do about it; empty if nothing is known.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub remedy: String,
}

/// How bad a problem is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// Something does not work.
    Error,
    /// Something will stop working, or works badly. So is what a later release calls otherwise.
    #[default]
    #[serde(other)]
    Warning,
}

impl Finding {
    /// What a finding is about that concerns the node itself.
    pub const NODE: &'static str = "node";

    /// Something does not work. Texts are cut where they get too long: instances and the CA wrote parts of them.
    #[must_use]
    pub fn error(about: &str, code: &str, cause: impl AsRef<str>, remedy: impl AsRef<str>) -> Self {
        let [about, cause, remedy] = [about, cause.as_ref(), remedy.as_ref()].map(cut);
        Self { severity: Severity::Error, node: None, about, code: code.to_owned(), cause, remedy }
    }

    /// As [`Finding::error`], of something that will stop working, or works badly.
    #[must_use]
    pub fn warning(about: &str, code: &str, cause: impl AsRef<str>, remedy: impl AsRef<str>) -> Self {
        Self { severity: Severity::Warning, ..Self::error(about, code, cause, remedy) }
    }
}

impl Findings {
    /// What was found with this number of pods: errors first, each once, and no more than an answer may have.
    #[must_use]
    pub fn sorted(mut findings: Vec<Finding>, pods: usize) -> Self {
        findings.sort();
        findings.dedup();
        let left_out = findings.len().saturating_sub(MOST_FINDINGS);
        findings.truncate(MOST_FINDINGS);
        Self { findings, pods, left_out }
    }
}

impl Severity {
    /// The word for people.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Error => "ERROR",
            Self::Warning => "warning",
        }
    }
}

fn cut(text: &str) -> String {
    match text.char_indices().nth(MOST_CHARS) {
        Some((at, _)) => format!("{}…", &text[..at]),
        None => text.to_owned(),
    }
}

pub(super) fn is_zero(count: &usize) -> bool {
    *count == 0
}

/// Of one node.
const MOST_FINDINGS: usize = 1000;
const MOST_CHARS: usize = 500;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_come_first_and_findings_and_their_texts_are_bounded() {
        let long = "é".repeat(10_000);
        let warning = Finding::warning("shop/a", "old_settings", &long, "");
        assert_eq!((warning.cause.chars().count(), warning.remedy.as_str()), (MOST_CHARS + 1, ""));
        let error = Finding::error("shop/b", "no_answer", "refused", "look");
        let found = Findings::sorted(vec![warning.clone(), error.clone(), error.clone()], 2);
        assert_eq!(found, Findings { findings: vec![error, warning], pods: 2, left_out: 0 });
        let many = (0..MOST_FINDINGS + 7).map(|number| Finding::error("node", &number.to_string(), "", ""));
        let found = Findings::sorted(many.collect(), 0);
        assert_eq!((found.findings.len(), found.left_out), (MOST_FINDINGS, 7));
    }

    #[test]
    fn a_word_of_a_later_release_is_a_warning() {
        let finding: Finding = serde_json::from_str(r#"{"severity":"catastrophe","code":"x","moon":1}"#).unwrap();
        assert_eq!((finding.severity, finding.code.as_str()), (Severity::Warning, "x"));
    }
}
