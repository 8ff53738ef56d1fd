//! Hands the node over to another process, and takes over from an earlier one.
//!
//! `export` makes the state, `import` starts with one. `inherited` has the sessions of the earlier process while peers
//! still send in them, and `reconnects` the handshakes that replace these.

mod export;
mod import;
mod inherited;
mod reconnects;

pub(super) use self::inherited::Inheritance;
