//! The connections of a pod's programs to pods and Services, as its kernel knows them (sock_diag(7)): when an
//! instance starts for a pod that already runs, they were opened through the instance before it.

use std::io;
use std::net::IpAddr;

use ipnet::IpNet;
use nebula_cni_contract::netlink;
use nebula_core::{FlowKey, protocol};
use nebula_linux::netns::Namespace;
use nix::libc;
use nix::sys::socket::SockProtocol;

/// Flows of connected TCP and UDP sockets in the pod whose other end is in `ranges` or has one of `ports`, first to
/// last. Those that cannot be listed count as none: then only what the pod itself sends next finds its endpoint
/// again.
pub(crate) fn to(namespace: &Namespace, ranges: &[IpNet], ports: Option<(u16, u16)>) -> Vec<FlowKey> {
    let listed = namespace.run("connections", || {
        let mut flows = Vec::new();
        for (protocol, states) in [(protocol::TCP, TCP_STATES), (protocol::UDP, 1 << ESTABLISHED)] {
            for family in [libc::AF_INET, libc::AF_INET6] {
                flows.extend(list(family, protocol, states)?);
            }
        }
        io::Result::Ok(flows)
    });
    let listed = listed.map_err(io::Error::other).and_then(|listed| listed);
    let mut flows = listed.unwrap_or_else(|error| {
        tracing::info!(%error, "Cannot list the pod's connections: the next packet of each must be the pod's own");
        Vec::new()
    });
    let has_port = |port: u16| ports.is_some_and(|(first, last)| (first..=last).contains(&port));
    flows.retain(|flow| ranges.iter().any(|range| range.contains(&flow.remote)) || has_port(flow.remote_port));
    flows
}

/// The connected sockets of a family and a protocol in this thread's network namespace.
fn list(family: i32, protocol: u8, states: u32) -> io::Result<impl Iterator<Item = FlowKey>> {
    // struct inet_diag_req_v2 (linux/inet_diag.h).
    let mut body = vec![family as u8, protocol, 0, 0];
    body.extend(states.to_ne_bytes());
    body.extend([0; 48]);
    let mut request = Vec::new();
    netlink::push_message(&mut request, SOCK_DIAG_BY_FAMILY, libc::NLM_F_DUMP, 1, &body);
    let replies = netlink::dump(&netlink::connect(SockProtocol::NetlinkSockDiag)?, &request)?;
    Ok(replies.into_iter().filter_map(move |reply| flow(&reply, protocol)))
}

/// Reads a struct inet_diag_msg; `None` if it is cut short.
fn flow(reply: &[u8], protocol: u8) -> Option<FlowKey> {
    let port = |at: usize| Some(u16::from_be_bytes(*reply.get(at..)?.first_chunk()?));
    let address = |at: usize| {
        let octets = reply.get(at..)?.first_chunk::<16>()?;
        let is_v4 = i32::from(*reply.first()?) == libc::AF_INET;
        // A socket of IPv6 may speak IPv4.
        Some(if is_v4 { IpAddr::from(*octets.first_chunk::<4>()?) } else { IpAddr::from(*octets).to_canonical() })
    };
    let (local_port, remote_port) = (port(4)?, port(6)?);
    let (local, remote) = (address(8)?, address(24)?);
    Some(FlowKey { local, remote, local_port, remote_port, protocol, fragment: false })
}

const SOCK_DIAG_BY_FAMILY: u16 = 20;
/// Numbers of states (include/net/tcp_states.h).
const ESTABLISHED: u32 = 1;
/// Those in which data or the end of the connection may still come from the other side.
const TCP_STATES: u32 = 1 << ESTABLISHED | 1 << 4 | 1 << 5 | 1 << 8 | 1 << 9 | 1 << 11;

#[cfg(test)]
mod tests {
    use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};

    use super::*;

    /// Whether a connection between these ends is listed, seen from the first of them.
    fn is_listed(flows: &[FlowKey], protocol: u8, local: SocketAddr, remote: SocketAddr) -> bool {
        let expected = FlowKey {
            local: local.ip().to_canonical(),
            remote: remote.ip().to_canonical(),
            local_port: local.port(),
            remote_port: remote.port(),
            protocol,
            fragment: false,
        };
        flows.contains(&expected)
    }

    #[test]
    fn connected_sockets_to_the_ranges_are_listed_in_both_families() {
        for (at, range) in
            [("127.0.0.1:0", "127.0.0.0/8"), ("[::1]:0", "::1/128"), ("[::ffff:127.0.0.1]:0", "127.0.0.0/8")]
        {
            let Ok(listener) = TcpListener::bind(at) else {
                assert!(at.starts_with("[::1]"), "only IPv6 may be missing");
                continue;
            };
            let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let datagrams = UdpSocket::bind(at).unwrap();
            datagrams.connect(listener.local_addr().unwrap()).unwrap();
            let ends = (client.local_addr().unwrap(), client.peer_addr().unwrap());
            let flows = to(&Namespace::Own, &[range.parse().unwrap()], None);
            assert!(is_listed(&flows, protocol::TCP, ends.0, ends.1), "{at}: {flows:?}");
            let ends = (datagrams.local_addr().unwrap(), datagrams.peer_addr().unwrap());
            assert!(is_listed(&flows, protocol::UDP, ends.0, ends.1), "{at}: {flows:?}");
            let others = to(&Namespace::Own, &["10.96.0.0/12".parse().unwrap()], None);
            assert!(!is_listed(&others, protocol::TCP, client.local_addr().unwrap(), client.peer_addr().unwrap()));
        }
    }

    #[test]
    fn a_reply_that_is_cut_short_is_no_connection() {
        let mut reply = vec![0; 72];
        reply[0] = libc::AF_INET6 as u8;
        assert!(flow(&reply, protocol::TCP).is_some());
        for length in 0..40 {
            assert_eq!(flow(&reply[..length], protocol::TCP), None);
        }
    }
}
