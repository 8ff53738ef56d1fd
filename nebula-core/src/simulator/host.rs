//! One simulated host: control plane, forwarding plane, one lane, and a tiny IP stack that answers pings.

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Instant;

use nebula_cert::Identity;

use super::packet::{self, Contents};
use crate::forward::{Delivery, Offload, Received};
use crate::lighthouse::LocalAddress;
use crate::{Config, Event, Forwarder, Lane, Node, Transmit, Verdict, WallClock};

/// A host as the network sees it.
pub(super) struct Host {
    pub(super) name: String,
    pub(super) overlay: Vec<IpAddr>,
    /// Address of its socket; private if it is behind a NAT.
    pub(super) underlay: SocketAddr,
    pub(super) nat: Option<usize>,
    pub(super) is_up: bool,
    pub(super) node: Node,
    pub(super) forwarder: Arc<Forwarder>,
    lane: Lane,
    /// Configuration for the next start.
    config: Config,
    pub(super) events: Vec<Event>,
    /// Packets delivered to the host.
    pub(super) received: Vec<Vec<u8>>,
    outgoing: VecDeque<Transmit>,
}

impl Host {
    pub(super) fn new(
        name: String,
        underlay: SocketAddr,
        nat: Option<usize>,
        config: Config,
        now: Instant,
        wall: WallClock,
        seed: [u8; 32],
    ) -> Self {
        let overlay = config.identity.networks().iter().map(ipnet::IpNet::addr).collect();
        let (node, forwarder) = Node::new(config.clone(), now, wall, seed);
        let lane = forwarder.lane();
        let (events, received, outgoing) = (Vec::new(), Vec::new(), VecDeque::new());
        let is_up = true;
        let mut host =
            Self { name, overlay, underlay, nat, is_up, node, forwarder, lane, config, events, received, outgoing };
        host.node.set_local_addresses(vec![LocalAddress { address: underlay.ip(), interface: "eth0".to_owned() }]);
        host.collect();
        host
    }

    /// Loses all state, as after a crash.
    pub(super) fn restart(&mut self, now: Instant, wall: WallClock, seed: [u8; 32]) {
        let (name, config) = (self.name.clone(), self.config.clone());
        *self = Self::new(name, self.underlay, self.nat, config, now, wall, seed);
    }

    /// Certificates it started with.
    pub(super) fn identity(&self) -> &Identity {
        &self.config.identity
    }

    /// Adds to its configuration, for the next start as well.
    pub(super) fn add_static_hosts(&mut self, now: Instant, hosts: Vec<(IpAddr, Vec<SocketAddr>)>) {
        self.config.static_hosts.extend(hosts);
        let hosts = self.config.static_hosts.clone();
        self.control(|node| node.reconfigure(now, |config| config.static_hosts = hosts));
    }

    /// Changes its configuration for the next start.
    pub(super) fn edit_config(&mut self, change: impl FnOnce(&mut Config)) {
        change(&mut self.config);
    }

    /// Calls the node and collects its output.
    pub(super) fn control<T>(&mut self, change: impl FnOnce(&mut Node) -> T) -> T {
        let result = change(&mut self.node);
        self.collect();
        result
    }

    /// When [`Host::timeout`] is due.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        [self.node.poll_timeout(), self.lane.early_due()].into_iter().flatten().min().filter(|_| self.is_up)
    }

    pub(super) fn timeout(&mut self, now: Instant) {
        self.node.handle_timeout(now);
        self.collect();
        self.serve_early(now);
    }

    /// Handles a datagram from the underlay.
    pub(super) fn receive(&mut self, now: Instant, from: SocketAddr, datagram: &[u8]) {
        let mut buffer = datagram.to_vec();
        let slot = Received { from, range: 0..buffer.len(), segment_size: buffer.len() };
        self.forwarder.inbound(&mut self.lane, now, &mut buffer, &[slot]);
        self.pass_on(now, &buffer);
        self.serve_early(now);
    }

    /// Handles datagrams that waited for a tunnel that exists by now.
    fn serve_early(&mut self, now: Instant) {
        while let Some(memory) = self.forwarder.inbound_early(&mut self.lane, now) {
            self.pass_on(now, &memory);
        }
    }

    /// Empties the lane, whose pieces point into `buffer`.
    fn pass_on(&mut self, now: Instant, buffer: &[u8]) {
        let packets: Vec<_> = self.lane.deliveries().iter().map(|delivery| self.assemble(delivery, buffer)).collect();
        self.transmit_runs();
        self.punt(now);
        for packet in packets {
            self.deliver(now, packet);
        }
    }

    /// Sends a packet as a program on the host would.
    pub(super) fn send(&mut self, now: Instant, packet: &[u8]) -> Verdict {
        let mut packet = packet.to_vec();
        let verdict = self.forwarder.outbound(&mut self.lane, now, &mut packet, Offload::default());
        self.transmit_runs();
        let answers: Vec<_> = self.lane.deliveries().iter().map(|delivery| self.assemble(delivery, &[])).collect();
        self.received.extend(answers);
        self.punt(now);
        verdict
    }

    fn transmit_runs(&mut self) {
        for run in self.lane.runs() {
            for datagram in self.lane.arena()[run.range.clone()].chunks(run.segment_size.max(1)) {
                self.outgoing.push_back(Transmit { to: run.to, datagram: datagram.to_vec() });
            }
        }
    }

    /// Next datagram for the underlay.
    pub(super) fn next_datagram(&mut self) -> Option<Transmit> {
        self.outgoing.pop_front()
    }

    fn deliver(&mut self, now: Instant, packet: Vec<u8>) {
        if let Contents::EchoRequest { from, to, identifier, sequence } = packet::read(&packet) {
            let _verdict = self.send(now, &packet::echo(to, from, true, identifier, sequence));
        }
        self.received.push(packet);
    }

    fn assemble(&self, delivery: &Delivery, buffer: &[u8]) -> Vec<u8> {
        let mut packet = self.lane.headers()[delivery.header.clone()].to_vec();
        for piece in &self.lane.pieces()[delivery.pieces.clone()] {
            packet.extend(&buffer[piece.clone()]);
        }
        packet
    }

    /// Hands the lane's punts to the control plane.
    fn punt(&mut self, now: Instant) {
        for punt in self.lane.take_punts().collect::<Vec<_>>() {
            self.node.handle_punt(now, punt);
        }
        self.lane.clear();
        self.collect();
    }

    fn collect(&mut self) {
        self.outgoing.extend(std::iter::from_fn(|| self.node.poll_transmit()));
        self.received.extend(std::iter::from_fn(|| self.node.poll_packet()));
        self.events.extend(std::iter::from_fn(|| self.node.poll_event()));
    }
}
