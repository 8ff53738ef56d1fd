//! Process signals, waited for on one thread.

use nix::sys::signal::SigSet;
pub use nix::sys::signal::Signal;

/// The signals this program handles, blocked in every thread started afterwards.
#[derive(Debug, Clone, Copy)]
pub struct Signals(SigSet);

impl Signals {
    /// Blocks SIGTERM, SIGINT and SIGHUP. Call it before any thread is started.
    ///
    /// # Errors
    /// From the system.
    pub fn block() -> std::io::Result<Self> {
        let set: SigSet = [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP].into_iter().collect();
        set.thread_block()?;
        Ok(Self(set))
    }

    /// The next signal.
    #[must_use]
    pub fn wait(&self) -> Signal {
        loop {
            if let Ok(signal) = self.0.wait() {
                return signal;
            }
        }
    }
}

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
