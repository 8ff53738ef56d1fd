//! Measures throughput, memory per connection and what closed ones leave behind, what a packet costs beside many
//! connections, and many nodes in one process.
//!
//! ```sh
//! cargo run --release --example measure [throughput [SECONDS] | memory [CONNECTIONS] | closed [CONNECTIONS] |
//!     packets [CONNECTIONS] | nodes [NODES]]
//! ```
//!
//! `benches/connections` counts the instructions of `measure counted CONNECTIONS`.
//!
//! In two processes, with `ca.crt`, and `host.crt` and `host.key` of each, in a folder for each; the one that listens
//! is 10.42.0.2:
//!
//! ```sh
//! measure listen FOLDER UNDERLAY
//! measure dial FOLDER UNDERLAY PEER_UNDERLAY SECONDS
//! ```

#![allow(clippy::print_stdout, reason = "an example speaks to people")]
#![allow(clippy::disallowed_methods, reason = "a measurement reads the clock")]

mod common;

use std::error::Error;
use std::net::SocketAddr;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use common::{hosts, overlay};
use nebula_cert::{CaPool, Identity};
use nebula_core::Config;
use nebula_core::firewall::Rule;
use nebula_core::forward::{Offload, cut_packet};
use nebula_net::Net;
use nebula_net::stack::{Id, Stack, StackOptions};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["listen", folder, underlay] => return listen(folder, underlay.parse()?).await,
        ["dial", folder, underlay, peer, seconds] => {
            return dial(folder, underlay.parse()?, peer.parse()?, Duration::from_secs_f64(seconds.parse()?)).await;
        }
        ["counted", connections] => return count(connections.parse()?),
        _ => {}
    }
    let number = |default| arguments.get(1).map_or(Ok(default), |text| text.parse());
    let wanted = |name: &str| arguments.first().is_none_or(|argument| argument == name);
    if wanted("throughput") {
        throughput(Duration::from_secs(number(5)?)).await?;
    }
    if wanted("memory") {
        memory(number(10_000)? as usize).await?;
    }
    if wanted("closed") {
        closed(number(2000)? as usize).await?;
    }
    if wanted("packets") {
        packets(number(10_000)? as usize)?;
    }
    if wanted("nodes") {
        nodes(number(1000)? as usize).await?;
    }
    Ok(())
}

fn nets() -> Result<[Net; 2]> {
    let [near, far] = hosts()?.map(|(socket, config)| Net::builder(config).socket(socket).start());
    Ok([near?, far?])
}

/// One stream from one node to another on loopback, both in this process.
async fn throughput(time: Duration) -> Result<()> {
    let [near, far] = nets()?;
    let listener = far.listen(7)?;
    let reading = tokio::spawn(async move {
        let Ok((mut stream, _)) = listener.accept().await else { return 0 };
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

/// A node with the files of this folder, which allows everything.
fn node(folder: &str, underlay: SocketAddr, peer: Option<SocketAddr>) -> Result<Net> {
    let file = |name: &str| format!("{folder}/{name}");
    let identity = Identity::read(file("host.crt"), file("host.key"))?;
    let mut config = Config::new(identity, CaPool::from_pem(&std::fs::read(file("ca.crt"))?)?);
    config.static_hosts.extend(peer.map(|peer| (overlay(2).into(), vec![peer])));
    config.firewall.outbound.push(Rule::any());
    config.firewall.inbound.push(Rule::any());
    Ok(Net::builder(config).bind(underlay).start()?)
}

/// Reads one stream to its end, and answers with the number of bytes.
async fn listen(folder: &str, underlay: SocketAddr) -> Result<()> {
    let node = node(folder, underlay, None)?;
    let listener = node.listen(7)?;
    println!("listening");
    let (mut stream, _) = listener.accept().await?;
    let (mut total, mut buffer) = (0, vec![0; 1 << 18]);
    while let count @ 1.. = stream.read(&mut buffer).await? {
        total += count;
    }
    stream.write_all(total.to_string().as_bytes()).await?;
    stream.shutdown().await?;
    // What was written is delivered by then.
    tokio::time::sleep(Duration::from_millis(500)).await;
    Ok(())
}

/// Writes for some time, and prints how fast the peer received it.
async fn dial(folder: &str, underlay: SocketAddr, peer: SocketAddr, time: Duration) -> Result<()> {
    let node = node(folder, underlay, Some(peer))?;
    let mut stream = node.dial_address(SocketAddr::new(overlay(2).into(), 7)).await?;
    let (started, data) = (Instant::now(), vec![7; 1 << 18]);
    while started.elapsed() < time {
        stream.write_all(&data).await?;
    }
    stream.shutdown().await?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await?;
    println!("{answer} bytes in {:.3} s", started.elapsed().as_secs_f64());
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
        let (mut near, (mut far, _)) = (near?, far?);
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

/// What many connections that carried half a megabyte each at the same time leave behind.
async fn closed(connections: usize) -> Result<()> {
    static DATA: [u8; 500_000] = [7; 500_000];
    let trimming = |(socket, config)| Net::builder(config).socket(socket).on_idle(trim).start();
    let [near, far] = hosts()?.map(trimming);
    let (near, far) = (near?, far?);
    let listener = far.listen(7)?;
    near.up(overlay(2).into()).await?;
    let before = resident()?;
    let mut serving = tokio::task::JoinSet::new();
    let mut dialling = tokio::task::JoinSet::new();
    for _ in 0..connections {
        let near = near.clone();
        dialling.spawn(async move {
            let mut stream = near.dial_address(SocketAddr::new(overlay(2).into(), 7)).await?;
            stream.write_all(&DATA).await?;
            stream.shutdown().await?;
            stream.read_to_end(&mut Vec::new()).await
        });
    }
    let mut accepted = Vec::new();
    for _ in 0..connections {
        accepted.push(listener.accept().await?.0);
    }
    // Nobody reads meanwhile.
    tokio::time::sleep(Duration::from_secs(2)).await;
    let loaded = resident()?;
    for mut stream in accepted {
        serving.spawn(async move { tokio::io::copy(&mut stream, &mut tokio::io::sink()).await });
    }
    while let Some(done) = serving.join_next().await {
        done??;
    }
    while let Some(done) = dialling.join_next().await {
        done??;
    }
    near.wait_idle().await;
    far.wait_idle().await;
    let kept = |now: usize| now.saturating_sub(before) >> 20;
    println!("{connections} connections: {} MB more while loaded, {} MB at their end", kept(loaded), kept(resident()?));
    for seconds in [5, 60] {
        tokio::time::sleep(Duration::from_secs(seconds)).await;
        println!("{seconds} s later: {} MB", kept(resident()?));
    }
    Ok(())
}

/// Has the allocator give back what is free.
#[allow(unsafe_code, reason = "a function of the C library")]
fn trim() {
    // SAFETY: looks for free blocks under the allocator's own lock; no reference points into them.
    #[cfg(target_env = "gnu")]
    let _ = unsafe { libc::malloc_trim(0) };
}

/// Many nodes in this process, in networks of two: each pair makes a tunnel and a connection, and then all rest.
async fn nodes(count: usize) -> Result<()> {
    let (before, started) = (resident()?, Instant::now());
    let pairs = (0..count / 2).map(|_| nets()).collect::<Result<Vec<_>>>()?;
    let mut open = Vec::new();
    for [near, far] in &pairs {
        let listener = far.listen(7)?;
        let (near, far) = tokio::join!(near.dial_address(SocketAddr::new(overlay(2).into(), 7)), listener.accept());
        let (mut near, (mut far, _)) = (near?, far?);
        let mut buffer = [7; 1000];
        near.write_all(&buffer).await?;
        far.read_exact(&mut buffer).await?;
        open.push((near, far));
    }
    let (took, each) = (started.elapsed(), resident()?.saturating_sub(before) / count.max(1));
    let (used, rest) = (cpu()?, Duration::from_secs(10));
    tokio::time::sleep(rest).await;
    let idle = (cpu()? - used).as_secs_f64() / rest.as_secs_f64();
    println!(
        "{count} nodes with a tunnel and a connection each in {took:.1?}; {each} bytes for each; at rest all take {:.2} % of a core",
        idle * 100.0
    );
    Ok(())
}

/// Processor time of this process.
fn cpu() -> Result<Duration> {
    // Fields 14 and 15 of proc_pid_stat(5), in hundredths of a second; the name before them is in parentheses.
    let stat = std::fs::read_to_string("/proc/self/stat")?;
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    let ticks = |at: usize| fields.get(at).ok_or("no such field")?.parse::<u64>().map_err(Box::<dyn Error>::from);
    Ok(Duration::from_millis(10 * (ticks(11)? + ticks(12)?)))
}

/// What a small write and its way through both stacks costs beside few and many idle connections: the best of rounds
/// in which each number has its turn, so that other work on the machine disturbs all alike.
fn packets(connections: usize) -> Result<()> {
    let mut beds = [0, 100, connections]
        .into_iter()
        .map(|others| Bed::new(others).map(|bed| (bed, f64::MAX)))
        .collect::<Result<Vec<_>>>()?;
    for _ in 0..200 {
        for (bed, best) in &mut beds {
            *best = best.min(bed.round()?);
        }
    }
    let alone = beds[0].1;
    for (bed, best) in &beds {
        let (others, ratio) = (bed.ends.len() - 1, best / alone);
        println!(
            "beside {others} idle connections: {best:.1} ns for a write of 100 bytes, its packets and the read; {ratio:.3}"
        );
    }
    Ok(())
}

/// Two stacks with connections, one of which is used.
struct Bed {
    pair: [Stack; 2],
    now: Instant,
    ends: Vec<(Id, Id)>,
}

impl Bed {
    fn new(others: usize) -> Result<Self> {
        let now = Instant::now();
        let options = StackOptions::default();
        let mut pair =
            [1, 2].map(|number| Stack::new(now, vec![overlay(number).into()], options.clone(), [number; 32]));
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
        Ok(Self { pair, now, ends })
    }

    /// Nanoseconds for one write, its packets and the read.
    fn round(&mut self) -> Result<f64> {
        const WRITES: u32 = 2_000;
        let started = Instant::now();
        self.write(WRITES)?;
        Ok(started.elapsed().as_nanos() as f64 / f64::from(WRITES))
    }

    /// Writes to one of the connections, carries the packets and reads.
    fn write(&mut self, times: u32) -> Result<()> {
        let mut context = Context::from_waker(Waker::noop());
        let (near, far) = self.ends[self.ends.len() / 2];
        let mut out = [0; 100];
        for _ in 0..times {
            self.now += Duration::from_micros(10);
            let now = self.now;
            self.pair.iter_mut().for_each(|stack| stack.timeout(now));
            let Poll::Ready(Ok(100)) = self.pair[0].poll_write(now, near, &mut context, &[7; 100]) else {
                return Err("no room".into());
            };
            carry(&mut self.pair, now);
            let Poll::Ready(Ok(100)) = self.pair[1].poll_read(now, far, &mut context, &mut out) else {
                return Err("no data".into());
            };
        }
        Ok(())
    }
}

/// Writes to one of so many connections, and prints how often.
fn count(connections: usize) -> Result<()> {
    const WRITES: u32 = 1_000;
    let mut bed = Bed::new(connections.saturating_sub(1))?;
    bed.write(WRITES)?;
    counted(&mut bed, WRITES)?;
    println!("{WRITES}");
    Ok(())
}

/// The tracer finds this function by its name.
#[inline(never)]
fn counted(bed: &mut Bed, writes: u32) -> Result<()> {
    std::hint::black_box(bed).write(writes)
}

/// Carries packets until there are none.
fn carry(pair: &mut [Stack; 2], now: Instant) {
    let (mut packet, mut idle) = (Vec::new(), 0);
    for from in (0..2).cycle() {
        idle += 1;
        while let Some(offload) = pair[from].poll_packet(now, &mut packet) {
            idle = 0;
            cut_packet(&packet, offload, |piece| pair[1 - from].receive(now, &[piece], Offload::default()));
            while let Some(asked) = pair[1 - from].next_asked() {
                pair[1 - from].admit(now, asked, None);
            }
            while let Some((id, _)) = pair[1 - from].next_opened() {
                pair[1 - from].set_sender(id, None);
            }
        }
        if idle == 2 {
            return;
        }
    }
}
