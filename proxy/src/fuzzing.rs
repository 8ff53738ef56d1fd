//! Entry points for fuzzing what clients can reach, without sockets.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use nebula_cert::listener::Source;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::credentials::Credentials;
use crate::head::Head;
use crate::socks::message::{Command, Request, parse_datagram};
use crate::socks::owner::{CHECK_INTERVAL, Judgement, Owner};
use crate::socks::read_request;

/// Who opened the association.
const CLIENT: Source = Source::User(1000);
/// Most that a client is told before its request is known.
const MAX_ANSWERS: usize = 4;

/// A client of SOCKS up to its UDP association, and what anybody sends to that.
///
/// The first byte: whether there are passwords, whether the kernel tells users, how the bytes are cut. Then what the
/// client sends on its connection; behind it, for each datagram, whose it is and from which port, how much later it
/// comes, and its length in two bytes.
pub fn association(data: &[u8]) {
    let Some((settings, data)) = data.split_first() else { return };
    let credentials = (settings & 1 != 0).then(|| Credentials::parse(b"ann:one").ok()).flatten();
    let client = if settings & 2 != 0 { Source::of_address(Ipv4Addr::LOCALHOST.into()) } else { CLIENT };
    let mut stream = Script { rest: data, step: 1 + usize::from(settings >> 4), answered: 0 };
    let Some((request, early)) = request(credentials.as_ref(), &mut stream) else { return };
    let (Command::Associate, Some(target)) = (request.command, request.target) else { return };
    let rest = [&early[..], stream.rest].concat();
    let owner = Owner::new(Ipv4Addr::LOCALHOST.into(), client, target.port, credentials.is_some());
    datagrams(owner, (client, target.port, credentials.is_some()), &rest);
}

/// The request of a client that waits for nothing but bytes.
fn request(credentials: Option<&Credentials>, stream: &mut Script<'_>) -> Option<(Request, Vec<u8>)> {
    let from = SocketAddr::from((Ipv4Addr::LOCALHOST, 9));
    let read = async {
        let mut head = Head::default();
        let request = read_request(credentials, Duration::ZERO, stream, from, &mut head).await;
        Some((request.ok()??, head.into_rest()))
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().ok()?;
    let _inside = runtime.enter();
    match pin!(read).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(request) => request,
        // Only after a wrong password.
        Poll::Pending => None,
    }
}

/// Datagrams of anybody: none that is not the client's gets through.
fn datagrams(mut owner: Owner, (client, named, has_credentials): (Source, u16, bool), mut rest: &[u8]) {
    #[allow(clippy::disallowed_methods, reason = "where virtual time begins")]
    let mut now = Instant::now();
    let mut heard: Option<(SocketAddr, Instant)> = None;
    while let [who, port, later, high, low, tail @ ..] = rest {
        let len = usize::from(u16::from_be_bytes([*high, *low])).min(tail.len());
        let (datagram, tail) = tail.split_at(len);
        rest = tail;
        now += Duration::from_millis(u64::from(*later) * 10);
        let address = IpAddr::from([127, 0, 0, 1 + (who >> 6 & 1)]);
        let port = if *port == 0 { named } else { u16::from(*port) };
        let from = SocketAddr::new(address, port);
        let whose = match who & 3 {
            0 | 1 => client,
            2 => Source::User(1001),
            _ => Source::of_address(address),
        };
        let judgement = owner.judge(now, from, || whose);
        if judgement == Judgement::Stranger {
            continue;
        }
        assert!(address == IpAddr::from(Ipv4Addr::LOCALHOST), "another address");
        assert!(named == 0 || named == port, "another port than the client named");
        let fresh = heard.is_some_and(|(_, checked)| now < checked + CHECK_INTERVAL);
        match heard {
            None => assert_eq!(judgement, Judgement::First),
            Some((source, _)) => assert_eq!((judgement, source), (Judgement::Known, from), "another source"),
        }
        if !fresh {
            assert!(client != CLIENT || whose == CLIENT, "another user");
            assert!(client == CLIENT || named != 0 || !has_credentials, "nobody knows whose it is");
            heard = Some((from, now));
        }
        if let Ok((_, header)) = parse_datagram(datagram) {
            assert!(header <= datagram.len());
        }
    }
}

/// A connection whose peer sends these bytes, a few at a time, and is then gone.
struct Script<'a> {
    rest: &'a [u8],
    step: usize,
    answered: usize,
}

impl AsyncRead for Script<'_> {
    fn poll_read(mut self: Pin<&mut Self>, _: &mut Context<'_>, out: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let count = self.step.min(self.rest.len()).min(out.remaining());
        let (now, later) = self.rest.split_at(count);
        out.put_slice(now);
        self.rest = later;
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Script<'_> {
    fn poll_write(mut self: Pin<&mut Self>, _: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.answered += bytes.len();
        assert!(self.answered <= MAX_ANSWERS, "more than a choice and the answer to a login");
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}
