//! The tun device in the service manager's descriptor store. It outlives this process, whatever ends it, with its
//! addresses, its routes and the packets that wait in it.

use std::io;
use std::thread::sleep;
use std::time::Duration;

use nebula_core::io::Tun;
use nebula_linux::clock::now;
use nebula_linux::store::Store;

/// The device, and whether it is that of the last run.
#[derive(Debug)]
pub(crate) struct OpenTun {
    pub(crate) tun: Tun,
    pub(crate) is_kept: bool,
}

impl OpenTun {
    /// Goes on with the device of the last run if it is the one that [`Tun::create`] would make with these arguments in
    /// the network namespace of the calling thread, or makes one.
    ///
    /// # Errors
    /// Returns an error if no device could be made.
    pub(crate) fn new(store: &mut Store, name: &str, routines: usize, offloads: bool) -> io::Result<Self> {
        let before = store.left(TUN).first().and_then(Tun::transient_device);
        if let Some(tun) = store.adopt(TUN, |queues| Tun::adopt(queues, name, routines, offloads)) {
            tracing::info!(device = tun.name(), "The tun device of the last run goes on");
            return Ok(Self { tun, is_kept: true });
        }
        if let Some(before) = before {
            await_end(&before);
        }
        let tun = store.make_when_free(io::ErrorKind::ResourceBusy, || Tun::create(name, routines, offloads))?;
        Ok(Self { tun, is_kept: false })
    }

    /// Whether it may have addresses and routes that the last run gave to it. What is on a persistent device may be
    /// somebody else's.
    pub(crate) fn has_leftovers(&self) -> bool {
        self.is_kept && !self.tun.is_persistent().unwrap_or(false)
    }
}

/// Waits until a device is gone that the service manager was asked to close. Two devices would have the same networks.
fn await_end(device: &str) {
    let end = now() + PATIENCE;
    while now() < end && nix::net::if_::if_nametoindex(device).is_ok() {
        sleep(INTERVAL);
    }
}

/// All queues of the device.
pub(crate) const TUN: &str = "tun";
// It takes some milliseconds.
const PATIENCE: Duration = Duration::from_secs(2);
const INTERVAL: Duration = Duration::from_millis(1);
