//! The control socket, through which programs on this host query the running daemon. Request and answer are one JSON
//! object each, on a line of its own.
//!
//! Clients may be slow or hostile: each gets its own thread, their number is limited, and every connection has
//! deadlines. The daemon's user owns the socket, and no other user may open it (mode 0600).

mod answer;
mod facts;
mod flow;
mod probe;
mod refusal;
mod request;
mod service;
mod socket;
mod sockets;

#[cfg(feature = "ssh")]
pub(crate) use request::Request;
pub(crate) use service::{ControlService, Facts};
pub(crate) use sockets::{ControlSockets, RemovedAtEnd, SocketFiles};
