//! Pings through the overlay.

use std::net::IpAddr;
use std::time::Duration;

use super::packet::{self, Contents};
use super::{HostId, SimNet};

/// A ping that is not sent yet.
#[must_use = "nothing is sent before one of its verbs is called"]
pub struct Ping<'a> {
    pub(super) net: &'a mut SimNet,
    pub(super) from: HostId,
    pub(super) to: HostId,
    pub(super) addresses: (IpAddr, IpAddr),
}

impl Ping<'_> {
    /// Uses these overlay addresses.
    pub fn between(self, from: &str, to: &str) -> Self {
        Self { addresses: (from.parse().expect("an address"), to.parse().expect("an address")), ..self }
    }

    /// Pings once a second until an answer comes; returns how long it took. Panics with the packet flow after a minute.
    pub fn until_delivered(self) -> Duration {
        let net = self.net;
        let began = net.now;
        let identifier = net.next_ping();
        for sequence in 0..60 {
            net.echo(self.from, self.addresses, identifier, sequence);
            if net.run_until(Duration::from_secs(1), |net| net.answered(self.from, identifier, None)) {
                return net.now.saturating_duration_since(began);
            }
        }
        let [from, to] = [self.from, self.to].map(|host| net.hosts[host].name.clone());
        panic!("no ping from {from} to {to} was answered within a minute\n{}", net.diagram());
    }

    /// Pings once; returns whether the answer comes within `limit`.
    pub fn is_answered_within(self, limit: Duration) -> bool {
        let identifier = self.net.next_ping();
        self.net.echo(self.from, self.addresses, identifier, 0);
        self.net.run_until(limit, |net| net.answered(self.from, identifier, None))
    }

    /// Sends `count` pings at this interval, all with one identifier; returns how many were answered.
    pub fn train(self, count: u16, distance: Duration) -> usize {
        let identifier = self.net.next_ping();
        for sequence in 0..count {
            self.net.echo(self.from, self.addresses, identifier, sequence);
            self.net.run_for(distance);
        }
        self.net.run_for(Duration::from_secs(1));
        (0..count).filter(|sequence| self.net.answered(self.from, identifier, Some(*sequence))).count()
    }
}

impl SimNet {
    fn next_ping(&mut self) -> u16 {
        self.pings += 1;
        self.pings
    }

    fn echo(&mut self, from: HostId, addresses: (IpAddr, IpAddr), identifier: u16, sequence: u16) {
        let _verdict = self.send_packet(from, &packet::echo(addresses.0, addresses.1, false, identifier, sequence));
    }

    fn answered(&self, host: HostId, wanted: u16, wanted_sequence: Option<u16>) -> bool {
        self.hosts[host].received.iter().any(|packet| match packet::read(packet) {
            Contents::EchoReply { identifier, sequence } => {
                identifier == wanted && wanted_sequence.is_none_or(|wanted| wanted == sequence)
            }
            _ => false,
        })
    }
}
