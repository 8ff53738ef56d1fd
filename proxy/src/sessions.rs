//! UDP has no connections: a session is what one source sends, and the answers to it.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::time::Duration;

use nebula_instance::log;
use tokio::sync::mpsc::{self, Receiver, Sender};
use tokio::task::JoinSet;
use tracing::Level;

/// A session without datagrams for so long ends. Longer than the two minutes for which RFC 4787 wants NATs to keep a mapping.
pub(crate) const IDLE: Duration = Duration::from_secs(180);
/// Longest datagram that is carried, in bytes. None is longer than the MTU of the overlay.
pub(crate) const MAX_DATAGRAM: usize = 9000;
/// Datagrams of a session that wait; more are dropped.
const WAITING: usize = 64;

/// The sessions of one UDP port, by source.
pub(crate) struct Sessions {
    name: String,
    limit: usize,
    open: HashMap<SocketAddr, Sender<Vec<u8>>>,
    tasks: JoinSet<()>,
}

impl Sessions {
    /// At most `limit` at a time. `name` is that of the port, for log lines.
    pub(crate) fn new(name: String, limit: usize) -> Self {
        Self { name, limit, open: HashMap::new(), tasks: JoinSet::new() }
    }

    /// Hands a datagram to the session of its source, which `begin` makes if there is none. All end when this is dropped.
    pub(crate) fn deliver<F: Future<Output = ()> + Send + 'static>(
        &mut self,
        from: SocketAddr,
        payload: Vec<u8>,
        begin: impl FnOnce(Receiver<Vec<u8>>) -> F,
    ) {
        let known = self.open.get(&from).filter(|session| !session.is_closed());
        if let Some(session) = known {
            // A full queue drops it, as a full socket would.
            let _ = session.try_send(payload);
            return;
        }
        while self.tasks.try_join_next().is_some() {}
        if self.open.len() >= self.limit {
            self.open.retain(|_, session| !session.is_closed());
        }
        if self.open.len() >= self.limit && !self.open.contains_key(&from) {
            const FULL: &str =
                "Too many sources of UDP at a time, datagrams of another are dropped; -udp-sessions allows more";
            if log::admits(Level::WARN, FULL, &self.name) {
                tracing::warn!(listener = self.name, %from, "{FULL}");
            }
            return;
        }
        let (sender, receiver) = mpsc::channel(WAITING);
        let _ = sender.try_send(payload);
        self.open.insert(from, sender);
        self.tasks.spawn(begin(receiver));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_source_has_one_session_and_their_number_is_limited() {
        let (done, mut seen) = mpsc::channel(10);
        let mut sessions = Sessions::new("test".to_owned(), 2);
        let source = |port| SocketAddr::from(([127, 0, 0, 1], port));
        let mut send = |port, payload: &[u8]| {
            let done = done.clone();
            sessions.deliver(source(port), payload.to_vec(), |mut receiver| async move {
                while let Some(payload) = receiver.recv().await {
                    done.send((port, payload.clone())).await.unwrap();
                    if payload == b"end" {
                        return;
                    }
                }
            });
        };
        for (port, payload) in [(1, &b"a"[..]), (1, b"b"), (2, b"c"), (3, b"dropped")] {
            send(port, payload);
        }
        for expected in [(1, &b"a"[..]), (1, b"b"), (2, b"c")] {
            assert_eq!(seen.recv().await.unwrap(), (expected.0, expected.1.to_vec()));
        }
        send(1, b"end");
        assert_eq!(seen.recv().await.unwrap().0, 1);
        tokio::task::yield_now().await;
        send(3, b"now there is room");
        assert_eq!(seen.recv().await.unwrap().0, 3);
    }
}
