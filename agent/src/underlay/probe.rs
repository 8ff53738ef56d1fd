//! Asks whether a host of the overlay is at an endpoint.
//!
//! It answers a datagram of a tunnel that it does not know with a receive error, whoever sends it. So the question
//! needs no certificate, and the answer is shorter than the question.

use std::hash::{BuildHasher as _, RandomState};
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use tokio::net::UdpSocket;
use tokio::time::timeout;

/// Sends a datagram of a tunnel that nobody has, until it is answered or was lost several times.
pub(super) async fn ask(endpoint: &str) -> io::Result<()> {
    let address = timeout(PATIENCE, tokio::net::lookup_host(endpoint)).await??.next();
    let address = address.ok_or_else(|| io::Error::other("the name has no address"))?;
    let any = if address.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind(SocketAddr::new(any, 0)).await?;
    socket.connect(address).await?;
    // Nobody else knows it, so nobody else can answer.
    let index = (RandomState::new().hash_one(address) as u32).to_be_bytes();
    let (question, expected) = (datagram(DATA, index, BODY), datagram(RECEIVE_ERROR, index, 0));
    for _ in 0..ATTEMPTS {
        socket.send(&question).await?;
        let mut answer = [0; HEADER + 1];
        // Nothing, or something else.
        let Ok(length) = timeout(PATIENCE, socket.recv(&mut answer)).await else { continue };
        if answer.get(..length?) == Some(&expected[..]) {
            return Ok(());
        }
    }
    Err(io::Error::other("no answer"))
}

/// A header of Nebula, and some zeros.
fn datagram(kind: u8, [a, b, c, d]: [u8; 4], body: usize) -> Vec<u8> {
    let mut bytes = vec![VERSION << 4 | kind, 0, 0, 0, a, b, c, d];
    bytes.resize(HEADER + body, 0);
    bytes
}

const VERSION: u8 = 1;
const DATA: u8 = 1;
const RECEIVE_ERROR: u8 = 2;
const HEADER: usize = 16;
/// As long as the shortest datagram of a tunnel.
const BODY: usize = 16;
const ATTEMPTS: u32 = 3;
const PATIENCE: Duration = Duration::from_secs(1);

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Answers as every host of the overlay does, with `change` made to the answer.
    pub(crate) async fn host(change: fn(&mut Vec<u8>)) -> String {
        let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let at = socket.local_addr().unwrap().to_string();
        tokio::spawn(async move {
            let mut question = [0; 64];
            while let Ok((length, from)) = socket.recv_from(&mut question).await {
                assert_eq!((length, question[0]), (32, 0x11));
                let index = *question[4..].first_chunk().unwrap();
                let mut answer = datagram(RECEIVE_ERROR, index, 0);
                change(&mut answer);
                let _ = socket.send_to(&answer, from).await;
            }
        });
        at
    }
}
