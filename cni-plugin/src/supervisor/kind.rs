//! The kinds of supervisors that keep instances alive.

use serde::{Deserialize, Serialize};

/// The kind of a supervisor, as recorded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// [`super::Direct`].
    #[default]
    Direct,
    /// [`super::Systemd`].
    Systemd,
}
