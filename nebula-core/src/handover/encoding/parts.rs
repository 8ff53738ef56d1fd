//! The parts of a document, each as a message of its own.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use nebula_cert::protobuf::{Fields, Malformed, Value, Writer};
use nebula_cert::{Certificate, Version};
use zeroize::Zeroizing;

use super::DecodeError;
use crate::capture::{Endpoint, FlowState, HandedOverAffinity, HandedOverCourse, Target};
use crate::counters::Direction;
use crate::firewall::HandedOverFlow;
use crate::handover::{Flow, Hop, MeasuredPath, Peer, Session, State};
use crate::index::{LocalIndex, RelayIndex};
use crate::tunnel::cipher::Cipher;
use crate::tunnel::{Opening, ReplayRecord};
use crate::wire::ip::FlowKey;

pub(in crate::handover) const MAX_PEERS: usize = 1 << 17;
pub(in crate::handover) const MAX_SESSIONS: usize = 1 << 17;
pub(in crate::handover) const MAX_HOPS: usize = 1 << 16;
pub(in crate::handover) const MAX_FLOWS: usize = 1 << 20;
pub(in crate::handover) const MAX_AFFINITIES: usize = 1 << 12;
pub(in crate::handover) const MAX_ATTACHED: usize = 1 << 20;
const MAX_COUNTERS: usize = 1 << 12;
const MAX_COUNTER_NAME: usize = 100;
/// Sums of several of these do not overflow.
const MAX_COUNT: u64 = 1 << 60;
/// Longer than any certificate in a handshake.
const MAX_CERTIFICATE: usize = 1 << 16;
/// Blocks of eight replay windows.
const MAX_BLOCKS: usize = 1 << 13;

/// A number that the document is not longer than.
pub(super) fn upper_bound(state: &State) -> usize {
    let peers = state.peers.iter().map(|peer| peer.certificate.to_bytes().len() + 128);
    let sessions = state.sessions.iter().map(|session| 4 * session.opening.replay.blocks().len() + 128);
    let counters = state.counters.keys().map(|name| name.len() + 32);
    let lists =
        32 * state.hops.len() + 96 * state.flows.len() + 160 * state.courses.len() + 128 * state.affinities.len();
    128 + peers.chain(sessions).chain(counters).sum::<usize>() + lists + state.attached.len()
}

pub(super) fn write(state: &State, body: &mut Writer) {
    body.number(1, millis(state.made));
    state.peers.iter().for_each(|peer| body.message(2, |to| write_peer(peer, to)));
    state.sessions.iter().for_each(|session| body.message(3, |to| write_session(session, to)));
    for Hop { index, session } in &state.hops {
        body.message(4, |to| {
            to.number(1, index.0.into());
            to.number(2, session.0.into());
        });
    }
    for Flow { peer, known } in &state.flows {
        body.message(5, |to| {
            to.number(1, (*peer).into());
            to.message(2, |to| write_flow(&known.flow, to));
            to.number(3, if known.direction == Direction::Inbound { 1 } else { 2 });
            to.number(4, known.answered.into());
            to.number(5, millis(known.idle));
            to.number(6, known.ended.into());
        });
    }
    for course in &state.courses {
        body.message(6, |to| {
            to.message(1, |to| write_flow(&course.original, to));
            to.message(2, |to| write_endpoint(&course.endpoint, to));
            to.number(3, course.port.into());
            to.number(4, number_of(course.state));
            to.number(5, millis(course.idle));
        });
    }
    for HandedOverAffinity { service, endpoint, lasts } in &state.affinities {
        body.message(7, |to| {
            to.bytes(1, &address_bytes(service.address));
            to.number(2, service.port.into());
            to.number(3, service.protocol.into());
            if let Some(endpoint) = endpoint {
                to.message(4, |to| write_endpoint(endpoint, to));
            }
            to.number(5, millis(*lasts));
        });
    }
    for (name, n) in &state.counters {
        body.message(8, |to| {
            to.bytes(1, name.as_bytes());
            to.number(2, *n);
        });
    }
    body.nonempty(9, &state.attached);
}

pub(super) fn read(body: &[u8]) -> Result<State, DecodeError> {
    let mut state = State {
        made: Duration::ZERO,
        peers: Vec::new(),
        // Reserved at once, because growing would leave copies of keys behind.
        sessions: Vec::with_capacity(number_of_sessions(body).min(MAX_SESSIONS)),
        hops: Vec::new(),
        flows: Vec::new(),
        courses: Vec::new(),
        affinities: Vec::new(),
        counters: BTreeMap::new(),
        attached: Vec::new(),
    };
    for field in Fields::new(body) {
        match field? {
            (1, value) => state.made = Duration::from_millis(value.u64()?),
            (2, value) => push(&mut state.peers, MAX_PEERS, "peers", Some(read_peer(value.bytes()?)?))?,
            (3, value) => push(&mut state.sessions, MAX_SESSIONS, "sessions", read_session(value.bytes()?)?)?,
            (4, value) => push(&mut state.hops, MAX_HOPS, "relay hops", Some(read_hop(value.bytes()?)?))?,
            (5, value) => push(&mut state.flows, MAX_FLOWS, "flows", read_known(value.bytes()?)?)?,
            (6, value) => push(&mut state.courses, MAX_FLOWS, "translated flows", read_course(value.bytes()?)?)?,
            (7, value) => push(&mut state.affinities, MAX_AFFINITIES, "affinities", read_affinity(value.bytes()?)?)?,
            (8, value) => {
                let (name, n) = read_counter(value.bytes()?)?;
                state.counters.insert(name, n.min(MAX_COUNT));
                if state.counters.len() > MAX_COUNTERS {
                    return Err(DecodeError::TooMany("counters"));
                }
            }
            (9, value) => {
                let bytes = value.bytes()?;
                if bytes.len() > MAX_ATTACHED {
                    return Err(DecodeError::TooMany("bytes of the program"));
                }
                state.attached = bytes.to_vec();
            }
            _ => {}
        }
    }
    Ok(state)
}

fn number_of_sessions(body: &[u8]) -> usize {
    Fields::new(body).filter(|field| matches!(field, Ok((3, _)))).count()
}

/// Adds an entry, unless it has something that only a later release knows.
fn push<T>(list: &mut Vec<T>, most: usize, what: &'static str, item: Option<T>) -> Result<(), DecodeError> {
    if list.len() >= most {
        return Err(DecodeError::TooMany(what));
    }
    list.extend(item);
    Ok(())
}

fn write_peer(peer: &Peer, to: &mut Writer) {
    to.number(1, peer.certificate.version().number().into());
    to.bytes(2, &peer.certificate.to_bytes());
    if let Some(endpoint) = peer.endpoint {
        to.bytes(3, &socket_bytes(endpoint));
    }
    if let Some(relay) = peer.relay {
        to.bytes(4, &address_bytes(relay));
    }
    to.number(5, millis(peer.idle));
    if let Some(path) = peer.path {
        to.message(6, |to| {
            to.number(1, path.mtu.into());
            to.number(2, path.confirmed.into());
            to.number(3, path.limit.unwrap_or_default().into());
            to.number(4, u64::try_from(path.round_trip.as_micros()).unwrap_or(u64::MAX));
        });
    }
}

fn read_peer(message: &[u8]) -> Result<Peer, Malformed> {
    let (mut version, mut bytes) = (None, &[][..]);
    let (mut endpoint, mut relay, mut idle, mut path) = (None, None, Duration::ZERO, None);
    for field in Fields::new(message) {
        match field? {
            (1, value) => version = version_of(value.u32()?),
            (2, value) => bytes = value.bytes()?,
            (3, value) => endpoint = Some(socket(value.bytes()?)?),
            (4, value) => relay = Some(address(value.bytes()?)?),
            (5, value) => idle = Duration::from_millis(value.u64()?),
            (6, value) => path = Some(read_path(value.bytes()?)?),
            _ => {}
        }
    }
    let is_certificate = bytes.len() <= MAX_CERTIFICATE;
    let certificate = version.filter(|_| is_certificate).and_then(|it| Certificate::from_bytes(it, bytes).ok());
    let certificate = certificate.ok_or(Malformed("a peer without a certificate that can be read"))?;
    Ok(Peer { certificate, endpoint, relay, idle, path })
}

fn version_of(number: u32) -> Option<Version> {
    [Version::V1, Version::V2].into_iter().find(|version| version.number() == number)
}

fn read_path(message: &[u8]) -> Result<MeasuredPath, Malformed> {
    let mut path = MeasuredPath { mtu: 0, confirmed: 0, limit: None, round_trip: Duration::ZERO };
    for field in Fields::new(message) {
        match field? {
            (1, value) => path.mtu = small(value)?,
            (2, value) => path.confirmed = small(value)?,
            (3, value) => path.limit = Some(small(value)?).filter(|limit| *limit > 0),
            (4, value) => path.round_trip = Duration::from_micros(value.u64()?),
            _ => {}
        }
    }
    Ok(path)
}

fn write_session(session: &Session, to: &mut Writer) {
    let Opening { cipher, key, replay } = &session.opening;
    to.number(1, session.peer.into());
    to.number(2, session.index.0.into());
    to.number(3, if *cipher == Cipher::Aes256Gcm { 1 } else { 2 });
    to.bytes(4, &**key);
    to.number(5, replay.highest());
    // These are no secrets.
    let blocks: Vec<u8> = replay.blocks().iter().flat_map(|block| block.to_be_bytes()).collect();
    to.bytes(6, &blocks);
    to.number(7, millis(session.age));
}

fn read_session(message: &[u8]) -> Result<Option<Session>, Malformed> {
    let (mut peer, mut index, mut cipher, mut key) = (0, 0, None, None);
    let (mut highest, mut blocks, mut age) = (0, Vec::new(), Duration::ZERO);
    for field in Fields::new(message) {
        match field? {
            (1, value) => peer = value.u32()?,
            (2, value) => index = value.u32()?,
            (3, value) => cipher = cipher_of(value.u64()?),
            (4, value) => {
                let mut bytes = Zeroizing::new([0; 32]);
                let given = value.bytes()?;
                if given.len() != bytes.len() {
                    return Err(Malformed("a key of another length"));
                }
                bytes.copy_from_slice(given);
                key = Some(bytes);
            }
            (5, value) => highest = value.u64()?,
            (6, value) => {
                let (words, rest) = value.bytes()?.as_chunks::<4>();
                if !rest.is_empty() || words.len() > MAX_BLOCKS {
                    return Err(Malformed("a replay window of another length"));
                }
                blocks = words.iter().map(|word| u32::from_be_bytes(*word)).collect();
            }
            (7, value) => age = Duration::from_millis(value.u64()?),
            _ => {}
        }
    }
    let (Some(cipher), Some(key)) = (cipher, key) else { return Ok(None) };
    let opening = Opening { cipher, key, replay: ReplayRecord::new(highest, &blocks) };
    Ok(Some(Session { peer, index: LocalIndex(index), opening, age }))
}

fn cipher_of(number: u64) -> Option<Cipher> {
    match number {
        1 => Some(Cipher::Aes256Gcm),
        2 => Some(Cipher::ChaCha20Poly1305),
        _ => None,
    }
}

fn read_hop(message: &[u8]) -> Result<Hop, Malformed> {
    let mut hop = Hop { index: RelayIndex(0), session: LocalIndex(0) };
    for field in Fields::new(message) {
        match field? {
            (1, value) => hop.index = RelayIndex(value.u32()?),
            (2, value) => hop.session = LocalIndex(value.u32()?),
            _ => {}
        }
    }
    Ok(hop)
}

fn read_known(message: &[u8]) -> Result<Option<Flow>, Malformed> {
    let (mut peer, mut flow, mut direction) = (0, None, None);
    let (mut answered, mut ended, mut idle) = (false, false, Duration::ZERO);
    for field in Fields::new(message) {
        match field? {
            (1, value) => peer = value.u32()?,
            (2, value) => flow = Some(read_flow(value.bytes()?)?),
            (3, value) => direction = direction_of(value.u64()?),
            (4, value) => answered = value.u64()? != 0,
            (5, value) => idle = Duration::from_millis(value.u64()?),
            (6, value) => ended = value.u64()? != 0,
            _ => {}
        }
    }
    let (Some(flow), Some(direction)) = (flow, direction) else { return Ok(None) };
    Ok(Some(Flow { peer, known: HandedOverFlow { flow, direction, answered, ended, idle } }))
}

fn direction_of(number: u64) -> Option<Direction> {
    match number {
        1 => Some(Direction::Inbound),
        2 => Some(Direction::Outbound),
        _ => None,
    }
}

fn write_flow(flow: &FlowKey, to: &mut Writer) {
    to.bytes(1, &address_bytes(flow.local));
    to.bytes(2, &address_bytes(flow.remote));
    to.number(3, flow.local_port.into());
    to.number(4, flow.remote_port.into());
    to.number(5, flow.protocol.into());
    to.number(6, flow.fragment.into());
}

fn read_flow(message: &[u8]) -> Result<FlowKey, Malformed> {
    let (mut local, mut remote) = (None, None);
    let (mut local_port, mut remote_port, mut protocol, mut fragment) = (0, 0, 0, false);
    for field in Fields::new(message) {
        match field? {
            (1, value) => local = Some(address(value.bytes()?)?),
            (2, value) => remote = Some(address(value.bytes()?)?),
            (3, value) => local_port = small(value)?,
            (4, value) => remote_port = small(value)?,
            (5, value) => protocol = byte(value)?,
            (6, value) => fragment = value.u64()? != 0,
            _ => {}
        }
    }
    let (Some(local), Some(remote)) = (local, remote) else { return Err(Malformed("a flow without its addresses")) };
    if local.is_ipv4() != remote.is_ipv4() {
        return Err(Malformed("a flow between two families of addresses"));
    }
    Ok(FlowKey { local, remote, local_port, remote_port, protocol, fragment })
}

fn write_endpoint(endpoint: &Endpoint, to: &mut Writer) {
    to.bytes(1, &address_bytes(endpoint.address));
    to.number(2, endpoint.port.into());
    to.number(3, endpoint.incarnation);
}

fn read_endpoint(message: &[u8]) -> Result<Endpoint, Malformed> {
    let (mut at, mut port, mut incarnation) = (None, 0, 0);
    for field in Fields::new(message) {
        match field? {
            (1, value) => at = Some(address(value.bytes()?)?),
            (2, value) => port = small(value)?,
            (3, value) => incarnation = value.u64()?,
            _ => {}
        }
    }
    let address = at.ok_or(Malformed("an endpoint without an address"))?;
    Ok(Endpoint { address, port, incarnation })
}

fn read_course(message: &[u8]) -> Result<Option<HandedOverCourse>, Malformed> {
    let (mut original, mut endpoint, mut port, mut state, mut idle) = (None, None, 0, None, Duration::ZERO);
    for field in Fields::new(message) {
        match field? {
            (1, value) => original = Some(read_flow(value.bytes()?)?),
            (2, value) => endpoint = Some(read_endpoint(value.bytes()?)?),
            (3, value) => port = small(value)?,
            (4, value) => state = state_of(value.u64()?),
            (5, value) => idle = Duration::from_millis(value.u64()?),
            _ => {}
        }
    }
    let (Some(original), Some(endpoint), Some(state)) = (original, endpoint, state) else { return Ok(None) };
    if original.local.is_ipv4() != endpoint.address.is_ipv4() {
        return Err(Malformed("a flow that is translated to another family of addresses"));
    }
    Ok(Some(HandedOverCourse { original, endpoint, port, state, idle }))
}

/// Their numbers in documents begin with 1.
const FLOW_STATES: [FlowState; 6] =
    [FlowState::New, FlowState::Resumed, FlowState::Answered, FlowState::Closing, FlowState::Reset, FlowState::Gone];

fn number_of(state: FlowState) -> u64 {
    (1..).zip(FLOW_STATES).find(|(_, known)| *known == state).map_or(0, |(number, _)| number)
}

fn state_of(number: u64) -> Option<FlowState> {
    let at = usize::try_from(number.checked_sub(1)?).ok()?;
    FLOW_STATES.get(at).copied()
}

fn read_affinity(message: &[u8]) -> Result<Option<HandedOverAffinity>, Malformed> {
    let (mut at, mut port, mut protocol) = (None, 0, 0);
    let (mut endpoint, mut lasts) = (None, Duration::ZERO);
    for field in Fields::new(message) {
        match field? {
            (1, value) => at = Some(address(value.bytes()?)?),
            (2, value) => port = small(value)?,
            (3, value) => protocol = byte(value)?,
            (4, value) => endpoint = Some(read_endpoint(value.bytes()?)?),
            (5, value) => lasts = Duration::from_millis(value.u64()?),
            _ => {}
        }
    }
    let Some(address) = at else { return Ok(None) };
    Ok(Some(HandedOverAffinity { service: Target { address, port, protocol }, endpoint, lasts }))
}

fn read_counter(message: &[u8]) -> Result<(String, u64), Malformed> {
    let (mut name, mut n) = (&[][..], 0);
    for field in Fields::new(message) {
        match field? {
            (1, value) => name = value.bytes()?,
            (2, value) => n = value.u64()?,
            _ => {}
        }
    }
    let name = std::str::from_utf8(name).ok().filter(|name| name.len() <= MAX_COUNTER_NAME);
    Ok((name.ok_or(Malformed("a counter without a name"))?.to_owned(), n))
}

fn small(value: Value<'_>) -> Result<u16, Malformed> {
    u16::try_from(value.u64()?).map_err(|_| Malformed("number does not fit 16 bits"))
}

fn byte(value: Value<'_>) -> Result<u8, Malformed> {
    u8::try_from(value.u64()?).map_err(|_| Malformed("number does not fit 8 bits"))
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

fn address_bytes(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(v4) => v4.octets().to_vec(),
        IpAddr::V6(v6) => v6.octets().to_vec(),
    }
}

fn address(bytes: &[u8]) -> Result<IpAddr, Malformed> {
    let v4 = || <[u8; 4]>::try_from(bytes).map(IpAddr::from);
    v4().or_else(|_| <[u8; 16]>::try_from(bytes).map(IpAddr::from))
        .map_err(|_| Malformed("an address of another length"))
}

fn socket_bytes(at: SocketAddr) -> Vec<u8> {
    let mut bytes = address_bytes(at.ip());
    bytes.extend(at.port().to_be_bytes());
    bytes
}

fn socket(bytes: &[u8]) -> Result<SocketAddr, Malformed> {
    let (ip, port) = bytes.split_last_chunk().ok_or(Malformed("an endpoint without a port"))?;
    Ok(SocketAddr::new(address(ip)?, u16::from_be_bytes(*port)))
}
