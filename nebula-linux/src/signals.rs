//! Signals of this process, handled on one thread.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::thread;

use nix::sys::signal::SigSet;
pub use nix::sys::signal::Signal;
use nix::sys::signalfd::{SfdFlags, SignalFd};

/// The signals that this program handles, blocked in every thread started afterwards.
#[derive(Debug, Clone, Copy)]
pub struct Signals(SigSet);

impl Signals {
    /// Blocks SIGTERM, SIGINT and SIGHUP. Call it before starting any thread.
    ///
    /// # Errors
    /// Returns an error if the system call fails.
    pub fn block() -> io::Result<Self> {
        let set: SigSet = [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP].into_iter().collect();
        set.thread_block()?;
        Ok(Self(set))
    }
}

/// The same signals as a file descriptor, for poll(2).
#[derive(Debug)]
pub struct Arrived(SignalFd);

impl Arrived {
    pub fn of(signals: Signals) -> io::Result<Self> {
        Ok(Self(SignalFd::with_flags(&signals.0, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC)?))
    }

    /// The next pending signal, if any.
    pub fn next(&self) -> Option<Signal> {
        let found = self.0.read_signal().ok()??;
        Signal::try_from(found.ssi_signo.cast_signed()).ok()
    }
}

impl AsFd for Arrived {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Lets SIGTERM and SIGINT end this process where it is the first of a container, as they end any other: the kernel
/// spares the first process of a pid namespace every signal that it does not handle. Call it before starting any
/// thread.
///
/// # Errors
/// Returns an error if the system refuses to block signals or to start a thread.
pub fn end_even_first_process() -> io::Result<()> {
    if std::process::id() != 1 {
        return Ok(());
    }
    let set: SigSet = [Signal::SIGTERM, Signal::SIGINT].into_iter().collect();
    set.thread_block()?;
    thread::Builder::new().name("signals".to_owned()).stack_size(STACK).spawn(move || {
        let Ok(signal) = set.wait() else { return };
        // As a shell reports a process that the signal ended; raised here, it would be ignored like the first one.
        std::process::exit(128 + signal as i32);
    })?;
    Ok(())
}

/// Enough for a thread that only waits.
const STACK: usize = 64 << 10;

/// How Go names a signal in its log.
#[must_use]
pub fn go_name(signal: Signal) -> &'static str {
    match signal {
        Signal::SIGTERM => "terminated",
        Signal::SIGINT => "interrupt",
        Signal::SIGHUP => "hangup",
        other => other.as_str(),
    }
}
