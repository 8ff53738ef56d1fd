//! What our programs share where they listen: all addresses of a system with or without IPv6 ([`listen`]), whose a
//! connection is ([`Source`]), and how many there may be at a time without one source keeping the others out
//! ([`Places`]). Not about certificates; it is in this crate because all programs have it.

mod places;
mod source;

use std::io::{self, ErrorKind};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};

pub use places::{Place, Places};
pub use source::Source;

/// Listens on `address`. `::` means all addresses of both families, or of IPv4 if the system gives no IPv6 socket: the
/// kernel has IPv6 switched off, or a filter of system calls refuses it.
///
/// # Errors
/// Returns the system's error.
pub fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    match TcpListener::bind(address) {
        // A program that listens on IPv6 alone keeps the port.
        Err(error) if address.ip() == Ipv6Addr::UNSPECIFIED && error.kind() != ErrorKind::AddrInUse => {
            TcpListener::bind((Ipv4Addr::UNSPECIFIED, address.port())).map_err(|_| error)
        }
        bound => bound,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_unspecified_address_serves_both_families_and_a_port_belongs_to_one() {
        let listener = listen((Ipv6Addr::UNSPECIFIED, 0).into()).unwrap();
        let port = listener.local_addr().unwrap().port();
        assert!(std::net::TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_ok());
        let again = listen((Ipv6Addr::UNSPECIFIED, port).into());
        assert_eq!(again.unwrap_err().kind(), ErrorKind::AddrInUse);
        assert_eq!(listen((Ipv4Addr::LOCALHOST, 0).into()).unwrap().local_addr().unwrap().ip(), Ipv4Addr::LOCALHOST);
    }
}
