//! Measures throughput, memory per connection, and what a packet costs beside many connections.
//!
//! ```sh
//! cargo run --release --example measure [throughput [SECONDS] | memory [CONNECTIONS] | packets [CONNECTIONS]]
//! ```

#![allow(clippy::print_stdout, reason = "an example speaks to people")]
#![allow(clippy::disallowed_methods, reason = "a measurement reads the clock")]

mod common;

use std::error::Error;
use std::net::SocketAddr;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use common::{hosts, overlay};
use nebula_core::forward::{Offload, cut_packet};
use nebula_net::Net;
use nebula_net::stack::{Limits, Stack, StackOptions};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |default| arguments.get(1).map_or(Ok(default), |text| text.parse());
    let wanted = |name: &str| arguments.first().is_none_or(|argument| argument == name);
    if wanted("throughput") {
        throughput(Duration::from_secs(number(5)?)).await?;
    }
    if wanted("memory") {
        memory(number(10_000)? as usize).await?;
    }
    if wanted("packets") {
        packets(number(10_000)? as usize)?;
    }
    Ok(())
}

fn nets() -> Result<[Net; 2]> {
    let limits = || {
        let mut limits = Limits::default();
        limits.half_open_per_peer = 1024;
        limits
    };
    let start = |(socket, config)| Net::builder(config).socket(socket).limits(limits()).start();
    let nets = hosts(2)?.into_iter().map(start).collect::<std::result::Result<Vec<_>, _>>()?;
    nets.try_into().map_err(|_| "two hosts".into())
}

/// One stream from one node to another on loopback, both in this process.
async fn throughput(time: Duration) -> Result<()> {
    let [near, far] = nets()?;
    let listener = far.listen(7)?;
    let reading = tokio::spawn(async move {
        let Ok(mut stream) = listener.accept().await else { return 0 };
        let (mut total, mut buffer) = (0, vec![0; 1 << 18]);
        while let Ok(count @ 1..) = stream.read(&mut buffer).await {
            total += count;
        }
        total
    });
    let mut stream = near.dial_address(SocketAddr::new(overlay(2).into(), 7)).await?;
    let (started, data) = (Instant::now(), vec![7; 1 << 18]);
    while started.elapsed() < time {
        stream.write_all(&data).await?;
    }
    stream.shutdown().await?;
    let total = reading.await?;
    let seconds = started.elapsed().as_secs_f64();
    println!("one stream: {:.2} Gbit/s over {seconds:.1} s", total as f64 * 8e-9 / seconds);
    Ok(())
}

/// Resident memory of this process in bytes.
fn resident() -> Result<usize> {
    let pages = std::fs::read_to_string("/proc/self/statm")?;
    Ok(pages.split_whitespace().nth(1).ok_or("no such field")?.parse::<usize>()? * 4096)
}

/// Both ends of many connections that carried a kilobyte each way and are idle now.
async fn memory(connections: usize) -> Result<()> {
    let [near, far] = nets()?;
    let listener = far.listen(7)?;
    near.up(overlay(2).into()).await?;
    let before = resident()?;
    let started = Instant::now();
    let (mut dialled, mut accepted) = (Vec::new(), Vec::new());
    let mut buffer = [7; 1000];
    for _ in 0..connections {
        let target = SocketAddr::new(overlay(2).into(), 7);
        let (near, far) = tokio::join!(near.dial_address(target), listener.accept());
        let (mut near, mut far) = (near?, far?);
        near.write_all(&buffer).await?;
        far.read_exact(&mut buffer).await?;
        far.write_all(&buffer).await?;
        near.read_exact(&mut buffer).await?;
        dialled.push(near);
        accepted.push(far);
    }
    let took = started.elapsed();
    let each = resident()?.saturating_sub(before) / (2 * connections);
    println!("{connections} connections made in {took:.1?}; {each} bytes for each of {} ends", 2 * connections);
    Ok(())
}

/// What a small write and its way through both stacks costs, with one connection and beside many idle ones.
fn packets(connections: usize) -> Result<()> {
    for others in [0, connections, 0, connections] {
        let now = Instant::now();
        let mut options = StackOptions::default();
        options.limits.half_open_per_peer = 1024;
        let [near, far] =
            [1, 2].map(|number| Stack::new(now, vec![overlay(number).into()], options.clone(), [number; 32]));
        let mut pair = [near, far];
        pair[1].listen(None, 7).ok_or("the port is free")?;
        let mut context = Context::from_waker(Waker::noop());
        let target = SocketAddr::new(overlay(2).into(), 7);
        let mut ends = Vec::new();
        for _ in 0..=others {
            let near = pair[0].connect(now, target)?;
            carry(&mut pair, now);
            let Poll::Ready(Some(far)) = pair[1].poll_accept(None, 7, &mut context) else {
                return Err("no connection".into());
            };
            ends.push((near, far));
        }
        let (near, far) = ends[others / 2];
        let rounds = 200_000;
        let mut out = [0; 100];
        let started = Instant::now();
        for _ in 0..rounds {
            let Poll::Ready(Ok(100)) = pair[0].poll_write(now, near, &mut context, &[7; 100]) else {
                return Err("no room".into());
            };
            carry(&mut pair, now);
            let Poll::Ready(Ok(100)) = pair[1].poll_read(now, far, &mut context, &mut out) else {
                return Err("no data".into());
            };
        }
        let each = started.elapsed() / rounds;
        println!(
            "beside {others} idle connections: {} ns for a write of 100 bytes, its packets, and the read",
            each.as_nanos()
        );
    }
    Ok(())
}

/// Carries packets until there are none.
fn carry(pair: &mut [Stack; 2], now: Instant) {
    let (mut packet, mut idle) = (Vec::new(), 0);
    for from in (0..2).cycle() {
        idle += 1;
        while let Some(offload) = pair[from].poll_packet(now, &mut packet) {
            idle = 0;
            cut_packet(&packet, offload, |piece| pair[1 - from].receive(now, &[piece], Offload::default()));
            while let Some((id, _)) = pair[1 - from].next_asked() {
                pair[1 - from].admit(now, id, None);
            }
            while let Some((id, _)) = pair[1 - from].next_opened() {
                pair[1 - from].set_certificate(id, None);
            }
        }
        if idle == 2 {
            return;
        }
    }
}
