//! What makes one path better than another.

use std::time::Duration;

use super::PathReason;
use crate::node::samples::worth_a_change;

/// What counts about a path, the most important first; the less, the better.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Merit {
    pub(super) is_other_range: bool,
    pub(super) is_lossy: bool,
    pub(super) round_trip: Duration,
}

impl Merit {
    /// Why the other is better by so much that it is worth a change.
    pub(super) fn beaten_by(self, other: Self) -> Option<PathReason> {
        if self.is_other_range != other.is_other_range {
            return self.is_other_range.then_some(PathReason::Preferred);
        }
        if self.is_lossy != other.is_lossy {
            return self.is_lossy.then_some(PathReason::LessLoss);
        }
        (self.round_trip > worth_a_change(other.round_trip)).then_some(PathReason::Faster)
    }

    /// Whether it is no reason to change that the other one is better.
    pub(super) fn is_as_good(self, other: Self) -> bool {
        self.beaten_by(other).is_none()
    }
}
