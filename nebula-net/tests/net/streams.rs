//! What programs expect of streams and listeners, as tokio and the standard library have them.

use std::io::{ErrorKind, Read, Write};
use std::net::SocketAddr;
use std::time::Duration;

use nebula_net::{BlockingNet, Net, TcpStream};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::Instant;

use crate::common::overlay;
use crate::{builders, nets, pattern, within};

/// Both ends of a connection.
async fn ends(near: &Net, far: &Net) -> (TcpStream, TcpStream) {
    let listener = far.listen(7).expect("free");
    let (dialled, accepted) = within(async { tokio::join!(near.dial("10.42.0.2:7"), listener.accept()) }).await;
    (dialled.expect("dialled"), accepted.expect("accepted").0)
}

#[tokio::test]
async fn halves_are_used_by_two_tasks_and_put_together_again() {
    let [near, far] = nets();
    let (mut dialled, accepted) = ends(&near, &far).await;
    let echo = tokio::spawn(async move {
        let (mut reader, mut writer) = accepted.into_split();
        tokio::io::copy(&mut reader, &mut writer).await.unwrap();
        // Dropping this half closes the direction.
        drop(writer);
        reader
    });
    {
        let (mut reader, mut writer) = dialled.split();
        let mut back = [0; 5];
        writer.write_all(b"hello").await.unwrap();
        within(reader.read_exact(&mut back)).await.unwrap();
        assert_eq!(&back, b"hello");
    }
    let (mut reader, mut writer) = dialled.into_split();
    let (sent, data) = (pattern(2_000_000), pattern(2_000_000));
    let writing = tokio::spawn(async move {
        writer.write_all(&sent).await.unwrap();
        writer.shutdown().await.unwrap();
        writer
    });
    let mut back = Vec::new();
    within(reader.read_to_end(&mut back)).await.unwrap();
    assert!(back == data);
    let stream = reader.reunite(writing.await.unwrap()).unwrap();
    assert_eq!(stream.peer_addr().unwrap(), SocketAddr::new(overlay(2).into(), 7));
    within(echo).await.unwrap();
}

#[tokio::test]
async fn halves_of_two_streams_are_not_put_together_and_a_forgotten_one_closes_nothing() {
    let [near, far] = nets();
    let listener = far.listen(7).unwrap();
    let [one, other] =
        [within(near.dial("10.42.0.2:7")).await.unwrap(), within(near.dial("10.42.0.2:7")).await.unwrap()];
    let (mut accepted, _) = within(listener.accept()).await.unwrap();
    let _second = within(listener.accept()).await.unwrap();
    let ((reader, writer), (_other_reader, other_writer)) = (one.into_split(), other.into_split());
    let error = reader.reunite(other_writer).unwrap_err();
    assert_eq!(error.to_string(), "the two halves are not of the same stream");
    writer.forget();
    let waits = tokio::time::timeout(Duration::from_millis(50), accepted.read(&mut [0])).await;
    assert!(waits.is_err(), "{waits:?}");
    drop(error);
    assert_eq!(within(accepted.read(&mut [0])).await.unwrap(), 0);
}

#[tokio::test]
async fn a_stream_is_tried_and_looked_into_without_waiting() {
    let [near, far] = nets();
    let (dialled, accepted) = ends(&near, &far).await;
    let mut buffer = [0; 100];
    assert_eq!(accepted.try_read(&mut buffer).unwrap_err().kind(), ErrorKind::WouldBlock);
    within(dialled.writable()).await.unwrap();
    assert_eq!(dialled.try_write(b"hello").unwrap(), 5);
    within(accepted.readable()).await.unwrap();
    for len in [2, 100] {
        let seen = within(accepted.peek(&mut buffer[..len])).await.unwrap();
        assert_eq!(&buffer[..seen], &b"hello"[..len.min(5)]);
    }
    assert_eq!(accepted.try_read(&mut buffer).unwrap(), 5);
    assert_eq!(accepted.try_read(&mut buffer).unwrap_err().kind(), ErrorKind::WouldBlock);
    // The node does not run meanwhile, so its buffer fills.
    let full = std::iter::repeat_with(|| dialled.try_write(&[0; 1000])).take(100_000).find_map(Result::err);
    assert_eq!(full.unwrap().kind(), ErrorKind::WouldBlock);
    drop(accepted);
    within(dialled.readable()).await.unwrap();
    let ended = dialled.try_read(&mut buffer).map_err(|error| error.kind());
    assert_ne!(ended, Err(ErrorKind::WouldBlock), "it ends");
}

#[tokio::test]
async fn a_listener_says_where_it_is() {
    let [near, _far] = nets();
    let all = near.listen(0).unwrap();
    assert_eq!(all.local_addr().unwrap(), SocketAddr::new([0, 0, 0, 0].into(), all.port()));
    let own = SocketAddr::new(overlay(1).into(), 80);
    assert_eq!(near.listen_at(own).unwrap().local_addr().unwrap(), own);
}

fn blocking() -> [BlockingNet; 2] {
    builders().map(|builder| builder.start_blocking().expect("it starts"))
}

/// A call gives up after about this time.
fn gives_up<T: std::fmt::Debug>(limit: Duration, call: impl FnOnce() -> std::io::Result<T>) {
    let started = Instant::now();
    assert_eq!(call().expect_err("nothing comes").kind(), ErrorKind::WouldBlock);
    assert!(started.elapsed() >= limit && started.elapsed() < limit + Duration::from_secs(20));
}

#[test]
fn a_thread_waits_as_long_as_it_wants_and_the_stream_goes_on() {
    let [near, far] = blocking();
    let listener = far.listen(7).unwrap();
    let limit = Duration::from_millis(30);
    gives_up(limit, || listener.accept_timeout(limit));
    let mut stream = near.dial("10.42.0.2:7").unwrap();
    let (mut accepted, from) = listener.accept_timeout(Duration::from_secs(60)).unwrap();
    assert_eq!((from, accepted.peer_addr().unwrap()), (stream.local_addr().unwrap(), from));
    assert_eq!(stream.set_read_timeout(Some(Duration::ZERO)).unwrap_err().kind(), ErrorKind::InvalidInput);
    stream.set_read_timeout(Some(limit)).unwrap();
    let mut other = stream.try_clone().unwrap();
    gives_up(limit, || stream.read(&mut [0]));
    gives_up(limit, || other.peek(&mut [0]));
    accepted.write_all(b"x").unwrap();
    let mut byte = [0];
    other.set_read_timeout(None).unwrap();
    assert_eq!((other.peek(&mut byte).unwrap(), stream.read(&mut byte).unwrap(), byte), (1, 1, *b"x"));
    // The stream goes on until the last clone is dropped.
    drop(stream);
    other.write_all(b"y").unwrap();
    drop(other);
    let mut rest = Vec::new();
    accepted.read_to_end(&mut rest).unwrap();
    assert_eq!(rest, b"y");
    accepted.set_write_timeout(Some(limit)).unwrap();
}

#[test]
fn a_write_gives_up_when_nobody_reads() {
    let [near, far] = blocking();
    let listener = far.listen(7).unwrap();
    let stream = near.dial("10.42.0.2:7").unwrap();
    let _accepted = listener.accept().unwrap();
    let limit = Duration::from_millis(30);
    stream.set_write_timeout(Some(limit)).unwrap();
    let full = std::iter::repeat_with(|| (&stream).write(&[0; 100_000])).take(1000).find_map(Result::err);
    assert_eq!(full.unwrap().kind(), ErrorKind::WouldBlock);
}

#[test]
fn threads_have_datagrams() {
    let [near, far] = blocking();
    let (here, there) = (near.bind_udp(0).unwrap(), far.bind_udp_at(SocketAddr::new(overlay(2).into(), 53)).unwrap());
    let limit = Duration::from_millis(30);
    there.set_read_timeout(Some(limit)).unwrap();
    gives_up(limit, || there.try_clone().unwrap().recv());
    there.set_read_timeout(None).unwrap();
    assert_eq!(here.send_to(b"question", there.local_addr().unwrap()).unwrap(), 8);
    let question = there.recv().unwrap();
    assert_eq!(there.socket().peer_certificate(&question).unwrap().name(), "host-1");
    there.send_to(b"answer", question.from).unwrap();
    let mut buffer = [0; 100];
    let (len, from) = here.recv_from(&mut buffer).unwrap();
    assert_eq!((&buffer[..len], from), (&b"answer"[..], there.local_addr().unwrap()));
}
