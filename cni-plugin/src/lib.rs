//! Chained CNI plugin: one run per verb. The instance uses [`launch::LaunchSpec`] of this crate and nothing else.

pub mod launch;
