//! A relay between two nodes, and hostile relay control messages from both of them.

use std::net::IpAddr;
use std::sync::OnceLock;
use std::time::Duration;

use nebula_cert::{Identity, Version};
use nebula_core::MessageType;
use nebula_core::internals::messages::{Control, ControlKind};
use nebula_core::{Punt, Transmit};

use crate::pair::{Side, start};

/// The relay and its two peers, which both know the relay's endpoint.
struct Trio {
    now: std::time::Instant,
    relay: Side,
    ends: [Side; 2],
}

impl Trio {
    fn new() -> Self {
        let now = start();
        static IDENTITIES: OnceLock<[Identity; 3]> = OnceLock::new();
        let made = || ["10.9.0.3/24", "10.9.0.1/24", "10.9.0.2/24"].map(crate::pair::identity);
        let [r, a, b] = IDENTITIES.get_or_init(made).clone();
        let known = Some(("10.9.0.3", "192.0.2.3:4242"));
        let mut relay = Side::new(r, "192.0.2.3:4242", None, now, 3);
        relay.node.reconfigure(now, |config| config.relay.am_relay = true);
        let ends = [Side::new(a, "192.0.2.1:4242", known, now, 1), Side::new(b, "192.0.2.2:4242", known, now, 2)];
        let mut trio = Self { now, relay, ends };
        for end in 0..2 {
            trio.ends[end].node.connect(now, "10.9.0.3".parse().expect("an address"));
        }
        trio.settle();
        // The relay asks its peers to prove that they have the session keys.
        trio.now += Duration::from_millis(100);
        trio.relay.node.handle_timeout(trio.now);
        trio.settle();
        assert_eq!(trio.relay.node.tunnels().len(), 2, "the handshakes complete");
        trio
    }

    /// Delivers datagrams until no node sends any. Relay control messages must not loop.
    fn settle(&mut self) {
        for _ in 0..ROUNDS {
            let mut carried = false;
            for from in 0..3 {
                let side = if from == 2 { &mut self.relay } else { &mut self.ends[from] };
                let (at, sent) = (side.at, side.take_transmits());
                for Transmit { to, datagram, .. } in sent {
                    carried = true;
                    let receiver = match self.ends.iter_mut().find(|end| end.at == to) {
                        Some(end) => Some(end),
                        None => (self.relay.at == to).then_some(&mut self.relay),
                    };
                    if let Some(receiver) = receiver {
                        receiver.take(self.now, at, &datagram);
                    }
                }
            }
            if !carried {
                return;
            }
        }
        panic!("the nodes do not come to rest");
    }

    /// Passes a message to the relay as if this end had sent it.
    fn tell(&mut self, end: usize, plaintext: Vec<u8>) {
        let at = self.ends[end].at;
        let tunnels = self.relay.node.tunnels();
        let Some(tunnel) = tunnels.iter().find(|tunnel| tunnel.endpoint == Some(at)) else { return };
        let (tunnel, from, kind) = (tunnel.local_index, at.into(), MessageType::Control);
        self.relay.node.handle_punt(self.now, Punt::Message { tunnel, from, kind, plaintext });
    }
}

/// Runs a list of operations of eight bytes each, and finally sends the raw input bytes as messages.
pub(crate) fn relay_control(data: &[u8]) {
    if let Ok(control) = Control::parse(data)
        && let Ok(bytes) = control.encode()
    {
        assert_eq!(Control::parse(&bytes).expect("what we wrote reads"), control);
    }
    let mut trio = Trio::new();
    let (operations, rest) = data.as_chunks::<8>();
    let mut told = 0;
    for operation in operations.iter().take(64) {
        let [what, form, from, to, a, b, c, d] = *operation;
        let address = |n: u8| IpAddr::from([10, 9, 0, if n & 0x40 == 0 { n & 3 } else { n }]);
        match what % 8 {
            6 => {
                trio.now += Duration::from_millis(u64::from(a) * 100);
                for side in trio.ends.iter_mut().chain([&mut trio.relay]) {
                    if side.node.poll_timeout().is_some_and(|due| due <= trio.now) {
                        side.node.handle_timeout(trio.now);
                    }
                }
            }
            7 => {
                trio.relay.node.reconfigure(trio.now, |config| config.relay.am_relay = a & 1 == 0);
            }
            _ => {
                let kinds = [ControlKind::CreateRelayRequest, ControlKind::CreateRelayResponse];
                let message = Control {
                    kind: kinds[usize::from((what / 8) & 1)],
                    version: if form & 1 == 0 { Version::V2 } else { Version::V1 },
                    initiator_index: u32::from_be_bytes([0, 0, a, b]),
                    responder_index: u32::from_be_bytes([0, 0, c, d]),
                    from: address(from),
                    to: address(to),
                };
                if let Ok(plaintext) = message.encode() {
                    trio.tell(usize::from(what & 1), plaintext);
                    told += 1;
                }
            }
        }
        trio.settle();
    }
    for end in [0, 1] {
        trio.tell(end, rest.to_vec());
        trio.tell(end, data.to_vec());
        told += 2;
    }
    trio.settle();
    let hops = |side: &Side| side.node.table_sizes().relay_hops;
    assert!(hops(&trio.relay) <= 2 * told, "{} hops after {told} messages", hops(&trio.relay));
    trio.relay.node.close_all(trio.now);
    trio.settle();
    assert_eq!(hops(&trio.relay), 0, "hops outlive their tunnels");
}

const ROUNDS: usize = 64;
