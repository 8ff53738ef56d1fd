//! Why the instance of a pod ended.

use std::path::Path;

use nebula_cert::with_causes;
use nebula_cni_contract::launch::StartError;
use nebula_enrolment::ca_client::Refusal;
use nebula_linux::errno;

/// Why an instance failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The launch file is unusable.
    #[error("launch file {file}: {}", with_causes(&**source))]
    Launch {
        /// Path of the file.
        file: String,
        /// What is wrong with it.
        #[source]
        source: Cause,
    },
    /// Something on this node could not be set up.
    #[error("{what}: {}", with_causes(&**source))]
    SetUp {
        /// What was tried.
        what: String,
        /// Why it failed.
        #[source]
        source: Cause,
    },
    /// The CA refused a certificate.
    #[error("ca-denied: {0}")]
    Denied(Refusal),
    /// The CA service cannot be used as configured.
    #[error("ca-unusable: {0}")]
    Misconfigured(String),
    /// No answer from the CA in time.
    #[error("ca-unavailable: {0}")]
    Unavailable(String),
    /// The data path failed.
    #[error("the tunnel failed: {}", with_causes(&**.0))]
    Broken(#[source] Cause),
}

/// The error of any component.
pub type Cause = Box<dyn std::error::Error + Send + Sync>;

impl Error {
    pub(crate) fn set_up(what: impl Into<String>, cause: impl Into<Cause>) -> Self {
        Self::SetUp { what: what.into(), source: cause.into() }
    }

    /// [`Error::SetUp`] for an error of the operating system, worded by [`errno`].
    pub(crate) fn set_up_io(what: impl Into<String>, error: std::io::Error) -> Self {
        Self::set_up(what, errno::Plain(error))
    }

    pub(crate) fn launch(file: &Path, cause: impl Into<Cause>) -> Self {
        Self::Launch { file: file.display().to_string(), source: cause.into() }
    }

    /// The form in which the plugin that waits for the start receives this error.
    #[must_use]
    pub fn to_start_error(&self) -> StartError {
        match self {
            Self::Denied(Refusal { code, message }) => {
                StartError::Refused { code: code.clone(), message: message.clone() }
            }
            Self::Misconfigured(cause) => StartError::Misconfigured { cause: cause.clone() },
            Self::Unavailable(cause) => StartError::Unavailable { cause: cause.clone() },
            Self::Launch { file, source } => {
                StartError::Failed { what: format!("launch file {file}"), cause: with_causes(&**source) }
            }
            Self::SetUp { what, source } => StartError::Failed { what: what.clone(), cause: with_causes(&**source) },
            Self::Broken(source) => {
                StartError::Failed { what: "the tunnel failed".to_owned(), cause: with_causes(&**source) }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_plugin_gets_the_code_of_a_refusal_and_the_texts_that_the_log_has() {
        let refusal = Refusal { code: Some("wrong_node".to_owned()), message: "pod is on another node".to_owned() };
        let error = Error::Denied(refusal);
        assert_eq!(error.to_string(), "ca-denied: pod is on another node (wrong_node)");
        let line = error.to_start_error().to_line();
        assert_eq!(
            StartError::from_line(&line),
            Some(StartError::Refused {
                code: Some("wrong_node".to_owned()),
                message: "pod is on another node".to_owned()
            })
        );
        for error in [
            Error::launch(Path::new("/x"), "no such file"),
            Error::set_up_io("tun", std::io::Error::from_raw_os_error(1)),
            Error::Broken("it ended by itself".into()),
        ] {
            assert_eq!(error.to_start_error().to_string(), error.to_string());
        }
    }
}
