//! The answer: how far the chain holds, where it breaks, and what to do.

use serde::{Deserialize, Serialize};

use super::causes::{Cause, Link};
use super::chain::{self, Verdict};
use super::facts::Facts;
use crate::columns::columns;

/// The links up to the first that is broken.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Report {
    /// What was found, in order.
    pub steps: Vec<Step>,
    /// Why the flow does not pass; `None`: nothing was found, or not all is known.
    pub cause: Option<Cause>,
    /// The cause as one word.
    pub word: Option<String>,
    /// What to do.
    pub remedy: Option<String>,
}

/// One link.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Step {
    /// Which.
    pub link: Link,
    /// Whether it holds.
    pub standing: Standing,
    /// What was seen.
    pub text: String,
}

/// Whether a link holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Standing {
    /// It does.
    Fine,
    /// It is not known.
    Unknown,
    /// It does not.
    Broken,
}

/// What was found out, with what follows: the answer as JSON.
#[derive(Debug, Serialize, Deserialize)]
pub struct Document {
    /// What was found out.
    pub facts: Facts,
    /// What follows from it.
    pub report: Report,
}

impl Document {
    /// With what follows.
    #[must_use]
    pub fn of(facts: Facts) -> Self {
        Self { report: Report::of(&facts), facts }
    }
}

impl Report {
    /// Looks at all links, up to the first that is broken.
    #[must_use]
    pub fn of(facts: &Facts) -> Self {
        let (mut steps, mut cause) = (Vec::new(), None);
        for link in Link::ALL {
            let (standing, text) = match chain::judge(facts, link) {
                Verdict::Fine(text) => (Standing::Fine, text),
                Verdict::Unknown(text) => (Standing::Unknown, text),
                Verdict::Broken(why, text) => {
                    cause = Some(why);
                    (Standing::Broken, text)
                }
            };
            // Some of it is as programs and peers wrote it: a step is one line.
            let text = text.replace(char::is_control, " ");
            steps.push(Step { link, standing, text });
            if cause.is_some() {
                break;
            }
        }
        let remedy = cause.map(|cause: Cause| cause.remedy().to_owned());
        Self { steps, cause, word: cause.map(Cause::word), remedy }
    }

    /// Whether every link is known to hold.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.steps.iter().all(|step| step.standing == Standing::Fine)
    }

    /// A line for each link, and what follows. Escape what is printed: some of it is as peers wrote it.
    #[must_use]
    pub fn text(&self) -> String {
        let mark = |standing| match standing {
            Standing::Fine => "ok",
            Standing::Unknown => "?",
            Standing::Broken => "BROKEN",
        };
        let row = |step: &Step| [mark(step.standing).to_owned(), step.link.name().to_owned(), step.text.clone()];
        let mut text = columns(["", "LINK", "SEEN"], self.steps.iter().map(row));
        text.push_str(&match (&self.word, &self.remedy) {
            (Some(word), Some(remedy)) => format!("\n{word}: {remedy}\n"),
            _ if self.is_whole() => "\nNothing is broken that can be seen from here.\n".to_owned(),
            _ => "\nNothing is broken that can be seen from here, and not all could be seen.\n".to_owned(),
        });
        text
    }
}
