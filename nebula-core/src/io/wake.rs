//! Wakes a thread that waits with poll.

use std::os::fd::{AsFd, BorrowedFd};

use nix::sys::eventfd::{EfdFlags, EventFd};

use super::Error;

/// Raised by anybody, lowered by the thread that waits.
#[derive(Debug)]
pub(super) struct Wake {
    event: EventFd,
    // A model does not see system calls; with this it tries them in every order too.
    #[cfg(all(test, loom))]
    order: crate::sync::atomic::AtomicBool,
}

impl Wake {
    pub(super) fn new() -> Result<Self, Error> {
        let event = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)
            .map_err(|errno| Error::io("cannot make an eventfd", errno))?;
        Ok(Self {
            event,
            #[cfg(all(test, loom))]
            order: crate::sync::atomic::AtomicBool::new(false),
        })
    }

    pub(super) fn raise(&self) {
        self.in_order();
        // Fails only when the counter is at its limit, and then the reader is awake already.
        let _ = self.event.write(1);
    }

    pub(super) fn lower(&self) {
        self.in_order();
        // Nothing to read is as good.
        let _ = self.event.read();
    }

    pub(super) fn in_order(&self) {
        #[cfg(all(test, loom))]
        self.order.swap(true, crate::sync::atomic::Ordering::SeqCst);
    }
}

impl AsFd for Wake {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}
