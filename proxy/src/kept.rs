//! The sockets that outlive this process under systemd: the UDP port of the node, the listeners, and the UDP ports of
//! forwards. While no proxy runs, systemd holds them: what arrives waits for the next one, nobody is refused, and no
//! other program can take a port that clients trust with their passwords.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::slice;

use nebula_core::io::{UdpSocket, check_kind, without_missing_v6};
use nebula_linux::descriptors::Passed;
use nebula_linux::store::{Store, UDP, UDP_ANY_PORT, udp_name};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, getsockopt, socket, sockopt};
use tokio::net::{TcpListener, TcpSocket};

use crate::arguments::{Offers, Transport};

/// Sockets by the address to which they are bound.
type Bound = Vec<(SocketAddr, OwnedFd)>;

/// What the last run left, as far as it fits, and what is to be kept of this one.
pub(crate) struct Kept {
    store: Store,
    listeners: Bound,
    forwards: Bound,
    /// What this run opened, by name.
    opened: Vec<(&'static str, OwnedFd)>,
}

impl Kept {
    /// Closes what does not fit, so that its port is free.
    pub(crate) fn new(passed: io::Result<Vec<Passed>>, offers: &Offers) -> Self {
        let of = |transport| offers.forwards.iter().filter(move |forward| forward.transport == transport);
        let tcp = of(Transport::Tcp).map(|forward| &forward.local);
        let listeners = offers.socks.iter().chain(&offers.http).chain(tcp).copied();
        let mut listeners: Vec<_> = listeners.map(without_missing_v6).collect();
        let mut forwards: Vec<_> = of(Transport::Udp).map(|forward| without_missing_v6(forward.local)).collect();
        let mut store = Store::new(passed, &NAMES);
        Self {
            listeners: store.adopt_each(LISTENER, |file| check_listener(file, &mut listeners)),
            forwards: store.adopt_each(UDP_FORWARD, |file| check_forward(file, &mut forwards)),
            store,
            opened: Vec::new(),
        }
    }

    /// The socket of the node.
    ///
    /// # Errors
    /// Returns an error if no socket could be bound.
    pub(crate) fn underlay(&mut self, listen: SocketAddr) -> io::Result<std::net::UdpSocket> {
        let adopt = |kept: Vec<OwnedFd>| {
            UdpSocket::check_kept(&kept, listen, 1)?;
            kept.into_iter().next().map(Into::into).ok_or_else(|| io::ErrorKind::NotFound.into())
        };
        let socket = self.store.udp(listen, adopt, || std::net::UdpSocket::bind(without_missing_v6(listen)))?;
        // The store holds an adopted one already, and takes it once.
        self.opened.push((udp_name(listen), socket.as_fd().try_clone_to_owned()?));
        Ok(socket)
    }

    /// A listener for programs of this host.
    ///
    /// # Errors
    /// Returns an error if no socket could be bound.
    pub(crate) fn listener(&mut self, address: SocketAddr) -> io::Result<TcpListener> {
        let address = without_missing_v6(address);
        if let Some(file) = take(&mut self.listeners, address) {
            let listener = std::net::TcpListener::from(file);
            listener.set_nonblocking(true)?;
            return TcpListener::from_std(listener);
        }
        let listener = self.store.make_when_free(io::ErrorKind::AddrInUse, || listen(address))?;
        self.note(LISTENER, address, &listener)?;
        Ok(listener)
    }

    /// The UDP port of a forward.
    ///
    /// # Errors
    /// Returns an error if no socket could be bound.
    pub(crate) fn forward(&mut self, address: SocketAddr) -> io::Result<tokio::net::UdpSocket> {
        let address = without_missing_v6(address);
        let bind = || std::net::UdpSocket::bind(address);
        let socket = match take(&mut self.forwards, address) {
            Some(file) => file.into(),
            None => {
                let socket = self.store.make_when_free(io::ErrorKind::AddrInUse, bind)?;
                self.note(UDP_FORWARD, address, &socket)?;
                socket
            }
        };
        socket.set_nonblocking(true)?;
        tokio::net::UdpSocket::from_std(socket)
    }

    /// Has systemd hold what is in use, and nothing else. Until then, a start that fails leaves what fits to the next
    /// one.
    pub(crate) fn keep(mut self) {
        self.store.clear();
        for (name, file) in &self.opened {
            self.store.keep(name, &[file.as_fd()]);
        }
    }

    /// A port that the kernel chooses is another one at each start.
    fn note(&mut self, name: &'static str, address: SocketAddr, socket: &impl AsFd) -> io::Result<()> {
        if address.port() != 0 {
            self.opened.push((name, socket.as_fd().try_clone_to_owned()?));
        }
        Ok(())
    }
}

fn take(bound: &mut Bound, address: SocketAddr) -> Option<OwnedFd> {
    let at = bound.iter().position(|(at, _)| *at == address)?;
    Some(bound.swap_remove(at).1)
}

/// As [`TcpListener::bind`] makes it.
fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

/// Whether a file is a listener at one of the `wanted` addresses, which is wanted no more then.
fn check_listener(file: &OwnedFd, wanted: &mut Vec<SocketAddr>) -> io::Result<SocketAddr> {
    let bound = std::net::TcpListener::from(file.try_clone()?).local_addr().map_err(no_ip_socket)?;
    let family = if bound.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    let new = socket(family, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
    check_kind(file, &new)?;
    if !getsockopt(file, sockopt::AcceptConn)? {
        return Err(io::Error::other("the socket does not listen"));
    }
    if getsockopt(file, sockopt::ReusePort)? {
        return Err(io::Error::other("the socket shares its port"));
    }
    if bound.is_ipv6() && getsockopt(file, sockopt::Ipv6V6Only)? != getsockopt(&new, sockopt::Ipv6V6Only)? {
        return Err(io::Error::other("the socket has other address families"));
    }
    want(wanted, bound)
}

/// Whether a file is the UDP port of a forward at one of the `wanted` addresses, which is wanted no more then.
fn check_forward(file: &OwnedFd, wanted: &mut Vec<SocketAddr>) -> io::Result<SocketAddr> {
    let bound = std::net::UdpSocket::from(file.try_clone()?).local_addr().map_err(no_ip_socket)?;
    UdpSocket::check_kept(slice::from_ref(file), bound, 1)?;
    want(wanted, bound)
}

fn no_ip_socket(error: io::Error) -> io::Error {
    io::Error::other(format!("not a socket of IPv4 or IPv6: {error}"))
}

fn want(wanted: &mut Vec<SocketAddr>, bound: SocketAddr) -> io::Result<SocketAddr> {
    let at = wanted.iter().position(|address| *address == bound);
    let at = at.ok_or_else(|| io::Error::other(format!("the flags name no {bound}, or another socket has it")))?;
    Ok(wanted.swap_remove(at))
}

/// Listeners of `-socks`, `-http` and `-forward`. What is spoken there is up to the flags of the next run.
const LISTENER: &str = "listener";
const UDP_FORWARD: &str = "udp-forward";
const NAMES: [&str; 4] = [UDP, UDP_ANY_PORT, LISTENER, UDP_FORWARD];
const BACKLOG: u32 = 1024;

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::net::{TcpListener as Listener, TcpStream, UdpSocket as Udp};
    use std::os::fd::AsRawFd;

    use nebula_config::go::flags;
    use nix::sys::socket::{SockaddrIn, bind, setsockopt};
    use nix::sys::stat::fstat;

    use super::*;
    use crate::arguments::{FLAGS, Order};

    fn offers(words: &[String]) -> Offers {
        let parsed = flags::parse(words.iter().cloned(), FLAGS).unwrap();
        let Ok(Order::Run(offers)) = Order::read(&parsed) else { panic!("{words:?}") };
        *offers
    }

    /// The flags for a SOCKS listener and a UDP forward at these addresses.
    fn flags(socks: SocketAddr, forward: SocketAddr) -> Offers {
        offers(&["-socks".into(), socks.to_string(), "-forward".into(), format!("udp:{forward}=10.42.0.2:53")])
    }

    fn passed(files: Vec<(&str, OwnedFd)>) -> io::Result<Vec<Passed>> {
        Ok(files.into_iter().map(|(name, file)| Passed { name: name.to_owned(), file }).collect())
    }

    fn inode(file: &impl AsFd) -> u64 {
        fstat(file).unwrap().st_ino
    }

    #[tokio::test]
    async fn sockets_of_the_configured_addresses_go_on_with_what_waits_in_them() {
        let (listener, forward, underlay) =
            (Listener::bind("127.0.0.1:0").unwrap(), Udp::bind("127.0.0.1:0").unwrap(), Udp::bind("[::]:0").unwrap());
        let [at, to, port] =
            [listener.local_addr().unwrap(), forward.local_addr().unwrap(), underlay.local_addr().unwrap()];
        let inodes = [inode(&listener), inode(&forward), inode(&underlay)];
        let client = TcpStream::connect(at).unwrap();
        Udp::bind("127.0.0.1:0").unwrap().send_to(b"waits", to).unwrap();
        let files = vec![(LISTENER, listener.into()), (UDP_FORWARD, forward.into()), (UDP, underlay.into())];
        let mut kept = Kept::new(passed(files), &flags(at, to));
        let (listener, forward) = (kept.listener(at).unwrap(), kept.forward(to).unwrap());
        let underlay = kept.underlay(port).unwrap();
        assert_eq!([inode(&listener), inode(&forward), inode(&underlay)], inodes);
        assert_eq!(listener.accept().await.unwrap().1, client.local_addr().unwrap());
        let mut waiting = [0; 10];
        assert_eq!(forward.recv(&mut waiting).await.unwrap(), 5);
        assert_eq!(kept.opened.iter().map(|(name, _)| *name).collect::<Vec<_>>(), [UDP], "nothing new");
    }

    #[tokio::test]
    async fn a_listener_for_more_addresses_of_a_port_takes_the_place_of_the_old_one() {
        let before = Listener::bind("127.0.0.1:0").unwrap();
        let (at, old) = (before.local_addr().unwrap(), inode(&before));
        let wider = SocketAddr::from(([0, 0, 0, 0], at.port()));
        let forward: SocketAddr = "127.0.0.1:0".parse().unwrap();
        let line = format!("{wider}=10.42.0.2:22");
        let mut kept = Kept::new(passed(vec![(LISTENER, before.into())]), &offers(&["-forward".into(), line]));
        let listener = kept.listener(wider).unwrap();
        assert_eq!(listener.local_addr().unwrap(), wider);
        assert_ne!(inode(&listener), old);
        assert_eq!(kept.opened.len(), 1);
        kept.forward(forward).unwrap();
        assert_eq!(kept.opened.len(), 1, "any port is another one next time");
    }

    #[test]
    fn files_of_another_kind_are_refused_under_each_name() {
        let kinds: [fn() -> (SocketAddr, OwnedFd); 7] = [
            || (SocketAddr::from(([127, 0, 0, 1], 9)), File::open("/dev/null").unwrap().into()),
            || (SocketAddr::from(([127, 0, 0, 1], 9)), std::os::unix::net::UnixStream::pair().unwrap().0.into()),
            || {
                let socket = Udp::bind("127.0.0.1:0").unwrap();
                socket.connect("127.0.0.1:9").unwrap();
                (socket.local_addr().unwrap(), socket.into())
            },
            || {
                let stream = Listener::bind("127.0.0.1:0").unwrap();
                let stream = TcpStream::connect(stream.local_addr().unwrap()).unwrap();
                (stream.local_addr().unwrap(), stream.into())
            },
            || {
                // It is bound, and does not listen.
                let new = socket(AddressFamily::Inet, SockType::Stream, SockFlag::empty(), None).unwrap();
                bind(new.as_raw_fd(), &SockaddrIn::new(127, 0, 0, 1, 0)).unwrap();
                let socket = Listener::from(new);
                (socket.local_addr().unwrap(), socket.into())
            },
            || {
                let socket = Listener::bind("127.0.0.1:0").unwrap();
                setsockopt(&socket, sockopt::ReusePort, &true).unwrap();
                (socket.local_addr().unwrap(), socket.into())
            },
            || {
                let socket = Udp::bind("127.0.0.1:0").unwrap();
                setsockopt(&socket, sockopt::ReusePort, &true).unwrap();
                (socket.local_addr().unwrap(), socket.into())
            },
        ];
        for (number, make) in kinds.into_iter().enumerate() {
            for name in NAMES {
                let (at, file) = make();
                let mut kept = Kept::new(passed(vec![(name, file)]), &flags(at, at));
                assert!(kept.listeners.is_empty() && kept.forwards.is_empty(), "{number} {name}");
                let refused = kept.store.udp(
                    at,
                    |files| UdpSocket::check_kept(&files, at, 1),
                    || Err(io::ErrorKind::Other.into()),
                );
                assert!(refused.is_err(), "{number} {name}");
            }
        }
    }

    #[test]
    fn a_port_in_use_twice_or_a_socket_in_place_of_another_kind_is_refused() {
        let listener = Listener::bind("127.0.0.1:0").unwrap();
        let at = listener.local_addr().unwrap();
        let udp = Udp::bind(at).unwrap();
        let again = listener.try_clone().unwrap();
        let files = vec![(LISTENER, listener.into()), (LISTENER, again.into()), (LISTENER, udp.into())];
        let kept = Kept::new(passed(files), &flags(at, at));
        assert_eq!((kept.listeners.len(), kept.forwards.len()), (1, 0));

        let (one, other) = (Udp::bind("127.0.0.1:0").unwrap(), Udp::bind("127.0.0.1:0").unwrap());
        let (port, old) = (one.local_addr().unwrap(), inode(&one));
        let mut kept = Kept::new(passed(vec![(UDP, one.into()), (UDP, other.into())]), &flags(at, at));
        let underlay = kept.underlay(port).unwrap();
        assert!(underlay.local_addr().unwrap() == port && inode(&underlay) != old, "one too many");
    }
}
