use nebula_cert::{CaPool, Identity, UnixTime};
use proptest::prelude::*;

use super::*;
use crate::handshake::{Initiator, Own, respond};
use crate::index::LocalIndex;
use crate::tunnel::cipher::Cipher;
use crate::wire::header::HEADER_LEN;

const CERTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/vectors/certs/v2-25519/");
const NOW: UnixTime = 1_800_000_000;
const CALLER: LocalIndex = LocalIndex(0x0102_0304);
const CALLED: LocalIndex = LocalIndex(0x0506_0708);

fn identity(name: &str) -> Identity {
    Identity::read(format!("{CERTS}{name}.crt"), format!("{CERTS}{name}.key")).unwrap()
}

/// Both ends after the Noise part, the caller's first, and its two messages.
fn noise(cipher: Cipher, [caller_offers, called_offers]: [bool; 2]) -> ([Agreed; 2], [Vec<u8>; 2]) {
    let trust = CaPool::from_pem(&std::fs::read(format!("{CERTS}ca.crt")).unwrap()).unwrap();
    let (caller, called) = (identity("host-plain"), identity("host-groups"));
    let own =
        |identity, offers_kem| Own { identity, default_version: nebula_cert::Version::V2, cipher, time: 1, offers_kem };
    let (mut machine, first) =
        Initiator::start(own(&caller, caller_offers), nebula_cert::Version::V2, CALLER, [1; 32]).unwrap();
    let (there, second) = respond(own(&called, called_offers), CALLED, [2; 32], &first, &trust, NOW).unwrap();
    let here = machine.finish(&second, &trust, NOW).unwrap();
    ([here, there], [first, second])
}

fn exchanges(cipher: Cipher) -> [Exchange; 2] {
    noise(cipher, [true; 2]).0.map(|agreed| match agreed {
        Agreed::Exchange(exchange) => exchange,
        Agreed::Tunnel(_) => panic!("both offered it"),
    })
}

fn is_noise_error<T>(result: Result<T, Error>) -> bool {
    matches!(result, Err(Error::Noise(_)))
}

#[test]
fn both_ends_get_the_same_keys_which_are_not_those_of_noise() {
    for cipher in [Cipher::Aes256Gcm, Cipher::ChaCha20Poly1305] {
        let [here, there] = exchanges(cipher);
        let before = here.noise_keys();
        let (offer, message) = here.offer().unwrap();
        let (keys, answer) = there.answer(&message).unwrap();
        let (there, here) = (there.complete(keys), offer.read_answer(&answer).unwrap());
        let here = offer.complete(here);
        assert!(here.keys.send == there.keys.receive && here.keys.receive == there.keys.send);
        assert!(here.keys.send != here.keys.receive && here.keys.cipher == cipher);
        for key in [&here.keys.send, &here.keys.receive] {
            assert!(!before.chunks_exact(32).any(|noise| noise == key));
        }
        assert!(here.post_quantum && there.post_quantum);
        assert_eq!((here.local_index, there.local_index), (CALLER, CALLED));
    }
}

/// The smallest IPv6 path carries 1280 bytes, 1232 of them in a UDP datagram.
#[test]
fn each_message_fits_into_one_datagram_and_the_answer_is_the_shorter_one() {
    let [here, there] = exchanges(Cipher::Aes256Gcm);
    let (_, message) = here.offer().unwrap();
    let (_, answer) = there.answer(&message).unwrap();
    assert_eq!((message.len(), answer.len()), (1216, 1120));
    assert!(message.len() <= 1232 && answer.len() < message.len());
}

#[test]
fn there_is_an_exchange_exactly_if_both_offer_it() {
    for offers in [[false, false], [true, false], [false, true], [true, true]] {
        let (agreed, messages) = noise(Cipher::Aes256Gcm, offers);
        for end in &agreed {
            let is_exchange = matches!(end, Agreed::Exchange(_));
            assert_eq!((is_exchange, end.negotiated().post_quantum), (offers == [true; 2], offers == [true; 2]));
        }
        // Message 1 is not encrypted: two bytes of the field's number, one of its value.
        assert_eq!(messages[0].windows(3).any(|bytes| bytes == [0xa0, 0x06, 1]), offers[0]);
    }
}

/// What somebody on the way does to the announcements: the hash of the handshake covers both.
#[test]
fn an_announcement_that_is_removed_or_added_on_the_way_ends_the_handshake() {
    let trust = CaPool::from_pem(&std::fs::read(format!("{CERTS}ca.crt")).unwrap()).unwrap();
    let (caller, called) = (identity("host-plain"), identity("host-groups"));
    let own = |identity, offers_kem| {
        let (default_version, cipher) = (nebula_cert::Version::V2, Cipher::Aes256Gcm);
        Own { identity, default_version, cipher, time: 1, offers_kem }
    };
    for offers in [true, false] {
        let start = |offers| Initiator::start(own(&caller, offers), nebula_cert::Version::V2, CALLER, [1; 32]).unwrap();
        // The same keys and payload, but for the announcement: what the attacker makes of message 1.
        let ((mut machine, sent), (_, changed)) = (start(offers), start(!offers));
        assert_eq!(sent.len().abs_diff(changed.len()), 3);
        let (_, second) = respond(own(&called, true), CALLED, [2; 32], &changed, &trust, NOW).unwrap();
        assert!(is_noise_error(machine.finish(&second, &trust, NOW)));
        let (_, second) = respond(own(&called, true), CALLED, [2; 32], &sent, &trust, NOW).unwrap();
        assert!(machine.finish(&second, &trust, NOW).is_ok(), "the right answer is still read");
    }
}

#[test]
fn messages_that_are_damaged_or_of_another_handshake_change_nothing() {
    let [here, there] = exchanges(Cipher::Aes256Gcm);
    let [_, stranger] = exchanges(Cipher::ChaCha20Poly1305);
    let (offer, message) = here.offer().unwrap();
    for at in (0..message.len()).step_by(7).chain([message.len() - 1]) {
        let mut damaged = message.clone();
        damaged[at] ^= 1;
        assert!(is_noise_error(there.answer(&damaged)), "byte {at}");
    }
    assert!(is_noise_error(there.answer(&message[..HEADER_LEN])) && is_noise_error(stranger.answer(&message)));
    let (_, answer) = there.answer(&message).unwrap();
    for at in (0..answer.len()).step_by(7).chain([answer.len() - 1]) {
        let mut damaged = answer.clone();
        damaged[at] ^= 1;
        assert!(is_noise_error(offer.read_answer(&damaged)), "byte {at}");
    }
    assert!(is_noise_error(offer.read_answer(&message)) && is_noise_error(there.answer(&answer)), "swapped");
    assert!(offer.read_answer(&answer).is_ok());
}

/// A caller that has finished the Noise part and sends something else than an ML-KEM key.
#[test]
fn a_key_that_is_none_is_refused() {
    let [here, there] = exchanges(Cipher::Aes256Gcm);
    // All coefficients are 4095, beyond the modulus (FIPS 203, section 7.2).
    let message = here.seal(OFFER_COUNTER, &[0xff; ENCAPSULATION_KEY_LEN]);
    assert!(matches!(there.answer(&message), Err(Error::Payload(_))));
}

/// A recorded tunnel does not open with the secrets of the Noise part. With that of ML-KEM as well it does.
#[test]
fn the_secrets_of_noise_do_not_open_a_recorded_tunnel() {
    let [here, there] = exchanges(Cipher::Aes256Gcm);
    // Both Noise splits and the hash: what somebody has who recorded messages 1 and 2 and breaks X25519.
    let [spy, _] = exchanges(Cipher::Aes256Gcm);
    assert_eq!((*spy.noise_keys(), spy.hash), (*here.noise_keys(), here.hash), "the seeds are the same");
    let (offer, message) = here.offer().unwrap();
    let (keys, answer) = there.answer(&message).unwrap();
    let mut packet = b"recorded".to_vec();
    let tag = AeadKey::new(Cipher::Aes256Gcm, &keys.send).seal(3, b"header", &mut packet);
    packet.extend(tag);
    let opens = |key: &[u8; 32]| AeadKey::new(Cipher::Aes256Gcm, key).open(3, b"header", &mut packet.clone());
    let noise = spy.noise_keys();
    assert!(!noise.chunks_exact(32).any(|key| opens(key.try_into().unwrap())));
    let (sent, answered) = (sha256(&message), sha256(&answer));
    for guess in [&[][..], &[0; 32], &[0xff; 32]] {
        let guessed = spy.keys(guess, &sent, &answered);
        assert!(!opens(&guessed.receive) && !opens(&guessed.send));
    }
    // The control: with the secret, which only the holder of the caller's ML-KEM key gets from the recording.
    let ciphertext = spy.open(ANSWER_COUNTER, CIPHERTEXT_LEN, &answer).unwrap();
    let secret = offer.key.decapsulate(Ciphertext::from(&*ciphertext)).unwrap();
    assert!(opens(&spy.keys(secret.as_ref(), &sent, &answered).receive));
}

proptest! {
    #[test]
    fn any_bytes_are_refused_without_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..1300)) {
        let [here, there] = exchanges(Cipher::Aes256Gcm);
        prop_assert!(is_noise_error(there.answer(&bytes)));
        let (offer, _) = here.offer().unwrap();
        prop_assert!(is_noise_error(offer.read_answer(&bytes)));
    }

    /// Sealed by a peer that has the keys, but with any content.
    #[test]
    fn any_content_of_a_peer_is_answered_or_refused(len in 0_usize..1300, byte in any::<u8>()) {
        let [here, there] = exchanges(Cipher::Aes256Gcm);
        let _ = there.answer(&here.seal(OFFER_COUNTER, &vec![byte; len]));
        let sealed = there.seal(ANSWER_COUNTER, &vec![byte; len]);
        let (offer, _) = here.offer().unwrap();
        prop_assert_eq!(offer.read_answer(&sealed).is_ok(), len == CIPHERTEXT_LEN, "implicit rejection");
    }
}
