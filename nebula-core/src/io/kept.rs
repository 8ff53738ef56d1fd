//! Sockets that another process opened, compared with new ones.
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// Compares a socket that another process opened, as a former run of the program, with a `new` one: address family,
/// type, protocol and network namespace, none of which ever changes. Kernels before 5.14 do not tell the namespace,
/// which is not compared there.
///
/// # Errors
/// Returns an error that says what is different, or the system's error if `kept` is not a socket.
pub fn check_kind(kept: &impl AsFd, new: &impl AsFd) -> io::Result<()> {
    for (name, text) in [
        (libc::SO_DOMAIN, "another address family"),
        (libc::SO_TYPE, "another type"),
        (libc::SO_PROTOCOL, "another protocol"),
    ] {
        if option::<c_int>(kept, name)? != option::<c_int>(new, name)? {
            return Err(invalid(format!("the socket has {text}")));
        }
    }
    if namespace(kept)? != namespace(new)? {
        return Err(invalid("the socket is in another network namespace".to_owned()));
    }
    Ok(())
}

/// The number of a socket's network namespace; none on kernels before 5.14, which cannot tell.
fn namespace(socket: &impl AsFd) -> io::Result<Option<u64>> {
    match option(socket, SO_NETNS_COOKIE) {
        Ok(number) => Ok(Some(number)),
        Err(error) if error.raw_os_error() == Some(libc::ENOPROTOOPT) => Ok(None),
        Err(error) => Err(error),
    }
}

pub(super) fn invalid(text: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, text)
}

/// Reads an option whose value is a number.
fn option<T: Number>(socket: &impl AsFd, name: c_int) -> io::Result<T> {
    let (socket, level) = (socket.as_fd().as_raw_fd(), libc::SOL_SOCKET);
    let mut value = T::default();
    let mut len = size_of::<T>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes to a number of that size, and any bytes are a number.
    let result = unsafe { libc::getsockopt(socket, level, name, (&raw mut value).cast(), &raw mut len) };
    if result == 0 { Ok(value) } else { Err(io::Error::last_os_error()) }
}

/// A number of any bytes.
trait Number: Default + PartialEq {}
impl Number for c_int {}
impl Number for u64 {}

// Linux 5.14; missing in libc for this target.
const SO_NETNS_COOKIE: c_int = 71;

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, UdpSocket};

    use super::*;

    #[test]
    fn sockets_of_one_kind_are_alike_whatever_they_are_bound_to() {
        let tcp = || TcpListener::bind("127.0.0.1:0").unwrap();
        check_kind(&tcp(), &tcp()).unwrap();
        let udp = UdpSocket::bind("127.0.0.1:0").unwrap();
        assert!(check_kind(&udp, &tcp()).unwrap_err().to_string().contains("another type"));
        let (local, _) = std::os::unix::net::UnixStream::pair().unwrap();
        assert!(check_kind(&local, &tcp()).unwrap_err().to_string().contains("family"));
        assert!(check_kind(&std::fs::File::open("/dev/null").unwrap(), &tcp()).is_err());
    }
}
