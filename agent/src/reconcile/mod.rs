//! Keeps every enrolled pod of the node protected: compares what the runtime runs with what the plugin set up, and
//! repairs the differences.
//!
//! [`observe`] looks, [`plan`] decides (pure), [`repair`] acts, [`keeper`] repeats that. The plugin's own program makes
//! each repair, so that what repairs a pod is what set it up.

pub mod backoff;
pub mod command;
pub mod entry;
pub mod keeper;
pub mod observe;
pub mod old_settings;
pub mod plan;
pub mod prev_result;
pub mod program;
pub mod repair;
pub mod seen;
pub mod start;
