//! Who may open connections in clear to and from a captured pod (`capture.clear`), with real packets: pods without a
//! certificate on the same link, on the node and on another one, the node and other nodes, clients that kube-proxy
//! translates, and programs that forge their source.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use nebula_cni_contract::launch::MARK;
use nebula_cni_plugin::link::capture_rules::refused;
use nix::sys::socket::{setsockopt, sockopt};
use serde_json::{Value, json};

use super::BOTH;
use super::site::{FRAMES, Listener, NODE, NODE6, OTHER_NODE, Pod, Primary, REMOTE_SERVICE, SERVICE, Site};

/// A pod of another node that is not enrolled.
const FAR: &str = "10.244.2.9";
const PORT: u16 = 7000;
const UNANSWERED: Duration = Duration::from_millis(300);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Protocol {
    Tcp,
    Udp,
}
use Protocol::{Tcp, Udp};

/// One end: a namespace and its address there.
type End<'a> = (&'a str, &'a str);

fn ends(name: &str, address: &str, port: u16) -> SocketAddr {
    SocketAddr::new(address.parse().unwrap_or_else(|_| panic!("{name} {address}")), port)
}

/// Sockets of captured pods are marked: what the pod sends beside its device, as the instance does for what it passes
/// through.
fn marked(socket: &impl AsFd) -> std::io::Result<()> {
    Ok(setsockopt(socket, sockopt::Mark, &MARK)?)
}

/// Whether a client is answered by a server on port 7000 of `at`, asked by the address and port `to`.
fn is_answered(site: &Site, protocol: Protocol, client: End<'_>, to: SocketAddr, (server, address): End<'_>) -> bool {
    let is_over = &AtomicBool::new(false);
    let here = ends(server, address, PORT);
    thread::scope(|scope| match protocol {
        Tcp => {
            let listener = site.at(server, || TcpListener::bind(here)).unwrap();
            marked(&listener).unwrap();
            listener.set_nonblocking(true).unwrap();
            scope.spawn(move || {
                while !is_over.load(Ordering::Relaxed) {
                    match listener.accept() {
                        Ok((mut stream, _)) => drop(stream.write_all(b"answer")),
                        Err(error) if error.kind() == ErrorKind::WouldBlock => thread::sleep(Duration::from_millis(5)),
                        Err(error) => panic!("{error}"),
                    }
                }
            });
            let asked = site.at(client.0, || Ok(asked_by_tcp(client.1, to)));
            is_over.store(true, Ordering::Relaxed);
            asked.unwrap()
        }
        Udp => {
            let socket = site.at(server, || UdpSocket::bind(here)).unwrap();
            marked(&socket).unwrap();
            socket.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
            scope.spawn(move || {
                while !is_over.load(Ordering::Relaxed) {
                    if let Ok((_, from)) = socket.recv_from(&mut [0; 16]) {
                        let _ = socket.send_to(b"answer", from);
                    }
                }
            });
            let asked = site.at(client.0, || Ok(asked_by_udp(client.1, to)));
            is_over.store(true, Ordering::Relaxed);
            asked.unwrap()
        }
    })
}

fn asked_by_tcp(source: &str, to: SocketAddr) -> bool {
    use nix::sys::socket::{AddressFamily, SockFlag, SockType, SockaddrStorage, bind, connect, socket};
    use std::os::fd::AsRawFd;
    let family = if to.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    let made = socket(family, SockType::Stream, SockFlag::SOCK_CLOEXEC, None).unwrap();
    marked(&made).unwrap();
    bind(made.as_raw_fd(), &SockaddrStorage::from(ends("client", source, 0))).unwrap();
    let patience = nix::sys::time::TimeVal::new(0, 300_000);
    setsockopt(&made, sockopt::SendTimeout, &patience).unwrap();
    if connect(made.as_raw_fd(), &SockaddrStorage::from(to)).is_err() {
        return false;
    }
    let mut stream = TcpStream::from(made);
    stream.set_read_timeout(Some(UNANSWERED)).unwrap();
    stream.read_exact(&mut [0; 6]).is_ok()
}

fn asked_by_udp(source: &str, to: SocketAddr) -> bool {
    let socket = UdpSocket::bind(ends("client", source, 0)).unwrap();
    marked(&socket).unwrap();
    socket.set_read_timeout(Some(UNANSWERED)).unwrap();
    (0..2).any(|_| {
        // A refusal may be reported.
        let _ = socket.send_to(b"question", to);
        socket.recv(&mut [0; 16]).is_ok()
    })
}

fn ping(site: &Site, from: &str, to: &str) -> bool {
    site.succeeds(from, &["ping", "-qc1", "-W1", "-m", &MARK.to_string(), to])
}

/// A site with a captured pod and one that is not enrolled, which the node agent tells the guard as it does.
fn site_with(primary: Primary, capture: &[(&str, Value)]) -> (Site, Pod, Pod) {
    let mut site = Site::new(primary);
    for (key, value) in capture {
        site.node.entry["capture"][*key] = value.clone();
    }
    let (pod, plain) = (site.captured("pod", 7), site.pod("plain", 9));
    site.reach_pods_of_the_other_node();
    let of_pods = [plain.v4() + "/32", plain.v6() + "/128", format!("{FAR}/32"), "fd00:244:2::9/128".to_owned()];
    let of_nodes = [format!("{NODE}/32"), format!("{NODE6}/128"), "10.244.2.1/32".to_owned()];
    let clear: Vec<&str> = of_pods.iter().chain(&of_nodes).map(String::as_str).collect();
    assert!(site.set_clear(&clear));
    (site, pod, plain)
}

/// Clients without a certificate: namespace and addresses. The last is another node, which its kubelet and pods in
/// its network use as well.
fn strangers(plain: &Pod) -> [(&'static str, String, String); 3] {
    [
        ("plain", plain.v4(), plain.v6()),
        ("other", FAR.to_owned(), "fd00:244:2::9".to_owned()),
        ("other", OTHER_NODE.to_owned(), "2001:db8::2".to_owned()),
    ]
}

#[test]
#[ignore = "needs root and network namespaces"]
fn whoever_has_no_certificate_can_open_nothing_to_a_pod_that_may_open_what_it_wants_to() {
    for primary in BOTH {
        let (site, pod, plain) = site_with(primary, &[]);
        for (name, v4, v6) in strangers(&plain) {
            for (theirs, ours) in [(&v4, pod.v4()), (&v6, pod.v6())] {
                let what = format!("{primary:?} {name} {theirs}");
                for protocol in [Tcp, Udp] {
                    let to_pod = is_answered(&site, protocol, (name, theirs), ends(name, &ours, PORT), ("pod", &ours));
                    assert!(!to_pod, "{what} opens {protocol:?} to the pod");
                    let by_pod = is_answered(&site, protocol, ("pod", &ours), ends(name, theirs, PORT), (name, theirs));
                    assert!(by_pod, "{what} does not answer the pod by {protocol:?}");
                }
                assert!(ping(&site, "pod", theirs), "{what} is not answered by ping");
                assert!(!site.succeeds(name, &["ping", "-qc1", "-W1", "-I", theirs, &ours]), "{what} pings the pod");
            }
        }
        // The node, as the kubelet does with probes.
        for (node, ours) in [(NODE, pod.v4()), (NODE6, pod.v6())] {
            for protocol in [Tcp, Udp] {
                let probed = is_answered(&site, protocol, ("node", node), ends("node", &ours, PORT), ("pod", &ours));
                assert!(probed, "{primary:?} {node} {protocol:?}");
                let asked = is_answered(&site, protocol, ("pod", &ours), ends("node", node, PORT), ("node", node));
                assert!(asked, "{primary:?} the pod asks {node} {protocol:?}");
            }
            assert!(ping(&site, "node", &ours) && ping(&site, "pod", node), "{primary:?} {node}");
        }
        let counts = site.at("node", refused).unwrap();
        let end = pod.host_end();
        let is_counted = |(link, reason, packets): &(Option<String>, String, u64)| {
            link.as_deref() == Some(end.as_str()) && reason.starts_with("from somebody without") && *packets > 0
        };
        assert!(counts.iter().any(is_counted), "{counts:?}");
        site.call("DEL", &pod).expect_ok();
        assert_eq!(site.rules(), "");
    }
}

#[test]
#[ignore = "needs root and network namespaces"]
fn what_kube_proxy_translates_is_answered_for_the_pod_and_refused_for_others() {
    for primary in BOTH {
        let (site, pod, plain) = site_with(primary, &[]);
        // Cluster DNS, say: a Service whose endpoint is not enrolled.
        site.serve(REMOTE_SERVICE, FAR);
        // Services that lead to the pod; as a node port and what comes from outside, the second one has the node as
        // its source.
        site.serve(SERVICE, &pod.v4());
        site.serve_masqueraded("10.96.0.7", &pod.v4());
        let (ours, theirs) = (pod.v4(), plain.v4());
        for protocol in [Tcp, Udp] {
            let to = ends("service", REMOTE_SERVICE, PORT);
            assert!(is_answered(&site, protocol, ("pod", &ours), to, ("other", FAR)), "{primary:?} {protocol:?}");
            for (service, client) in [
                (SERVICE, ("plain", theirs.as_str())),
                ("10.96.0.7", ("plain", &theirs)),
                ("10.96.0.7", ("other", OTHER_NODE)),
            ] {
                let to = ends("service", service, PORT);
                let is_reached = is_answered(&site, protocol, client, to, ("pod", &ours));
                assert!(!is_reached, "{primary:?} {client:?} reaches the pod by {protocol:?} and {service}");
            }
            // A program of the node.
            let to = ends("service", SERVICE, PORT);
            assert!(is_answered(&site, protocol, ("node", "0.0.0.0"), to, ("pod", &ours)), "{primary:?} {protocol:?}");
        }
    }
}

#[test]
#[ignore = "needs root and network namespaces"]
fn accepted_ports_are_open_to_the_named_clients_and_to_nobody_who_is_or_may_be_enrolled() {
    let accept =
        json!([{"port": "6999-7000"}, {"port": 7000, "proto": "udp", "from": ["10.244.0.0/16", "fd00:244::/32"]}]);
    for primary in BOTH {
        for clear in ["outgoing", "deny"] {
            let (site, pod, plain) = site_with(primary, &[("accept", accept.clone()), ("clear", json!(clear))]);
            let ours = pod.v4();
            for (name, theirs, _) in strangers(&plain) {
                let answered =
                    |protocol| is_answered(&site, protocol, (name, &theirs), ends(name, &ours, PORT), ("pod", &ours));
                let in_range = theirs.starts_with("10.244.");
                assert!(answered(Tcp), "{primary:?} {clear} {name} {theirs}");
                assert_eq!(answered(Udp), in_range, "{primary:?} {clear} {name} {theirs}");
            }
            let v6 = pod.v6();
            for protocol in [Tcp, Udp] {
                let answered =
                    is_answered(&site, protocol, ("plain", &plain.v6()), ends("pod", &v6, PORT), ("pod", &v6));
                assert!(answered, "{primary:?} {clear} {protocol:?} by IPv6");
            }
            // Of this one nothing is known: it may be enrolled.
            site.set_clear(&[]);
            for protocol in [Tcp, Udp] {
                let theirs = plain.v4();
                assert!(!is_answered(&site, protocol, ("plain", &theirs), ends("plain", &ours, PORT), ("pod", &ours)));
            }
        }
    }
}

#[test]
#[ignore = "needs root and network namespaces"]
fn denied_clear_leaves_the_node_and_what_is_excluded() {
    for primary in BOTH {
        // Cluster DNS.
        let exclude = json!([format!("{REMOTE_SERVICE}/32")]);
        let (site, pod, plain) = site_with(primary, &[("clear", json!("deny")), ("exclude", exclude)]);
        site.serve(REMOTE_SERVICE, FAR);
        for (name, v4, v6) in strangers(&plain) {
            for (theirs, ours) in [(&v4, pod.v4()), (&v6, pod.v6())] {
                for protocol in [Tcp, Udp] {
                    let what = format!("{primary:?} {name} {theirs} {protocol:?}");
                    let to_pod = is_answered(&site, protocol, (name, theirs), ends(name, &ours, PORT), ("pod", &ours));
                    let by_pod = is_answered(&site, protocol, ("pod", &ours), ends(name, theirs, PORT), (name, theirs));
                    assert!(!to_pod && !by_pod, "{what}: to the pod {to_pod}, by the pod {by_pod}");
                }
                assert!(!ping(&site, "pod", theirs), "{primary:?} {theirs}");
            }
        }
        let ours = pod.v4();
        for protocol in [Tcp, Udp] {
            let to = ends("service", REMOTE_SERVICE, PORT);
            assert!(is_answered(&site, protocol, ("pod", &ours), to, ("other", FAR)), "{primary:?} {protocol:?}");
        }
        for (node, ours) in [(NODE, pod.v4()), (NODE6, pod.v6())] {
            for protocol in [Tcp, Udp] {
                let probed = is_answered(&site, protocol, ("node", node), ends("node", &ours, PORT), ("pod", &ours));
                let asked = is_answered(&site, protocol, ("pod", &ours), ends("node", node, PORT), ("node", node));
                assert!(probed && asked, "{primary:?} {node} {protocol:?}: probed {probed}, asked {asked}");
            }
            assert!(ping(&site, "node", &ours) && ping(&site, "pod", node), "{primary:?} {node}");
        }
    }
}

#[test]
#[ignore = "needs root and network namespaces"]
fn no_forged_source_opens_anything_on_the_pod_s_own_link() {
    for clear in ["outgoing", "deny"] {
        let (mut site, pod, _plain) = site_with(Primary::Bridge, &[("clear", json!(clear))]);
        let bare = site.pod("bare", 8);
        let forged = |to: &Pod| {
            let parameters = json!({"mac": site.mac("plain", "eth0"), "pod_mac": site.mac(&to.name, "eth0"), "pod4": to.v4(),
                "pod6": to.v6(), "plain4": "10.244.1.9", "plain6": "fd00:244:1::9", "node4": NODE, "node6": NODE6,
                "service4": SERVICE, "outside4": "203.0.113.9", "other_node4": OTHER_NODE});
            let listener = Listener::start(&site, &to.name, &[]);
            site.inside("plain", &["python3", FRAMES, "send", "eth0", "clear", &parameters.to_string()]);
            listener.heard().into_iter().map(|heard| heard.replace(" on eth0", "")).collect::<Vec<_>>()
        };
        let control = forged(&bare);
        for name in
            ["udp@node", "syn@service", "echo@outside", "udp6@plain", "6 bytes in a frame of type 0800", "uncovered"]
        {
            assert!(control.iter().any(|heard| heard == name), "{name}: {control:?}");
        }
        let heard = forged(&pod);
        // They belong to no connection: the pod's kernel answers the former with a reset, and waits in vain for the
        // rest of the latter.
        let harmless = |name: &&String| !name.starts_with("ack@") && !name.starts_with("last-fragment@");
        let through: Vec<&String> = heard.iter().filter(harmless).collect();
        assert!(through.is_empty(), "{clear}: {through:?}");
        assert!(
            clear == "outgoing" || heard.is_empty() || heard.iter().all(|name| name.ends_with("@node")),
            "{heard:?}"
        );
    }
}

#[test]
#[ignore = "needs root and network namespaces"]
fn an_address_that_no_range_has_fails_add_and_nothing_passes_from_or_to_one_that_comes_later() {
    for primary in BOTH {
        let mut site = Site::new(primary);
        site.node.entry["overlay"] = json!(["10.244.0.0/16"]);
        let (pod, plain) = (site.pod("pod", 7), site.pod("plain", 9));
        let error = site.call("ADD", &pod).error();
        assert_eq!(error["code"], 118, "{error}");
        let says = error["msg"].as_str().unwrap();
        assert!(says.contains(&pod.v6()) && says.contains("capture.ranges"), "{error}");
        assert_eq!(site.rules(), "");
        // The operator says that IPv6 may be in clear.
        site.node.entry["capture"]["exclude"] = json!(["fd00:244::/32"]);
        site.add_v4_only(&pod);
        site.call("CHECK", &pod).expect_ok();
        site.set_clear(&[&(plain.v4() + "/32")]);
        let (ours, theirs) = (pod.v6(), plain.v6());
        assert!(is_answered(&site, Udp, ("pod", &ours), ends("plain", &theirs, PORT), ("plain", &theirs)));
        assert!(!is_answered(&site, Udp, ("plain", &theirs), ends("pod", &ours, PORT), ("pod", &ours)));
        // One more address, by which the pod could be reached around its rules.
        let [later, of_plain] = [(&pod, "172.16.0.7"), (&plain, "172.16.0.9")].map(|(pod, address)| {
            site.inside(&pod.name, &["ip", "addr", "add", &format!("{address}/32"), "dev", "eth0"]);
            site.inside("node", &["ip", "route", "add", address, "via", &pod.v4(), "dev", &site.way_to(pod), "onlink"]);
            address
        });
        assert!(is_answered(&site, Udp, ("node", NODE), ends("plain", of_plain, PORT), ("plain", of_plain)));
        for protocol in [Tcp, Udp] {
            assert!(
                !is_answered(&site, protocol, ("node", NODE), ends("pod", later, PORT), ("pod", later)),
                "{primary:?}"
            );
            assert!(
                !is_answered(&site, protocol, ("pod", later), ends("node", NODE, PORT), ("node", NODE)),
                "{primary:?}"
            );
        }
        let error = site.call("CHECK", &pod).error();
        assert!(error["code"] == 118 && error["msg"].as_str().unwrap().contains(later), "{error}");
    }
}
