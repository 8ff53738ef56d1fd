//! Findings by category.

use std::fmt::Write as _;

use clap::ValueEnum;
use nebula_cert::visible;
use serde::Serialize;

use crate::outcome::{Outcome, ToolError};
use crate::shown::{Mark, Printer};

/// What a finding is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Category {
    /// The API server.
    Kubernetes,
    /// What the user may do.
    Rights,
    /// The nodes themselves.
    Nodes,
    /// The CA.
    Ca,
    /// Lighthouses.
    Lighthouses,
    /// The agents of the nodes.
    Agents,
    /// Pods and their certificates.
    Pods,
    /// Upgrades of instances.
    Upgrades,
}

/// One thing that was looked at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Finding {
    category: Category,
    level: &'static str,
    text: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    hint: String,
}

/// All findings.
#[derive(Debug, Default)]
pub(super) struct Report(Vec<Finding>);

impl Report {
    /// It is as it should be.
    pub(super) fn good(&mut self, category: Category, text: impl Into<String>) {
        self.add(category, Mark::Good, text.into(), String::new());
    }

    /// It is worth a look.
    pub(super) fn warn(&mut self, category: Category, text: impl Into<String>, hint: impl Into<String>) {
        self.add(category, Mark::Warning, text.into(), hint.into());
    }

    /// It is wrong.
    pub(super) fn bad(&mut self, category: Category, text: impl Into<String>, hint: impl Into<String>) {
        self.add(category, Mark::Bad, text.into(), hint.into());
    }

    fn add(&mut self, category: Category, mark: Mark, text: String, hint: String) {
        let level = match mark {
            Mark::Good => GOOD,
            Mark::Warning => WARNING,
            Mark::Bad => BAD,
        };
        self.0.push(Finding { category, level, text, hint });
    }

    /// Keeps findings of these categories; all, if there are none.
    pub(super) fn retain(&mut self, only: &[Category]) {
        self.0.retain(|finding| only.is_empty() || only.contains(&finding.category));
        self.0.sort_by_key(|finding| finding.category);
    }

    /// Prints all of them.
    pub(super) fn show(&self, printer: &mut Printer<'_>) -> Result<Outcome, ToolError> {
        if printer.is_table() {
            let text = self.text(printer);
            printer.text(&text)?;
        } else {
            printer.documents(&self.0)?;
        }
        Ok(Outcome::findings(self.count(BAD) > 0))
    }

    fn text(&self, printer: &Printer<'_>) -> String {
        let (mut text, mut before) = (String::new(), None);
        for finding in &self.0 {
            if before != Some(finding.category) {
                let gap = if before.is_some() { "\n" } else { "" };
                let name = finding.category.to_possible_value().map(|value| value.get_name().to_owned());
                let _ = writeln!(text, "{gap}{}", name.unwrap_or_default());
                before = Some(finding.category);
            }
            let mark = match finding.level {
                GOOD => Mark::Good,
                WARNING => Mark::Warning,
                _ => Mark::Bad,
            };
            let mut lines = finding.text.lines();
            let _ = writeln!(text, "  {} {}", printer.sign(mark), visible(lines.next().unwrap_or_default()));
            for line in lines.chain(finding.hint.lines()) {
                let _ = writeln!(text, "      {}", visible(line));
            }
        }
        let (bad, warnings) = (self.count(BAD), self.count(WARNING));
        let _ = writeln!(text, "\n{} looked at: {bad} wrong, {warnings} worth a look.", self.0.len());
        text
    }

    fn count(&self, level: &str) -> usize {
        self.0.iter().filter(|finding| finding.level == level).count()
    }

    /// For tests: levels and texts.
    #[cfg(test)]
    pub(super) fn found(&self) -> Vec<String> {
        self.0.iter().map(|finding| format!("{}: {}", finding.level, finding.text)).collect()
    }
}

const GOOD: &str = "good";
const WARNING: &str = "warning";
const BAD: &str = "bad";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn findings_stand_below_their_category_with_what_to_do_and_only_wrong_ones_count() {
        let mut report = Report::default();
        report.bad(Category::Agents, "n1: NOT\u{1b} ready\nits disk is full", "make room");
        report.good(Category::Kubernetes, "1.30");
        report.warn(Category::Agents, "n2: is older", "");
        report.retain(&[]);
        let (mut out, mut notes) = (Vec::new(), Vec::new());
        let outcome = report.show(&mut Printer::new(None, &mut out, &mut notes)).unwrap();
        let text = String::from_utf8(out).unwrap();
        let expected = "kubernetes\n  ✓ 1.30\n\nagents\n  ✗ n1: NOT\\u{1b} ready\n      its disk is full\n      make room\n  ! n2: is older\n\n3 looked at: 1 wrong, 1 worth a look.\n";
        assert_eq!((text.as_str(), outcome), (expected, Outcome::Findings));
        report.retain(&[Category::Kubernetes]);
        assert_eq!((report.found(), report.count(BAD)), (vec!["good: 1.30".to_owned()], 0));
    }
}
