//! One variant per reason a certificate or key is refused.

/// Why a certificate, key or trust store was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Placeholder until the reasons are filled in.
    #[error("invalid certificate: {0}")]
    Invalid(String),
}
