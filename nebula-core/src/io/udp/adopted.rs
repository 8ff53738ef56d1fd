//! Sockets that were bound elsewhere: by another program, or by this one before it was started again.

use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::atomic::AtomicBool;

use nix::sys::socket::{AddressFamily, SockFlag, SockType, getsockopt, setsockopt, socket, sockopt};

use super::{Family, SocketOptions, UdpSocket, without_missing_v6};
use crate::io::kept::{check_kind, invalid};

impl UdpSocket {
    /// Adopts a bound socket opened elsewhere, and probes its offloads.
    ///
    /// # Errors
    /// Returns an error if `fd` is not a bound UDP socket.
    pub fn from_fd(fd: OwnedFd, options: &SocketOptions) -> io::Result<Self> {
        let inner = std::net::UdpSocket::from(fd);
        inner.set_nonblocking(true)?;
        let family = if inner.local_addr()?.is_ipv4() { Family::V4 } else { Family::V6 };
        let gso = options.offloads && getsockopt(&inner, sockopt::UdpGsoSegment).is_ok();
        let gro = setsockopt(&inner, sockopt::UdpGroSegment, &options.offloads).is_ok() && options.offloads;
        Ok(Self { inner, family, gso: AtomicBool::new(gso), gro })
    }

    /// Adopts sockets of a former run of this program if they are those that [`UdpSocket::bind`] would make with these
    /// arguments in the network namespace of the calling thread, and sets their options again. Datagrams that wait in
    /// the sockets stay there. A port of 0 is any port.
    ///
    /// # Errors
    /// Returns an error that says what is different, or if a descriptor is not a UDP socket.
    pub fn adopt(
        kept: Vec<OwnedFd>,
        address: SocketAddr,
        count: usize,
        options: &SocketOptions,
    ) -> io::Result<Vec<Self>> {
        Self::check_kept(&kept, address, count)?;
        let new = new_socket(without_missing_v6(address))?;
        let adopt = |fd| {
            let inner = std::net::UdpSocket::from(fd);
            reset(&inner, &new, options)?;
            Self::from_fd(inner.into(), options)
        };
        kept.into_iter().map(adopt).collect()
    }

    /// What [`UdpSocket::adopt`] checks, without a change to the sockets.
    ///
    /// # Errors
    /// The same as [`UdpSocket::adopt`].
    pub fn check_kept(kept: &[OwnedFd], address: SocketAddr, count: usize) -> io::Result<()> {
        if kept.len() != count.max(1) {
            return Err(invalid(format!("there are {} sockets, and {} are wanted", kept.len(), count.max(1))));
        }
        let mut address = without_missing_v6(address);
        let new = new_socket(address)?;
        for fd in kept {
            check_kind(fd, &new)?;
            check_choices(fd, count > 1, address.is_ipv6())?;
            let socket = std::net::UdpSocket::from(fd.try_clone()?);
            let bound = socket.local_addr()?;
            if bound.ip() != address.ip() || (address.port() != 0 && bound.port() != address.port()) {
                return Err(invalid(format!("the socket is bound to {bound}, and {address} is wanted")));
            }
            if socket.peer_addr().is_ok() {
                return Err(invalid("the socket is connected to one peer".to_owned()));
            }
            // All of them share one port.
            address.set_port(bound.port());
        }
        Ok(())
    }
}

/// What the system gives to a new socket.
fn new_socket(address: SocketAddr) -> io::Result<OwnedFd> {
    let domain = if address.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    Ok(socket(domain, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None)?)
}

/// Compares what was chosen when the socket was bound.
fn check_choices(kept: &OwnedFd, shares_port: bool, is_v6: bool) -> io::Result<()> {
    if getsockopt(kept, sockopt::ReusePort)? != shares_port {
        let text = if shares_port { "does not share its port" } else { "shares its port" };
        return Err(invalid(format!("the socket {text}, and `routines` wants the contrary")));
    }
    if is_v6 && getsockopt(kept, sockopt::Ipv6V6Only)? {
        return Err(invalid("the socket takes no IPv4".to_owned()));
    }
    Ok(())
}

/// Undoes what the former run set, and sets what is wanted. [`UdpSocket::from_fd`] does the same with offloads, and the
/// driver with how the kernel discovers MTUs.
fn reset(kept: &std::net::UdpSocket, new: &OwnedFd, options: &SocketOptions) -> io::Result<()> {
    if getsockopt(kept, sockopt::Mark)? != 0 {
        setsockopt(kept, sockopt::Mark, &0)?;
    }
    // The kernel doubles what is set, and tells the double.
    if options.read_buffer == 0 {
        setsockopt(kept, sockopt::RcvBuf, &(getsockopt(new, sockopt::RcvBuf)? / 2))?;
    }
    if options.write_buffer == 0 {
        setsockopt(kept, sockopt::SndBuf, &(getsockopt(new, sockopt::SndBuf)? / 2))?;
    }
    options.size_buffers(kept);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bound(address: &str, count: usize) -> (Vec<OwnedFd>, SocketAddr) {
        let sockets = UdpSocket::bind(address.parse().unwrap(), count, &SocketOptions::default()).unwrap();
        let address = sockets[0].local_addr().unwrap();
        (sockets.into_iter().map(|socket| socket.inner.into()).collect(), address)
    }

    fn refusal(kept: Vec<OwnedFd>, address: SocketAddr, count: usize) -> String {
        UdpSocket::adopt(kept, address, count, &SocketOptions::default()).unwrap_err().to_string()
    }

    #[test]
    fn a_kept_socket_goes_on_with_what_waits_in_it_and_with_new_options() {
        for (address, count) in [("127.0.0.1:0", 1), ("[::]:0", 1), ("127.0.0.1:0", 3)] {
            let (kept, address) = bound(address, count);
            let to = SocketAddr::from(([127, 0, 0, 1], address.port()));
            let sender = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
            sender.send_to(b"waiting", to).unwrap();
            let mut options = SocketOptions { offloads: false, read_buffer: 0, write_buffer: 0 };
            let adopted = UdpSocket::adopt(kept, address, count, &options).unwrap();
            let new = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
            assert_eq!(
                getsockopt(&adopted[0], sockopt::RcvBuf).unwrap(),
                getsockopt(&new, sockopt::RcvBuf).unwrap(),
                "the system's default"
            );
            assert!(!adopted[0].receives_runs() && !adopted[0].sends_runs());
            options = SocketOptions { offloads: true, read_buffer: 100_000, write_buffer: 0 };
            let kept = adopted.into_iter().map(|socket| socket.inner.into()).collect();
            let any = SocketAddr::new(address.ip(), 0);
            let adopted = UdpSocket::adopt(kept, any, count, &options).unwrap();
            assert_eq!(getsockopt(&adopted[0], sockopt::RcvBuf).unwrap(), 200_000);
            assert!(adopted[0].receives_runs() && adopted[0].sends_runs());
            let mut bytes = [0; 16];
            let received = adopted.iter().filter_map(|socket| socket.inner.recv(&mut bytes).ok()).sum::<usize>();
            assert_eq!(&bytes[..received], b"waiting");
        }
    }

    #[test]
    fn a_socket_that_is_not_the_configured_one_is_refused_with_the_reason() {
        let (kept, address) = bound("127.0.0.1:0", 1);
        let other = SocketAddr::new(address.ip(), address.port() ^ 1);
        let text = refusal(kept, other, 1);
        assert!(text.contains(&address.to_string()) && text.contains(&other.to_string()), "{text}");
        let (kept, address) = bound("127.0.0.1:0", 1);
        assert!(refusal(kept, SocketAddr::from(([0, 0, 0, 0], address.port())), 1).contains("bound to"));
        let (kept, address) = bound("127.0.0.1:0", 1);
        assert!(refusal(kept, format!("[::]:{}", address.port()).parse().unwrap(), 1).contains("family"));
        let (kept, address) = bound("127.0.0.1:0", 2);
        assert!(refusal(kept, address, 1).contains("2 sockets, and 1 are"));
        let (mut kept, address) = bound("127.0.0.1:0", 2);
        kept.pop();
        assert!(refusal(kept, address, 1).contains("shares its port"));
        let (mut kept, address) = bound("127.0.0.1:0", 1);
        kept.push(bound("127.0.0.1:0", 1).0.pop().unwrap());
        assert!(refusal(kept, address, 2).contains("does not share"));
        let (mut kept, address) = bound("127.0.0.1:0", 2);
        kept.splice(1.., bound("127.0.0.1:0", 2).0.into_iter().take(1));
        assert!(refusal(kept, SocketAddr::new(address.ip(), 0), 2).contains("bound to"), "two ports");

        let connected = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        connected.connect("127.0.0.1:9").unwrap();
        let address = connected.local_addr().unwrap();
        assert!(refusal(vec![connected.into()], address, 1).contains("connected"));
        let stream = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = stream.local_addr().unwrap();
        assert!(refusal(vec![stream.into()], address, 1).contains("another type"));
        let file = std::fs::File::open("/dev/null").unwrap();
        assert!(UdpSocket::adopt(vec![file.into()], address, 1, &SocketOptions::default()).is_err());
        assert!(UdpSocket::adopt(Vec::new(), address, 0, &SocketOptions::default()).is_err());
    }
}
