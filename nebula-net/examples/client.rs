//! The client of the README, for the server beside it. Reads `ca.crt`, `client.crt` and `client.key` from the current
//! folder.

#![allow(clippy::print_stdout, reason = "an example speaks to people")]

use nebula_cert::{CaPool, Identity};
use nebula_core::{Config, firewall::Rule};
use nebula_net::Net;
use tokio::io::AsyncReadExt;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let identity = Identity::read("client.crt", "client.key")?;
    let mut config = Config::new(identity, CaPool::from_pem(&std::fs::read("ca.crt")?)?);
    config.static_hosts.insert("10.42.0.1".parse()?, vec!["127.0.0.1:4242".parse()?]);
    config.firewall.outbound.push(Rule::any());
    let net = Net::builder(config).start()?;
    let mut stream = net.dial("10.42.0.1:7").await?;
    println!("connected to {:?}", stream.peer_certificate().map(|it| it.name().to_owned()));
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await?;
    print!("{answer}");
    Ok(())
}
