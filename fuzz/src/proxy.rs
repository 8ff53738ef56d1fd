//! What clients of `nebula-proxy` send, and the header that a service behind it reads.

use nebula_net::proxy_header::ProxyHeader;
use nebula_proxy::socks::message::{datagram_header, parse_datagram, parse_greeting, parse_login, parse_request};

/// A header that parses is written to one that parses the same.
pub fn header(data: &[u8]) {
    let Ok(Some((header, len))) = ProxyHeader::parse(data) else { return };
    assert!(len <= data.len());
    let bytes = header.encode().expect("it came out of as many bytes");
    assert_eq!(ProxyHeader::parse(&bytes), Ok(Some((header, bytes.len()))));
}

/// No message is longer than what arrived, and bytes behind it change nothing.
pub fn message(data: &[u8]) {
    if let Ok(Some((methods, len))) = parse_greeting(data) {
        assert_eq!(len, 2 + methods.len());
        assert_eq!(parse_greeting(&data[..len]), Ok(Some((methods, len))));
    }
    if let Ok(Some((_, len))) = parse_login(data, |name, password| name.len() + password.len()) {
        assert!(len <= data.len());
    }
    if let Ok(Some((request, len))) = parse_request(data) {
        assert!(len <= data.len());
        assert_eq!(parse_request(&data[..len]), Ok(Some((request, len))));
    }
    if let Ok((target, len)) = parse_datagram(data) {
        assert!(len <= data.len());
        if let Ok(address) = target.to_string().parse() {
            let again = datagram_header(address);
            assert_eq!(parse_datagram(&again), Ok((target, again.len())));
        }
    }
}
