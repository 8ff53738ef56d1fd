//! UDP has no connections: a session is what one source sends, and the answers to it.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::time::Duration;

use nebula_cert::listener::Source;
use tokio::sync::mpsc::{self, Receiver, Sender};

use crate::listener::Tasks;

/// A session without datagrams for so long ends. Longer than the two minutes for which RFC 4787 wants NATs to keep a
/// mapping.
pub(crate) const IDLE: Duration = Duration::from_secs(180);
/// Longest datagram that is carried, in bytes. None is longer than the MTU of the overlay.
pub(crate) const MAX_DATAGRAM: usize = 9000;
/// Datagrams of a session that wait; more are dropped.
const WAITING: usize = 64;

/// The sessions of one UDP port, by source.
pub(crate) struct Sessions {
    limit: usize,
    open: HashMap<SocketAddr, Sender<Vec<u8>>>,
    tasks: Tasks,
}

impl Sessions {
    /// At most `limit` at a time. `name` is that of the port, for log lines.
    pub(crate) fn new(name: String, limit: usize) -> Self {
        const FULL: &str = "Too many sources of UDP at a time, one ends; -udp-sessions allows more";
        Self { limit, open: HashMap::new(), tasks: Tasks::new(name, limit, FULL) }
    }

    /// Hands a datagram to the session of where it comes from, which `begin` makes if there is none. `source` says
    /// whose it is. All end when this is dropped.
    pub(crate) async fn deliver<F: Future<Output = ()> + Send + 'static>(
        &mut self,
        from: SocketAddr,
        source: impl FnOnce() -> Source,
        payload: Vec<u8>,
        begin: impl FnOnce(Receiver<Vec<u8>>) -> F,
    ) {
        let known = self.open.get(&from).filter(|session| !session.is_closed());
        if let Some(session) = known {
            // A full queue drops it, as a full socket would.
            let _ = session.try_send(payload);
            return;
        }
        let (sender, receiver) = mpsc::channel(WAITING);
        let _ = sender.try_send(payload);
        if !self.tasks.begin((source(), from), begin(receiver)).await {
            return;
        }
        self.open.insert(from, sender);
        // The limit, and those that are about to end.
        if self.open.len() > 2 * self.limit {
            self.open.retain(|_, session| !session.is_closed());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sessions that tell which payload came in which of them, and one that ends them.
    async fn send(
        (sessions, done): (&mut Sessions, &Sender<(u16, Vec<u8>)>),
        (user, port): (u32, u16),
        payload: &[u8],
    ) {
        let done = done.clone();
        let begin = |mut receiver: Receiver<Vec<u8>>| async move {
            while let Some(payload) = receiver.recv().await {
                done.send((port, payload.clone())).await.unwrap();
                if payload == b"end" {
                    return;
                }
            }
        };
        let from = SocketAddr::from(([127, 0, 0, 1], port));
        sessions.deliver(from, || Source::User(user), payload.to_vec(), begin).await;
    }

    const ALICE: u32 = 70_001;
    const BOB: u32 = 70_002;

    #[tokio::test]
    async fn a_source_has_one_session_and_who_has_most_makes_room_for_another() {
        let (done, mut seen) = mpsc::channel(10);
        let mut sessions = Sessions::new("test".to_owned(), 2);
        for (who, payload) in [((ALICE, 1), &b"a"[..]), ((ALICE, 1), b"b"), ((ALICE, 2), b"c"), ((BOB, 3), b"d")] {
            send((&mut sessions, &done), who, payload).await;
        }
        let mut got = Vec::new();
        for _ in 0..4 {
            got.push(seen.recv().await.unwrap());
        }
        got.sort();
        assert_eq!(got, [(1, b"a".to_vec()), (1, b"b".to_vec()), (2, b"c".to_vec()), (3, b"d".to_vec())]);
        let is_open = |sessions: &Sessions, port| {
            let from = SocketAddr::from(([127, 0, 0, 1], port));
            sessions.open.get(&from).is_some_and(|session| !session.is_closed())
        };
        assert_eq!([1, 2, 3].map(|port| is_open(&sessions, port)), [false, true, true], "Alice's oldest made room");
        send((&mut sessions, &done), (BOB, 4), b"e").await;
        assert_eq!(seen.recv().await.unwrap(), (4, b"e".to_vec()));
        assert_eq!([2, 3, 4].map(|port| is_open(&sessions, port)), [true, false, true], "Bob makes room for himself");
    }

    #[tokio::test]
    async fn any_number_of_sources_takes_bounded_memory() {
        let (done, _seen) = mpsc::channel(10_000);
        let mut sessions = Sessions::new("test".to_owned(), 4);
        for port in 1..1000 {
            send((&mut sessions, &done), (ALICE, port), b"x").await;
        }
        assert!(sessions.open.len() <= 9, "{}", sessions.open.len());
    }
}
