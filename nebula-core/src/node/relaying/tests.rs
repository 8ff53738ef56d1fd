use std::net::SocketAddr;

use nebula_cert::Version;
use rand_chacha::ChaCha20Rng;
use rand_chacha::rand_core::SeedableRng as _;

use super::*;
use crate::forward::testing;
use crate::index::RemoteIndex;
use crate::node::hops::Hops;
use crate::node::outbox::Outbox;
use crate::node::tunnels::{Established, Live, Tunnels};
use crate::{Config, Forwarder, Origin};

/// What [`Relaying`] borrows of a node, 10.1.0.1, with direct tunnels to 10.1.0.2 and 10.1.0.3: numbers 2 and 3.
struct Parts {
    config: Config,
    tunnels: Tunnels,
    hops: Hops,
    outbox: Outbox,
    rng: ChaCha20Rng,
    forwarder: Arc<Forwarder>,
    now: Instant,
}

impl Parts {
    #[allow(clippy::disallowed_methods, reason = "a base for virtual time")]
    fn new(am_relay: bool) -> Self {
        let now = Instant::now();
        let config = testing::config(&["10.1.0.1/16"]);
        let forwarder = Arc::new(Forwarder::new((&config).into(), now, [1, 2]));
        let mut tunnels = Tunnels::default();
        for number in [2, 3] {
            let peer = testing::verified(&[&format!("10.1.0.{number}/16")]);
            let own_certificate = peer.fingerprint();
            let tunnel = testing::tunnel(LocalIndex(number), peer);
            tunnel.set_endpoint(Some(endpoint(number)));
            forwarder.tunnels().publish(Arc::clone(&tunnel));
            forwarder.tunnels().set_primary(&tunnel);
            let from = Origin::Direct(endpoint(number));
            let made =
                Established { tunnel, from, unproven: None, since: now, own_certificate, opened_by: None, took: None };
            tunnels.insert(Live::new(now, made));
        }
        let hops = Hops::new(Arc::clone(&forwarder), am_relay);
        let outbox = Outbox::new(Arc::clone(&forwarder));
        Self { config, tunnels, hops, outbox, rng: ChaCha20Rng::from_seed([7; 32]), forwarder, now }
    }

    fn relaying(&mut self) -> Relaying<'_> {
        Relaying {
            now: self.now,
            config: &self.config,
            tunnels: &self.tunnels,
            hops: &mut self.hops,
            outbox: &mut self.outbox,
            rng: &mut self.rng,
            forwarder: &self.forwarder,
        }
    }

    fn tunnel(&self, number: u32) -> Arc<Tunnel> {
        self.forwarder.tunnels().by_index(LocalIndex(number)).unwrap()
    }

    /// Where datagrams were sent since the last call.
    fn sent(&mut self) -> Vec<SocketAddr> {
        std::iter::from_fn(|| self.outbox.next_transmit()).map(|transmit| transmit.to).collect()
    }
}

fn endpoint(number: u32) -> SocketAddr {
    SocketAddr::from(([192, 0, 2, number as u8], 4242))
}

fn address(number: u8) -> IpAddr {
    IpAddr::from([10, 1, 0, number])
}

fn response(initiator_index: u32, responder_index: u32) -> Control {
    let (kind, version) = (ControlKind::CreateRelayResponse, Version::V2);
    Control { kind, version, initiator_index, responder_index, from: address(1), to: address(9) }
}

#[test]
fn a_hop_can_be_used_once_the_relay_that_was_asked_has_responded() {
    let mut parts = Parts::new(false);
    let key = HopKey { tunnel: LocalIndex(2), kind: Kind::Terminal, far: address(9) };
    parts.relaying().request(key, Version::V2, address(9));
    assert_eq!(parts.sent(), [endpoint(2)]);
    let index = parts.hops.entries.at(key).unwrap().index;
    let [relay, other] = [2, 3].map(|number| parts.tunnel(number));
    assert_eq!(parts.relaying().handle_response(&other, response(index.0, 77)), None, "another host responds");
    assert_eq!(parts.relaying().handle_response(&relay, response(index.0 ^ 1, 77)), None, "nobody asked for that");
    assert_eq!(parts.relaying().handle_response(&relay, response(index.0, 0)), None, "0 is no index");
    assert_eq!(parts.hops.entries.at(key).unwrap().hop(), None);
    assert_eq!(parts.relaying().handle_response(&relay, response(index.0, 77)), Some(index));
    let hop = Hop { tunnel: LocalIndex(2), index: RemoteIndex(77) };
    assert_eq!(parts.hops.entries.at(key).unwrap().hop(), Some(hop));
}

#[test]
fn a_relay_responds_to_the_end_that_asked_as_soon_as_the_other_end_has_responded() {
    let mut parts = Parts::new(true);
    let [asker, target] = [2, 3].map(|number| parts.tunnel(number));
    let (kind, version) = (ControlKind::CreateRelayRequest, Version::V2);
    let request = Control { kind, version, initiator_index: 5, responder_index: 0, from: address(2), to: address(3) };
    assert!(parts.relaying().connect(&asker, &target, request));
    assert_eq!(parts.sent(), [endpoint(3)]);
    let key = HopKey { tunnel: LocalIndex(3), kind: Kind::Forwarding, far: address(2) };
    let index = parts.hops.entries.at(key).unwrap().index;
    assert_eq!(parts.relaying().handle_response(&target, response(index.0, 6)), Some(index));
    assert_eq!(parts.sent(), [endpoint(2)]);
    assert_eq!(parts.relaying().handle_response(&target, response(index.0, 6)), Some(index));
    assert!(parts.sent().is_empty(), "each request gets one response");
}
