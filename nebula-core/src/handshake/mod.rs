//! Noise handshakes: the state machine of one handshake, and the tables of those in progress.

mod admission;
mod excess;
mod half_open_table;
mod kem;
mod machine;
mod noise;
mod pending;
mod reached;

pub(crate) use admission::Admission;
use excess::Excess;
pub(crate) use half_open_table::{Answered, HalfOpenTable};
pub(crate) use kem::{Agreed, Exchange, Offer, sha256};
pub(crate) use machine::{Error, Initiator, Own, Verifier, respond};
pub(crate) use pending::{Offered, Opened, Pending, PendingHandshakes, Waiting};
pub(crate) use reached::Reached;
