//! Which supervisor keeps an instance alive.

use serde::{Deserialize, Serialize};

/// The supervisors there are, as a record names them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// [`super::Direct`].
    #[default]
    Direct,
    /// [`super::Systemd`].
    Systemd,
}
