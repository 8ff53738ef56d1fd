//! The transport layer of `nebula-net`, fed with packets of peers that know its sequence numbers or do not. After
//! each step its accounts of connections and memory must be right.

use std::collections::VecDeque;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::OnceLock;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use nebula_cert::{CaPool, Curve, SigningKey, Template, VerifiedCertificate};
use nebula_core::forward::Offload;
use nebula_net::stack::{Id, Stack, StackOptions};
use nebula_net::tcp::segment::{Flags, Header};

const LOCAL: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 1);
const PEER: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 2);
const PORT: u16 = 80;
/// With one, the stack leaves the checksum to us, as it does for super-packets.
const UNCHECKED: Offload = Offload { segment: None, checksum: Some((20, 16)) };
/// More packets than this in answer to one would be an amplifier.
const MAX_ANSWERS: usize = 200;
const MAX_ROUNDS: usize = 10;
/// Answers that are remembered.
const MAX_KNOWN: usize = 8;

/// A header that parses is encoded to one that parses the same.
pub fn segment(data: &[u8]) {
    let Some((header, len)) = Header::parse(data) else { return };
    assert!(len <= data.len());
    let mut bytes = Vec::new();
    header.emit(&mut bytes);
    let (mut again, len) = Header::parse(&bytes).expect("what we wrote reads");
    assert_eq!(len, bytes.len());
    // Blocks that do not fit beside all other options are left out.
    assert!(header.options.sack.as_slice().starts_with(again.options.sack.as_slice()));
    again.options.sack = header.options.sack;
    assert_eq!(again, header);
}

/// Steps of a peer, of the program and of the clock, each a byte that says which, and its bytes.
pub fn transport(data: &[u8]) {
    #[allow(clippy::disallowed_methods, reason = "where virtual time begins")]
    let mut now = Instant::now();
    let mut options = StackOptions::default();
    // So small that floods of a few segments reach them.
    (options.limits.half_open, options.limits.backlog, options.limits.connections) = (3, 3, 24);
    (options.limits.time_wait, options.limits.receive_memory) = (3, 20_000);
    let mut stack = Stack::new(now, vec![LOCAL.into()], options, [7; 32]);
    stack.listen(None, PORT).expect("a free port");
    let mut context = Context::from_waker(Waker::noop());
    let (mut connections, mut known) = (Vec::<Id>::new(), VecDeque::from([Header::default()]));
    let mut rest = data;
    while let [step, tail @ ..] = rest {
        let take = usize::from(*step >> 3) * 4;
        let (bytes, tail) = tail.split_at(take.min(tail.len()));
        rest = tail;
        match step & 7 {
            0 => stack.receive(now, &[bytes], Offload::default()),
            1 | 2 => stack.receive(now, &[&packet(bytes, None)], UNCHECKED),
            // Near the numbers of the newest or the oldest answer that is remembered.
            kind @ (3 | 4) => {
                let known = if kind == 3 { known.back() } else { known.front() };
                stack.receive(now, &[&packet(bytes, known), &[9; 1000]], UNCHECKED);
            }
            5 => now += Duration::from_millis(take as u64 * take as u64),
            6 => {
                if let Ok(id) = stack.connect(now, SocketAddr::new(PEER.into(), PORT)) {
                    connections.push(id);
                }
            }
            _ => {
                while let Poll::Ready(Some(id)) = stack.poll_accept(None, PORT, &mut context) {
                    connections.push(id);
                }
                let mut out = [0; 500];
                for id in &connections {
                    let _ = stack.poll_read(now, *id, &mut context, &mut out);
                    let _ = stack.poll_write(now, *id, &mut context, &out);
                }
                if let Some(id) = connections.pop_if(|_| take > 100) {
                    stack.close(now, id);
                }
            }
        }
        while let Some(asked) = stack.next_asked() {
            let sender = senders().get(usize::from(asked.flow().remote.port()) % 3).cloned();
            stack.admit(now, asked, sender);
        }
        while let Some((id, _)) = stack.next_opened() {
            stack.set_sender(id, None);
        }
        // Each call serves one timer of a connection; after a jump of the clock several may be due.
        let (mut rounds, mut answers, mut answer) = (0, 0, Vec::new());
        while rounds == 0 || stack.poll_timeout().is_some_and(|due| due <= now) {
            rounds += 1;
            assert!(rounds < MAX_ROUNDS, "a timer that is due is never served");
            stack.timeout(now);
            while stack.poll_packet(now, &mut answer).is_some() {
                answers += 1;
                assert!(answers < MAX_ANSWERS, "it does not stop sending");
                if let Some((header, _)) = answer.get(20..).and_then(Header::parse) {
                    known.push_back(header);
                    if known.len() > MAX_KNOWN {
                        known.pop_front();
                    }
                }
            }
            stack.audit();
        }
    }
}

/// Two peers with certificates; there is a third one without.
fn senders() -> &'static [VerifiedCertificate] {
    static SENDERS: OnceLock<Vec<VerifiedCertificate>> = OnceLock::new();
    SENDERS.get_or_init(|| {
        let key = SigningKey::generate(Curve::Curve25519).expect("random bytes");
        let template = |name: &str| Template { public_key: key.public_key(), ..Template::new(name, 0..=10) };
        let authority = template("ca").self_sign(&key).expect("it can be signed");
        let mut pool = CaPool::new();
        pool.add(authority.clone()).expect("a CA");
        let peer = |name| {
            let networks = vec!["10.0.0.2/24".parse().expect("a network")];
            let certificate = Template { networks, ..template(name) }.sign(&authority, &key).expect("it can be signed");
            pool.verify(certificate, 5).expect("it is valid")
        };
        ["first", "second"].map(peer).into()
    })
}

/// A TCP packet of the peer. With a header of ours, its numbers are near those that we expect.
fn packet(bytes: &[u8], known: Option<&Header>) -> Vec<u8> {
    let mut transport = bytes.to_vec();
    transport.resize(bytes.len().max(20), 0);
    transport[12] = transport[12].max(0x50);
    let Some((mut header, len)) = Header::parse(&transport).or_else(|| {
        transport[12] = 0x50;
        Header::parse(&transport)
    }) else {
        return Vec::new();
    };
    header.destination = PORT;
    header.source = 1000 + header.source % 64;
    if let Some(known) = known {
        (header.source, header.destination) = (known.destination, known.source);
        let near = |number: u32, of: u32| of.wrapping_add((number as i16) as u32);
        header.sequence = near(header.sequence, known.acknowledgement);
        header.acknowledgement = near(header.acknowledgement, known.sequence);
        header.flags = header.flags.with(Flags::ACK);
        if header.window & 1 == 0 {
            header.options.timestamps = known.options.timestamps.map(|(value, echo)| (echo.wrapping_add(1), value));
        }
    }
    let mut packet = vec![0x45, 0, 0, 0, 0, 0, 0x40, 0, 64, 6, 0, 0];
    for address in [PEER, LOCAL] {
        packet.extend(address.octets());
    }
    header.emit(&mut packet);
    packet.extend_from_slice(&transport[len..]);
    let len = packet.len() as u16 + if known.is_some() { 1000 } else { 0 };
    packet[2..4].copy_from_slice(&len.to_be_bytes());
    packet
}
