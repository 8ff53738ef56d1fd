//! Handshakes and traffic recorded with Go Nebula 1.6.1, 1.9.3 and 1.11.0, repeated bit for bit from the recorded
//! ephemeral keys.

use std::path::{Path, PathBuf};

use serde_json::Value;

use super::*;
use crate::tunnel::cipher::AeadKey;
use crate::tunnel::{ReplayWindow, Session};
use crate::wire::messages::{Control, Meta};

fn vectors() -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/vectors")).to_owned()
}

fn unhex(text: &str) -> Vec<u8> {
    (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap()).collect()
}

struct Recording {
    json: Value,
}

/// One recorded datagram.
struct Frame {
    from_initiator: bool,
    description: String,
    datagram: Vec<u8>,
    plaintext: Option<Vec<u8>>,
    inner_plaintext: Option<Vec<u8>>,
}

impl Recording {
    /// Reads all recordings whose file name ends in `suffix`. `expected` is their number, so that none is missed.
    fn all(suffix: &str, expected: usize) -> Vec<Self> {
        let mut files: Vec<_> = std::fs::read_dir(vectors().join("pcap"))
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .filter(|path| path.to_str().unwrap().ends_with(suffix))
            .collect();
        files.sort();
        assert_eq!(files.len(), expected, "{files:?}");
        files
            .into_iter()
            .map(|path| Self { json: serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap() })
            .collect()
    }

    fn text(&self, field: &str) -> &str {
        self.json[field].as_str().unwrap()
    }

    fn index(&self, field: &str) -> u32 {
        self.json[field].as_u64().unwrap().try_into().unwrap()
    }

    fn key(&self, field: &str) -> [u8; 32] {
        unhex(self.text(field)).try_into().unwrap()
    }

    fn name(&self) -> &str {
        self.text("name")
    }

    fn cipher(&self) -> Cipher {
        if self.text("noise").contains("AESGCM") { Cipher::Aes256Gcm } else { Cipher::ChaCha20Poly1305 }
    }

    fn identity(&self, field: &str) -> Identity {
        let certificate = vectors().join(self.text(field));
        Identity::read(&certificate, certificate.with_extension("key")).unwrap()
    }

    fn trust(&self) -> CaPool {
        CaPool::from_pem(&std::fs::read(vectors().join(self.text("certs")).join("ca.crt")).unwrap()).unwrap()
    }

    fn frames(&self) -> Vec<Frame> {
        let bytes = |value: &Value| value.as_str().map(unhex);
        let is_between_the_two = |direction: &str| matches!(direction, "P>L" | "L>P" | "P>B" | "B>P");
        let initiator = if self.json["initiator_ephemeral_private"].is_string() { 'P' } else { 'B' };
        self.json["frames"]
            .as_array()
            .unwrap()
            .iter()
            .filter(|frame| frame["frame"].is_string() && is_between_the_two(frame["dir"].as_str().unwrap()))
            .map(|frame| Frame {
                from_initiator: frame["dir"].as_str().unwrap().starts_with(initiator),
                description: format!("{}: {}", self.name(), frame["desc"].as_str().unwrap()),
                datagram: bytes(&frame["frame"]).unwrap(),
                plaintext: bytes(&frame["plaintext"]),
                inner_plaintext: bytes(&frame["inner_plaintext"]),
            })
            .collect()
    }

    /// Keys of both directions.
    fn keys(&self, to_responder: &str, to_initiator: &str) -> [AeadKey; 2] {
        [to_responder, to_initiator].map(|field| AeadKey::new(self.cipher(), &self.key(field)))
    }

    fn assert_keys(&self, completed: &Negotiated, to_responder: &str, to_initiator: &str) {
        let (send, receive) =
            if completed.initiator { (to_responder, to_initiator) } else { (to_initiator, to_responder) };
        assert!(completed.keys.send == self.key(send), "{}: send key", self.name());
        assert!(completed.keys.receive == self.key(receive), "{}: receive key", self.name());
    }
}

/// A node as it was when handshakes were recorded.
fn own(identity: &Identity, cipher: Cipher, time: u64) -> Own<'_> {
    Own { identity, default_version: identity.primary().version(), cipher, time, offers_kem: false }
}

/// Replays the initiator's side of a handshake, and feeds it a tampered message 2 before the real one.
fn repeat_initiator(recording: &Recording, ephemeral: &str, first: &[u8], second: &[u8]) -> Negotiated {
    let identity = recording.identity("initiator_cert");
    let clear = HEADER_LEN + 2 * noise::public_key_len(identity.curve());
    let payload = HandshakePayload::parse(&first[clear..]).unwrap();
    let at = UnixTime::try_from(payload.time / 1_000_000_000).unwrap();
    let version = identity.primary().version();
    let own = own(&identity, recording.cipher(), payload.time);
    let local_index = LocalIndex(payload.initiator_index);
    let ephemeral = Ephemeral::Key(recording.key(ephemeral));
    let (mut initiator, datagram) = Initiator::start_with(own, version, local_index, ephemeral.clone()).unwrap();
    if payload.certificate_version == 0 {
        // Recorded with peers that do not know the Time field, which we always write: use the recorded payload.
        let mut noise = noise::handshake(&identity, recording.cipher(), ephemeral, true).unwrap();
        let mut message = vec![0; first.len() + TAG_LEN];
        let len = noise.write_message(&first[clear..], &mut message).unwrap();
        assert_eq!(&message[..len], &first[HEADER_LEN..], "{}", recording.name());
        initiator.noise = Some(Box::new(noise));
        assert_eq!(datagram[..clear], first[..clear], "{}", recording.name());
    } else {
        assert_eq!(datagram, first, "{}", recording.name());
    }

    let trust = recording.trust();
    for at_byte in (HEADER_LEN..second.len()).step_by(7) {
        let mut tampered = second.to_vec();
        tampered[at_byte] ^= 0x10;
        let refused = initiator.finish(&tampered, &trust, at);
        assert!(matches!(refused, Err(Error::Noise(_))), "{}: {refused:?}", recording.name());
    }
    initiator.finish(second, &trust, at).unwrap().tunnel()
}

#[test]
fn recorded_initiators_are_repeated_bit_for_bit() {
    for recording in Recording::all(".active.json", 9) {
        let frames = recording.frames();
        let completed =
            repeat_initiator(&recording, "initiator_ephemeral_private", &frames[0].datagram, &frames[1].datagram);
        recording.assert_keys(&completed, "k_i2r", "k_r2i");
        assert_eq!(completed.local_index, LocalIndex(recording.index("initiator_index")));
        assert_eq!(completed.remote_index, RemoteIndex(recording.index("responder_index")));
        assert_eq!(completed.peer.name(), recording.identity("responder_cert").primary().name());
        assert_eq!(completed.peer.public_key(), unhex(recording.text("responder_static")));
    }
}

#[test]
fn recorded_handshakes_through_a_relay_are_repeated_bit_for_bit() {
    for recording in Recording::all(".active.json", 9) {
        let frames = recording.frames();
        let inner = |number: u8| {
            let ending = format!("relayed handshake message {number}");
            frames.iter().find(|frame| frame.description.ends_with(&ending)).unwrap().plaintext.clone().unwrap()
        };
        let completed = repeat_initiator(&recording, "relay_initiator_ephemeral_private", &inner(1), &inner(2));
        recording.assert_keys(&completed, "relay_k_i2r", "relay_k_r2i");
        assert_eq!(completed.peer.name(), recording.identity("third_cert").primary().name());
    }
}

#[test]
fn recorded_responders_are_repeated_bit_for_bit() {
    for recording in Recording::all(".passive.json", 5) {
        let frames = recording.frames();
        let (first, second) = (&frames[0], &frames[1]);
        let identity = recording.identity("responder_cert");
        let payload = HandshakePayload::parse(second.plaintext.as_ref().unwrap()).unwrap();
        let at = UnixTime::try_from(payload.time / 1_000_000_000).unwrap();
        let own = own(&identity, recording.cipher(), payload.time);
        let local_index = LocalIndex(recording.index("responder_index"));
        let ephemeral = Ephemeral::Key(recording.key("responder_ephemeral_private"));
        let (completed, answer) =
            respond_with(own, local_index, ephemeral.clone(), &first.datagram, &recording.trust(), at).unwrap();
        let completed = completed.tunnel();
        recording.assert_keys(&completed, "k_i2r", "k_r2i");
        assert_eq!(completed.peer.name(), recording.identity("initiator_cert").primary().name());
        if payload.certificate_version == 0 {
            let mut noise = noise::handshake(&identity, recording.cipher(), ephemeral, false).unwrap();
            read_message(&mut noise, &first.datagram[HEADER_LEN..]).unwrap();
            let mut message = vec![0; second.datagram.len()];
            let len = noise.write_message(second.plaintext.as_ref().unwrap(), &mut message).unwrap();
            assert_eq!(&message[..len], &second.datagram[HEADER_LEN..], "{}", second.description);
        } else {
            assert_eq!(answer, second.datagram, "{}", second.description);
        }
    }
}

#[test]
fn every_recorded_frame_opens_and_seals_to_the_recorded_bytes() {
    let mut recordings = Recording::all(".active.json", 9);
    recordings.extend(Recording::all(".passive.json", 5));
    let (mut direct, mut relayed) = (0, 0);
    for recording in recordings {
        let keys = recording.keys("k_i2r", "k_r2i");
        for frame in recording.frames() {
            let header = Header::parse(&frame.datagram).unwrap();
            let (Some(plaintext), true) = (&frame.plaintext, header.kind != MessageType::Handshake) else { continue };
            let key = &keys[usize::from(!frame.from_initiator)];
            let (aad, sealed) = match header.kind {
                MessageType::Relay => frame.datagram.split_at(frame.datagram.len() - TAG_LEN),
                _ => frame.datagram.split_at(HEADER_LEN),
            };
            let mut opened = sealed.to_vec();
            assert!(key.open(header.counter, aad, &mut opened), "{}", frame.description);
            opened.truncate(sealed.len() - TAG_LEN);
            if header.kind == MessageType::Relay {
                assert_eq!(&aad[HEADER_LEN..], plaintext, "{}", frame.description);
                relayed += 1;
            } else {
                assert_eq!(&opened, plaintext, "{}", frame.description);
                direct += 1;
            }
            let tag = key.seal(header.counter, aad, &mut opened);
            opened.extend_from_slice(&tag);
            assert_eq!(opened, sealed, "{}", frame.description);

            if let Some(inner_plaintext) = &frame.inner_plaintext {
                let keys = recording.keys("relay_k_i2r", "relay_k_r2i");
                let key = &keys[usize::from(!frame.from_initiator)];
                let inner = Header::parse(plaintext).unwrap();
                let (aad, sealed) = plaintext.split_at(HEADER_LEN);
                let mut opened = sealed.to_vec();
                assert!(key.open(inner.counter, aad, &mut opened), "{}", frame.description);
                assert_eq!(&opened[..opened.len() - TAG_LEN], inner_plaintext, "{}", frame.description);
            }
        }
    }
    assert!(direct > 200 && relayed >= 9 * 4, "{direct} direct, {relayed} relayed");
}

#[test]
fn recorded_counters_start_at_three_and_replays_are_refused() {
    let mut recordings = Recording::all(".active.json", 9);
    recordings.extend(Recording::all(".passive.json", 5));
    for recording in recordings {
        let session = Session::new(SessionKeys { cipher: recording.cipher(), send: [0; 32], receive: [0; 32] });
        let windows = [ReplayWindow::new(), ReplayWindow::new()];
        let mut replays = 0;
        for frame in recording.frames() {
            let header = Header::parse(&frame.datagram).unwrap();
            assert_eq!(header.to_bytes(), frame.datagram[..HEADER_LEN], "{}", frame.description);
            if matches!(header.kind, MessageType::Handshake | MessageType::RecvError) || header.index == 0xdead_beef {
                continue;
            }
            let from_real_node = recording.json["initiator_index"].is_u64() != frame.from_initiator;
            if from_real_node {
                assert_eq!(session.reserve(1), Some(header.counter), "{}", frame.description);
            }
            let seen_before = frame.description.contains("replay") || frame.plaintext.is_none();
            let fresh = windows[usize::from(frame.from_initiator)].commit(header.counter);
            if seen_before {
                assert!(!fresh, "{}", frame.description);
                replays += 1;
            }
        }
        assert!(session.next_counter() > 4);
        assert_eq!(replays > 0, recording.json["initiator_index"].is_u64(), "{}", recording.name());
    }
}

#[test]
fn recorded_lighthouse_and_relay_messages_are_read_and_written_byte_for_byte() {
    let (mut lighthouse, mut control) = (0, 0);
    for recording in Recording::all(".active.json", 9) {
        for frame in recording.frames() {
            let Some(plaintext) = &frame.plaintext else { continue };
            match Header::parse(&frame.datagram).unwrap().kind {
                MessageType::Lighthouse => {
                    let mut meta = Meta::parse(plaintext).unwrap();
                    assert_eq!(&meta.encode().unwrap(), plaintext, "{}", frame.description);
                    meta.kind = crate::wire::messages::MetaKind::Other(0);
                    assert_ne!(&meta.encode().unwrap(), plaintext);
                    lighthouse += 1;
                }
                MessageType::Control => {
                    let message = Control::parse(plaintext).unwrap();
                    assert_eq!(&message.encode().unwrap(), plaintext, "{}", frame.description);
                    control += 1;
                }
                MessageType::Handshake => {
                    let payload = HandshakePayload::parse(plaintext).unwrap();
                    assert_eq!(&payload.encode(), plaintext, "{}", frame.description);
                }
                _ => {}
            }
        }
    }
    assert!(lighthouse >= 9 * 4 && control == 9 * 2, "{lighthouse} lighthouse, {control} control");
}

/// UDP payloads of an Ethernet capture, each with whether 192.168.200.2 (the initiator) sent it.
fn capture(path: &Path) -> Vec<(bool, Vec<u8>)> {
    let bytes = std::fs::read(path).unwrap();
    assert_eq!(bytes[..4], [0xd4, 0xc3, 0xb2, 0xa1], "little-endian pcap");
    let mut records = &bytes[24..];
    let mut datagrams = Vec::new();
    while !records.is_empty() {
        let (header, rest) = records.split_at(16);
        let (frame, rest) = rest.split_at(u32::from_le_bytes(header[8..12].try_into().unwrap()) as usize);
        records = rest;
        const ETHERNET: usize = 14;
        const IPV4_AND_UDP: usize = 20 + 8;
        if frame.len() > ETHERNET + IPV4_AND_UDP && frame[12..15] == [8, 0, 0x45] && frame[23] == 17 {
            let udp_len = usize::from(u16::from_be_bytes([frame[38], frame[39]]));
            let from_initiator = frame[26..30] == [192, 168, 200, 2];
            datagrams.push((from_initiator, frame[ETHERNET + IPV4_AND_UDP..][..udp_len - 8].to_vec()));
        }
    }
    datagrams
}

#[test]
fn captured_initiators_of_every_release_are_answered() {
    let mut captures = 0;
    for entry in std::fs::read_dir(vectors().join("pcap")).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
        if path.extension().is_none_or(|extension| extension != "pcap") {
            continue;
        }
        captures += 1;
        let datagrams = capture(&path);
        let certificates = vectors().join("certs").join(name.split('-').take(2).collect::<Vec<_>>().join("-"));
        let identity =
            Identity::read(certificates.join("host-unsafe.crt"), certificates.join("host-unsafe.key")).unwrap();
        let trust = CaPool::from_pem(&std::fs::read(certificates.join("ca.crt")).unwrap()).unwrap();
        let cipher = if name.contains("chachapoly") { Cipher::ChaCha20Poly1305 } else { Cipher::Aes256Gcm };
        let own = own(&identity, cipher, 1);

        let (from_initiator, first) = &datagrams[0];
        assert!(from_initiator, "{name}");
        let payload = &first[HEADER_LEN + 2 * noise::public_key_len(identity.curve())..];
        let payload = HandshakePayload::parse(payload).unwrap();
        let at = UnixTime::try_from(payload.time / 1_000_000_000).unwrap();
        let ephemeral = Ephemeral::Seed(Zeroizing::new([1; 32]));
        let (completed, answer) = respond_with(own, LocalIndex(1), ephemeral, first, &trust, at).unwrap();
        let completed = completed.tunnel();
        assert_eq!(completed.remote_index, RemoteIndex(payload.initiator_index), "{name}");
        let expected_peer = if name.starts_with("v1") { "host-groups" } else { "host-multi" };
        assert_eq!(completed.peer.name(), expected_peer, "{name}");

        let (_, second) = datagrams.iter().find(|(from_initiator, _)| !from_initiator).unwrap();
        assert_eq!(second[..HEADER_LEN], answer[..HEADER_LEN], "{name}");

        let windows = [ReplayWindow::new(), ReplayWindow::new()];
        for (from_initiator, datagram) in datagrams.iter().filter(|(_, datagram)| datagram.len() > 1) {
            let header = Header::parse(datagram).unwrap();
            if header.kind != MessageType::Handshake {
                assert!(windows[usize::from(*from_initiator)].commit(header.counter), "{name}: {header:?}");
            }
        }
        for window in &windows {
            assert!(!window.check(3) && !window.check(4), "{name}: nothing was sent");
        }
    }
    assert_eq!(captures, 9);
}
