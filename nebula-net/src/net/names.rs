//! Names of peers: those in their certificates, and what the DNS of a lighthouse knows.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use super::Net;

/// For one answer of one lighthouse.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);
const TRIES: usize = 2;
const A: u16 = 1;
const AAAA: u16 = 28;
const INTERNET: u16 = 1;

impl Net {
    pub(crate) async fn resolve(&self, target: &str) -> io::Result<SocketAddr> {
        if let Ok(address) = target.parse() {
            return Ok(address);
        }
        let (host, port) = target.rsplit_once(':').ok_or_else(|| invalid("a target is HOST:PORT"))?;
        let port = port.parse().map_err(|_| invalid("the port is not a number"))?;
        if let Ok(address) = host.parse() {
            return Ok(SocketAddr::new(address, port));
        }
        Ok(SocketAddr::new(self.look_up(host).await?, port))
    }

    /// The overlay address of a host: the name in the certificate of a peer with a tunnel, or a name that the DNS of
    /// a lighthouse knows.
    ///
    /// # Errors
    /// Returns [`NotFound`](io::ErrorKind::NotFound) if nobody knows the name, and an error if the node has ended.
    pub async fn look_up(&self, host: &str) -> io::Result<IpAddr> {
        match self.named(host).await? {
            Some(address) => Ok(address),
            None => self.ask_lighthouses(host).await,
        }
    }

    /// This node, or the peer with this name in its certificate, if there is a tunnel to it. Of several peers with
    /// the name, the one that had it first.
    async fn named(&self, host: &str) -> io::Result<Option<IpAddr>> {
        let host = host.trim_end_matches('.').to_owned();
        let (own_name, tunnels) = self.control(|node| (node.own_name().to_owned(), node.tunnels())).await?;
        let own = self.addresses();
        if own_name.eq_ignore_ascii_case(&host) {
            return Ok(own.first().copied());
        }
        let reachable = |address: &IpAddr| own.iter().any(|own| own.is_ipv4() == address.is_ipv4());
        let named = tunnels.into_iter().filter(|tunnel| tunnel.name.eq_ignore_ascii_case(&host));
        Ok(named.filter(|tunnel| tunnel.holds_name).find_map(|tunnel| tunnel.peer.into_iter().find(reachable)))
    }

    /// Asks the lighthouses, one after the other.
    async fn ask_lighthouses(&self, host: &str) -> io::Result<IpAddr> {
        let unknown =
            || io::Error::new(io::ErrorKind::NotFound, format!("no peer or lighthouse knows the name {host}"));
        let own = self.addresses();
        let lighthouses = &self.inner.lighthouses;
        let socket = self.bind_udp(0)?;
        for kind in [A, AAAA].into_iter().filter(|kind| own.iter().any(|own| own.is_ipv4() == (*kind == A))) {
            for (number, lighthouse) in lighthouses.iter().cycle().take(lighthouses.len() * TRIES).enumerate() {
                // The tunnel authenticates who answers; the number only tells answers apart.
                let number = number as u16 + kind * 256;
                let server = SocketAddr::new(*lighthouse, self.inner.dns_port);
                socket.send_to(&query(number, host, kind).ok_or_else(unknown)?, server).await?;
                let answer = async {
                    loop {
                        let datagram = socket.recv().await?;
                        if datagram.from == server
                            && let Some(answer) = parse_answer(&datagram.payload, number, kind)
                        {
                            return Ok::<_, io::Error>(answer);
                        }
                    }
                };
                match tokio::time::timeout(ANSWER_TIMEOUT, answer).await {
                    Ok(Ok(Some(address))) => return Ok(address),
                    Ok(Ok(None)) => break,
                    Ok(Err(error)) => return Err(error),
                    Err(_) => {}
                }
            }
        }
        Err(unknown())
    }
}

fn invalid(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, what)
}

/// A DNS query (RFC 1035 section 4); `None` if the name cannot be one.
fn query(number: u16, host: &str, kind: u16) -> Option<Vec<u8>> {
    let mut message = Vec::new();
    for word in [number, 0x0100, 1, 0, 0, 0] {
        message.extend_from_slice(&word.to_be_bytes());
    }
    for label in host.trim_end_matches('.').split('.') {
        let len = u8::try_from(label.len()).ok().filter(|len| (1..64).contains(len))?;
        message.push(len);
        message.extend_from_slice(label.as_bytes());
    }
    message.push(0);
    message.extend_from_slice(&kind.to_be_bytes());
    message.extend_from_slice(&INTERNET.to_be_bytes());
    (message.len() <= 12 + 255 + 4).then_some(message)
}

/// Reads the answer to a query with this number; the inner `None` says that there is no such name.
#[allow(clippy::option_option, reason = "the outer one says whether it is the answer")]
fn parse_answer(bytes: &[u8], number: u16, kind: u16) -> Option<Option<IpAddr>> {
    let word = |at: usize| bytes.get(at..at + 2).map(|two| u16::from_be_bytes([two[0], two[1]]));
    // An answer, and to this query.
    if word(0)? != number || word(2)? & 0x8000 == 0 {
        return None;
    }
    let mut at = 12;
    for _ in 0..word(4)? {
        at = skip_name(bytes, at)? + 4;
    }
    for _ in 0..word(6)? {
        at = skip_name(bytes, at)?;
        let (found, len) = (word(at)?, usize::from(word(at + 8)?));
        let data = bytes.get(at + 10..at + 10 + len)?;
        if found == kind {
            let address = match kind {
                A => data.first_chunk::<4>().map(|four| Ipv4Addr::from(*four).into()),
                _ => data.first_chunk::<16>().map(|all| Ipv6Addr::from(*all).into()),
            };
            return Some(address);
        }
        at += 10 + len;
    }
    Some(None)
}

/// Offset after the name at `at`.
fn skip_name(bytes: &[u8], mut at: usize) -> Option<usize> {
    loop {
        match *bytes.get(at)? {
            0 => return Some(at + 1),
            len if len & 0xc0 == 0xc0 => return Some(at + 2),
            len => at += 1 + usize::from(len),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_to_a_query_is_read() {
        let mut answer = query(7, "db.example", A).unwrap();
        answer[2] |= 0x80;
        answer[7] = 1;
        answer.extend_from_slice(&[0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 60, 0, 4, 10, 42, 0, 9]);
        assert_eq!(parse_answer(&answer, 7, A), Some(Some(IpAddr::from([10, 42, 0, 9]))));
        assert_eq!(parse_answer(&answer, 7, AAAA), Some(None));
        assert_eq!(parse_answer(&answer, 8, A), None);
        for len in 0..answer.len() {
            let _ = parse_answer(&answer[..len], 7, A);
        }
        assert_eq!(query(7, "a..b", A), None);
        assert_eq!(query(7, &"a".repeat(64), A), None);
    }
}
