//! The control socket: programs of this host ask the running daemon. One JSON object in, one out, each on a line.
//!
//! Whoever asks may be slow, or hostile: every conversation has a thread of its own, of which there are few, and ends in
//! time. The socket belongs to the user of the daemon and nobody else may open it (mode 0600).

mod answer;
mod flow;
mod refusal;
mod request;
mod rule_text;
mod service;
mod socket;

#[cfg(feature = "ssh")]
pub(crate) use request::Request;
pub(crate) use service::{ControlService, Facts};
pub(crate) use socket::{ControlSocket, SocketFile};
