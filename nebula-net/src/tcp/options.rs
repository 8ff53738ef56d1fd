//! Settings of connections.

use std::time::Duration;

/// Settings of a connection.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct TcpOptions {
    /// Receive window at the beginning, in bytes. It grows with what the program reads in a round-trip time. Default:
    /// 64 KiB.
    pub receive_window: usize,
    /// Largest receive window in bytes, and so the most memory for received data. Default: 4 MiB.
    pub max_receive_window: usize,
    /// Data to send that is taken at the beginning, in bytes. It grows with the congestion window. Default: 64 KiB.
    pub send_buffer: usize,
    /// Most data to send that is taken before the peer acknowledges it, in bytes. Default: 4 MiB.
    pub max_send_buffer: usize,
    /// Send small segments at once instead of waiting for the acknowledgement of others. Default: true.
    pub no_delay: bool,
    /// When a silent peer is probed; `None`: never. Default: `None`.
    pub keepalive: Option<Keepalive>,
    /// How long data, or the end of the stream, may wait for the peer's acknowledgement before the connection ends
    /// (TCP_USER_TIMEOUT, RFC 5482); `None`: until it was sent 16 times, which takes a quarter of an hour. Default:
    /// `None`.
    pub user_timeout: Option<Duration>,
    /// Times that a SYN is sent again. Default: 6, which takes two minutes.
    pub syn_retries: u32,
    /// How long the ports of a closed connection rest. Default: 60 s.
    pub time_wait: Duration,
}

/// When a silent peer is probed, and when it is given up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Keepalive {
    /// Time without a segment from the peer until the first probe.
    pub idle: Duration,
    /// Time between two probes without an answer.
    pub interval: Duration,
    /// Probes without an answer after which the connection ends.
    pub probes: u32,
}

impl Keepalive {
    /// Probes after this time of silence, up to nine times, each 15 seconds.
    #[must_use]
    pub fn after(idle: Duration) -> Self {
        Self { idle, interval: Duration::from_secs(15), probes: 9 }
    }
}

impl Default for TcpOptions {
    fn default() -> Self {
        Self {
            receive_window: 64 << 10,
            max_receive_window: 4 << 20,
            send_buffer: 64 << 10,
            max_send_buffer: 4 << 20,
            no_delay: true,
            keepalive: None,
            user_timeout: None,
            syn_retries: 6,
            time_wait: Duration::from_secs(60),
        }
    }
}

impl TcpOptions {
    /// The smallest shift with which the window field can tell the largest window.
    pub(crate) fn shift(&self) -> u8 {
        let largest = self.max_receive_window.max(self.receive_window);
        (0..14).find(|shift| largest >> shift <= usize::from(u16::MAX)).unwrap_or(14)
    }
}
