//! A lighthouse: tells hosts where the others are. It needs no tun device and no privileges.
//!
//! ```sh
//! cargo run --example pki -- /tmp/pki 10.42.0.1/16
//! cargo run --example lighthouse -- /tmp/pki
//! ```

#![allow(clippy::print_stdout, reason = "an example speaks to people")]

use std::error::Error;
use std::path::PathBuf;

use nebula_cert::{CaPool, Identity};
use nebula_core::Config;
use nebula_core::io::{Driver, Options, SocketOptions, UdpSocket};

fn main() -> Result<(), Box<dyn Error>> {
    let folder = PathBuf::from(std::env::args().nth(1).ok_or("usage: lighthouse FOLDER")?);
    let identity = Identity::read(folder.join("host.crt"), folder.join("host.key"))?;
    let trust = CaPool::from_pem(&std::fs::read(folder.join("ca.crt"))?)?;

    let mut config = Config::new(identity, trust);
    config.lighthouse.am_lighthouse = true;
    let sockets = UdpSocket::bind("0.0.0.0:4242".parse()?, 1, &SocketOptions::default())?;
    let mut driver = Driver::start(config, None, sockets, Options::default())?;
    println!("listening on UDP port 4242");

    let events = driver.take_events();
    std::thread::spawn(move || events.into_iter().flatten().for_each(|event| println!("{event:?}")));
    Ok(driver.run()?)
}
