//! Replays a conversation recorded with Go Nebula to one of our nodes, with hostile datagrams in between: our answers
//! must be the same as Go's, whatever the attacker sends.
//!
//! The recordings (`recorded/`) were made between a test client and Go Nebula 1.11.0 as the responder, and include all
//! of the client's keys; these keys are used for nothing else. Our node has the responder's certificate. It answers the
//! recorded handshake messages itself and then adopts the recorded session keys, because Go's secrets in the handshake
//! are not known.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nebula_cert::{CaPool, Certificate, Identity, VerifiedCertificate};
use nebula_core::config::Cipher;
use nebula_core::firewall::{Policy, Rule};
use nebula_core::forward::Received;
use nebula_core::internals::AeadKey;
use nebula_core::internals::SessionKeys;
use nebula_core::internals::header::{HEADER_LEN, Header, MessageType};
use nebula_core::{Config, Forwarder, Node, Punt, Seed, WallClock};
use nebula_core::{LocalIndex, RemoteIndex};
use serde_json::Value;

/// The first input byte selects the recording. After that, one byte before each recorded datagram says how many hostile
/// datagrams to send first, each described by four bytes.
pub(crate) fn differential(data: &[u8]) {
    let mut noise = data.iter().copied();
    let recordings = [RECORDED_V2, RECORDED_V1];
    let recording = recordings[usize::from(noise.next().unwrap_or_default()) % recordings.len()];
    let mut replay = Replay::new(&serde_json::from_str(recording).expect("a recording is JSON"));
    for step in std::mem::take(&mut replay.steps) {
        let hostile = noise.next().unwrap_or_default() % MAX_HOSTILE;
        for _ in 0..hostile {
            let [kind, which, at, bit] = [0; 4].map(|_: u8| noise.next().unwrap_or_default());
            replay.disturb(kind, which.into(), at.into(), bit);
        }
        replay.play(&step);
    }
}

/// One datagram of the client, and Go's answers.
struct Step {
    what: String,
    kind: MessageType,
    counter: u64,
    sent: Sent,
    answers: Vec<Answer>,
}

enum Sent {
    /// Sent as recorded.
    Datagram(Vec<u8>),
    /// Plaintext, to be sealed with the recorded key.
    InTunnel(Vec<u8>),
}

#[derive(Debug, PartialEq, Eq)]
struct Answer {
    kind: (u8, u8),
    length: usize,
    /// The decrypted plaintext; for a handshake message the whole datagram; empty if not sealed with the recorded key.
    plaintext: Vec<u8>,
}

struct Replay {
    now: Instant,
    node: Node,
    forwarder: Arc<Forwarder>,
    steps: Vec<Step>,
    to_node: AeadKey,
    from_node: AeadKey,
    initiator_index: u32,
    cipher: Cipher,
    send: [u8; 32],
    receive: [u8; 32],
    peer: VerifiedCertificate,
    /// Local index of the recorded tunnel, once it exists.
    local_index: Option<LocalIndex>,
    /// The highest counter so far in the recorded tunnel.
    newest: u64,
    /// The datagrams that the client has sent so far.
    seen: Vec<Vec<u8>>,
    /// The first answer to the client's handshake message.
    reply: Option<Vec<u8>>,
}

impl Replay {
    fn new(recording: &Value) -> Self {
        let text = |name: &str| recording[name].as_str().expect("a text").to_owned();
        let key = |name: &str| <[u8; 32]>::try_from(bytes(&recording[name])).expect("a key");
        let cipher = if text("cipher") == "aes" { Cipher::Aes256Gcm } else { Cipher::ChaCha20Poly1305 };
        let identity = Identity::from_pem(text("responder_certificate").as_bytes(), text("responder_key").as_bytes());
        let trust = CaPool::from_pem(text("ca").as_bytes()).expect("the CA of the recording");
        let mut config = Config::new(identity.expect("the identity of the responder"), trust.clone());
        config.cipher = cipher;
        config.lighthouse.am_lighthouse = true;
        config.firewall = Policy { inbound: vec![Rule::any()], outbound: vec![Rule::any()], ..Policy::default() };
        let now = crate::pair::start();
        let (node, forwarder) =
            Node::new(config, now, WallClock { at: now, unix: RECORDED_AT }, Seed::predictable([1; 32]));
        let certificate = Certificate::from_pem(text("initiator_certificate").as_bytes()).expect("a certificate");
        let peer = trust.verify(certificate, RECORDED_AT.as_secs().cast_signed()).expect("it is valid then");
        let initiator_index = number(&recording["initiator_index"]);
        let (receive, send) = (key("initiator_to_responder"), key("responder_to_initiator"));
        Self {
            now,
            node,
            forwarder,
            steps: recording["steps"].as_array().expect("steps").iter().map(Step::new).collect(),
            to_node: AeadKey::new(cipher, &receive),
            from_node: AeadKey::new(cipher, &send),
            initiator_index,
            cipher,
            send,
            receive,
            peer,
            local_index: None,
            newest: 0,
            seen: Vec::new(),
            reply: None,
        }
    }

    /// Sends the client's datagram and compares the answers.
    fn play(&mut self, step: &Step) {
        let datagram = match &step.sent {
            Sent::Datagram(datagram) => datagram.clone(),
            Sent::InTunnel(plaintext) => {
                let index = self.tunnel().0;
                let header = Header { kind: step.kind, index, counter: step.counter }.to_bytes();
                let mut sealed = plaintext.clone();
                let tag = self.to_node.seal(step.counter, &header, &mut sealed);
                [&header[..], &sealed, &tag].concat()
            }
        };
        let in_tunnel = matches!(step.sent, Sent::InTunnel(_));
        let (answers, delivered) = self.receive(client(), &datagram);
        self.seen.push(datagram);
        match (&step.sent, step.kind) {
            // Go's answer came from its kernel, so compare what is delivered to the device.
            (Sent::InTunnel(packet), MessageType::Data) => {
                assert_eq!(delivered, std::slice::from_ref(packet), "{}", step.what)
            }
            (_, MessageType::Handshake) => self.compare_replies(step, answers),
            _ => {
                assert!(delivered.is_empty(), "{}: {delivered:?}", step.what);
                if !in_tunnel || self.newest < step.counter + GO_WINDOW {
                    assert_eq!(answers, step.answers, "{}", step.what);
                } else {
                    // Our replay window is larger than Go's, for which this counter is too old.
                    assert!(step.answers.is_empty() && answers.len() == 1, "{}: {answers:?}", step.what);
                }
                self.newest = self.newest.max(if in_tunnel { step.counter } else { 0 });
            }
        }
    }

    /// Returns the index of the recorded tunnel, which is created for the first datagram in it.
    fn tunnel(&mut self) -> LocalIndex {
        if let Some(index) = self.local_index {
            return index;
        }
        let keys = SessionKeys { cipher: self.cipher, send: self.send, receive: self.receive };
        let addresses = self.peer.networks().iter().map(ipnet::IpNet::addr).collect();
        let remote_index = RemoteIndex(self.initiator_index);
        let index = self.node.adopt_session(self.now, self.peer.clone(), addresses, client(), keys, remote_index);
        // Datagrams that the node sends because the tunnel is new are not answers.
        while self.node.poll_transmit().is_some() {}
        *self.local_index.insert(index.expect("the table has room"))
    }

    /// The second handshake message depends on this node's own ephemeral key, so only compare its kind and approximate
    /// length with Go's. A repeated first message must get the same bytes again.
    fn compare_replies(&mut self, step: &Step, answers: Vec<Answer>) {
        let [answer] = <[Answer; 1]>::try_from(answers).expect("one reply");
        let of_go = step.answers.first().expect("Go replied");
        assert_eq!(answer.kind, of_go.kind, "{}", step.what);
        // Indexes and times are encoded with variable length.
        assert!(answer.length.abs_diff(of_go.length) < 16, "{}: {} bytes", step.what, answer.length);
        let first = self.reply.get_or_insert_with(|| answer.plaintext.clone());
        assert_eq!(*first, answer.plaintext, "{}", step.what);
    }

    /// An attacker resends a datagram of the client, unchanged or modified.
    fn disturb(&mut self, kind: u8, which: usize, at: usize, bit: u8) {
        let Some(datagram) = self.seen.get(which % self.seen.len().max(1)) else { return };
        let mut datagram = datagram.clone();
        let at = at % datagram.len();
        match kind % 4 {
            0 => {}
            1 => datagram.truncate(at),
            2 => datagram.extend_from_slice(&vec![bit; at]),
            _ => datagram[at] ^= 1 << (bit % 8),
        }
        let (_, delivered) = self.receive(attacker(), &datagram);
        assert!(delivered.is_empty(), "a hostile datagram delivered {delivered:?}");
    }

    /// Receives a datagram; returns the answers to the sender and the packets for the device.
    fn receive(&mut self, from: SocketAddr, datagram: &[u8]) -> (Vec<Answer>, Vec<Vec<u8>>) {
        let mut buffer = datagram.to_vec();
        let mut lane = self.forwarder.lane();
        let received = [Received { from, range: 0..buffer.len(), segment_size: buffer.len().max(1) }];
        self.forwarder.inbound(&mut lane, self.now, &mut buffer, &received);
        let mut sent = Vec::new();
        for run in lane.runs() {
            let datagrams = lane.arena()[run.range.clone()].chunks(run.segment_size.max(1));
            sent.extend(datagrams.map(|datagram| (run.to, datagram.to_vec())));
        }
        let delivered = lane.deliveries().iter().map(|delivery| {
            let pieces = &lane.pieces()[delivery.pieces.clone()];
            pieces.iter().flat_map(|piece| buffer[piece.clone()].iter().copied()).collect()
        });
        let delivered = delivered.collect();
        for punt in lane.take_punts().collect::<Vec<Punt>>() {
            self.node.handle_punt(self.now, punt);
        }
        while self.node.poll_event().is_some() {}
        sent.extend(std::iter::from_fn(|| self.node.poll_transmit()).map(|transmit| (transmit.to, transmit.datagram)));
        let answers = sent.iter().filter(|(to, _)| *to == from).map(|(_, datagram)| self.read(datagram));
        (answers.collect(), delivered)
    }

    fn read(&self, datagram: &[u8]) -> Answer {
        let header = Header::parse(datagram).expect("we send headers");
        if header.kind == MessageType::Handshake {
            return Answer { kind: header.kind.numbers(), length: datagram.len(), plaintext: datagram.to_vec() };
        }
        let mut plaintext = datagram[HEADER_LEN..].to_vec();
        let in_tunnel = header.index == self.initiator_index;
        let opened = in_tunnel && self.from_node.open(header.counter, &datagram[..HEADER_LEN], &mut plaintext);
        plaintext.truncate(if opened { plaintext.len() - nebula_core::internals::header::TAG_LEN } else { 0 });
        Answer { kind: header.kind.numbers(), length: datagram.len(), plaintext }
    }
}

impl Step {
    fn new(step: &Value) -> Self {
        let kind = |of: &Value| (number::<u8>(&of["type"]), number::<u8>(&of["subtype"]));
        let answer = |answer: &Value| Answer {
            kind: kind(answer),
            length: number(&answer["length"]),
            plaintext: bytes(&answer["plaintext"]),
        };
        let datagram = step.get("datagram").map(bytes);
        Self {
            what: step["what"].as_str().unwrap_or_default().to_owned(),
            kind: message_type(kind(step)),
            counter: number(&step["counter"]),
            sent: datagram.map_or_else(|| Sent::InTunnel(bytes(&step["plaintext"])), Sent::Datagram),
            answers: step["answers"].as_array().expect("answers").iter().map(answer).collect(),
        }
    }
}

fn message_type(numbers: (u8, u8)) -> MessageType {
    use MessageType as M;
    let types = [M::Handshake, M::Data, M::Lighthouse, M::TestRequest, M::CloseTunnel];
    types.into_iter().find(|kind| kind.numbers() == numbers).expect("a type that the client sends")
}

fn number<T: TryFrom<u64>>(value: &Value) -> T {
    value.as_u64().and_then(|number| T::try_from(number).ok()).expect("a number")
}

fn bytes(hex: &Value) -> Vec<u8> {
    let digits: Vec<u32> = hex.as_str().unwrap_or_default().chars().filter_map(|c| c.to_digit(16)).collect();
    digits.chunks_exact(2).map(|pair| (pair[0] << 4 | pair[1]) as u8).collect()
}

fn client() -> SocketAddr {
    SocketAddr::from(([192, 168, 200, 9], 4242))
}

fn attacker() -> SocketAddr {
    SocketAddr::from(([192, 0, 2, 66], 666))
}

const RECORDED_V2: &str = include_str!("../recorded/v2-25519-aes.json");
const RECORDED_V1: &str = include_str!("../recorded/v1-25519-chachapoly.json");
/// A time within the validity of the certificates.
const RECORDED_AT: Duration = Duration::from_secs(1_800_000_000);
const MAX_HOSTILE: u8 = 8;
/// Size of Go's replay window.
const GO_WINDOW: u64 = 1024;
