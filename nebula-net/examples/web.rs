//! A web server of axum on the overlay, which greets its clients by the names in their certificates.
//!
//! ```sh
//! cargo run --example web
//! ```

#![allow(clippy::print_stdout, reason = "an example speaks to people")]

mod common;

use std::net::{Ipv4Addr, SocketAddr};

use axum::Router;
use axum::extract::ConnectInfo;
use axum::extract::connect_info::Connected;
use axum::routing::get;
use axum::serve::{IncomingStream, Listener};
use common::hosts;
use nebula_net::{Net, TcpListener, TcpStream};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// A listener as axum wants it.
struct Overlay(TcpListener);

impl Listener for Overlay {
    type Io = TcpStream;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (TcpStream, SocketAddr) {
        loop {
            // An error says that the connection or the node has ended.
            if let Ok(stream) = self.0.accept().await
                && let Ok(address) = stream.peer_addr()
            {
                return (stream, address);
            }
            tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        }
    }

    fn local_addr(&self) -> std::io::Result<SocketAddr> {
        Ok(SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), self.0.port()))
    }
}

/// Who is at the other end.
#[derive(Clone)]
struct Peer(String);

impl Connected<IncomingStream<'_, Overlay>> for Peer {
    fn connect_info(stream: IncomingStream<'_, Overlay>) -> Self {
        let certificate = stream.io().peer_certificate();
        Self(certificate.map_or_else(|| "stranger".to_owned(), |certificate| certificate.name().to_owned()))
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut hosts = hosts(2)?.into_iter();
    let (Some((near_socket, near)), Some((far_socket, far))) = (hosts.next(), hosts.next()) else { return Ok(()) };
    let near = Net::builder(near).socket(near_socket).start()?;
    let far = Net::builder(far).socket(far_socket).start()?;

    let greet = |ConnectInfo(Peer(name)): ConnectInfo<Peer>| async move { format!("hello, {name}") };
    let service = Router::new().route("/", get(greet)).into_make_service_with_connect_info::<Peer>();
    tokio::spawn(axum::serve(Overlay(far.listen(80)?), service).into_future());

    let mut stream = near.dial("10.42.0.2:80").await?;
    stream.write_all(b"GET / HTTP/1.1\r\nHost: web\r\nConnection: close\r\n\r\n").await?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await?;
    println!("{answer}");
    Ok(())
}
