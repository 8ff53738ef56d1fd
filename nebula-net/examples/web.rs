//! A web server of axum on the overlay, which greets its clients by the names in their certificates, and only those
//! of a group.
//!
//! ```sh
//! cargo run --features tower --example web
//! ```

#![allow(clippy::print_stdout, reason = "an example speaks to people")]

mod common;

use axum::Router;
use axum::extract::ConnectInfo;
use axum::routing::get;
use common::hosts;
use nebula_net::Net;
use nebula_net::tower::{Peer, RequireGroup};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let [(near_socket, near), (far_socket, far)] = hosts()?;
    let near = Net::builder(near).socket(near_socket).start()?;
    let far = Net::builder(far).socket(far_socket).start()?;

    let greet =
        |ConnectInfo(peer): ConnectInfo<Peer>| async move { format!("hello, {}", peer.name().unwrap_or("stranger")) };
    let service = Router::new().route("/", get(greet)).layer(RequireGroup::new("example"));
    tokio::spawn(axum::serve(far.listen(80)?, service.into_make_service_with_connect_info::<Peer>()).into_future());

    let mut stream = near.dial("10.42.0.2:80").await?;
    stream.write_all(b"GET / HTTP/1.1\r\nHost: web\r\nConnection: close\r\n\r\n").await?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await?;
    println!("{answer}");
    Ok(())
}
