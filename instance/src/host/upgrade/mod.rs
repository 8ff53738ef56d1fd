//! Replaces the running daemon by another program while connections go on: `nebula ctl upgrade`.
//!
//! The old process checks the new program ([`program`]), starts it with one end of a [`channel`] and offers what it has
//! ([`old`]); the new one reads the configuration, checks that device and sockets fit, and says that it is ready
//! ([`takeover`]). Until the old one commits, it goes on whatever the new one does. Who serves when is decided by
//! [`nebula_core::handover::commit`].

mod channel;
pub(crate) mod old;
pub(crate) mod program;
pub(crate) mod takeover;
