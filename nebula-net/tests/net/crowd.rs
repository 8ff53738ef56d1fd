//! Many connections at once.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use nebula_net::Net;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::common::{hosts, overlay};
use crate::gateway::Gateway;
use crate::{nets, within};

/// How long threads of this process have waited for a processor that others had.
fn waited() -> Duration {
    let threads = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let of_thread = |thread: std::fs::DirEntry| -> Option<u64> {
        let times = std::fs::read_to_string(thread.path().join("schedstat")).ok()?;
        times.split_whitespace().nth(1)?.parse().ok()
    };
    Duration::from_nanos(threads.filter_map(of_thread).sum())
}

/// A SYN that was lost comes again after a second.
const NONE_LOST: Duration = Duration::from_millis(900);

/// A pool, a forwarder or a gateway opens many at once.
#[tokio::test]
async fn two_thousand_connections_of_one_peer_at_once_are_open_well_below_a_second() {
    const CONNECTIONS: usize = 2000;
    let [near, far] = nets();
    within(near.up(overlay(2).into())).await.unwrap();
    let listener = far.listen(7).unwrap();
    let server = tokio::spawn(async move {
        let mut streams = Vec::new();
        while streams.len() < CONNECTIONS {
            let (mut stream, _) = listener.accept().await.unwrap();
            stream.write_all(b"x").await.unwrap();
            streams.push(stream);
        }
        streams
    });
    let (started, idle) = (tokio::time::Instant::now(), waited());
    let mut dialling = tokio::task::JoinSet::new();
    for _ in 0..CONNECTIONS {
        let near = near.clone();
        dialling.spawn(async move {
            let mut stream = near.dial("10.42.0.2:7").await.unwrap();
            stream.read_exact(&mut [0]).await.unwrap();
            stream
        });
    }
    let streams = within(dialling.join_all()).await;
    let (took, idle) = (started.elapsed(), waited().saturating_sub(idle));
    println!("{CONNECTIONS} connections in {took:?}");
    assert_eq!((streams.len(), within(server).await.unwrap().len()), (CONNECTIONS, CONNECTIONS));
    assert!(took < NONE_LOST + idle, "{took:?}, {idle:?} of it without a processor");
}

#[tokio::test]
async fn a_flood_of_syns_from_behind_a_gateway_keeps_nobody_out() {
    let [(socket, mut config), near, far] = hosts().unwrap();
    config.firewall.default_local_cidr_any = true;
    let [near, far] = [near, far].map(|(socket, config)| Net::builder(config).socket(socket).start().unwrap());
    let listener = far.listen(7).unwrap();
    let serving = tokio::spawn(async move {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            stream.write_all(b"x").await.unwrap();
        }
    });
    let until = Arc::new(AtomicBool::new(false));
    let ends = Arc::clone(&until);
    let flooding = std::thread::spawn(move || {
        let mut gateway = Gateway::start(socket, config);
        gateway.connect(overlay(3).into());
        let mut sent = 0_u32;
        while !ends.load(Ordering::Relaxed) {
            for host in 1..=200 {
                gateway.syn([172, 20, 1, host], 1024 + (sent / 200) as u16, overlay(3).octets());
                sent += 1;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        sent
    });
    let evicted = async {
        while far.counters().half_open_evicted == 0 {
            tokio::time::sleep(Duration::from_millis(20)).await
        }
    };
    within(evicted).await;
    for _ in 0..10 {
        let (started, idle) = (tokio::time::Instant::now(), waited());
        let mut stream = within(near.dial("10.42.0.3:7")).await.unwrap();
        within(stream.read_exact(&mut [0])).await.unwrap();
        let (took, idle) = (started.elapsed(), waited().saturating_sub(idle));
        assert!(took < NONE_LOST + idle, "{took:?}, {idle:?} of it without a processor");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    until.store(true, Ordering::Relaxed);
    println!("{} SYNs, {:?}", flooding.join().unwrap(), far.counters());
    serving.abort();
}
