//! Systemd's descriptor store. It holds files of a unit when the process ends, for whatever reason, and passes them to
//! the next process by name: a port stays bound, and what waits in it stays there.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::thread::sleep;
use std::time::Duration;

use crate::clock::now;
use crate::descriptors::Passed;
use crate::{errno, notify};

/// The sockets of a node's configured port on the underlay.
pub const UDP: &str = "udp";
/// The sockets of a node's port that the kernel chose.
pub const UDP_ANY_PORT: &str = "udp-any-port";

/// What the service manager holds for this unit.
#[derive(Debug, Default)]
pub struct Store {
    /// What the last run left, by name, as far as it is not in use again.
    left: BTreeMap<String, Vec<OwnedFd>>,
    /// Other names, whose descriptors are closed here.
    foreign: BTreeSet<String>,
    /// Whether there is a systemd that would hold anything.
    is_there: bool,
    /// Names whose descriptors are in the store and in use again.
    in_use: BTreeSet<&'static str>,
    has_given_up: bool,
}

impl Store {
    /// Sorts what the service manager passed, and closes what has none of the `names` that this program gives.
    #[must_use]
    pub fn new(passed: io::Result<Vec<Passed>>, names: &[&str]) -> Self {
        let mut store = Self { is_there: connect(), ..Self::default() };
        let passed = passed.unwrap_or_else(|error| {
            tracing::warn!(error = errno::text(&error), "Descriptors of the service manager are left alone");
            Vec::new()
        });
        for Passed { name, file } in passed {
            if names.contains(&name.as_str()) {
                store.left.entry(name).or_default().push(file);
            } else {
                tracing::warn!(name, "Closed a descriptor of the service manager: this program has no use for it");
                store.foreign.insert(name);
            }
        }
        store
    }

    /// What the last run left under a name, and nobody has adopted.
    #[must_use]
    pub fn left(&self, name: &str) -> &[OwnedFd] {
        self.left.get(name).map_or(&[], Vec::as_slice)
    }

    /// Uses all that the last run left under a name, if `adopt` can. If not, it is given up.
    pub fn adopt<T>(&mut self, name: &'static str, adopt: impl FnOnce(Vec<OwnedFd>) -> io::Result<T>) -> Option<T> {
        match adopt(self.left.remove(name)?) {
            Ok(adopted) => {
                self.in_use.insert(name);
                Some(adopted)
            }
            Err(error) => {
                self.give_up(name, &error);
                None
            }
        }
    }

    /// Takes out all that the last run left under a name: the service manager holds it no longer.
    pub fn take(&mut self, name: &str) -> Vec<OwnedFd> {
        let files = self.left.remove(name).unwrap_or_default();
        if !files.is_empty() {
            self.unstore(name);
        }
        files
    }

    /// Uses those that the last run left under a name and that pass a `check`, whose result comes with each. The
    /// others are given up.
    pub fn adopt_each<T>(
        &mut self,
        name: &'static str,
        mut check: impl FnMut(&OwnedFd) -> io::Result<T>,
    ) -> Vec<(T, OwnedFd)> {
        let (mut adopted, mut refused) = (Vec::new(), false);
        for file in self.left.remove(name).unwrap_or_default() {
            match check(&file) {
                Ok(found) => adopted.push((found, file)),
                Err(error) => {
                    log_given_up(name, &error);
                    refused = true;
                }
            }
        }
        if refused {
            // There is no way to take one of them out.
            self.take_out(name);
            self.keep(name, &adopted.iter().map(|(_, file)| file.as_fd()).collect::<Vec<_>>());
        }
        adopted
    }

    /// The sockets of a node's port: those of the last run, if `adopt` can use them, or else what `bind` makes. A port
    /// that the kernel chose stays the same as long as any port is wanted.
    ///
    /// # Errors
    /// Returns the error of `bind`.
    pub fn udp<T>(
        &mut self,
        listen: SocketAddr,
        adopt: impl FnOnce(Vec<OwnedFd>) -> io::Result<T>,
        bind: impl FnMut() -> io::Result<T>,
    ) -> io::Result<T> {
        let name = udp_name(listen);
        let other = if name == UDP { UDP_ANY_PORT } else { UDP };
        if self.left.remove(other).is_some() {
            self.give_up(other, &io::Error::other("listen.port changed from or to 0"));
        }
        if let Some(sockets) = self.adopt(name, adopt) {
            tracing::info!("The UDP port of the last run goes on");
            return Ok(sockets);
        }
        self.make_when_free(io::ErrorKind::AddrInUse, bind)
    }

    /// Makes something. If that fails because it is `busy`, and something was given up, it is tried again until the
    /// service manager has closed that.
    ///
    /// # Errors
    /// Returns the error of `make`.
    pub fn make_when_free<T>(&self, busy: io::ErrorKind, mut make: impl FnMut() -> io::Result<T>) -> io::Result<T> {
        let end = now() + PATIENCE;
        loop {
            match make() {
                Err(error) if self.has_given_up && error.kind() == busy && now() < end => sleep(INTERVAL),
                made => return made,
            }
        }
    }

    /// Has the service manager hold files for the next run; nothing if those of this name were adopted all together.
    pub fn keep(&self, name: &str, files: &[BorrowedFd<'_>]) {
        if !self.is_there || files.is_empty() || self.in_use.contains(name) {
            return;
        }
        if let Err(error) = notify::store(files, name) {
            let error = errno::text(&error);
            tracing::warn!(what = name, error, "A restart will not keep this: the service manager does not take it");
        }
    }

    /// Gives up what nobody has adopted. Call it when everything is open: until then, a start that fails leaves it
    /// there for the next one.
    pub fn clear(&mut self) {
        for (name, _) in std::mem::take(&mut self.left) {
            self.give_up(&name, &io::Error::other("the configuration has none"));
        }
        for name in std::mem::take(&mut self.foreign) {
            self.take_out(&name);
        }
    }

    /// Has the service manager close what this process has closed already.
    fn give_up(&mut self, name: &str, why: &io::Error) {
        log_given_up(name, why);
        self.take_out(name);
    }

    fn take_out(&mut self, name: &str) {
        self.has_given_up = true;
        self.unstore(name);
    }

    fn unstore(&self, name: &str) {
        if self.is_there
            && let Err(error) = notify::unstore(name)
        {
            tracing::warn!(what = name, error = errno::text(&error), "The service manager still holds it");
        }
    }
}

/// Has the service manager hold a file for the next run, and waits until it does: this process is about to end.
///
/// # Errors
/// Returns an error if there is no systemd, or it does not answer in time.
pub fn leave(name: &str, file: BorrowedFd<'_>) -> io::Result<()> {
    if !notify::is_systemd() {
        return Err(io::ErrorKind::NotConnected.into());
    }
    notify::store(&[file], name)?;
    notify::barrier(ENDS_WITHIN)
}

/// Has the service manager close what it holds under a name, and waits until it has. Call it before the last descriptor
/// of a tun device is closed: the kernel takes some 20 ms for that one, in which a service manager does nothing else.
///
/// # Errors
/// Returns an error if the service manager does not answer in time.
pub fn end(name: &str) -> io::Result<()> {
    if !notify::is_systemd() {
        return Ok(());
    }
    notify::unstore(name)?;
    notify::barrier(ENDS_WITHIN)
}

/// The name under which the sockets of a node are kept that is to listen there.
#[must_use]
pub fn udp_name(listen: SocketAddr) -> &'static str {
    if listen.port() == 0 { UDP_ANY_PORT } else { UDP }
}

fn log_given_up(name: &str, why: &io::Error) {
    tracing::info!(what = name, why = errno::text(why), "What the last run left does not fit, and is given up");
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

// It takes some milliseconds.
const PATIENCE: Duration = Duration::from_secs(2);
const INTERVAL: Duration = Duration::from_millis(1);
// It takes less than a millisecond, and a program that is to stop has little time.
const ENDS_WITHIN: Duration = Duration::from_millis(250);

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::net::UdpSocket;
    use std::os::unix::net::UnixStream;

    use super::*;

    fn passed(name: &str, file: impl Into<OwnedFd>) -> Passed {
        Passed { name: name.to_owned(), file: file.into() }
    }

    /// A file, and another one that reads the end as soon as that is closed everywhere.
    fn watched() -> (UnixStream, UnixStream) {
        let pair = UnixStream::pair().unwrap();
        pair.1.set_nonblocking(true).unwrap();
        pair
    }

    fn is_closed(mut watch: &UnixStream) -> bool {
        watch.read(&mut [0]).is_ok_and(|count| count == 0)
    }

    #[test]
    fn what_has_another_name_is_closed() {
        let (here, there) = watched();
        let mut store = Store::new(Ok(vec![passed("nebula.socket", here)]), &[UDP]);
        assert!(is_closed(&there) && store.left("nebula.socket").is_empty());
        assert!(store.adopt("nebula.socket", Ok).is_none());
        assert!(Store::new(Err(io::ErrorKind::InvalidInput.into()), &[UDP]).left(UDP).is_empty());
    }

    #[test]
    fn what_nobody_adopts_is_closed_when_everything_is_open() {
        let (here, there) = watched();
        let mut store = Store::new(Ok(vec![passed(UDP, here)]), &[UDP]);
        assert_eq!((store.left(UDP).len(), is_closed(&there)), (1, false));
        store.clear();
        assert!(is_closed(&there) && store.left(UDP).is_empty());
    }

    #[test]
    fn what_is_taken_out_is_given_out_once() {
        let (here, there) = watched();
        let mut store = Store::new(Ok(vec![passed("state", here)]), &["state"]);
        let taken = store.take("state");
        assert!(taken.len() == 1 && store.take("state").is_empty() && store.left("state").is_empty());
        drop(taken);
        assert!(is_closed(&there));
    }

    #[test]
    fn of_several_those_that_fit_go_on_and_the_others_are_closed() {
        let pairs = [(); 3].map(|()| watched());
        let (files, watches): (Vec<_>, Vec<_>) = pairs.into_iter().unzip();
        let mut store = Store::new(Ok(files.into_iter().map(|file| passed("listener", file)).collect()), &["listener"]);
        let mut at = 0;
        let adopted = store.adopt_each("listener", |_| {
            at += 1;
            if at == 2 { Err(io::Error::other("does not fit")) } else { Ok(at) }
        });
        assert_eq!(adopted.iter().map(|(at, _)| *at).collect::<Vec<_>>(), [1, 3]);
        assert_eq!(watches.iter().map(is_closed).collect::<Vec<_>>(), [false, true, false]);
        assert!(store.adopt_each("listener", |_| Ok(())).is_empty(), "each is given out once");
    }

    #[test]
    fn a_port_that_was_given_up_is_waited_for_and_one_of_another_program_is_not() {
        let taken = UdpSocket::bind("127.0.0.1:0").unwrap();
        let listen = taken.local_addr().unwrap();
        let started = now();
        let bind = || UdpSocket::bind(listen);
        assert!(Store::default().udp(listen, |_| Err(io::ErrorKind::InvalidInput.into()), bind).is_err());
        assert!(now() < started + PATIENCE);

        // The second descriptor is the service manager's, which closes it later.
        let (ours, theirs) = (taken.try_clone().unwrap(), taken);
        let mut store = Store::new(Ok(vec![passed(UDP_ANY_PORT, ours)]), &[UDP, UDP_ANY_PORT]);
        let closing = std::thread::spawn(move || {
            sleep(Duration::from_millis(50));
            drop(theirs);
        });
        let bound = store.udp(listen, |_| unreachable!("it has the other name"), bind).unwrap();
        assert_eq!(bound.local_addr().unwrap(), listen);
        closing.join().unwrap();
    }
}
