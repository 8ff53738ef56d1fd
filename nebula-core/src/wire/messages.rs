//! Handshake payload, lighthouse and relay-control messages (protobuf).
//!
//! Fields are written in ascending order and zeros are left out, so equal messages are encoded as equal bytes, which
//! are those of Go Nebula as well.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use nebula_cert::Version;

pub use nebula_cert::protobuf::Malformed;
use nebula_cert::protobuf::{Fields, Value, Writer, read_varint};

/// Maximum number of relays that are accepted per message. Further ones are skipped, as Go Nebula does.
pub const MAX_RELAYS: usize = 10;

/// Maximum number of endpoints that are accepted per message and named in an update; [`fair_cut`] shares them among
/// the families. Go Nebula reads ten of each family, and its lighthouses name eleven of each at most. The largest
/// reply has one more, the endpoint of the tunnel; with IPv6 everywhere and ten relays it makes a datagram of 1081
/// bytes through a relay, and the smallest IPv6 path carries 1280.
pub const MAX_ENDPOINTS: usize = 24;

/// How many endpoints of each family stay in a list that has so many of them: none takes the other's half of the room.
#[must_use]
pub fn fair_cut(ipv4: usize, ipv6: usize) -> (usize, usize) {
    let ipv4 = ipv4.min(MAX_ENDPOINTS - ipv6.min(MAX_ENDPOINTS / 2));
    (ipv4, ipv6.min(MAX_ENDPOINTS - ipv4))
}

/// Field of the details, far from those of Go Nebula.
const KEM_OFFER: u32 = 100;

/// What both handshake messages carry inside Noise.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct HandshakePayload<'a> {
    /// Certificate without its public key.
    pub certificate: &'a [u8],
    /// Index the initiator allocated; the responder copies it back.
    pub initiator_index: u32,
    /// Index the responder allocated; 0 in message 1.
    pub responder_index: u32,
    /// Nanoseconds since the Unix epoch by the sender's clock.
    pub time: u64,
    /// 0 (from peers older than 1.10) and 1 mean version 1.
    pub certificate_version: u32,
    /// Key exchanges that the sender offers beside that of Noise, a bit for each; in message 2 the one that is chosen.
    /// Not in Go Nebula, which skips the field: 1 is ML-KEM-768.
    pub kem_offer: u32,
}

impl<'a> HandshakePayload<'a> {
    /// Reads a decrypted payload.
    ///
    /// # Errors
    /// Returns an error if the payload is not protobuf or a known field has another type.
    pub fn parse(message: &'a [u8]) -> Result<Self, Malformed> {
        let mut payload = Self::default();
        for field in Fields::new(message) {
            if let (1, Value::Bytes(details)) = field? {
                payload.parse_details(details)?;
            }
        }
        Ok(payload)
    }

    fn parse_details(&mut self, details: &'a [u8]) -> Result<(), Malformed> {
        for field in Fields::new(details) {
            match field? {
                (1, value) => self.certificate = value.bytes()?,
                (2, value) => self.initiator_index = value.u32()?,
                (3, value) => self.responder_index = value.u32()?,
                (5, value) => self.time = value.u64()?,
                (8, value) => self.certificate_version = value.u32()?,
                (KEM_OFFER, value) => self.kem_offer = value.u32()?,
                _ => {}
            }
        }
        Ok(())
    }

    /// Wire form.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut writer = Writer::default();
        writer.message(1, |details| {
            if !self.certificate.is_empty() {
                details.bytes(1, self.certificate);
            }
            details.number(2, self.initiator_index.into());
            details.number(3, self.responder_index.into());
            details.number(5, self.time);
            details.number(8, self.certificate_version.into());
            details.number(KEM_OFFER, self.kem_offer.into());
        });
        writer.finish()
    }
}

/// Kind of a lighthouse message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MetaKind {
    /// Node to lighthouse: where is the subject?
    HostQuery,
    /// Lighthouse to node: the subject is here.
    HostQueryReply,
    /// Node to lighthouse: I am here.
    HostUpdateNotification,
    /// Lighthouse to node: the subject wants to reach you from here, punch.
    HostPunchNotification,
    /// Lighthouse to node: update accepted.
    HostUpdateNotificationAck,
    /// Defined but unused, or unknown: must be ignored.
    Other(u32),
}

impl MetaKind {
    fn from_number(number: u32) -> Self {
        match number {
            1 => Self::HostQuery,
            2 => Self::HostQueryReply,
            3 => Self::HostUpdateNotification,
            5 => Self::HostPunchNotification,
            10 => Self::HostUpdateNotificationAck,
            other => Self::Other(other),
        }
    }

    fn number(self) -> u32 {
        match self {
            Self::HostQuery => 1,
            Self::HostQueryReply => 2,
            Self::HostUpdateNotification => 3,
            Self::HostPunchNotification => 5,
            Self::HostUpdateNotificationAck => 10,
            Self::Other(other) => other,
        }
    }
}

/// A lighthouse message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Meta {
    /// Kind of message.
    pub kind: MetaKind,
    /// Version of the address fields. When read: version 1 if and only if the subject came in the version 1 field.
    pub version: Version,
    /// The host that the message is about. Absent in version 2 updates and acknowledgements.
    pub subject: Option<IpAddr>,
    /// Endpoints of the subject: IPv4 first, both when read and when written.
    pub endpoints: Vec<SocketAddr>,
    /// Overlay addresses of the subject's relays.
    pub relays: Vec<IpAddr>,
}

impl Meta {
    /// A message without endpoints and relays.
    #[must_use]
    pub fn new(kind: MetaKind, version: Version, subject: Option<IpAddr>) -> Self {
        Self { kind, version, subject, endpoints: Vec::new(), relays: Vec::new() }
    }

    /// Reads a message; longer lists than [`MAX_ENDPOINTS`] and [`MAX_RELAYS`] are truncated.
    ///
    /// # Errors
    /// Returns an error if the message is not protobuf, a known field has another type, or the details are missing.
    pub fn parse(message: &[u8]) -> Result<Self, Malformed> {
        let (mut kind, mut details) = (0, None::<MetaDetails>);
        for field in Fields::new(message) {
            match field? {
                (1, value) => kind = value.u32()?,
                (2, value) => details.get_or_insert_default().parse(value.bytes()?)?,
                _ => {}
            }
        }
        let details = details.ok_or(Malformed("lighthouse message without details"))?;
        let old_subject = details.old_subject.map(IpAddr::V4);
        let (mut endpoints, v6_endpoints) = (details.v4_endpoints, details.v6_endpoints);
        let (ipv4, ipv6) = fair_cut(endpoints.len(), v6_endpoints.len());
        endpoints.truncate(ipv4);
        endpoints.extend(v6_endpoints.into_iter().take(ipv6));
        let mut relays = details.old_relays;
        relays.extend(details.relays);
        relays.truncate(MAX_RELAYS);
        Ok(Self {
            kind: MetaKind::from_number(kind),
            version: if old_subject.is_some() { Version::V1 } else { Version::V2 },
            subject: old_subject.or(details.subject),
            endpoints,
            relays,
        })
    }

    /// Wire form. Version 1 leaves out IPv6 relays, which it cannot express.
    ///
    /// # Errors
    /// Returns an error for an IPv6 subject in version 1, which cannot express it.
    pub fn encode(&self) -> Result<Vec<u8>, SubjectNeedsV2> {
        let old_subject = match (self.version, self.subject) {
            (Version::V1, Some(IpAddr::V4(subject))) => subject.to_bits(),
            (Version::V1, Some(subject @ IpAddr::V6(_))) => return Err(SubjectNeedsV2(subject)),
            _ => 0,
        };
        let mut writer = Writer::default();
        writer.number(1, self.kind.number().into());
        writer.message(2, |details| {
            details.number(1, old_subject.into());
            for endpoint in &self.endpoints {
                if let (IpAddr::V4(address), port) = split(*endpoint) {
                    details.message(2, |message| {
                        message.number(1, address.to_bits().into());
                        message.number(2, port.into());
                    });
                }
            }
            for endpoint in &self.endpoints {
                if let (IpAddr::V6(address), port) = split(*endpoint) {
                    details.message(4, |message| {
                        write_address(message, address);
                        message.number(3, port.into());
                    });
                }
            }
            match self.version {
                Version::V1 => details.packed(
                    5,
                    self.relays.iter().filter_map(|relay| match relay {
                        IpAddr::V4(relay) => Some(relay.to_bits()),
                        IpAddr::V6(_) => None,
                    }),
                ),
                Version::V2 => {
                    if let Some(subject) = self.subject {
                        details.message(6, |message| write_address(message, mapped(subject)));
                    }
                    for relay in &self.relays {
                        details.message(7, |message| write_address(message, mapped(*relay)));
                    }
                }
            }
        });
        Ok(writer.finish())
    }
}

/// Version 1 messages cannot express an IPv6 overlay address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("version 1 messages cannot name the IPv6 address {0}: use a version 2 certificate")]
pub struct SubjectNeedsV2(pub IpAddr);

/// Details of a lighthouse message while it is read: a second occurrence is merged into the first.
#[derive(Default)]
struct MetaDetails {
    old_subject: Option<Ipv4Addr>,
    subject: Option<IpAddr>,
    v4_endpoints: Vec<SocketAddr>,
    v6_endpoints: Vec<SocketAddr>,
    old_relays: Vec<IpAddr>,
    relays: Vec<IpAddr>,
}

impl MetaDetails {
    fn parse(&mut self, details: &[u8]) -> Result<(), Malformed> {
        for field in Fields::new(details) {
            match field? {
                (1, value) => self.old_subject = nonzero_v4(value.u32()?),
                (2, value) => push_bounded(&mut self.v4_endpoints, parse_v4_endpoint(value.bytes()?)?, MAX_ENDPOINTS),
                (3, value) => drop(value.u32()?),
                (4, value) => push_bounded(&mut self.v6_endpoints, parse_v6_endpoint(value.bytes()?)?, MAX_ENDPOINTS),
                (5, Value::Bytes(mut packed)) => {
                    while !packed.is_empty() {
                        let relay = Value::Varint(read_varint(&mut packed)?).u32()?;
                        push_bounded(&mut self.old_relays, Ipv4Addr::from_bits(relay).into(), MAX_RELAYS);
                    }
                }
                (5, value) => push_bounded(&mut self.old_relays, Ipv4Addr::from_bits(value.u32()?).into(), MAX_RELAYS),
                (6, value) => self.subject = Some(parse_address(value.bytes()?)?),
                (7, value) => push_bounded(&mut self.relays, parse_address(value.bytes()?)?, MAX_RELAYS),
                _ => {}
            }
        }
        Ok(())
    }
}

/// Kind of a relay-control message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ControlKind {
    /// To a relay: please relay. From a relay: somebody wants to reach you through me.
    CreateRelayRequest,
    /// The relay is set up.
    CreateRelayResponse,
    /// Unknown: must be ignored.
    Other(u32),
}

/// A relay-control message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Control {
    /// Kind of message.
    pub kind: ControlKind,
    /// Version of the address fields; a response uses that of the request.
    pub version: Version,
    /// Relay index of the request's sender on this hop.
    pub initiator_index: u32,
    /// Relay index of the response's sender on this hop.
    pub responder_index: u32,
    /// Overlay address of the end that asked first.
    pub from: IpAddr,
    /// Overlay address of the end to be reached.
    pub to: IpAddr,
}

impl Control {
    /// Reads a message.
    ///
    /// # Errors
    /// Returns an error if the message is not protobuf, a known field has another type, or an address is missing.
    pub fn parse(message: &[u8]) -> Result<Self, Malformed> {
        let (mut kind, mut initiator_index, mut responder_index) = (0, 0, 0);
        let (mut old_from, mut old_to, mut from, mut to) = (0, 0, None, None);
        for field in Fields::new(message) {
            match field? {
                (1, value) => kind = value.u32()?,
                (2, value) => initiator_index = value.u32()?,
                (3, value) => responder_index = value.u32()?,
                (4, value) => old_to = value.u32()?,
                (5, value) => old_from = value.u32()?,
                (6, value) => to = Some(parse_address(value.bytes()?)?),
                (7, value) => from = Some(parse_address(value.bytes()?)?),
                _ => {}
            }
        }
        let kind = match kind {
            1 => ControlKind::CreateRelayRequest,
            2 => ControlKind::CreateRelayResponse,
            other => ControlKind::Other(other),
        };
        let version = if old_from != 0 || old_to != 0 { Version::V1 } else { Version::V2 };
        let (from, to) = match version {
            Version::V1 => (nonzero_v4(old_from).map(IpAddr::V4), nonzero_v4(old_to).map(IpAddr::V4)),
            Version::V2 => (from, to),
        };
        let from = from.ok_or(Malformed("relay message without its initiator's address"))?;
        let to = to.ok_or(Malformed("relay message without its target's address"))?;
        Ok(Self { kind, version, initiator_index, responder_index, from, to })
    }

    /// Wire form.
    ///
    /// # Errors
    /// Returns an error for an IPv6 address in version 1, which cannot express it.
    pub fn encode(&self) -> Result<Vec<u8>, SubjectNeedsV2> {
        let mut writer = Writer::default();
        writer.number(
            1,
            match self.kind {
                ControlKind::CreateRelayRequest => 1,
                ControlKind::CreateRelayResponse => 2,
                ControlKind::Other(other) => other.into(),
            },
        );
        writer.number(2, self.initiator_index.into());
        writer.number(3, self.responder_index.into());
        match self.version {
            Version::V1 => {
                for (field, address) in [(4, self.to), (5, self.from)] {
                    let IpAddr::V4(address) = address else { return Err(SubjectNeedsV2(address)) };
                    writer.number(field, address.to_bits().into());
                }
            }
            Version::V2 => {
                for (field, address) in [(6, self.to), (7, self.from)] {
                    writer.message(field, |message| write_address(message, mapped(address)));
                }
            }
        }
        Ok(writer.finish())
    }
}

fn push_bounded<T>(list: &mut Vec<T>, item: T, most: usize) {
    if list.len() < most {
        list.push(item);
    }
}

fn nonzero_v4(bits: u32) -> Option<Ipv4Addr> {
    (bits != 0).then(|| Ipv4Addr::from_bits(bits))
}

/// On the wire, and nowhere else, an IPv4 overlay address is an IPv4-mapped IPv6 one.
fn mapped(address: IpAddr) -> Ipv6Addr {
    match address {
        IpAddr::V4(address) => address.to_ipv6_mapped(),
        IpAddr::V6(address) => address,
    }
}

/// Address and port, unmapped.
fn split(endpoint: SocketAddr) -> (IpAddr, u16) {
    (endpoint.ip().to_canonical(), endpoint.port())
}

fn write_address(message: &mut Writer, address: Ipv6Addr) {
    let bits = address.to_bits();
    message.number(1, (bits >> 64) as u64);
    message.number(2, bits as u64);
}

fn parse_address(message: &[u8]) -> Result<IpAddr, Malformed> {
    parse_address_and_port(message).map(|(address, _)| address)
}

fn parse_v6_endpoint(message: &[u8]) -> Result<SocketAddr, Malformed> {
    parse_address_and_port(message).map(SocketAddr::from)
}

fn parse_address_and_port(message: &[u8]) -> Result<(IpAddr, u16), Malformed> {
    let (mut high, mut low, mut port) = (0, 0, 0);
    for field in Fields::new(message) {
        match field? {
            (1, value) => high = value.u64()?,
            (2, value) => low = value.u64()?,
            (3, value) => port = parse_port(value)?,
            _ => {}
        }
    }
    let address = Ipv6Addr::from_bits(u128::from(high) << 64 | u128::from(low));
    Ok((IpAddr::V6(address).to_canonical(), port))
}

fn parse_v4_endpoint(message: &[u8]) -> Result<SocketAddr, Malformed> {
    let (mut address, mut port) = (0, 0);
    for field in Fields::new(message) {
        match field? {
            (1, value) => address = value.u32()?,
            (2, value) => port = parse_port(value)?,
            _ => {}
        }
    }
    Ok(SocketAddr::from((Ipv4Addr::from_bits(address), port)))
}

fn parse_port(value: Value<'_>) -> Result<u16, Malformed> {
    u16::try_from(value.u64()?).map_err(|_| Malformed("port does not fit 16 bits"))
}

#[cfg(test)]
mod tests;
