//! Descriptors that the service manager passes to this process at its start (sd_listen_fds(3)).
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

/// A descriptor that the service manager passed.
#[derive(Debug)]
pub struct Passed {
    /// The name that it has there.
    pub name: String,
    pub file: OwnedFd,
}

/// Takes the descriptors that were passed, none of which a program that this process starts inherits. A second call
/// returns none. Call it before anything else opens a file: the environment only says how many descriptors there are
/// from number 3 on, and nothing but the order of events tells them from others.
///
/// # Errors
/// Returns an error if the environment contradicts itself or names descriptors that are not open; they are then left
/// alone.
pub fn take_passed() -> io::Result<Vec<Passed>> {
    if TAKEN.swap(true, Ordering::Relaxed) {
        return Ok(Vec::new());
    }
    let passed = sd_notify::listen_fds_with_names()?;
    // SAFETY: the descriptors are open, as was just checked; by the protocol they belong to this process (LISTEN_PID);
    // and each is given out once.
    Ok(passed.map(|(number, name)| Passed { name, file: unsafe { OwnedFd::from_raw_fd(number) } }).collect())
}

static TAKEN: AtomicBool = AtomicBool::new(false);
