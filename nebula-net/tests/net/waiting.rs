//! Several tasks and threads that wait for the same thing.

use std::io::{Read, Write};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::poll_immediate;
use tokio::task::JoinSet;

use crate::common::overlay;
use crate::{builders, nets, within};

const CLIENTS: usize = 20;

#[tokio::test]
async fn several_tasks_accept_from_one_listener() {
    let [near, far] = nets();
    let listener = Arc::new(far.listen(7).unwrap());
    let mut serving = JoinSet::new();
    for _ in 0..4 {
        let listener = Arc::clone(&listener);
        serving.spawn(async move {
            let mut streams = Vec::new();
            for _ in 0..CLIENTS / 4 {
                streams.push(listener.accept().await.unwrap().0);
            }
            streams
        });
    }
    // All of them wait by then.
    within(near.up(overlay(2).into())).await.unwrap();
    let mut dialled = Vec::new();
    for _ in 0..CLIENTS {
        dialled.push(within(near.dial("10.42.0.2:7")).await.unwrap());
    }
    assert_eq!(within(serving.join_all()).await.iter().flatten().count(), CLIENTS);
}

#[tokio::test]
async fn a_task_that_was_woken_and_gives_up_leaves_its_turn_to_the_next() {
    let [near, far] = nets();
    let listener = far.listen(7).unwrap();
    let mut first = Box::pin(listener.accept());
    let mut second = Box::pin(listener.accept());
    assert!(poll_immediate(&mut first).await.is_none() && poll_immediate(&mut second).await.is_none());
    let _stream = within(near.dial("10.42.0.2:7")).await.unwrap();
    tokio::time::sleep(Duration::from_millis(50)).await;
    // It was woken, and nobody polled it.
    drop(first);
    within(second).await.unwrap();

    let (here, there) = (near.bind_udp(0).unwrap(), far.bind_udp(53).unwrap());
    let mut first = Box::pin(there.recv());
    let mut second = Box::pin(there.recv());
    let mut third = Box::pin(there.recv());
    for waiting in [&mut first, &mut second, &mut third] {
        assert!(poll_immediate(waiting).await.is_none());
    }
    // One that was not woken takes nothing along either.
    drop(second);
    here.send_to(b"question", SocketAddr::new(overlay(2).into(), 53)).await.unwrap();
    tokio::time::sleep(Duration::from_millis(50)).await;
    drop(first);
    assert_eq!(within(third).await.unwrap().payload, b"question");
}

#[tokio::test]
async fn all_who_wait_are_told_that_the_node_is_closed() {
    let [_near, far] = nets();
    let (listener, socket) = (Arc::new(far.listen(7).unwrap()), Arc::new(far.bind_udp(53).unwrap()));
    let mut waiting = JoinSet::new();
    for _ in 0..3 {
        let (listener, socket) = (Arc::clone(&listener), Arc::clone(&socket));
        waiting.spawn(async move { listener.accept().await.map(drop) });
        waiting.spawn(async move { socket.recv().await.map(drop) });
    }
    tokio::time::sleep(Duration::from_millis(10)).await;
    far.close();
    assert!(within(waiting.join_all()).await.iter().all(Result::is_err));
}

#[test]
fn a_pool_of_threads_serves_one_listener_and_several_read_one_stream() {
    let [near, far] = builders().map(|builder| builder.start_blocking().unwrap());
    let listener = Arc::new(far.listen(7).unwrap());
    let serving: Vec<_> = (0..4)
        .map(|_| {
            let listener = Arc::clone(&listener);
            std::thread::spawn(move || {
                for _ in 0..CLIENTS / 4 {
                    let (mut stream, _) = listener.accept().unwrap();
                    let mut got = Vec::new();
                    stream.read_to_end(&mut got).unwrap();
                    stream.write_all(&got).unwrap();
                }
            })
        })
        .collect();
    let clients: Vec<_> = (0..CLIENTS)
        .map(|_| {
            let near = near.clone();
            std::thread::spawn(move || {
                let stream = near.dial("10.42.0.2:7").unwrap();
                (&stream).write_all(b"hello").unwrap();
                // Each byte is read by one of them.
                let mut got = 0;
                std::thread::scope(|scope| {
                    let read = || {
                        let (mut count, mut byte) = (0, [0]);
                        while (&stream).read(&mut byte).unwrap() > 0 {
                            count += 1;
                        }
                        count
                    };
                    let readers = [scope.spawn(read), scope.spawn(read)];
                    std::thread::sleep(Duration::from_millis(5));
                    stream.shutdown();
                    got = readers.map(|reader| reader.join().unwrap()).iter().sum::<usize>();
                });
                assert_eq!(got, 5);
            })
        })
        .collect();
    clients.into_iter().chain(serving).for_each(|thread| thread.join().unwrap());
}
