//! Why the instance of a pod ended.

use nebula_cni_plugin::launch::StartError;

use crate::ca_client::Refusal;

/// Why an instance ended other than by being told to.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The launch file is no use.
    #[error("launch file {file}: {cause}")]
    Launch {
        /// Path.
        file: String,
        /// What is wrong with it.
        cause: String,
    },
    /// Something on this node could not be set up.
    #[error("{what}: {cause}")]
    SetUp {
        /// What was tried.
        what: String,
        /// Why not.
        cause: String,
    },
    /// The CA refused a certificate.
    #[error("ca-denied: {0}")]
    Denied(Refusal),
    /// The CA could not be asked in time.
    #[error("ca-unavailable: {0}")]
    Unavailable(String),
    /// The data path broke.
    #[error("the tunnel failed: {0}")]
    Broken(String),
}

impl Error {
    /// For the plugin that waits for the start.
    #[must_use]
    pub fn to_start_error(&self) -> StartError {
        match self {
            Self::Denied(Refusal { code, message }) => {
                StartError::Refused { code: code.clone(), message: message.clone() }
            }
            Self::Unavailable(cause) => StartError::Unavailable { cause: cause.clone() },
            Self::Launch { file, cause } => {
                StartError::Failed { what: format!("launch file {file}"), cause: cause.clone() }
            }
            Self::SetUp { what, cause } => StartError::Failed { what: what.clone(), cause: cause.clone() },
            Self::Broken(cause) => StartError::Failed { what: "the tunnel failed".to_owned(), cause: cause.clone() },
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
            Error::Launch { file: "/x".to_owned(), cause: "no such file".to_owned() },
            Error::SetUp { what: "tun".to_owned(), cause: "permission denied".to_owned() },
            Error::Broken("it ended by itself".to_owned()),
        ] {
            assert_eq!(error.to_start_error().to_string(), error.to_string());
        }
    }
}
