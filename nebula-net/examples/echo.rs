//! Two nodes in one process; the second sends back what the first one sends.
//!
//! ```sh
//! cargo run --example echo
//! ```

#![allow(clippy::print_stdout, reason = "an example speaks to people")]

mod common;

use common::hosts;
use nebula_net::Net;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let [(near_socket, near), (far_socket, far)] = hosts()?;
    let near = Net::builder(near).socket(near_socket).start()?;
    let far = Net::builder(far).socket(far_socket).allow(|certificate| certificate.name() == "host-1").start()?;

    let listener = far.listen(7)?;
    tokio::spawn(async move {
        let (stream, _) = listener.accept().await?;
        let (mut reader, mut writer) = stream.into_split();
        tokio::io::copy(&mut reader, &mut writer).await?;
        writer.shutdown().await
    });

    let mut stream = near.dial("10.42.0.2:7").await?;
    let name = stream.peer_certificate().map(|certificate| certificate.name().to_owned());
    stream.write_all(b"hello").await?;
    stream.shutdown().await?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await?;
    println!("{} answers: {answer}", name.unwrap_or_default());
    Ok(())
}
