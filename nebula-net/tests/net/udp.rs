//! UDP between nodes of this process.

use std::future::poll_fn;
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::sync::Arc;

use futures_util::future::poll_immediate;
use nebula_net::{Net, UdpSocket};
use tokio::io::ReadBuf;

use crate::common::overlay;
use crate::gateway::Gateway;
use crate::{nets, within};

/// A socket of each node, that of the far one at port 53.
fn sockets(near: &Net, far: &Net) -> (UdpSocket, UdpSocket, SocketAddr) {
    (near.bind_udp(0).expect("free"), far.bind_udp(53).expect("free"), SocketAddr::new(overlay(2).into(), 53))
}

#[tokio::test]
async fn datagrams_go_both_ways_and_say_who_sent_them() {
    let [near, far] = nets();
    let (here, there, to) = sockets(&near, &far);
    assert_eq!(here.send_to(b"question", to).await.unwrap(), 8);
    let question = within(there.recv()).await.unwrap();
    assert_eq!(
        (question.payload.as_slice(), question.from),
        (&b"question"[..], SocketAddr::new(overlay(1).into(), here.port()))
    );
    assert_eq!(there.peer_certificate(&question).unwrap().name(), "host-1");
    there.send_to(b"answer", question.from).await.unwrap();
    let mut buffer = [0; 4];
    // As of any datagram socket, the rest is gone.
    assert_eq!(within(here.recv_from(&mut buffer)).await.unwrap(), (4, to));
    assert_eq!(&buffer, b"answ");
    assert_eq!(here.try_recv_from(&mut buffer).unwrap_err().kind(), ErrorKind::WouldBlock);
    // Without its tunnel, nobody vouches for the datagram any more.
    near.close();
    within(near.closed()).await;
    let gone = async {
        while there.peer_certificate(&question).is_some() {
            tokio::task::yield_now().await
        }
    };
    within(gone).await;
}

#[tokio::test]
async fn a_datagram_of_a_host_behind_a_gateway_has_no_certificate() {
    let [(socket, mut config), (far_socket, far)] = crate::common::hosts().unwrap();
    config.firewall.default_local_cidr_any = true;
    let far = Net::builder(far).socket(far_socket).start().unwrap();
    let there = far.bind_udp(53).unwrap();
    let gateway = tokio::task::spawn_blocking(move || {
        let mut gateway = Gateway::start(socket, config);
        gateway.connect(overlay(2).into());
        gateway.datagram([172, 20, 1, 9], [10, 42, 0, 2]);
    });
    let datagram = within(there.recv()).await.unwrap();
    assert_eq!(datagram.from.ip(), std::net::IpAddr::from([172, 20, 1, 9]));
    assert!(there.peer_certificate(&datagram).is_none());
    gateway.await.unwrap();
}

#[tokio::test]
async fn what_cannot_be_sent_or_bound_is_told() {
    let [near, far] = nets();
    let (here, _there, to) = sockets(&near, &far);
    let most = here.max_datagram(to.ip());
    assert_eq!(most, 1272);
    let error = here.send_to(&vec![0; most + 1], to).await.unwrap_err();
    assert_eq!(error.raw_os_error(), Some(nix::errno::Errno::EMSGSIZE as i32));
    assert_eq!(here.try_send_to(&vec![0; most], to).unwrap(), most);
    let strange = "10.42.0.9:53".parse().unwrap();
    assert_eq!(near.bind_udp_at(strange).unwrap_err().kind(), ErrorKind::AddrNotAvailable);
    assert_eq!(near.listen_at(strange).unwrap_err().kind(), ErrorKind::AddrNotAvailable);
    let own = SocketAddr::new(overlay(1).into(), 53);
    let bound = near.bind_udp_at(own).unwrap();
    assert_eq!(bound.local_addr().unwrap(), own);
    assert_eq!(near.bind_udp_at(own).unwrap_err().kind(), ErrorKind::AddrInUse);
    let any = near.bind_udp_at("0.0.0.0:99".parse().unwrap()).unwrap();
    assert_eq!(any.local_addr().unwrap().to_string(), "0.0.0.0:99");
    assert_eq!(near.bind_udp(99).unwrap_err().kind(), ErrorKind::AddrInUse);
}

#[tokio::test]
async fn who_polls_by_hand_is_woken() {
    let [near, far] = nets();
    let (here, there, to) = sockets(&near, &far);
    let there = Arc::new(there);
    let receiving = tokio::spawn({
        let there = Arc::clone(&there);
        async move {
            let mut memory = [0; 100];
            let mut buffer = ReadBuf::new(&mut memory);
            let from = poll_fn(|context| there.poll_recv_from(context, &mut buffer)).await.unwrap();
            (from.port(), buffer.filled().to_vec())
        }
    });
    assert_eq!(poll_fn(|context| here.poll_send_to(context, b"x", to)).await.unwrap(), 1);
    assert_eq!(within(receiving).await.unwrap(), (here.port(), b"x".to_vec()));
}

/// The node does not run between two calls of a task that does not wait.
#[tokio::test(flavor = "current_thread")]
async fn a_sender_waits_while_too_many_datagrams_do() {
    let [near, far] = nets();
    let (here, there, to) = sockets(&near, &far);
    within(near.up(to.ip())).await.unwrap();
    for len in [1200, 1] {
        let full =
            std::iter::repeat_with(|| here.try_send_to(&[7; 1200][..len], to)).take(10_000).find_map(Result::err);
        assert_eq!(full.unwrap().kind(), ErrorKind::WouldBlock);
    }
    let mut first = Box::pin(here.send_to(b"nobody sends this", to));
    assert!(poll_immediate(&mut first).await.is_none());
    let mut waiting = Box::pin(here.send_to(b"the last", to));
    let mut ready = Box::pin(here.writable());
    assert!(poll_immediate(&mut waiting).await.is_none() && poll_immediate(&mut ready).await.is_none());
    assert!(poll_immediate(poll_fn(|context| here.poll_send_ready(context))).await.is_none());
    // A turn that is given up is the next one's.
    drop(first);
    assert_eq!(within(waiting).await.unwrap(), 8);
    within(ready).await.unwrap();
    within(poll_fn(|context| here.poll_send_ready(context))).await.unwrap();
    within(there.readable()).await.unwrap();
    assert_eq!(there.try_recv().unwrap().payload, [7; 1200]);
}

#[tokio::test]
async fn a_task_that_only_looks_whether_there_is_a_datagram_keeps_it_from_nobody() {
    let [near, far] = nets();
    let (here, there, to) = sockets(&near, &far);
    let mut looking = Box::pin(there.readable());
    let mut taking = Box::pin(there.recv());
    assert!(poll_immediate(&mut looking).await.is_none() && poll_immediate(&mut taking).await.is_none());
    here.send_to(b"x", to).await.unwrap();
    within(looking).await.unwrap();
    assert_eq!(within(taking).await.unwrap().payload, b"x");
}
