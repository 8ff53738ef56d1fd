//! How a node ends, and what is told to who still uses it.

use std::io::{ErrorKind, Write};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use nebula_core::firewall::Rule;
use nebula_net::{Net, TcpListener, TcpStream, UdpSocket};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::broadcast::error::RecvError;

use crate::common::overlay;
use crate::{builders, nets, within};

/// A call says at once that the node has ended.
async fn assert_fails<T>(what: &str, call: impl Future<Output = std::io::Result<T>>) {
    let result = tokio::time::timeout(Duration::from_secs(1), call).await;
    let Err(error) = result.unwrap_or_else(|_| panic!("{what} hangs")) else { panic!("{what} succeeds") };
    assert_eq!(error.kind(), ErrorKind::NotConnected, "{what}: {error}");
}

/// Everything of a node does.
async fn assert_ended(net: &Net, listener: &TcpListener, socket: &UdpSocket, stream: &mut TcpStream) {
    assert_fails("dial", net.dial("10.42.0.1:7")).await;
    assert_fails("dial by name", net.dial("host-1:7")).await;
    assert_fails("up", net.up(overlay(1).into())).await;
    assert_fails("accept", listener.accept()).await;
    assert_fails("recv", socket.recv()).await;
    assert_fails("recv_from", socket.recv_from(&mut [0])).await;
    assert_fails("readable", socket.readable()).await;
    assert_fails("writable", socket.writable()).await;
    assert_fails("control", net.control(|_| ())).await;
    assert_fails("reconfigure", net.reconfigure(|_| ())).await;
    assert_fails("write", stream.write_all(b"x")).await;
    assert_fails("read", stream.read(&mut [0])).await;
    let to = SocketAddr::new(overlay(1).into(), 7);
    assert_fails("listen", async { net.listen(9) }).await;
    assert_fails("bind_udp", async { net.bind_udp(9) }).await;
    assert_fails("send_to", socket.send_to(b"x", to)).await;
    let mut events = net.events();
    assert!(matches!(within(events.recv()).await, Err(RecvError::Closed)));
    within(net.closed()).await;
}

/// A far node with something of each kind, and the near one's end of its stream.
async fn busy(near: &Net, far: &Net) -> (TcpListener, UdpSocket, TcpStream, TcpStream) {
    let (listener, socket) = (far.listen(7).expect("free"), far.bind_udp(53).expect("free"));
    let (dialled, accepted) = tokio::join!(near.dial("10.42.0.2:7"), listener.accept());
    (listener, socket, accepted.expect("accepted").0, dialled.expect("dialled"))
}

#[tokio::test]
async fn closing_a_node_closes_it_for_all_clones_and_tells_its_peers() {
    let [near, far] = nets();
    let (listener, socket, mut stream, mut other) = within(busy(&near, &far)).await;
    let clone = far.clone();
    clone.close();
    within(far.closed()).await;
    assert_ended(&far, &listener, &socket, &mut stream).await;
    let error = within(other.read(&mut [0])).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
}

#[tokio::test]
async fn a_node_whose_runtime_is_gone_says_so() {
    let [near, far] = builders();
    let near = near.start().unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let far = {
        let _inside = runtime.enter();
        far.start().unwrap()
    };
    let (listener, socket, mut stream, _other) = within(busy(&near, &far)).await;
    runtime.shutdown_background();
    within(far.closed()).await;
    assert_ended(&far, &listener, &socket, &mut stream).await;
}

#[tokio::test]
async fn a_closure_of_the_program_that_panics_ends_the_node() {
    let [near, far] = builders();
    let near = near.start().unwrap();
    let panics = AtomicBool::new(false);
    let far = far.allow(move |_| if panics.swap(true, Ordering::Relaxed) { panic!("by the program") } else { true });
    let far = far.start().unwrap();
    let (listener, socket, mut stream, _other) = within(busy(&near, &far)).await;
    let dialling =
        tokio::spawn(async move { near.dial_timeout("10.42.0.2:7", Duration::from_millis(300)).await.map(drop) });
    within(far.closed()).await;
    assert_ended(&far, &listener, &socket, &mut stream).await;
    assert!(within(dialling).await.unwrap().is_err());

    let [near, far] = nets();
    let (listener, socket, mut stream, _other) = within(busy(&near, &far)).await;
    assert!(within(far.control(|_| panic!("by the program") as ())).await.is_err());
    assert_ended(&far, &listener, &socket, &mut stream).await;
}

#[test]
fn a_node_of_a_thread_may_be_closed_as_well() {
    let [near, far] = builders().map(|builder| builder.start_blocking().unwrap());
    let listener = far.listen(7).unwrap();
    let (sender, accepted) = std::sync::mpsc::channel();
    let accepting = std::thread::spawn(move || {
        sender.send(listener.accept().unwrap().0).unwrap();
        listener.accept().map(drop)
    });
    let _stream = near.dial("10.42.0.2:7").unwrap();
    let mut stream = accepted.recv().unwrap();
    far.net().close();
    assert_eq!(accepting.join().unwrap().unwrap_err().kind(), ErrorKind::NotConnected);
    assert_eq!(stream.write(b"x").unwrap_err().kind(), ErrorKind::NotConnected);
    assert_eq!(far.dial("10.42.0.1:7").unwrap_err().kind(), ErrorKind::NotConnected);
}

#[tokio::test]
async fn a_program_may_give_memory_back_after_a_load_and_is_not_asked_after_little() {
    let [near, far] = builders();
    let called = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&called);
    let far = far.on_idle(move || _ = count.fetch_add(1, Ordering::Relaxed)).start().unwrap();
    let near = near.start().unwrap();
    let listener = far.listen(7).unwrap();
    for (connections, calls) in [(10, 0), (100, 1)] {
        let mut open = Vec::new();
        for _ in 0..connections {
            let both = async { tokio::join!(near.dial("10.42.0.2:7"), listener.accept()) };
            open.push(within(both).await);
        }
        tokio::time::sleep(Duration::from_millis(1200)).await;
        assert_eq!(called.load(Ordering::Relaxed), 0, "{connections} are open");
        drop(open);
        within(far.wait_idle()).await;
        let asked = async {
            while called.load(Ordering::Relaxed) < calls {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        within(asked).await;
        tokio::time::sleep(Duration::from_millis(1200)).await;
        assert_eq!(called.load(Ordering::Relaxed), calls, "after {connections}");
    }
}

#[tokio::test]
async fn a_node_is_idle_when_all_is_delivered() {
    let [near, far] = nets();
    let (_listener, _socket, mut accepted, mut dialled) = within(busy(&near, &far)).await;
    within(async {
        dialled.write_all(&[7; 50_000]).await.unwrap();
        drop(dialled);
        assert!(
            tokio::time::timeout(Duration::from_millis(50), near.wait_idle()).await.is_err(),
            "the peer did not close"
        );
        let mut got = Vec::new();
        accepted.read_to_end(&mut got).await.unwrap();
        assert_eq!(got.len(), 50_000);
        drop(accepted);
        tokio::join!(near.wait_idle(), far.wait_idle());
    })
    .await;
}

#[tokio::test]
async fn a_configuration_with_which_a_node_would_not_start_is_refused() {
    let [near, far] = nets();
    let _listener = far.listen(7).unwrap();
    let error = within(near.reconfigure(|config| {
        config.firewall.outbound.clear();
        config.lighthouse.hosts = vec!["203.0.113.1".parse().unwrap()];
    }))
    .await
    .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
    assert!(error.get_ref().is_some_and(|cause| cause.is::<nebula_net::StartError>()), "{error:?}");
    within(near.dial("10.42.0.2:7")).await.expect("nothing has changed");
    let changed = within(near.reconfigure(|config| config.firewall.inbound = vec![Rule::any(), Rule::any()])).await;
    assert_eq!(changed.unwrap(), [nebula_core::Part::Firewall]);
}
