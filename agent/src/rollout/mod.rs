//! Gives running instances the program that the agent has installed, one canary first, and gives them the one before
//! back where that fails.
//!
//! [`plan`] decides which instances are next and [`gate`] whether one keeps its program; both are pure. [`upgrade`]
//! has the plugin replace one instance and watches it. [`keeper`] connects them with the reconciliation, and [`files`]
//! and [`state`] are what outlives the agent. [`command`] is for people.

pub mod command;
pub mod files;
pub mod gate;
pub mod keeper;
pub mod plan;
pub mod program;
pub mod state;
pub mod upgrade;
