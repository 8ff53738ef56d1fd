//! Why the instance of a pod ended.

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
    Denied(String),
    /// The CA could not be asked in time.
    #[error("ca-unavailable: {0}")]
    Unavailable(String),
    /// The data path broke.
    #[error("the tunnel failed: {0}")]
    Broken(String),
}
