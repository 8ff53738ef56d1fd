//! The header of the PROXY protocol, version 2, with which a proxy tells a service who connects: `nebula-proxy -serve
//! PORT=LOCAL,proxy-v2` writes it, and a service reads it.
//!
//! Format: <https://www.haproxy.org/download/3.0/doc/proxy-protocol.txt>, section 2.2. What the peer's certificate
//! says is in TLVs of the range for applications: [`TLV_NAME`], [`TLV_GROUP`] once for each group,
//! [`TLV_FINGERPRINT`].
//!
//! Whoever can connect to the service can send such a header. A service must believe it only where nobody but the
//! proxy can connect.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use nebula_cert::{Fingerprint, VerifiedCertificate};
use tokio::io::{AsyncRead, AsyncReadExt};

/// Type of the TLV with the name in the peer's certificate (UTF-8).
pub const TLV_NAME: u8 = 0xe0;
/// Type of the TLVs with the groups in the peer's certificate (UTF-8), one for each group.
pub const TLV_GROUP: u8 = 0xe1;
/// Type of the TLV with the fingerprint of the peer's certificate: SHA-256, 32 bytes.
pub const TLV_FINGERPRINT: u8 = 0xe2;

const SIGNATURE: [u8; 12] = *b"\r\n\r\n\0\r\nQUIT\n";
/// Signature, version and command, family and transport, length.
const FIXED: usize = 16;
const LOCAL: u8 = 0x20;
const PROXY: u8 = 0x21;
const TCP4: u8 = 0x11;
const TCP6: u8 = 0x21;

/// Who connects to what.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProxyHeader {
    /// Source and destination of the connection; `None`: the proxy itself connects, to see whether the service
    /// answers, or does not know.
    pub addresses: Option<(SocketAddr, SocketAddr)>,
    /// What the certificate of the source says; `None` if the header has none.
    pub peer: Option<ProxyPeer>,
}

/// What the certificate of the peer says that a proxy speaks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProxyPeer {
    /// Name.
    pub name: String,
    /// Groups.
    pub groups: Vec<String>,
    /// Fingerprint of the certificate.
    pub fingerprint: Fingerprint,
}

impl From<&VerifiedCertificate> for ProxyPeer {
    fn from(certificate: &VerifiedCertificate) -> Self {
        Self {
            name: certificate.name().to_owned(),
            groups: certificate.groups().to_vec(),
            fingerprint: certificate.fingerprint(),
        }
    }
}

/// Why bytes are no header, or a header cannot be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ProxyHeaderError {
    /// The bytes begin with something else.
    #[error("not a header of the PROXY protocol, version 2")]
    Signature,
    /// A version or command that the specification does not have.
    #[error("a header of the PROXY protocol with an unknown version or command")]
    Command,
    /// The addresses or a TLV end beyond the header, or a text is not UTF-8.
    #[error("a malformed header of the PROXY protocol")]
    Malformed,
    /// The two addresses are of different families.
    #[error("source and destination are of different address families")]
    Families,
    /// The certificate says more than a header can hold.
    #[error("the certificate is too long for a header of the PROXY protocol")]
    TooLong,
}

impl From<ProxyHeaderError> for io::Error {
    fn from(error: ProxyHeaderError) -> Self {
        Self::new(io::ErrorKind::InvalidData, error)
    }
}

impl ProxyHeader {
    /// The bytes to send before anything else.
    ///
    /// # Errors
    /// Returns an error if the addresses are of different families, or the groups are longer than 64 KiB together.
    pub fn encode(&self) -> Result<Vec<u8>, ProxyHeaderError> {
        let mut out = SIGNATURE.to_vec();
        out.extend([if self.addresses.is_some() { PROXY } else { LOCAL }, 0, 0, 0]);
        if let Some((source, destination)) = self.addresses {
            match (source.ip(), destination.ip()) {
                (IpAddr::V4(source), IpAddr::V4(destination)) => {
                    out[FIXED - 3] = TCP4;
                    out.extend(source.octets().into_iter().chain(destination.octets()));
                }
                (IpAddr::V6(source), IpAddr::V6(destination)) => {
                    out[FIXED - 3] = TCP6;
                    out.extend(source.octets().into_iter().chain(destination.octets()));
                }
                _ => return Err(ProxyHeaderError::Families),
            }
            out.extend(source.port().to_be_bytes().into_iter().chain(destination.port().to_be_bytes()));
        }
        if let Some(peer) = &self.peer {
            let groups = peer.groups.iter().map(|group| (TLV_GROUP, group.as_bytes()));
            let name = (TLV_NAME, peer.name.as_bytes());
            for (kind, value) in [name].into_iter().chain(groups).chain([(TLV_FINGERPRINT, &peer.fingerprint.0[..])]) {
                out.push(kind);
                out.extend(u16::try_from(value.len()).map_err(|_| ProxyHeaderError::TooLong)?.to_be_bytes());
                out.extend(value);
            }
        }
        let len = u16::try_from(out.len() - FIXED).map_err(|_| ProxyHeaderError::TooLong)?;
        out[FIXED - 2..FIXED].copy_from_slice(&len.to_be_bytes());
        Ok(out)
    }

    /// Reads a header at the beginning of what a connection received. Returns it and its length; `None` if more bytes
    /// are needed, of which a header has less than 65,552.
    ///
    /// # Errors
    /// Returns an error if the bytes are no such header.
    pub fn parse(bytes: &[u8]) -> Result<Option<(Self, usize)>, ProxyHeaderError> {
        let known = bytes.len().min(SIGNATURE.len());
        if bytes[..known] != SIGNATURE[..known] {
            return Err(ProxyHeaderError::Signature);
        }
        let Some((fixed, rest)) = bytes.split_first_chunk::<FIXED>() else { return Ok(None) };
        let [.., command, family, high, low] = *fixed;
        if !matches!(command, LOCAL | PROXY) {
            return Err(ProxyHeaderError::Command);
        }
        let len = usize::from(u16::from_be_bytes([high, low]));
        let Some(mut body) = rest.get(..len) else { return Ok(None) };
        let mut addresses = None;
        // For other families and transports, and for LOCAL, what follows is to be skipped.
        if command == PROXY {
            match family {
                TCP4 => addresses = Some(take_addresses(&mut body, |ip: [u8; 4]| Ipv4Addr::from(ip).into())?),
                TCP6 => addresses = Some(take_addresses(&mut body, |ip: [u8; 16]| Ipv6Addr::from(ip).into())?),
                _ => {}
            }
        }
        let peer = if addresses.is_some() { read_peer(body)? } else { None };
        Ok(Some((Self { addresses, peer }, FIXED + len)))
    }

    /// Reads a header from a connection, and nothing behind it. Give it a time limit.
    ///
    /// # Errors
    /// Returns an error if the connection ends, or begins with something else.
    pub async fn read<S: AsyncRead + Unpin>(stream: &mut S) -> io::Result<Self> {
        let mut bytes = vec![0; FIXED];
        stream.read_exact(&mut bytes).await?;
        if let Some((header, _)) = Self::parse(&bytes)? {
            return Ok(header);
        }
        let len = usize::from(u16::from_be_bytes([bytes[FIXED - 2], bytes[FIXED - 1]]));
        bytes.resize(FIXED + len, 0);
        stream.read_exact(&mut bytes[FIXED..]).await?;
        let (header, _) = Self::parse(&bytes)?.ok_or(ProxyHeaderError::Malformed)?;
        Ok(header)
    }
}

/// Takes the addresses and ports of one family from the front.
fn take_addresses<const LEN: usize>(
    body: &mut &[u8],
    address: impl Fn([u8; LEN]) -> IpAddr,
) -> Result<(SocketAddr, SocketAddr), ProxyHeaderError> {
    let (source, rest) = body.split_first_chunk::<LEN>().ok_or(ProxyHeaderError::Malformed)?;
    let (destination, rest) = rest.split_first_chunk::<LEN>().ok_or(ProxyHeaderError::Malformed)?;
    let ([a, b, c, d], rest) = rest.split_first_chunk::<4>().ok_or(ProxyHeaderError::Malformed)?;
    *body = rest;
    let (source, destination) = (address(*source), address(*destination));
    Ok((
        SocketAddr::new(source, u16::from_be_bytes([*a, *b])),
        SocketAddr::new(destination, u16::from_be_bytes([*c, *d])),
    ))
}

/// What TLVs say about the peer. A peer without all of name and fingerprint is none.
fn read_peer(mut body: &[u8]) -> Result<Option<ProxyPeer>, ProxyHeaderError> {
    let text = |value: &[u8]| std::str::from_utf8(value).map(str::to_owned).map_err(|_| ProxyHeaderError::Malformed);
    let (mut name, mut groups, mut fingerprint) = (None, Vec::new(), None);
    while let Some(([kind, high, low], rest)) = body.split_first_chunk::<3>() {
        let len = usize::from(u16::from_be_bytes([*high, *low]));
        let (value, rest) = rest.split_at_checked(len).ok_or(ProxyHeaderError::Malformed)?;
        body = rest;
        match *kind {
            TLV_NAME => name = Some(text(value)?),
            TLV_GROUP => groups.push(text(value)?),
            TLV_FINGERPRINT => {
                fingerprint = Some(Fingerprint(value.try_into().map_err(|_| ProxyHeaderError::Malformed)?));
            }
            _ => {}
        }
    }
    if !body.is_empty() {
        return Err(ProxyHeaderError::Malformed);
    }
    Ok(name.zip(fingerprint).map(|(name, fingerprint)| ProxyPeer { name, groups, fingerprint }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(source: &str, destination: &str) -> ProxyHeader {
        let peer = ProxyPeer {
            name: "laptop".to_owned(),
            groups: vec!["ops".to_owned(), "web".to_owned()],
            fingerprint: Fingerprint([7; 32]),
        };
        ProxyHeader { addresses: Some((source.parse().unwrap(), destination.parse().unwrap())), peer: Some(peer) }
    }

    #[test]
    fn a_header_is_read_as_it_was_written() {
        for header in [
            header("10.42.0.1:1000", "10.42.0.2:80"),
            header("[fd42::1]:1000", "[fd42::2]:80"),
            ProxyHeader { peer: None, ..header("10.42.0.1:1", "10.42.0.2:2") },
            ProxyHeader { addresses: None, peer: None },
        ] {
            let mut bytes = header.encode().unwrap();
            let len = bytes.len();
            for part in 0..len {
                assert_eq!(ProxyHeader::parse(&bytes[..part]), Ok(None), "{part} of {len} bytes");
            }
            bytes.extend(b"GET /");
            assert_eq!(ProxyHeader::parse(&bytes), Ok(Some((header, len))));
        }
    }

    /// Read by the library that others use.
    #[test]
    fn another_reader_finds_the_same() {
        let bytes = header("10.42.0.1:1000", "10.42.0.2:80").encode().unwrap();
        let read = ppp::v2::Header::try_from(&bytes[..]).unwrap();
        assert_eq!(
            (read.command, read.protocol, read.len()),
            (ppp::v2::Command::Proxy, ppp::v2::Protocol::Stream, bytes.len())
        );
        assert_eq!(read.addresses, ppp::v2::IPv4::new([10, 42, 0, 1], [10, 42, 0, 2], 1000, 80).into());
        let tlvs: Vec<_> = read.tlvs().map(|tlv| tlv.unwrap()).map(|tlv| (tlv.kind, tlv.value.into_owned())).collect();
        let expected =
            [(TLV_NAME, &b"laptop"[..]), (TLV_GROUP, b"ops"), (TLV_GROUP, b"web"), (TLV_FINGERPRINT, &[7; 32])];
        assert_eq!(tlvs, expected.map(|(kind, value)| (kind, value.to_vec())));
    }

    #[test]
    fn what_another_writer_wrote_is_read() {
        use ppp::v2::{Addresses, Builder, Command, Protocol, Type, Version};
        let ends: [SocketAddr; 2] = ["[fd42::1]:1".parse().unwrap(), "[fd42::2]:2".parse().unwrap()];
        let addresses: Addresses = (ends[0], ends[1]).into();
        let builder = Builder::with_addresses(Version::Two | Command::Proxy, Protocol::Stream, addresses);
        let builder = builder.write_tlv(Type::Authority, b"web.example").unwrap();
        let bytes = builder.write_tlv(TLV_NAME, b"laptop").unwrap().build().unwrap();
        let (read, len) = ProxyHeader::parse(&bytes).unwrap().unwrap();
        assert_eq!((read.addresses, len), (Some((ends[0], ends[1])), bytes.len()));
        assert_eq!(read.peer, None, "a name without a fingerprint is no certificate");
    }

    #[test]
    fn what_is_no_header_is_refused() {
        assert_eq!(ProxyHeader::parse(b"GET / HTTP/1.1"), Err(ProxyHeaderError::Signature));
        let good = header("10.42.0.1:1000", "10.42.0.2:80").encode().unwrap();
        let mut version = good.clone();
        version[12] = 0x31;
        assert_eq!(ProxyHeader::parse(&version), Err(ProxyHeaderError::Command));
        let mut long_tlv = good.clone();
        long_tlv[FIXED + 12 + 1] = 0xff;
        assert_eq!(ProxyHeader::parse(&long_tlv), Err(ProxyHeaderError::Malformed));
        let mut short = good;
        short[FIXED - 2..FIXED].copy_from_slice(&[0, 11]);
        assert_eq!(ProxyHeader::parse(&short), Err(ProxyHeaderError::Malformed));
    }

    #[test]
    fn what_does_not_fit_is_not_written() {
        assert_eq!(header("10.42.0.1:1", "[fd42::2]:2").encode(), Err(ProxyHeaderError::Families));
        let mut large = header("10.42.0.1:1", "10.42.0.2:2");
        large.peer.as_mut().unwrap().groups = vec!["g".repeat(1000); 70];
        assert_eq!(large.encode(), Err(ProxyHeaderError::TooLong));
    }

    #[tokio::test]
    async fn nothing_behind_the_header_is_read() {
        let header = header("10.42.0.1:1000", "10.42.0.2:80");
        let mut bytes = header.encode().unwrap();
        bytes.extend(b"data");
        let mut stream = &bytes[..];
        assert_eq!(ProxyHeader::read(&mut stream).await.unwrap(), header);
        assert_eq!(stream, b"data");
        assert!(ProxyHeader::read(&mut &b"GET / HTTP/1.1\r\n\r\n"[..]).await.is_err());
    }
}
