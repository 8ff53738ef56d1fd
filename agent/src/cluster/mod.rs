//! What the agent does at the API server: follows the pods of its node, reports events, evicts or labels unprotected
//! pods, and removes the taint. All of it is optional: without an API server the pods are protected just the same.

pub mod api;
pub(crate) mod condition;
pub mod evict;
#[cfg(test)]
pub(crate) mod fake_api_server;
pub mod heartbeat;
pub mod notice;
pub mod pods;
#[cfg(test)]
mod published_types;
pub mod queue;
pub mod taint;
pub mod taint_keeper;
pub mod throttle;
pub mod worker;
