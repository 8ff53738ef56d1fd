//! Who listens at a port of a pod, by the socket tables of its network namespace (proc_net(5)).

use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::Path;

use nebula_cni_contract::launch::Target;
use nebula_cni_contract::netns::{Namespaces, SystemNamespaces, in_namespace};
use nebula_cni_contract::why::Listener;

use crate::host_root::HostRoot;

/// Who listens for what is sent to `port` of `address` in the pod of an attachment; `None` if that cannot be seen.
pub(super) fn of(host: &HostRoot, target: &Target, protocol: u8, port: u16, address: IpAddr) -> Option<Listener> {
    let names = match protocol {
        6 => ["tcp", "tcp6"],
        UDP => ["udp", "udp6"],
        _ => return None,
    };
    // Namespaces are mounts of the node: only its first process surely sees them.
    let host = HostRoot::new(host.path().map(|_| NODE.into()));
    let netns = SystemNamespaces.open(&host.resolve(&target.netns)).ok().filter(|netns| netns.id == target.netns_id)?;
    let read = |name: &str| match fs::read_to_string(Path::new("/proc/thread-self/net").join(name)) {
        // A kernel without IPv6 has no such file.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(String::new()),
        other => other,
    };
    let tables = in_namespace(&netns.file, || Ok([read(names[0])?, read(names[1])?])).ok()?;
    let sockets = tables.iter().flat_map(|table| sockets(table, protocol));
    Some(judge(sockets.filter(|(_, own)| *own == port).map(|(bound, _)| bound), address))
}

/// Which of the addresses that sockets are bound to is reached at `address`.
fn judge(bound: impl Iterator<Item = IpAddr>, address: IpAddr) -> Listener {
    let mut found = Listener::Nobody;
    for own in bound {
        let canonical = own.to_canonical();
        // A socket bound to :: usually takes IPv4, too; the table does not say.
        let is_any = canonical.is_unspecified() && (own.is_ipv6() || address.is_ipv4());
        if is_any
            || (canonical.is_ipv4() == address.is_ipv4() && !canonical.is_loopback() && !canonical.is_unspecified())
        {
            return Listener::Reachable;
        }
        if canonical.is_loopback() {
            found = Listener::LoopbackOnly;
        } else if found == Listener::Nobody {
            found = Listener::OtherFamily;
        }
    }
    found
}

/// Addresses and ports of the sockets in a table that take what comes from anybody.
fn sockets(table: &str, protocol: u8) -> impl Iterator<Item = (IpAddr, u16)> {
    let wanted = if protocol == UDP { UNCONNECTED } else { LISTEN };
    table.lines().skip(1).filter_map(move |line| {
        let mut words = line.split_ascii_whitespace().skip(1);
        let (local, _, state) = (words.next()?, words.next()?, words.next()?);
        let (address, port) = local.split_once(':')?;
        (state == wanted).then(|| Some((self::address(address)?, u16::from_str_radix(port, 16).ok()?)))?
    })
}

/// An address as the kernel prints it: words of 32 bits in the order of this machine.
fn address(text: &str) -> Option<IpAddr> {
    let word = |at: usize| u32::from_str_radix(text.get(at..at + 8)?, 16).ok().map(u32::to_ne_bytes);
    match text.len() {
        8 => Some(Ipv4Addr::from(word(0)?).into()),
        32 => {
            let mut octets = [0; 16];
            for (n, part) in octets.chunks_exact_mut(4).enumerate() {
                part.copy_from_slice(&word(n * 8)?);
            }
            Some(Ipv6Addr::from(octets).into())
        }
        _ => None,
    }
}

/// States (include/net/tcp_states.h), as the tables print them.
const UDP: u8 = 17;
const LISTEN: &str = "0A";
const UNCONNECTED: &str = "07";
/// The node's files as its first process sees them.
const NODE: &str = "/proc/1/root";

#[cfg(test)]
mod tests {
    use std::net::{SocketAddr, TcpListener, UdpSocket};

    use super::*;

    fn judged(bound: &[&str], address: &str) -> Listener {
        judge(bound.iter().map(|text| text.parse().unwrap()), address.parse().unwrap())
    }

    #[test]
    fn a_socket_is_reached_by_its_family_and_unless_it_is_on_loopback() {
        for (bound, expected) in [
            (&[][..], Listener::Nobody),
            (&["0.0.0.0"], Listener::Reachable),
            (&["::"], Listener::Reachable),
            (&["10.0.0.7"], Listener::Reachable),
            (&["::ffff:10.0.0.7"], Listener::Reachable),
            (&["127.0.0.1"], Listener::LoopbackOnly),
            (&["::1", "127.0.0.53"], Listener::LoopbackOnly),
            (&["127.0.0.1", "10.0.0.7"], Listener::Reachable),
            (&["fd00::7"], Listener::OtherFamily),
        ] {
            assert_eq!(judged(bound, "10.0.0.7"), expected, "{bound:?}");
        }
        assert_eq!(judged(&["0.0.0.0"], "fd00::7"), Listener::OtherFamily);
        assert_eq!(judged(&["::"], "fd00::7"), Listener::Reachable);
    }

    #[test]
    fn sockets_of_this_process_are_in_the_kernel_s_tables() {
        let table = |name: &str| fs::read_to_string(format!("/proc/thread-self/net/{name}")).unwrap();
        let has = |name: &str, protocol, end: SocketAddr| {
            sockets(&table(name), protocol).any(|found| found == (end.ip(), end.port()))
        };
        let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
        let udp = UdpSocket::bind("127.0.0.1:0").unwrap();
        assert!(has("tcp", 6, tcp.local_addr().unwrap()));
        assert!(has("udp", UDP, udp.local_addr().unwrap()));
        // A connected socket takes nothing from others.
        udp.connect(tcp.local_addr().unwrap()).unwrap();
        assert!(!has("udp", UDP, udp.local_addr().unwrap()));
        if let Ok(tcp) = TcpListener::bind("[::1]:0") {
            assert!(has("tcp6", 6, tcp.local_addr().unwrap()));
        }
        for garbage in [
            "",
            "sl\n 0: zz:1 0 0A",
            "sl\n0: 0100007F 0 0A",
            "sl\n0: 0100007F:1 0",
            "sl\n0: \u{e9}\u{e9}\u{e9}\u{e9}:1 0 0A",
        ] {
            assert_eq!(sockets(garbage, 6).count(), 0, "{garbage}");
        }
    }
}
