//! Ctrl-C, or the end of the terminal: all processes are asked to end, and killed if they do not.
#![allow(unsafe_code, reason = "a signal's handler is installed")]

use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};
use std::thread;
use std::time::Duration;

use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};

use crate::process::Processes;

static SIGNAL: AtomicI32 = AtomicI32::new(0);

extern "C" fn note(signal: i32) {
    SIGNAL.store(signal, Ordering::SeqCst);
}

/// From here on these signals end the processes instead of this one.
pub(crate) fn end_on_signals(processes: Arc<Processes>) -> nix::Result<()> {
    let action = SigAction::new(SigHandler::Handler(note), SaFlags::SA_RESTART, SigSet::empty());
    for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
        // SAFETY: the handler does nothing but store a number.
        unsafe { sigaction(signal, &action) }?;
    }
    thread::spawn(move || {
        while signal().is_none() {
            thread::sleep(LOOK_EVERY);
        }
        processes.end(Signal::SIGTERM);
        thread::sleep(TIME_TO_END);
        processes.end(Signal::SIGKILL);
    });
    Ok(())
}

/// The signal that came.
pub(crate) fn signal() -> Option<i32> {
    Some(SIGNAL.load(Ordering::SeqCst)).filter(|signal| *signal != 0)
}

const LOOK_EVERY: Duration = Duration::from_millis(50);
const TIME_TO_END: Duration = Duration::from_secs(5);
