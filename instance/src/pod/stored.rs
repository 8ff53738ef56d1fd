//! What systemd's descriptor store holds for a pod's unit: the certificate, the device and the UDP sockets. They
//! outlive an instance that crashes or is killed, and the next one of the unit goes on with them.
//!
//! Only the instance that has the lock of the launch file may use them: while one instance takes over from another,
//! the stores of two units hold the same device.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use nebula_linux::descriptors::Passed;
use nebula_linux::errno;
use nebula_linux::store::{self, Store, UDP};

use crate::overlay::stored_tun::TUN;
use crate::pod::kept::IDENTITY;

/// Sorts what the service manager passed, for an instance that has the lock. One that takes over from a running
/// instance `is_successor`: it gets device and sockets from there.
pub(crate) fn open(passed: io::Result<Vec<Passed>>, is_successor: bool) -> Store {
    let mut store = Store::new(passed, &[IDENTITY, TUN, UDP]);
    for name in [TUN, UDP].into_iter().filter(|_| is_successor) {
        let refuse = |_| Err::<(), _>(io::Error::other("the running instance hands over its own"));
        store.adopt(name, refuse);
    }
    store
}

/// Has the service manager hold the device and the sockets that are in use, and nothing else beside the certificate. A
/// unit that an earlier release of the plugin made has room for the certificate only, which is there already.
pub(crate) fn keep(mut store: Store, tun: &[OwnedFd], udp: &[OwnedFd]) {
    store.clear();
    for (name, files) in [(TUN, tun), (UDP, udp)] {
        store.keep(name, &files.iter().map(AsFd::as_fd).collect::<Vec<_>>());
    }
}

/// Has the service manager close the device, which is to end with this process.
pub(crate) fn end_device() {
    if let Err(error) = store::end(TUN) {
        tracing::debug!(error = errno::text(&error), "The service manager may close the tun device last");
    }
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use super::*;

    #[test]
    fn an_instance_that_takes_over_uses_no_device_or_socket_of_the_store() {
        let passed = || {
            let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
            let file = |name: &str| Passed { name: name.to_owned(), file: socket.try_clone().unwrap().into() };
            Ok([TUN, UDP, IDENTITY, "more"].map(file).into())
        };
        let counts = |store: Store| [TUN, UDP, IDENTITY, "more"].map(|name| store.left(name).len());
        assert_eq!(counts(open(passed(), false)), [1, 1, 1, 0]);
        assert_eq!(counts(open(passed(), true)), [0, 0, 1, 0]);
    }
}
