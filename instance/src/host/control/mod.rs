//! The control socket: programs of this host ask the running daemon. One JSON object in, one out, each on a line.
//!
//! Clients may be slow or hostile: each has a thread of its own, their number is limited, and every connection has
//! deadlines. The socket belongs to the user of the daemon, and no other user may open it (mode 0600).

mod answer;
mod facts;
mod flow;
mod probe;
mod refusal;
mod request;
mod service;
mod socket;

#[cfg(feature = "ssh")]
pub(crate) use request::Request;
pub(crate) use service::{ControlService, Facts};
pub(crate) use socket::{ControlSocket, SocketFile};
