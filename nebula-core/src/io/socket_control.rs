//! What may change on an underlay socket while it is used, and what the kernel tells about it.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use nix::sys::socket::{setsockopt, sockopt};

use super::UdpSocket;

/// A second hold on an underlay socket, for its options. The packet path does not notice it.
#[derive(Debug)]
pub struct SocketControl {
    fd: OwnedFd,
}

/// Memory of a socket in bytes, and datagrams lost for want of it, as the kernel counts (`SO_MEMINFO`).
pub type SocketMemory = [(&'static str, u32); NAMES.len()];

// In the kernel's order; `sk_meminfo` in its headers.
const NAMES: [&str; 9] =
    ["rmem_alloc", "rcvbuf", "wmem_alloc", "sndbuf", "fwd_alloc", "wmem_queued", "optmem", "backlog", "drops"];

impl SocketControl {
    /// Of a bound socket.
    ///
    /// # Errors
    /// No file descriptor is left.
    pub fn of(socket: &UdpSocket) -> io::Result<Self> {
        Ok(Self { fd: socket.as_fd().try_clone_to_owned()? })
    }

    /// A further hold.
    ///
    /// # Errors
    /// No file descriptor is left.
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(Self { fd: self.fd.try_clone()? })
    }

    /// Sets the receive buffer in bytes, past the system's limit where that is allowed.
    ///
    /// # Errors
    /// From the system.
    pub fn set_read_buffer(&self, bytes: usize) -> io::Result<()> {
        setsockopt(&self.fd, sockopt::RcvBufForce, &bytes)
            .or_else(|_| setsockopt(&self.fd, sockopt::RcvBuf, &bytes))?;
        Ok(())
    }

    /// Sets the send buffer in bytes, past the system's limit where that is allowed.
    ///
    /// # Errors
    /// From the system.
    pub fn set_write_buffer(&self, bytes: usize) -> io::Result<()> {
        setsockopt(&self.fd, sockopt::SndBufForce, &bytes)
            .or_else(|_| setsockopt(&self.fd, sockopt::SndBuf, &bytes))?;
        Ok(())
    }

    /// Sets the mark of all that is sent, by which routing may choose; 0: none.
    ///
    /// # Errors
    /// It needs CAP_NET_ADMIN.
    pub fn set_mark(&self, mark: u32) -> io::Result<()> {
        Ok(setsockopt(&self.fd, sockopt::Mark, &mark)?)
    }

    /// Memory and losses; `None` on a kernel before 4.12.
    #[must_use]
    pub fn memory(&self) -> Option<SocketMemory> {
        let mut values = [0_u32; NAMES.len()];
        let mut len = libc::socklen_t::try_from(size_of_val(&values)).ok()?;
        // SAFETY: the kernel writes at most `len` bytes to an array of that size, and any bytes are valid numbers.
        let result = unsafe {
            libc::getsockopt(
                self.fd.as_raw_fd(),
                libc::SOL_SOCKET,
                SO_MEMINFO,
                values.as_mut_ptr().cast(),
                &raw mut len,
            )
        };
        (result == 0).then(|| std::array::from_fn(|at| (NAMES[at], values[at])))
    }
}

// Missing in libc's constants for this target.
const SO_MEMINFO: libc::c_int = 55;

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;
    use crate::io::SocketOptions;

    #[test]
    fn buffers_change_on_a_bound_socket_and_the_kernel_tells_of_them() {
        let socket = UdpSocket::bind("127.0.0.1:0".parse().unwrap(), 1, &SocketOptions::default()).unwrap().remove(0);
        let control = SocketControl::of(&socket).unwrap();
        control.set_read_buffer(65_536).unwrap();
        control.set_write_buffer(131_072).unwrap();
        let memory = control.memory().unwrap();
        // The kernel doubles what is asked for, to have room for its own notes.
        assert_eq!((memory[1], memory[3]), (("rcvbuf", 131_072), ("sndbuf", 262_144)));
        assert_eq!(memory[8], ("drops", 0));
    }
}
