//! The instance's end of the hand-off: collects the tokens of its clients and delivers the certificate.

use std::io::{self, BufReader, Write};
use std::net::Shutdown;
use std::os::fd::AsRawFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, sleep};
use std::time::Duration;

use nebula_linux::errno;
use nix::sys::socket::{Backlog, MsgFlags, getsockopt, recv, sockopt};
use zeroize::Zeroizing;

use crate::handoff::{self, Delivery, Hello, MAX_REASON_BYTES, MAX_TOKEN_BYTES, Receipt, Word};

/// Keeps clients waiting until the CA has decided about their tokens.
#[derive(Clone)]
pub(crate) struct HandoffServer {
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    stage: Stage,
    clients: Vec<Client>,
    /// Number of the latest client.
    last: u64,
    /// Number of the client whose token [`HandoffServer::token`] returned last.
    asked: u64,
    delivery: Option<Delivery>,
}

/// How far the serving thread is.
#[derive(Default, PartialEq, Eq)]
enum Stage {
    /// Another process may serve the listener.
    #[default]
    Waiting,
    Begun,
    Listening,
}

struct Client {
    number: u64,
    user: u32,
    token: Zeroizing<String>,
    /// How often its token was used for a request to the CA.
    asked: u32,
    /// The reason to send to the client.
    reason: Option<String>,
}

/// No client is waiting.
#[derive(Debug, thiserror::Error)]
#[error("the pod's init container has not shown its token")]
pub(crate) struct Nobody;

impl HandoffServer {
    /// Prepares to serve the clients of a listener, see [`listen`]. The serving thread calls `confine` once it listens.
    ///
    /// # Errors
    /// Returns an error if the thread cannot be started.
    pub(crate) fn prepare(
        listener: UnixListener,
        confine: impl FnOnce() -> io::Result<()> + Send + 'static,
    ) -> io::Result<Self> {
        let server = Self { shared: Arc::default() };
        let shared = Arc::clone(&server.shared);
        let serve = move || match take_over(&listener, &shared).and_then(|()| confine()) {
            Ok(()) => accept_all(&listener, &shared),
            Err(error) => tracing::error!(%error, "Nobody serves the pod's init container"),
        };
        Builder::new().name("handoff".to_owned()).stack_size(STACK_BYTES).spawn(serve)?;
        Ok(server)
    }

    /// Begins to serve, in place of any process that has served the same listener.
    pub(crate) fn begin(&self) {
        let mut state = self.shared.state();
        state.stage = Stage::Begun;
        self.shared.changed.notify_all();
        // Where the thread has failed nobody listens, which it has said.
        let is_begun = |state: &mut State| state.stage == Stage::Begun;
        drop(self.shared.changed.wait_timeout_while(state, LISTENS_WITHIN, is_begun));
    }

    /// A waiting token, preferably of the user and then of the client whose tokens were used least. `round` lists the
    /// clients whose tokens were used in this round; none is used twice.
    ///
    /// # Errors
    /// Returns an error if nobody is waiting, or all clients have had their turn in this round.
    pub(crate) fn token(&self, round: &mut Vec<u64>) -> Result<Zeroizing<String>, Nobody> {
        let mut state = self.shared.state();
        let of_user = |user: u32| state.clients.iter().filter(|c| c.user == user).map(|c| c.asked).sum::<u32>();
        let fresh = state.clients.iter().filter(|client| !round.contains(&client.number));
        let next = fresh.min_by_key(|client| (of_user(client.user), client.asked, client.number)).map(|c| c.number);
        let number = next.ok_or(Nobody)?;
        let client = state.clients.iter_mut().find(|client| client.number == number).ok_or(Nobody)?;
        client.asked = client.asked.saturating_add(1);
        let token = client.token.clone();
        round.push(number);
        state.asked = number;
        Ok(token)
    }

    /// Tells the client whose token was used last why there is no certificate yet.
    pub(crate) fn explain(&self, reason: &str) {
        let end =
            reason.char_indices().map(|(at, c)| at + c.len_utf8()).take_while(|end| *end <= MAX_REASON_BYTES).last();
        let mut state = self.shared.state();
        let asked = state.asked;
        if let Some(client) = state.clients.iter_mut().find(|client| client.number == asked) {
            client.reason = Some(reason[..end.unwrap_or(0)].to_owned());
        }
        self.shared.changed.notify_all();
    }

    /// Delivers the pod's certificate, in place of any earlier one, to those who wait and those who come.
    pub(crate) fn deliver(&self, delivery: Delivery) {
        self.shared.state().delivery = Some(delivery);
        self.shared.changed.notify_all();
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Binds `name` in the network namespace of the calling thread.
///
/// # Errors
/// Returns an error if the name is taken.
pub(crate) fn listen(name: &str) -> io::Result<UnixListener> {
    let address = handoff::address(name)?;
    let mut tries = MAX_BIND_TRIES;
    loop {
        match UnixListener::bind_addr(&address) {
            // The threads of an instance that was killed hold the name for a moment.
            Err(error) if error.kind() == io::ErrorKind::AddrInUse && tries > 0 => tries -= 1,
            bound => return bound,
        }
        sleep(BIND_INTERVAL);
    }
}

/// Waits until the server begins, and makes this process the one that listens: the kernel tells clients which process
/// was the last to do so, and the plugin compares that with the process of the instance.
fn take_over(listener: &UnixListener, shared: &Shared) -> io::Result<()> {
    let is_waiting = |state: &mut State| state.stage == Stage::Waiting;
    drop(shared.changed.wait_while(shared.state(), is_waiting));
    let listens = Backlog::new(MAX_WAITING).and_then(|backlog| nix::sys::socket::listen(listener, backlog));
    shared.state().stage = Stage::Listening;
    shared.changed.notify_all();
    Ok(listens?)
}

fn accept_all(listener: &UnixListener, shared: &Arc<Shared>) {
    let guests = Arc::new(());
    loop {
        let Ok((stream, _)) = listener.accept() else {
            sleep(BIND_INTERVAL);
            continue;
        };
        // Every program of the pod may connect; a client beyond the limit is closed at once and may retry.
        if Arc::strong_count(&guests) > MAX_CONNECTIONS {
            continue;
        }
        let (shared, guest) = (Arc::clone(shared), Arc::clone(&guests));
        let serve = move || {
            // It does not matter how a client ends.
            let _ = serve(&stream, &shared);
            let _ = stream.shutdown(Shutdown::Both);
            drop(guest);
        };
        drop(Builder::new().name("init-client".to_owned()).stack_size(STACK_BYTES).spawn(serve));
    }
}

fn serve(stream: &UnixStream, shared: &Shared) -> io::Result<()> {
    stream.set_read_timeout(Some(HELLO_TIMEOUT))?;
    stream.set_write_timeout(Some(HELLO_TIMEOUT))?;
    let user = getsockopt(stream, sockopt::PeerCredentials)?.uid();
    let mut reader = BufReader::new(stream);
    let Some(hello) = handoff::read::<Hello>(&mut reader, MAX_TOKEN_BYTES + 64)? else { return Ok(()) };
    if !handoff::is_token(&hello.token) {
        return tell(stream, &Word::Reason("this is no token".to_owned()));
    }
    let token = Zeroizing::new(hello.token.clone());
    drop(hello);
    let number = {
        let mut state = shared.state();
        if state.clients.iter().filter(|client| client.user == user).count() >= MAX_CONNECTIONS_PER_USER {
            drop(state);
            return tell(stream, &Word::Reason("others of this user wait already".to_owned()));
        }
        state.last += 1;
        let number = state.last;
        state.clients.push(Client { number, user, token, asked: 0, reason: None });
        number
    };
    let served = wait_for_turn(stream, &mut reader, shared, number);
    shared.state().clients.retain(|client| client.number != number);
    served
}

fn wait_for_turn(
    stream: &UnixStream,
    reader: &mut BufReader<&UnixStream>,
    shared: &Shared,
    number: u64,
) -> io::Result<()> {
    loop {
        let mut state = shared.state();
        let reason = state.clients.iter_mut().find(|client| client.number == number).and_then(|c| c.reason.take());
        if let Some(delivery) = state.delivery.clone() {
            drop(state);
            let taken = hand_over(stream, reader, delivery);
            match &taken {
                Ok(()) => tracing::info!("The init container has the certificate"),
                Err(error) => {
                    tracing::warn!(error = errno::text(error), "The init container did not take the certificate")
                }
            }
            return taken;
        }
        if let Some(reason) = reason {
            drop(state);
            tell(stream, &Word::Reason(reason))?;
            continue;
        }
        drop(shared.changed.wait_timeout(state, CHECK_INTERVAL).unwrap_or_else(PoisonError::into_inner));
        if has_gone(stream) {
            return Ok(());
        }
    }
}

fn hand_over(stream: &UnixStream, reader: &mut BufReader<&UnixStream>, delivery: Delivery) -> io::Result<()> {
    tell(stream, &Word::Delivery(delivery))?;
    match handoff::read::<Receipt>(reader, MAX_REASON_BYTES * 2)? {
        Some(Receipt { refused: None }) => Ok(()),
        Some(Receipt { refused: Some(why) }) => Err(io::Error::other(why)),
        None => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

fn tell(mut stream: &UnixStream, word: &Word) -> io::Result<()> {
    stream.write_all(&handoff::line(word)?)
}

fn has_gone(stream: &UnixStream) -> bool {
    let looked = recv(stream.as_raw_fd(), &mut [0], MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT);
    // Any bytes count as well: a client has nothing to say before the certificate arrives.
    !matches!(looked, Err(nix::errno::Errno::EAGAIN | nix::errno::Errno::EINTR))
}

const MAX_CONNECTIONS: usize = 8;
const MAX_CONNECTIONS_PER_USER: usize = 2;
const HELLO_TIMEOUT: Duration = Duration::from_secs(3);
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
const MAX_BIND_TRIES: u32 = 20;
const BIND_INTERVAL: Duration = Duration::from_millis(100);
const STACK_BYTES: usize = 128 << 10;
const LISTENS_WITHIN: Duration = Duration::from_secs(1);
// As std does.
const MAX_WAITING: i32 = 128;

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A server at this name that has begun.
    pub(crate) fn serve(name: &str) -> HandoffServer {
        let server = HandoffServer::prepare(listen(name).unwrap(), || Ok(())).unwrap();
        server.begin();
        server
    }

    fn delivery(certificate: &str) -> Delivery {
        Delivery { certificate: certificate.to_owned(), ca: "a".to_owned() }
    }

    fn come(name: &str, token: &str) -> BufReader<UnixStream> {
        let mut stream = UnixStream::connect_addr(&handoff::address(name).unwrap()).unwrap();
        stream.write_all(&handoff::line(&Hello { token: token.into() }).unwrap()).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        BufReader::new(stream)
    }

    fn hear(client: &mut BufReader<UnixStream>) -> Option<Word> {
        handoff::read(client, handoff::MAX_MESSAGE_BYTES).unwrap()
    }

    fn take(client: &mut BufReader<UnixStream>) -> String {
        let Some(Word::Delivery(delivery)) = hear(client) else { panic!("no delivery") };
        acknowledge(client);
        delivery.certificate
    }

    /// Returns when the server has ended the connection, so that it no longer counts among those of its user.
    fn acknowledge(client: &mut BufReader<UnixStream>) {
        client.get_mut().write_all(&handoff::line(&Receipt { refused: None }).unwrap()).unwrap();
        assert!(hear(client).is_none());
    }

    fn next(server: &HandoffServer, round: &mut Vec<u64>) -> String {
        for _ in 0..1000 {
            if let Ok(token) = server.token(round) {
                return token.to_string();
            }
            sleep(Duration::from_millis(10));
        }
        panic!("nobody comes");
    }

    fn name(test: &str) -> String {
        format!("nebula-test/{}/{test}", std::process::id())
    }

    #[test]
    fn the_name_is_taken_once_and_the_first_holds_it() {
        let name = name("once");
        let _server = serve(&name);
        assert_eq!(
            UnixListener::bind_addr(&handoff::address(&name).unwrap()).unwrap_err().kind(),
            io::ErrorKind::AddrInUse
        );
    }

    #[test]
    fn a_server_that_was_prepared_takes_no_client_before_it_begins() {
        let name = name("two");
        let listener = listen(&name).unwrap();
        let next_server = HandoffServer::prepare(listener.try_clone().unwrap(), || Ok(())).unwrap();
        let mut client = come(&name, "early");
        sleep(Duration::from_millis(100));
        assert!(next_server.token(&mut Vec::new()).is_err());
        next_server.begin();
        assert!(next_server.shared.state().stage == Stage::Listening);
        assert_eq!(next(&next_server, &mut Vec::new()), "early");
        next_server.deliver(delivery("c"));
        assert_eq!(take(&mut client), "c");
    }

    #[test]
    fn a_reason_goes_to_the_client_it_is_about_and_the_certificate_to_all() {
        let name = name("all");
        let server = serve(&name);
        let mut stranger = come(&name, "guessed");
        let mut round = Vec::new();
        assert_eq!(next(&server, &mut round), "guessed");
        server.explain("the CA knows no such token");
        assert!(matches!(hear(&mut stranger), Some(Word::Reason(why)) if why.contains("no such token")));
        let mut init = come(&name, "genuine");
        assert_eq!(next(&server, &mut round), "genuine");
        assert!(server.token(&mut round).is_err(), "each once in a round");
        server.deliver(delivery("c"));
        assert_eq!([take(&mut init), take(&mut stranger)], ["c", "c"]);
    }

    #[test]
    fn a_certificate_that_was_not_taken_waits_and_a_renewed_one_takes_its_place() {
        let name = name("again");
        let server = serve(&name);
        let mut init = come(&name, "genuine");
        next(&server, &mut Vec::new());
        server.deliver(delivery("first"));
        assert!(matches!(hear(&mut init), Some(Word::Delivery(_))));
        drop(init);
        assert_eq!(take(&mut come(&name, "genuine")), "first");
        server.deliver(delivery("newer"));
        assert_eq!(take(&mut come(&name, "genuine")), "newer");
    }

    #[test]
    fn garbage_and_too_many_of_one_user_are_sent_away() {
        let name = name("garbage");
        let server = serve(&name);
        let mut odd = UnixStream::connect_addr(&handoff::address(&name).unwrap()).unwrap();
        odd.write_all(b"GET /token HTTP/1.1\r\n\r\n").unwrap();
        assert!(hear(&mut BufReader::new(odd)).is_none());
        let mut waiting = [come(&name, "one"), come(&name, "two")];
        let mut round = Vec::new();
        let (first, second) = (next(&server, &mut round), next(&server, &mut round));
        assert_ne!(first, second);
        assert!(matches!(hear(&mut come(&name, "three")), Some(Word::Reason(why)) if why.contains("wait already")));
        waiting.iter_mut().for_each(|client| client.get_mut().shutdown(Shutdown::Both).unwrap());
    }
}
