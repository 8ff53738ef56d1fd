//! TCP without IO: one [`Connection`] is one end, fed with segments and the time, and asked for segments to send.
//!
//! | What | After |
//! | --- | --- |
//! | state machine, window, zero-window probes, urgent data ignored | RFC 9293 |
//! | window scaling, timestamps, protection against wrapped sequence numbers | RFC 7323 |
//! | selective acknowledgements, also of peers that forget; reports of duplicates | RFC 2018, RFC 2883 |
//! | loss detection by time, tail loss probes | RFC 8985 |
//! | retransmission timeout, undone if it was spurious | RFC 6298, RFC 3522 |
//! | congestion window, slow start, rate reduction | RFC 9438, RFC 9406, RFC 6937 |
//! | a window spread over the round trip (pacing), where that takes a millisecond or more | as Linux |
//! | challenge acknowledgements | RFC 5961 |
//! | a connection that follows one in TIME-WAIT, on either side | RFC 6191 |
//! | the path's MTU by errors, and by timeouts where long packets vanish | RFC 1191, RFC 8201, RFC 4821 section 7.7 |
//!
//! Where the peer has no selective acknowledgements, only timeouts detect losses. Explicit congestion notification
//! is left out: a tunnel does not copy the underlay's marks into its packets, so none of them would arrive.

mod buffer;
mod chunks;
mod connection;
mod cubic;
mod options;
mod pacer;
mod path_mss;
mod pieces;
mod receive;
mod rtt;
mod scoreboard;
pub mod segment;
mod send;
#[cfg(test)]
mod tests;

pub use chunks::{Chunks, Data};
pub use connection::{Begin, Connection, Reaction, State};
pub use options::{Keepalive, TcpOptions};
pub(crate) use pieces::PIECE_COST;

/// Why a connection ended other than by both sides closing it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The peer answered the SYN with a reset.
    #[error("the peer refused the connection")]
    Refused,
    /// The peer reset the connection.
    #[error("the peer reset the connection")]
    Reset,
    /// The peer did not answer for too long.
    #[error("the peer does not answer")]
    TimedOut,
    /// There is no way to the peer: no route, no tunnel, or the firewall denies it.
    #[error("the peer cannot be reached")]
    Unreachable,
    /// The address is the node's own, and a node has no loopback.
    #[error("the address is this node's own")]
    OwnAddress,
    /// The node has no address of that family.
    #[error("the node has no address of that family")]
    NoAddress,
    /// Each port has a connection to this destination.
    #[error("no port is free for another connection to this address and port")]
    NoPort,
    /// There are as many connections as the node may have ([`Limits::connections`](crate::stack::Limits::connections)).
    #[error("the node has too many connections")]
    TooMany,
    /// The node was closed, or what ran it has ended.
    #[error("the node has ended")]
    NodeEnded,
    /// The connection was closed on this side.
    #[error("the connection is closed")]
    Closed,
}

impl From<Error> for std::io::Error {
    fn from(error: Error) -> Self {
        use std::io::ErrorKind;
        let kind = match error {
            Error::Refused => ErrorKind::ConnectionRefused,
            Error::Reset => ErrorKind::ConnectionReset,
            Error::TimedOut => ErrorKind::TimedOut,
            Error::Unreachable => ErrorKind::HostUnreachable,
            Error::OwnAddress | Error::NoAddress | Error::NoPort => ErrorKind::AddrNotAvailable,
            Error::TooMany => ErrorKind::QuotaExceeded,
            Error::NodeEnded | Error::Closed => ErrorKind::NotConnected,
        };
        Self::new(kind, error)
    }
}
