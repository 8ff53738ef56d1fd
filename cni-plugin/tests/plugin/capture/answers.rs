//! What arrives on a captured pod's own interface is answered there, although nobody reads its device: probes of the
//! node, clients outside the cluster, pods without enrolment.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::thread;
use std::time::Duration;

use super::BOTH;
use super::site::{OTHER_NODE, Pod, Primary, Site};

const WITHIN: Duration = Duration::from_secs(2);

/// Serves one TCP connection and one datagram in the pod, and returns whether a client at `from` was answered by each.
fn answered(site: &Site, pod: &Pod, from: &str, source: &str, address: &str) -> (bool, bool) {
    let (listener, server) =
        site.at(&pod.name, || Ok((TcpListener::bind((address, 0))?, UdpSocket::bind((address, 0))?))).unwrap();
    let (tcp, udp) = (listener.local_addr().unwrap(), server.local_addr().unwrap());
    listener.set_nonblocking(true).unwrap();
    server.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..50 {
                match listener.accept() {
                    Ok((mut stream, _)) => {
                        stream.set_nonblocking(false).unwrap();
                        stream.set_read_timeout(Some(WITHIN)).unwrap();
                        let mut text = [0; 4];
                        let _ = stream.read_exact(&mut text).and_then(|()| stream.write_all(&text));
                        break;
                    }
                    Err(error) if error.kind() == ErrorKind::WouldBlock => thread::sleep(Duration::from_millis(50)),
                    Err(error) => panic!("{error}"),
                }
            }
        });
        scope.spawn(|| {
            let mut text = [0; 4];
            if let Ok((4, client)) = server.recv_from(&mut text) {
                let _ = server.send_to(&text, client);
            }
        });
        let client = || Ok((asked_by_tcp(tcp), asked_by_udp(source, udp)));
        site.at(from, client).unwrap()
    })
}

/// From the source that the namespace's route has.
fn asked_by_tcp(server: SocketAddr) -> bool {
    let Ok(mut stream) = TcpStream::connect_timeout(&server, WITHIN) else { return false };
    stream.set_read_timeout(Some(WITHIN)).unwrap();
    let mut text = [0; 4];
    stream.write_all(b"ping").and_then(|()| stream.read_exact(&mut text)).is_ok() && text == *b"ping"
}

fn asked_by_udp(source: &str, server: SocketAddr) -> bool {
    let socket = UdpSocket::bind((source, 0)).unwrap();
    socket.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
    let mut text = [0; 4];
    socket.send_to(b"ping", server).is_ok() && matches!(socket.recv_from(&mut text), Ok((4, _)))
}

#[test]
#[ignore = "needs root and network namespaces"]
fn the_node_and_clients_outside_are_answered_with_a_dead_device() {
    for primary in BOTH {
        let mut site = Site::new(primary);
        site.node.entry["capture"]["clear"] = "allow".into();
        let pod = site.captured("pod", 7);
        for (from, source) in [("node", "0.0.0.0"), ("other", OTHER_NODE)] {
            let (tcp, udp) = answered(&site, &pod, from, source, &pod.v4());
            assert!(tcp && udp, "{primary:?} {from}: TCP {tcp}, UDP {udp}");
            assert!(site.succeeds(from, &["ping", "-qc1", "-W2", &pod.v4()]), "{primary:?} {from}");
        }
        if primary == Primary::Bridge {
            let (tcp, udp) = answered(&site, &pod, "node", "::", &pod.v6());
            assert!(tcp && udp, "IPv6: TCP {tcp}, UDP {udp}");
            assert!(site.succeeds("node", &["ping", "-qc1", "-W2", &pod.v6()]));
        }
        // A closed port is refused, not silent: the reset carries the mark as well.
        let refused =
            site.at("other", || Ok(TcpStream::connect_timeout(&SocketAddr::new(pod.v4().parse().unwrap(), 9), WITHIN)));
        assert_eq!(refused.unwrap().unwrap_err().kind(), ErrorKind::ConnectionRefused, "{primary:?}");
    }
}

#[test]
#[ignore = "needs root and network namespaces"]
fn a_pod_known_to_be_clear_is_answered_and_an_enrolled_one_is_not() {
    for primary in BOTH {
        let mut site = Site::new(primary);
        site.node.entry["capture"]["clear"] = "allow".into();
        let pod = site.captured("pod", 7);
        let clear = site.pod("clear", 9);
        site.inside("other", &["ip", "route", "change", "10.244.1.0/24", "via", "192.0.2.1", "src", "10.244.2.9"]);
        for (from, source) in [("clear", clear.v4()), ("other", "10.244.2.9".to_owned())] {
            assert_eq!(answered(&site, &pod, from, &source, &pod.v4()), (false, false), "{primary:?} {from}");
        }
        site.set_clear(&[&format!("{}/32", clear.v4()), "10.244.2.9/32"]);
        for (from, source) in [("clear", clear.v4()), ("other", "10.244.2.9".to_owned())] {
            // Answers of UDP go through the instance, which does not run.
            assert_eq!(answered(&site, &pod, from, &source, &pod.v4()), (true, false), "{primary:?} {from}");
            assert!(site.succeeds(from, &["ping", "-qc1", "-W2", &pod.v4()]), "{primary:?} {from}");
        }
        assert!(!site.succeeds("pod", &["ping", "-qc1", "-W1", &clear.v4()]), "what the pod begins goes to the device");
    }
}
