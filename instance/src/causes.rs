//! Formats an error together with its causes.

pub(crate) use nebula_cert::with_causes;
