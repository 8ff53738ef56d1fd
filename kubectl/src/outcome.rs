//! How a command ends.

use std::io;

use nebula_cni_contract::seen::BadSeen;

use crate::cluster::ClusterError;

/// How a command ended that could show something.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Outcome {
    /// All is well.
    Fine,
    /// Something is not as it should be in the cluster.
    Findings,
    /// What is shown is not all: a node did not answer.
    Failed,
}

impl Outcome {
    /// Of a command line that cannot be understood (`EX_USAGE` of sysexits).
    pub const USAGE: u8 = 64;

    /// The exit code.
    #[must_use]
    pub fn code(self) -> u8 {
        match self {
            Self::Fine => 0,
            Self::Failed => 1,
            Self::Findings => 79,
        }
    }

    /// That of both: the worse one.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        self.max(other)
    }

    /// Findings if there are some.
    #[must_use]
    pub fn findings(has_some: bool) -> Self {
        if has_some { Self::Findings } else { Self::Fine }
    }
}

/// Why nothing can be shown.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ToolError {
    /// The API server does not do what it is asked for.
    #[error(transparent)]
    Cluster(#[from] ClusterError),
    /// There are no agents.
    #[error(
        "no agent of Nebula in namespace {namespace}: is it installed there? --system-namespace says where, and \
         `kubectl nebula check --pre` whether it can be"
    )]
    NoAgents {
        /// Where they were looked for.
        namespace: String,
    },
    /// All namespaces, where one is looked at.
    #[error("policies are suggested for the pods of one namespace: name it with -n")]
    OneNamespace,
    /// A file cannot be read.
    #[error("cannot read {file}: {reason}")]
    File {
        /// The file.
        file: String,
        /// Why.
        reason: String,
    },
    /// A file has something else.
    #[error(transparent)]
    Seen(#[from] BadSeen),
    /// The answer cannot be printed.
    #[error("cannot print the answer: {0}")]
    Print(#[from] io::Error),
    /// The command line asks for what cannot be.
    #[error("{0}")]
    Usage(String),
    /// The page cannot be served.
    #[error("cannot serve the page: {0}")]
    Page(String),
    /// A document cannot be written in its form.
    #[error("cannot write the answer as JSON or YAML: {0}")]
    Form(String),
}

impl ToolError {
    /// The exit code.
    #[must_use]
    pub fn code(&self) -> u8 {
        if matches!(self, Self::Usage(_)) { Outcome::USAGE } else { Outcome::Failed.code() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_that_is_not_whole_counts_more_than_what_was_found_in_it() {
        assert_eq!(Outcome::Fine.and(Outcome::Findings).and(Outcome::Failed).code(), 1);
        assert_eq!(Outcome::Failed.and(Outcome::Findings).code(), 1);
        assert_eq!(Outcome::findings(true).and(Outcome::Fine).code(), 79);
        assert_eq!(Outcome::findings(false).code(), 0);
    }
}
