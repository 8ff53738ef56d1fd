//! Numbers that a peer cannot guess, from one secret (RFC 6528, RFC 6056).

use std::net::{IpAddr, SocketAddr};

use aws_lc_rs::digest::{Context, Digest, SHA256};

use super::Flow;

/// First ephemeral port: the range is that of Linux, 32,768 to 60,999.
pub(crate) const FIRST_EPHEMERAL: u16 = 32_768;
/// Number of ephemeral ports.
pub(crate) const EPHEMERAL: u16 = 28_232;

/// The ephemeral port `step` places after one.
pub(crate) fn ephemeral(first: u16, step: u16) -> u16 {
    let place = (u32::from(first) + u32::from(step)) % u32::from(EPHEMERAL);
    FIRST_EPHEMERAL + place as u16
}

/// A secret, and a counter so that no number repeats.
pub(crate) struct Secret {
    bytes: [u8; 32],
    drawn: u64,
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret(redacted)")
    }
}

impl Secret {
    pub(crate) fn new(bytes: [u8; 32]) -> Self {
        Self { bytes, drawn: 0 }
    }

    /// Initial sequence number of a flow, to which the clock is added, and its timestamp offset.
    pub(crate) fn numbers(&self, flow: Flow) -> (u32, u32) {
        let hash = self.hash(b'n', &[flow.local, flow.remote], 0);
        (word(&hash, 0), word(&hash, 1))
    }

    /// Where the search for a free port to `remote` begins: one further each time, from a place that differs by peer.
    pub(crate) fn port(&mut self, local: IpAddr, remote: SocketAddr) -> u16 {
        self.drawn += 1;
        let hash = self.hash(b'p', &[SocketAddr::new(local, 0), remote], 0);
        (word(&hash, 0) as u16).wrapping_add(self.drawn as u16)
    }

    /// Where the search for a free port of the node begins.
    pub(crate) fn next_port(&mut self) -> u16 {
        self.drawn += 1;
        word(&self.hash(b'l', &[], self.drawn), 0) as u16
    }

    /// What only this node can know about a SYN and the `bits` that are kept of it.
    pub(crate) fn cookie(&self, flow: Flow, peer_initial: u32, period: u64, bits: u8) -> u32 {
        let number = u64::from(peer_initial) << 8 | u64::from(bits);
        let key = self.hash(b'k', &[], period);
        let mut context = Context::new(&SHA256);
        context.update(key.as_ref());
        update(&mut context, &[flow.local, flow.remote], number);
        word(&context.finish(), 0)
    }

    fn hash(&self, kind: u8, ends: &[SocketAddr], number: u64) -> Digest {
        let mut context = Context::new(&SHA256);
        context.update(&self.bytes);
        context.update(&[kind]);
        update(&mut context, ends, number);
        context.finish()
    }
}

fn update(context: &mut Context, ends: &[SocketAddr], number: u64) {
    for end in ends {
        match end.ip() {
            IpAddr::V4(v4) => context.update(&v4.to_ipv6_mapped().octets()),
            IpAddr::V6(v6) => context.update(&v6.octets()),
        }
        context.update(&end.port().to_be_bytes());
    }
    context.update(&number.to_be_bytes());
}

fn word(hash: &Digest, at: usize) -> u32 {
    let (words, _) = hash.as_ref().as_chunks::<4>();
    words.get(at).map_or(0, |word| u32::from_be_bytes(*word))
}
