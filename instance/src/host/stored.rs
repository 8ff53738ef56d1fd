//! The tun device and the UDP sockets in systemd's descriptor store. They outlive this process, whatever ends it, and
//! the daemon that is started next goes on with them: device, addresses, routes and port stay, and so do packets that
//! wait.

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::thread::sleep;
use std::time::Duration;

use nebula_config::{Settings, TunSettings};
use nebula_core::io::{SocketOptions, Tun, UdpSocket};
use nebula_linux::clock::now;
use nebula_linux::descriptors::Passed;
use nebula_linux::{errno, notify};

/// What the service manager holds for this unit.
#[derive(Debug, Default)]
pub(crate) struct Stored {
    /// What the last run left, by name, as far as it is not in use again.
    passed: BTreeMap<String, Vec<OwnedFd>>,
    /// Whether there is a systemd that would hold anything.
    has_store: bool,
    /// Names whose descriptors are in the store and in use again.
    adopted: Vec<&'static str>,
}

/// The device, and whether it is that of the last run.
pub(crate) struct Device {
    pub(crate) tun: Tun,
    pub(crate) is_kept: bool,
}

impl Device {
    /// Whether it may have addresses and routes that the last run gave to it. What is on a persistent device may be
    /// somebody else's.
    pub(crate) fn has_leftovers(&self) -> bool {
        self.is_kept && !self.tun.is_persistent().unwrap_or(false)
    }
}

impl Stored {
    /// Sorts what the service manager passed, and closes what no daemon of ours stored.
    pub(crate) fn new(passed: io::Result<Vec<Passed>>) -> Self {
        let mut stored = Self { has_store: connect(), ..Self::default() };
        let passed = passed.unwrap_or_else(|error| {
            tracing::warn!(error = errno::text(&error), "Descriptors of the service manager are left alone");
            Vec::new()
        });
        for Passed { name, file } in passed {
            if NAMES.contains(&name.as_str()) {
                stored.passed.entry(name).or_default().push(file);
            } else {
                tracing::warn!(?name, "Closed a descriptor of the service manager: the daemon has no use for it");
            }
        }
        stored
    }

    /// Whether device and sockets of another process fit the configuration. Changes nothing about them: that process
    /// still uses them.
    ///
    /// # Errors
    /// Returns an error that says what is different.
    pub(crate) fn check(&self, settings: &Settings, listen: SocketAddr) -> io::Result<()> {
        let of = |name| self.passed.get(name).map_or(&[][..], Vec::as_slice);
        let (tun, routines) = (&settings.tun, settings.routines);
        if tun.disabled != of(TUN).is_empty() {
            return Err(io::Error::other("tun.disabled changed"));
        }
        if !tun.disabled {
            Tun::check_kept(of(TUN), &tun.device, routines)?;
        }
        let name = if listen.port() == 0 { UDP_ANY_PORT } else { UDP };
        if of(name).is_empty() {
            return Err(io::Error::other("listen.port changed from or to 0"));
        }
        UdpSocket::check_kept(of(name), listen, routines)
    }

    /// The configured device: that of the last run if it fits, or else a new one.
    ///
    /// # Errors
    /// Returns an error if no device could be made.
    pub(crate) fn tun(&mut self, settings: &TunSettings, routines: usize) -> io::Result<Device> {
        let create = || Tun::create(&settings.device, routines, settings.offloads);
        let new = |tun| Device { tun, is_kept: false };
        let Some(queues) = self.passed.remove(TUN) else { return create().map(new) };
        let before = queues.first().and_then(Tun::transient_device);
        match Tun::adopt(queues, &settings.device, routines, settings.offloads) {
            Ok(tun) => {
                tracing::info!(device = tun.name(), "The tun device of the last run goes on");
                self.adopted.push(TUN);
                Ok(Device { tun, is_kept: true })
            }
            Err(error) => {
                self.discard(TUN, &error);
                if let Some(before) = before {
                    await_end(&before);
                }
                when_free(io::ErrorKind::ResourceBusy, create).map(new)
            }
        }
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
        let (name, other) = if listen.port() == 0 { (UDP_ANY_PORT, UDP) } else { (UDP, UDP_ANY_PORT) };
        let mut is_freed = false;
        if self.passed.remove(other).is_some() {
            self.discard(other, &io::Error::other("listen.port changed from or to 0"));
            is_freed = true;
        }
        if let Some(kept) = self.passed.remove(name) {
            match UdpSocket::adopt(kept, listen, routines, options) {
                Ok(sockets) => {
                    tracing::info!("The UDP port of the last run goes on");
                    self.adopted.push(name);
                    return Ok(sockets);
                }
                Err(error) => self.discard(name, &error),
            }
            is_freed = true;
        }
        let bind = || UdpSocket::bind(listen, routines, options);
        if is_freed { when_free(io::ErrorKind::AddrInUse, bind) } else { bind() }
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
        for (name, _) in std::mem::take(&mut self.passed) {
            self.discard(&name, &io::Error::other("the configuration has none"));
        }
        let queues: Vec<_> = tun.iter().flat_map(|tun| tun.queues()).collect();
        self.store(TUN, &queues);
        let sockets: Vec<_> = sockets.iter().map(AsFd::as_fd).collect();
        let udp = if listen.port() == 0 { UDP_ANY_PORT } else { UDP };
        self.store(udp, &sockets);
        let all = queues.iter().map(|queue| (TUN, queue)).chain(sockets.iter().map(|socket| (udp, socket)));
        all.map(|(name, file)| Ok(Passed { name: name.to_owned(), file: file.try_clone_to_owned()? })).collect()
    }

    fn store(&self, name: &str, files: &[std::os::fd::BorrowedFd<'_>]) {
        if !self.has_store || files.is_empty() || self.adopted.contains(&name) {
            return;
        }
        if let Err(error) = notify::store(files, name) {
            let error = errno::text(&error);
            tracing::warn!(what = name, error, "A restart will not keep this: the service manager does not take it");
        }
    }

    /// Has the service manager close what this process has closed already.
    fn discard(&self, name: &str, why: &io::Error) {
        tracing::info!(what = name, why = errno::text(why), "What the last run left does not fit, and is given up");
        if let Err(error) = notify::unstore(name) {
            tracing::warn!(what = name, error = errno::text(&error), "The service manager still holds it");
        }
    }
}

/// Whether systemd runs this process and listens.
fn connect() -> bool {
    if !notify::is_systemd() {
        return false;
    }
    let connected = notify::connect();
    if let Err(error) = &connected {
        tracing::warn!(error = errno::text(error), "A restart will keep nothing: the service manager does not listen");
    }
    connected.is_ok()
}

/// Waits until a device is gone that the service manager was asked to close. Two devices would have the same networks.
fn await_end(device: &str) {
    let end = now() + PATIENCE;
    while now() < end && nix::net::if_::if_nametoindex(device).is_ok() {
        sleep(INTERVAL);
    }
}

/// Makes what is `busy` until the service manager has closed what it was asked to.
fn when_free<T>(busy: io::ErrorKind, mut make: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    let end = now() + PATIENCE;
    loop {
        match make() {
            Err(error) if error.kind() == busy && now() < end => sleep(INTERVAL),
            made => return made,
        }
    }
}

/// All queues of the device.
const TUN: &str = "tun";
/// All sockets of the configured port.
const UDP: &str = "udp";
/// All sockets of a port that the kernel chose.
const UDP_ANY_PORT: &str = "udp-any-port";
const NAMES: [&str; 3] = [TUN, UDP, UDP_ANY_PORT];
// It takes some milliseconds.
const PATIENCE: Duration = Duration::from_secs(2);
const INTERVAL: Duration = Duration::from_millis(1);

#[cfg(test)]
mod tests {
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
        assert_eq!((inode(&sockets[0]), stored.adopted.as_slice()), (old, &[UDP][..]));

        // A second socket, as if the configuration had two routines before.
        let again = sockets[0].as_fd().try_clone_to_owned().unwrap();
        let other = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        drop(sockets);
        let mut stored = Stored::new(Ok(vec![passed(UDP, again), passed(UDP, other)]));
        let sockets = stored.sockets(listen, 1, &options).unwrap();
        assert_eq!(sockets[0].local_addr().unwrap(), listen);
        assert!(inode(&sockets[0]) != old && stored.adopted.is_empty());

        let any = SocketAddr::new(listen.ip(), 0);
        let fixed = sockets[0].as_fd().try_clone_to_owned().unwrap();
        let mut stored = Stored::new(Ok(vec![passed(UDP, fixed)]));
        assert_ne!(stored.sockets(any, 1, &options).unwrap()[0].local_addr().unwrap(), listen, "the kernel chooses");
        assert!(stored.passed.is_empty());
    }

    #[test]
    fn what_nobody_of_ours_stored_is_closed() {
        let (here, there) = std::os::unix::net::UnixStream::pair().unwrap();
        there.set_nonblocking(true).unwrap();
        let stored = Stored::new(Ok(vec![passed("nebula.socket", here)]));
        assert!(stored.passed.is_empty());
        let mut byte = [0];
        assert_eq!(io::Read::read(&mut &there, &mut byte).unwrap(), 0, "the other end is still open");
        assert!(Stored::new(Err(io::ErrorKind::InvalidInput.into())).passed.is_empty());
    }
}
