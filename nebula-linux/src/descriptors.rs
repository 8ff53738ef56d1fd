//! Descriptors of other processes: those that the service manager passes at the start (sd_listen_fds(3)), and those
//! that travel with messages of Unix sockets (SCM_RIGHTS, unix(7)).
#![allow(unsafe_code)]

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use nix::sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, UnixAddr, recvmsg, sendmsg};

/// A descriptor of another process, by name.
#[derive(Debug)]
pub struct Passed {
    /// The name that the other process gave it.
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

/// Sends a message with descriptors, at most [`MAX_FILES`].
///
/// # Errors
/// Returns an error if nobody holds the other end, or there are too many descriptors.
pub fn send(socket: &impl AsFd, bytes: &[u8], files: &[BorrowedFd<'_>]) -> io::Result<()> {
    let numbers: Vec<_> = files.iter().map(AsRawFd::as_raw_fd).collect();
    let rights = [ControlMessage::ScmRights(&numbers)];
    let control = if numbers.is_empty() { &[][..] } else { &rights[..] };
    let socket = socket.as_fd().as_raw_fd();
    sendmsg::<UnixAddr>(socket, &[IoSlice::new(bytes)], control, MsgFlags::MSG_NOSIGNAL, None)?;
    Ok(())
}

/// Receives a message without waiting; returns its length and its descriptors, which no program that this process
/// starts inherits.
///
/// # Errors
/// Returns an error if there is no message, or a part of it had no room.
pub fn receive(socket: &impl AsFd, bytes: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut space = nix::cmsg_space!([i32; MAX_FILES]);
    let flags = MsgFlags::MSG_CMSG_CLOEXEC | MsgFlags::MSG_DONTWAIT;
    let mut parts = [IoSliceMut::new(bytes)];
    let message = recvmsg::<UnixAddr>(socket.as_fd().as_raw_fd(), &mut parts, Some(&mut space), flags)?;
    let is_cut = message.flags.intersects(MsgFlags::MSG_TRUNC | MsgFlags::MSG_CTRUNC);
    let numbers = message.cmsgs()?.flat_map(|control| match control {
        ControlMessageOwned::ScmRights(numbers) => numbers,
        _ => Vec::new(),
    });
    // SAFETY: the kernel has just made these descriptors for this process, and nobody else knows them.
    let files = numbers.map(|number| unsafe { OwnedFd::from_raw_fd(number) }).collect();
    if is_cut { Err(io::ErrorKind::InvalidData.into()) } else { Ok((message.bytes, files)) }
}

/// Maximum number of descriptors in one message (SCM_MAX_FD of the kernel).
pub const MAX_FILES: usize = 253;

static TAKEN: AtomicBool = AtomicBool::new(false);
