//! Two nodes on sockets of an async runtime; the second answers each packet of the first.
//!
//! ```sh
//! cargo run --example tokio
//! ```

#![allow(clippy::print_stdout, reason = "an example speaks to people")]
#![allow(clippy::disallowed_methods, reason = "a program with sockets reads the clock")]

mod common;

use std::error::Error;
use std::time::{Duration, Instant, SystemTime};

use common::{Authority, udp_packet};
use nebula_core::forward::Offload;
use nebula_core::{Engine, Seed, WallClock};
use tokio::net::UdpSocket;
use tokio::sync::mpsc::{self, Receiver, Sender};

/// A node, its socket, and two queues of overlay packets.
struct Host {
    engine: Engine,
    socket: UdpSocket,
    to_send: Receiver<Vec<u8>>,
    received: Sender<Vec<u8>>,
}

impl Host {
    /// Runs until nobody sends or reads overlay packets any more.
    async fn run(mut self) -> Result<(), Box<dyn Error>> {
        let mut buffer = vec![0; 65_535];
        loop {
            let due = self.engine.poll_timeout().unwrap_or_else(|| Instant::now() + Duration::from_secs(3600));
            let output = tokio::select! {
                received = self.socket.recv_from(&mut buffer) => {
                    let (length, from) = received?;
                    self.engine.receive(Instant::now(), from, &mut buffer[..length])
                }
                packet = self.to_send.recv() => match packet {
                    Some(mut packet) => self.engine.send(Instant::now(), &mut packet, Offload::default()),
                    None => return Ok(()),
                },
                () = tokio::time::sleep_until(due.into()) => self.engine.timeout(Instant::now()),
            };
            for datagram in output.datagrams() {
                self.socket.send_to(datagram.bytes, datagram.to).await?;
            }
            for event in output.events() {
                println!("{event:?}");
            }
            for packet in output.packets() {
                if self.received.send(packet.to_vec()).await.is_err() {
                    return Ok(());
                }
            }
        }
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let authority = Authority::new("example CA")?;
    let sockets = [UdpSocket::bind("127.0.0.1:0").await?, UdpSocket::bind("127.0.0.1:0").await?];
    let endpoints = [sockets[0].local_addr()?, sockets[1].local_addr()?];
    let mut hosts = Vec::new();
    let mut ends = Vec::new();
    for ((socket, own), peer) in sockets.into_iter().zip([1, 2]).zip([2, 1]) {
        let config = authority.config(own, (peer, endpoints[usize::from(peer) - 1]))?;
        let clock = WallClock::new(Instant::now(), SystemTime::now());
        let engine = Engine::new(config, clock, Seed::from_os()?)?;
        let (sender, to_send) = mpsc::channel(16);
        let (received, receiver) = mpsc::channel(16);
        hosts.push(Host { engine, socket, to_send, received });
        ends.push((sender, receiver));
    }
    let (Some((second, mut at_second)), Some((first, mut at_first))) = (ends.pop(), ends.pop()) else { return Ok(()) };
    let (Some(host_2), Some(host_1)) = (hosts.pop(), hosts.pop()) else { return Ok(()) };

    let talk = async {
        first.send(udp_packet(1, 2, b"hello")).await?;
        let question = at_second.recv().await.ok_or("the second host ended")?;
        println!("the second received: {}", String::from_utf8_lossy(&question[28..]));
        second.send(udp_packet(2, 1, b"hello yourself")).await?;
        let answer = at_first.recv().await.ok_or("the first host ended")?;
        println!("the first received: {}", String::from_utf8_lossy(&answer[28..]));
        Ok(())
    };
    tokio::select! {
        result = host_1.run() => result,
        result = host_2.run() => result,
        result = talk => result,
        () = tokio::time::sleep(Duration::from_secs(10)) => Err("nobody answered within ten seconds".into()),
    }
}
