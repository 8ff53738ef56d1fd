//! Handing a running node over from one process to another: upgrades and restarts without a gap.
//!
//! - `state`: what a node hands over. [`Node::offer`](crate::Node::offer) and
//!   [`Node::hand_over`](crate::Node::hand_over) make it, [`Node::take_over`](crate::Node::take_over) starts with it.
//! - `encoding`: its bytes, which releases before and after this one read, too.
//! - [`commit`]: who serves when, whatever gets lost and whoever dies.
//!
//! The new process never gets a key to seal with, nor a counter: it performs a new handshake with every peer. What it
//! gets besides the peers are the keys to open what they still send in the sessions of the old process.

pub mod commit;
mod encoding;
mod state;

pub use encoding::{DecodeError, MAX_DOCUMENT};
pub use state::State;
pub(crate) use state::{Flow, Hop, MeasuredPath, Peer, Session};
