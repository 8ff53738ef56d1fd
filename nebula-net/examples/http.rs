//! HTTP over the overlay with hyper alone: a server that knows its clients by certificate, and a client.
//!
//! ```sh
//! cargo run --example http
//! ```

#![allow(clippy::print_stdout, reason = "an example speaks to people")]

mod common;

use std::convert::Infallible;

use common::hosts;
use http_body_util::{BodyExt as _, Empty};
use hyper::body::{Bytes, Incoming};
use hyper::service::service_fn;
use hyper::{Request, Response, client, server};
use hyper_util::rt::TokioIo;
use nebula_net::{Net, TcpListener};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let [(near_socket, near), (far_socket, far)] = hosts()?;
    let near = Net::builder(near).socket(near_socket).start()?;
    let far = Net::builder(far).socket(far_socket).start()?;
    tokio::spawn(serve(far.listen(80)?));

    let stream = near.dial("10.42.0.2:80").await?;
    let (mut sender, connection) = client::conn::http1::handshake(TokioIo::new(stream)).await?;
    tokio::spawn(connection);
    let request = Request::get("/").header("Host", "web").body(Empty::<Bytes>::new())?;
    let answer = sender.send_request(request).await?.into_body().collect().await?.to_bytes();
    println!("{}", String::from_utf8_lossy(&answer));
    Ok(())
}

async fn serve(listener: TcpListener) {
    while let Ok((stream, _)) = listener.accept().await {
        let name = stream.peer_certificate().map_or_else(String::new, |peer| peer.name().to_owned());
        let greet = service_fn(move |_: Request<Incoming>| {
            let greeting = format!("hello, {name}");
            async move { Ok::<_, Infallible>(Response::new(greeting)) }
        });
        tokio::spawn(server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), greet));
    }
}
