//! The instance's end of the hand-off: collects the tokens of its clients, delivers the certificate, and gives the
//! private key only to a client whose token the CA accepted.

use std::io::{self, BufReader, Write};
use std::net::Shutdown;
use std::os::fd::AsRawFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, sleep};
use std::time::Duration;

use aws_lc_rs::digest::{Digest, SHA256, digest};
use nix::sys::socket::{MsgFlags, getsockopt, recv, sockopt};
use zeroize::Zeroizing;

use crate::handoff::{self, Delivery, Hello, MAX_REASON_BYTES, MAX_TOKEN_BYTES, Receipt, Word};
use crate::linux::errno;

/// Keeps clients waiting until the CA has decided about their tokens.
#[derive(Clone)]
pub struct HandoffServer {
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    clients: Vec<Client>,
    /// Number of the latest client.
    last: u64,
    /// Number of the client whose token [`HandoffServer::token`] returned last.
    asked: u64,
    /// Hash of the token that the CA accepted.
    accepted: Option<Digest>,
    delivery: Option<Delivery>,
    /// A newer one, for when the first one's key has been taken.
    next: Option<Delivery>,
    /// The private key is being sent.
    handing: bool,
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
pub struct Nobody;

impl HandoffServer {
    /// Binds `name` in the network namespace of the calling thread. The serving thread calls `confine` first.
    ///
    /// # Errors
    /// Returns an error if the name is taken or the thread cannot be started.
    pub fn open(name: &str, confine: impl FnOnce() -> io::Result<()> + Send + 'static) -> io::Result<Self> {
        let listener = listen(name)?;
        let server = Self { shared: Arc::default() };
        let shared = Arc::clone(&server.shared);
        let accept = move || match confine() {
            Ok(()) => accept_all(&listener, &shared),
            Err(error) => tracing::error!(%error, "Nobody serves the pod's init container"),
        };
        Builder::new().name("handoff".to_owned()).stack_size(STACK_BYTES).spawn(accept)?;
        Ok(server)
    }

    /// A waiting token, preferably of the user and then of the client whose tokens were used least. `round` lists the
    /// clients whose tokens were used in this round; none is used twice.
    ///
    /// # Errors
    /// Returns an error if nobody is waiting, or all clients have had their turn in this round.
    pub fn token(&self, round: &mut Vec<u64>) -> Result<Zeroizing<String>, Nobody> {
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
    pub fn explain(&self, reason: &str) {
        let end =
            reason.char_indices().map(|(at, c)| at + c.len_utf8()).take_while(|end| *end <= MAX_REASON_BYTES).last();
        let mut state = self.shared.state();
        let asked = state.asked;
        if let Some(client) = state.clients.iter_mut().find(|client| client.number == asked) {
            client.reason = Some(reason[..end.unwrap_or(0)].to_owned());
        }
        self.shared.changed.notify_all();
    }

    /// Delivers the certificate that the CA issued for the token that was used last.
    pub fn deliver(&self, delivery: Delivery) {
        let mut state = self.shared.state();
        let asked = state.clients.iter().find(|client| client.number == state.asked);
        // If that client is gone, nobody gets the key.
        state.accepted = asked.map(|client| digest(&SHA256, client.token.as_bytes()));
        state.delivery = Some(delivery);
        self.shared.changed.notify_all();
    }

    /// Replaces the certificate to deliver. While the first one's key still waits for init, the first certificate stays
    /// with it.
    pub fn renewed(&self, mut delivery: Delivery) {
        let mut state = self.shared.state();
        delivery.key = None;
        if !state.handing && state.delivery.as_ref().is_none_or(|first| first.key.is_none()) {
            state.delivery = Some(delivery);
        } else {
            state.next = Some(delivery);
        }
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn listen(name: &str) -> io::Result<UnixListener> {
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
        state.clients.push(Client { number, user, token: token.clone(), asked: 0, reason: None });
        number
    };
    let served = wait_for_turn(stream, &mut reader, shared, number, &token);
    shared.state().clients.retain(|client| client.number != number);
    served
}

fn wait_for_turn(
    stream: &UnixStream,
    reader: &mut BufReader<&UnixStream>,
    shared: &Shared,
    number: u64,
    token: &str,
) -> io::Result<()> {
    loop {
        let mut state = shared.state();
        let reason = state.clients.iter_mut().find(|client| client.number == number).and_then(|c| c.reason.take());
        let accepted =
            state.accepted.as_ref().is_some_and(|one| one.as_ref() == digest(&SHA256, token.as_bytes()).as_ref());
        if let Some(delivery) = &mut state.delivery {
            if delivery.key.is_some() && !accepted {
                drop(state);
                return tell(stream, &Word::Reason("another token got the pod's certificate and its key".to_owned()));
            }
            // Taken out before it is sent, so that it is never sent twice.
            let key = delivery.key.take();
            let copy =
                Delivery { certificate: delivery.certificate.clone(), ca: delivery.ca.clone(), key: key.clone() };
            let (has_key, key) = (key.is_some(), key.map(Zeroizing::new));
            state.handing |= has_key;
            drop(state);
            let taken = hand_over(stream, reader, copy);
            match &taken {
                Ok(()) => tracing::info!("The init container has the certificate"),
                Err(error) => {
                    tracing::warn!(error = errno::text(error), "The init container did not take the certificate")
                }
            }
            if has_key {
                let mut state = shared.state();
                state.handing = false;
                if taken.is_ok() {
                    state.delivery = state.next.take().or_else(|| state.delivery.take());
                } else if let (Some(delivery), Some(key)) = (&mut state.delivery, key) {
                    delivery.key = Some(String::clone(&key));
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

#[cfg(test)]
mod tests {
    use super::*;

    fn delivery(key: Option<&str>) -> Delivery {
        Delivery { certificate: "c".into(), ca: "a".into(), key: key.map(str::to_owned) }
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

    fn take(client: &mut BufReader<UnixStream>) -> Option<String> {
        let Some(Word::Delivery(delivery)) = hear(client) else { panic!("no delivery") };
        acknowledge(client);
        delivery.key.clone()
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
        let _server = HandoffServer::open(&name, || Ok(())).unwrap();
        assert_eq!(
            UnixListener::bind_addr(&handoff::address(&name).unwrap()).unwrap_err().kind(),
            io::ErrorKind::AddrInUse
        );
    }

    #[test]
    fn the_key_goes_once_and_to_the_token_that_got_the_certificate() {
        let name = name("key");
        let server = HandoffServer::open(&name, || Ok(())).unwrap();
        let mut thief = come(&name, "guessed");
        let mut round = Vec::new();
        assert_eq!(next(&server, &mut round), "guessed");
        server.explain("the CA knows no such token");
        assert!(matches!(hear(&mut thief), Some(Word::Reason(why)) if why.contains("no such token")));
        let mut init = come(&name, "genuine");
        assert_eq!(next(&server, &mut round), "genuine");
        assert!(server.token(&mut round).is_err(), "each once in a round");
        server.deliver(delivery(Some("secret")));
        // The thief gets nothing before init has the key; after that, only what everybody may see.
        match hear(&mut thief) {
            Some(Word::Reason(why)) => assert!(why.contains("another token"), "{why}"),
            Some(Word::Delivery(delivery)) => {
                assert!(delivery.key.is_none());
                acknowledge(&mut thief);
            }
            None => panic!("it hears nothing"),
        }
        assert_eq!(take(&mut init).as_deref(), Some("secret"));
        // From here on there is no secret left to get, whatever the token.
        assert_eq!(take(&mut come(&name, "genuine")), None);
        assert_eq!(take(&mut come(&name, "guessed")), None);
    }

    #[test]
    fn a_key_that_was_not_taken_waits_for_the_same_token() {
        let name = name("again");
        let server = HandoffServer::open(&name, || Ok(())).unwrap();
        let mut init = come(&name, "genuine");
        next(&server, &mut Vec::new());
        server.deliver(delivery(Some("secret")));
        assert!(matches!(hear(&mut init), Some(Word::Delivery(_))));
        drop(init);
        sleep(Duration::from_millis(100));
        server.renewed(delivery(None));
        let mut thief = come(&name, "guessed");
        assert!(matches!(hear(&mut thief), Some(Word::Reason(_))));
        assert_eq!(take(&mut come(&name, "genuine")).as_deref(), Some("secret"));
    }

    #[test]
    fn a_renewal_while_the_key_waits_or_is_sent_is_delivered_after_it() {
        let name = name("renewal");
        let server = HandoffServer::open(&name, || Ok(())).unwrap();
        let mut init = come(&name, "genuine");
        next(&server, &mut Vec::new());
        server.deliver(delivery(Some("secret")));
        let Some(Word::Delivery(first)) = hear(&mut init) else { panic!("no delivery") };
        assert_eq!((first.certificate.as_str(), first.key.as_deref()), ("c", Some("secret")));
        let newer = Some("other".to_owned());
        server.renewed(Delivery { certificate: "newer".into(), ca: "a".into(), key: newer });
        acknowledge(&mut init);
        let mut restarted = come(&name, "genuine");
        let Some(Word::Delivery(second)) = hear(&mut restarted) else { panic!("no delivery") };
        assert_eq!((second.certificate.as_str(), second.key.as_deref()), ("newer", None));
    }

    #[test]
    fn garbage_and_too_many_of_one_user_are_sent_away() {
        let name = name("garbage");
        let server = HandoffServer::open(&name, || Ok(())).unwrap();
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
