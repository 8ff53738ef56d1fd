//! Formats an error together with its causes.

pub use nebula_cert::with_causes;
