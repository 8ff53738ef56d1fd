//! Nodes of this process on loopback.

#[path = "../../examples/common/mod.rs"]
mod common;
mod crowd;
mod dial;
mod ending;
mod gateway;
mod lighthouse;
mod streams;
mod udp;
mod waiting;

use std::io::{Read, Write};
use std::net::IpAddr;
use std::time::Duration;

use common::{hosts, overlay};
use nebula_net::{Builder, Net, TcpStream};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// Builders of two nodes that know each other.
fn builders() -> [Builder; 2] {
    hosts().expect("two hosts").map(|(socket, config)| Net::builder(config).socket(socket))
}

fn nets() -> [Net; 2] {
    builders().map(|builder| builder.start().expect("it starts"))
}

/// Bytes that are not the same in any two places.
fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at.wrapping_mul(2_654_435_761) >> 7) as u8).collect()
}

async fn echo(mut stream: TcpStream) {
    let mut buffer = vec![0; 40_000];
    while let Ok(count @ 1..) = stream.read(&mut buffer).await {
        stream.write_all(&buffer[..count]).await.expect("the peer reads");
    }
    stream.shutdown().await.expect("it can be closed");
}

async fn within<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(60), future).await.expect("done within a minute")
}

#[tokio::test]
async fn what_is_written_comes_back_over_either_family() {
    let [near, far] = nets();
    let listener = far.listen(7).unwrap();
    let server = tokio::spawn(async move {
        for _ in 0..2 {
            let (stream, from) = listener.accept().await.unwrap();
            assert_eq!(from, stream.peer_addr().unwrap());
            assert_eq!(stream.peer_certificate().unwrap().name(), "host-1");
            echo(stream).await;
        }
    });
    for target in ["10.42.0.2:7", "[fd42::2]:7"] {
        let stream = within(near.dial(target)).await.unwrap();
        assert_eq!(stream.peer_certificate().unwrap().name(), "host-2");
        assert_eq!(stream.peer_addr().unwrap().to_string(), target);
        let data = pattern(5_000_000);
        let (mut reader, mut writer) = stream.into_split();
        let sent = data.clone();
        let writing = tokio::spawn(async move {
            writer.write_all(&sent).await.unwrap();
            writer.shutdown().await.unwrap();
        });
        let mut back = Vec::new();
        within(reader.read_to_end(&mut back)).await.unwrap();
        assert!(back == data, "{} bytes of {}", back.len(), data.len());
        writing.await.unwrap();
    }
    within(server).await.unwrap();
}

#[tokio::test]
async fn a_name_is_that_of_the_peer_that_had_it_first() {
    let names = ["near", "db", "DB", "Near"];
    let hosts: [_; 4] = common::named(names).expect("four hosts");
    let [near, ..] = &hosts.map(|(socket, config)| Net::builder(config).socket(socket).start().expect("it starts"));
    // Sorted by address, the second one with the name would be the first.
    for number in [3, 2, 4] {
        within(near.up(overlay(number).into())).await.unwrap();
    }
    assert_eq!(near.look_up("db").await.unwrap(), IpAddr::from(overlay(3)));
    assert_eq!(near.look_up("near").await.unwrap(), IpAddr::from(overlay(1)));
}

#[tokio::test]
async fn a_peer_is_found_by_the_name_in_its_certificate() {
    let [near, far] = nets();
    let listener = far.listen(7).unwrap();
    assert!(near.dial("host-2:7").await.is_err(), "there is no tunnel yet");
    let certificate = within(near.up(overlay(2).into())).await.unwrap();
    assert_eq!(certificate.name(), "host-2");
    let (dialled, accepted) = tokio::join!(within(near.dial("Host-2:7")), within(listener.accept()));
    assert_eq!(dialled.unwrap().local_addr().unwrap(), accepted.unwrap().1);
}

#[tokio::test]
async fn a_peer_that_is_not_allowed_is_refused_before_the_program_sees_it() {
    let [near, far] = builders();
    let near = near.start().unwrap();
    let far = far.allow(|certificate| certificate.name() == "somebody else").start().unwrap();
    let listener = far.listen(7).unwrap();
    let refused = within(near.dial("10.42.0.2:7")).await.unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::ConnectionRefused);
    let nobody = tokio::time::timeout(Duration::from_millis(50), listener.accept()).await;
    assert!(nobody.is_err(), "nothing to accept");
}

#[tokio::test]
async fn a_destination_without_a_route_fails_at_once() {
    let [near, _far] = nets();
    let started = tokio::time::Instant::now();
    let error = within(near.dial("203.0.113.1:80")).await.unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::NetworkUnreachable);
    assert!(started.elapsed() < Duration::from_secs(10));
}

#[tokio::test]
async fn a_node_cannot_dial_itself_and_says_so() {
    let [near, _far] = nets();
    let error = within(near.dial("10.42.0.1:7")).await.unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::AddrNotAvailable);
    assert_eq!(error.to_string(), "the address is this node's own");
}

#[tokio::test]
async fn dropping_everything_delivers_what_was_written_and_ends_the_node() {
    let [near, far] = nets();
    let listener = far.listen(7).unwrap();
    let mut events = far.events();
    let mut stream = within(near.dial("10.42.0.2:7")).await.unwrap();
    let data = pattern(300_000);
    stream.write_all(&data[..60_000]).await.unwrap();
    drop((stream, near));
    let (mut accepted, _) = listener.accept().await.unwrap();
    let mut got = Vec::new();
    within(accepted.read_to_end(&mut got)).await.unwrap();
    assert!(got == data[..60_000]);
    drop(accepted);
    let down = async { while !matches!(events.recv().await.unwrap(), nebula_core::Event::TunnelDown { .. }) {} };
    within(down).await;
}

#[tokio::test]
async fn a_closed_node_answers_with_errors() {
    let [near, far] = nets();
    let listener = far.listen(7).unwrap();
    let mut stream = within(near.dial("10.42.0.2:7")).await.unwrap();
    far.close();
    assert!(listener.accept().await.is_err());
    let error = within(stream.read(&mut [0; 10])).await.unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
}

#[test]
fn programs_without_a_runtime_use_threads() {
    let [near, far] = builders().map(|builder| builder.start_blocking().unwrap());
    let listener = far.listen(7).unwrap();
    let server = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut got = Vec::new();
        stream.read_to_end(&mut got).unwrap();
        stream.write_all(&got).unwrap();
    });
    assert_eq!(near.up(IpAddr::from(overlay(2))).unwrap().name(), "host-2");
    let mut stream = near.dial("10.42.0.2:7").unwrap();
    let data = pattern(1_000_000);
    stream.write_all(&data).unwrap();
    stream.shutdown();
    let mut back = Vec::new();
    stream.read_to_end(&mut back).unwrap();
    assert!(back == data);
    server.join().unwrap();
}
