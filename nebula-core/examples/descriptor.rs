//! The driver with descriptors that were opened elsewhere: by a supervisor, by a process with more privileges, or for
//! another network namespace. Here they come from the standard library, and two drivers in one process meet.
//!
//! ```sh
//! cargo run --example descriptor            # without a tun device and without privileges
//! cargo run --example descriptor -- nebula9 # the first host has this device (needs CAP_NET_ADMIN)
//! ```

#![allow(clippy::print_stdout, reason = "an example speaks to people")]

#[allow(dead_code, reason = "the driver needs no packets made by hand")]
mod common;

use std::error::Error;
use std::os::fd::OwnedFd;
use std::time::Duration;

use common::{Authority, overlay};
use nebula_core::Event;
use nebula_core::io::{Driver, Options, SocketOptions, Tun, UdpSocket};

fn main() -> Result<(), Box<dyn Error>> {
    // What somebody else opened: bound UDP sockets, and the queues of a tun device with IFF_VNET_HDR.
    let sockets = [std::net::UdpSocket::bind("127.0.0.1:0")?, std::net::UdpSocket::bind("127.0.0.1:0")?];
    let endpoints = [sockets[0].local_addr()?, sockets[1].local_addr()?];
    let queues = match std::env::args().nth(1) {
        Some(name) => Some(Tun::create(&name, 1, true)?.into_queues()),
        None => None,
    };

    let [first, second] = sockets.map(OwnedFd::from);
    let authority = Authority::new("example CA")?;
    let tun = queues.map(Tun::from_queues).transpose()?;
    let socket = UdpSocket::from_fd(first, &SocketOptions::default())?;
    let mut driver = Driver::start(authority.config(1, (2, endpoints[1]))?, tun, vec![socket], Options::default())?;
    let socket = UdpSocket::from_fd(second, &SocketOptions::default())?;
    let peer = Driver::start(authority.config(2, (1, endpoints[0]))?, None, vec![socket], Options::default())?;

    let events = driver.take_events().ok_or("the events were taken before")?;
    driver.handle().connect(overlay(2).into());
    loop {
        let event = events.recv_timeout(Duration::from_secs(10))?;
        println!("{event:?}");
        if matches!(event, Event::TunnelUp { .. }) {
            break;
        }
    }
    // Both close their tunnels before they end.
    for driver in [peer, driver] {
        driver.handle().stop();
        driver.run()?;
    }
    Ok(())
}
