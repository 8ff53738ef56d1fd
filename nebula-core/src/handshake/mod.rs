//! Handshakes: one as a pure machine, and those under way.

mod admission;
mod machine;
mod noise;
mod pending;

pub(crate) use admission::Admission;
pub(crate) use machine::{Completed, Error, Initiator, Own, respond};
pub(crate) use pending::{Opened, Pending, PendingHandshakes, Waiting};
