//! The server of the README. Reads `ca.crt`, `server.crt` and `server.key` from the current folder, and runs until it
//! is ended.

#![allow(clippy::print_stdout, reason = "an example speaks to people")]

use nebula_cert::{CaPool, Identity};
use nebula_core::{Config, firewall::Rule};
use nebula_net::Net;
use tokio::io::AsyncWriteExt;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let identity = Identity::read("server.crt", "server.key")?;
    let mut config = Config::new(identity, CaPool::from_pem(&std::fs::read("ca.crt")?)?);
    config.firewall.inbound.push(Rule::any());
    let net = Net::builder(config).bind("127.0.0.1:4242".parse()?).start()?;
    let listener = net.listen(7)?;
    loop {
        let (mut stream, from) = listener.accept().await?;
        println!("called by {:?} at {from}", stream.peer_certificate().map(|it| it.name().to_owned()));
        stream.write_all(b"hello over Nebula\n").await?;
        stream.shutdown().await?;
    }
}
