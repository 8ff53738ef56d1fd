//! The tun device and the UDP sockets in systemd's descriptor store. They outlive this process, whatever ends it, and
//! the daemon that is started next goes on with them: device, addresses, routes and port stay, and so do packets that
//! wait.

use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;

use nebula_config::{Settings, TunSettings};
use nebula_core::handover::State;
use nebula_core::io::{SocketOptions, Tun, UdpSocket};
use nebula_linux::descriptors::Passed;
use nebula_linux::store::{Store, UDP, UDP_ANY_PORT, udp_name};

use crate::host::left_state::{self, STATE};
use crate::overlay::stored_tun::{OpenTun, TUN};

/// What the service manager holds for this unit.
#[derive(Debug)]
pub(crate) struct Stored(Store);

impl Stored {
    /// Sorts what the service manager passed, and closes what no daemon of ours stored.
    pub(crate) fn new(passed: io::Result<Vec<Passed>>) -> Self {
        Self(Store::new(passed, &NAMES))
    }

    /// Whether device and sockets of another process fit the configuration. Changes nothing about them: that process
    /// still uses them.
    ///
    /// # Errors
    /// Returns an error that says what is different.
    pub(crate) fn check(&self, settings: &Settings, listen: SocketAddr) -> io::Result<()> {
        let (tun, routines) = (&settings.tun, settings.routines);
        let (queues, sockets) = (self.0.left(TUN), self.0.left(udp_name(listen)));
        if tun.disabled != queues.is_empty() {
            return Err(io::Error::other("tun.disabled changed"));
        }
        if !tun.disabled {
            Tun::check_kept(queues, &tun.device, routines)?;
        }
        if sockets.is_empty() {
            return Err(io::Error::other("listen.port changed from or to 0"));
        }
        UdpSocket::check_kept(sockets, listen, routines)
    }

    /// The configured device: that of the last run if it fits, or else a new one.
    ///
    /// # Errors
    /// Returns an error if no device could be made.
    pub(crate) fn tun(&mut self, settings: &TunSettings, routines: usize) -> io::Result<OpenTun> {
        OpenTun::new(&mut self.0, &settings.device, routines, settings.offloads)
    }

    /// The configured sockets: those of the last run if they fit, or else new ones.
    ///
    /// # Errors
    /// Returns an error if no socket could be bound.
    pub(crate) fn sockets(
        &mut self,
        listen: SocketAddr,
        routines: usize,
        options: &SocketOptions,
    ) -> io::Result<Vec<UdpSocket>> {
        let adopt = |kept| UdpSocket::adopt(kept, listen, routines, options);
        self.0.udp(listen, adopt, || UdpSocket::bind(listen, routines, options))
    }

    /// The flows of the last run, if that left them.
    pub(crate) fn state(&mut self) -> Option<State> {
        left_state::take(&mut self.0)
    }

    /// Has the service manager hold what is in use, and nothing else; returns the same for an upgrade. `listen` is the
    /// configured address.
    ///
    /// # Errors
    /// Returns an error if there are no more descriptors.
    pub(crate) fn keep(
        mut self,
        tun: Option<&Tun>,
        sockets: &[UdpSocket],
        listen: SocketAddr,
    ) -> io::Result<Vec<Passed>> {
        self.0.clear();
        let queues: Vec<_> = tun.iter().flat_map(|tun| tun.queues()).collect();
        self.0.keep(TUN, &queues);
        let sockets: Vec<_> = sockets.iter().map(AsFd::as_fd).collect();
        let udp = udp_name(listen);
        self.0.keep(udp, &sockets);
        let all = queues.iter().map(|queue| (TUN, queue)).chain(sockets.iter().map(|socket| (udp, socket)));
        all.map(|(name, file)| Ok(Passed { name: name.to_owned(), file: file.try_clone_to_owned()? })).collect()
    }
}

const NAMES: [&str; 4] = [TUN, UDP, UDP_ANY_PORT, STATE];

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;

    use super::*;

    fn passed(name: &str, file: impl Into<OwnedFd>) -> Passed {
        Passed { name: name.to_owned(), file: file.into() }
    }

    #[test]
    fn sockets_go_on_if_they_fit_and_are_made_anew_if_not() {
        let before = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let listen = before.local_addr().unwrap();
        let inode = |file: &dyn AsFd| nix::sys::stat::fstat(file.as_fd()).unwrap().st_ino;
        let old = inode(&before);
        let options = SocketOptions::default();
        let mut stored = Stored::new(Ok(vec![passed(UDP, before)]));
        let sockets = stored.sockets(listen, 1, &options).unwrap();
        assert_eq!(inode(&sockets[0]), old);

        // A second socket, as if the configuration had two routines before.
        let again = sockets[0].as_fd().try_clone_to_owned().unwrap();
        let other = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        drop(sockets);
        let mut stored = Stored::new(Ok(vec![passed(UDP, again), passed(UDP, other)]));
        let sockets = stored.sockets(listen, 1, &options).unwrap();
        assert_eq!(sockets[0].local_addr().unwrap(), listen);
        assert_ne!(inode(&sockets[0]), old);

        let any = SocketAddr::new(listen.ip(), 0);
        let fixed = sockets[0].as_fd().try_clone_to_owned().unwrap();
        let mut stored = Stored::new(Ok(vec![passed(UDP, fixed)]));
        assert_ne!(stored.sockets(any, 1, &options).unwrap()[0].local_addr().unwrap(), listen, "the kernel chooses");
        assert!(stored.0.left(UDP).is_empty());
    }
}
