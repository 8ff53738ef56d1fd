//! Hands the node over to another process, and takes over from an earlier one.
//!
//! `export` makes the state, `import` starts with one. `inherited` has the sessions of the earlier process while peers
//! still send in them, and `calls` the handshakes that replace these.

mod calls;
mod export;
mod import;
mod inherited;

pub(super) use self::inherited::Inheritance;
