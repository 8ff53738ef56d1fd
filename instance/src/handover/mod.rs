//! Handing a running node over to another process: what `nebula` (`host/upgrade/`) and one pod's instance
//! (`pod/successor.rs`) have in common.
//!
//! [`old`] offers and stops, [`new`] prepares and takes over, and a [`channel`] joins them. Until the old process
//! commits, it goes on whatever the new one does. Who serves when is decided by [`nebula_core::handover::commit`].

pub(crate) mod channel;
pub(crate) mod new;
pub(crate) mod old;
