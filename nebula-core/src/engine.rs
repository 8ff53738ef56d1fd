//! One node as one value: control plane, forwarding plane and a lane, with the order of their calls inside.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use nebula_cert::VerifiedCertificate;

use crate::config::InvalidConfig;
use crate::forward::{Delivery, Offload, Received, cut_packet};
use crate::handover::State;
use crate::index::LocalIndex;
use crate::{Config, DropReason, Event, Forwarder, Lane, Node, PacketOwned, Seed, Transmit, Verdict, WallClock};

/// A whole node without IO: the program brings sockets, a clock and the overlay packets.
///
/// Each call takes something in and returns its complete [`Output`]: datagrams to send, packets for this host,
/// events, and when to call [`Engine::timeout`] at the latest. Outputs borrow from the engine and from the receive
/// buffer, so they are used up before the next call. Times must never go backwards. The crate's front page shows the
/// loop.
///
/// Engines share nothing with each other, so one process can have many, on any threads. A program that wants several
/// threads for one node uses [`Node`] with a [`Lane`] per thread instead.
#[derive(Debug)]
pub struct Engine {
    pub(crate) node: Node,
    pub(crate) forwarder: Arc<Forwarder>,
    lane: Lane,
    /// What became of the last packet to send.
    verdict: Option<Verdict>,
    transmits: Vec<Transmit>,
    packets: Vec<Built>,
    bypassed: Vec<PacketOwned>,
    events: Vec<Event>,
}

/// A packet in memory of its own.
#[derive(Debug)]
struct Built {
    bytes: Vec<u8>,
    offload: Offload,
    header_len: u16,
    tunnel: Option<LocalIndex>,
}

impl Engine {
    /// A node that starts at `clock.at`. All its randomness derives from `seed`. Without sockets of its own it knows
    /// no port: [`Config::listen_port`] must be that of the program's socket if the node shall be found through
    /// lighthouses.
    ///
    /// Some output may be due at once: call [`Engine::timeout`] first.
    ///
    /// # Errors
    /// Returns an error if the configuration contradicts itself, see [`Config::validate`].
    pub fn new(config: Config, clock: WallClock, seed: Seed) -> Result<Self, InvalidConfig> {
        config.validate()?;
        Ok(Self::unchecked(config, clock, seed))
    }

    /// Like [`Engine::new`], for a node that goes on where another process stopped; see [`Node::take_over`].
    ///
    /// # Errors
    /// Returns an error if the configuration contradicts itself, see [`Config::validate`].
    pub fn take_over(config: Config, clock: WallClock, seed: Seed, state: State) -> Result<Self, InvalidConfig> {
        let mut engine = Self::new(config, clock, seed)?;
        engine.node.import(clock.at, state);
        Ok(engine)
    }

    /// Ends the node and returns what another process needs to go on in its place; see [`Node::hand_over`]. Datagrams
    /// that wait here for their tunnel are lost.
    #[must_use]
    pub fn hand_over(self, now: Instant) -> State {
        self.node.hand_over(now)
    }

    /// Like [`Engine::new`], for a configuration that will be completed later.
    pub(crate) fn unchecked(config: Config, clock: WallClock, seed: Seed) -> Self {
        let (node, forwarder) = Node::new(config, clock.at, clock, seed);
        let lane = forwarder.lane();
        Self {
            node,
            forwarder,
            lane,
            verdict: None,
            transmits: Vec::new(),
            packets: Vec::new(),
            bypassed: Vec::new(),
            events: Vec::new(),
        }
    }

    /// Takes an overlay packet of this host to send, possibly a super-packet. Its bytes are unspecified afterwards.
    /// Without a tunnel to the peer it waits in the node until the handshake is done.
    pub fn send(&mut self, now: Instant, packet: &mut [u8], offload: Offload) -> Output<'_> {
        self.send_all(now, std::iter::once((packet, offload)))
    }

    /// Like [`Engine::send`], for several packets. Once the output is large enough, the rest of `packets` is left
    /// alone: pass a `&mut` iterator to go on with it after the output is sent.
    pub fn send_all<'p>(
        &mut self,
        now: Instant,
        packets: impl IntoIterator<Item = (&'p mut [u8], Offload)>,
    ) -> Output<'_> {
        self.begin(now);
        let mut packets = packets.into_iter();
        while self.lane.has_room()
            && let Some((packet, offload)) = packets.next()
        {
            let verdict = self.forwarder.outbound(&mut self.lane, now, packet, offload);
            if verdict == Verdict::Bypass {
                self.bypassed.push(PacketOwned { bytes: packet.to_vec(), offload });
            }
            self.verdict = Some(verdict);
        }
        self.settle(now);
        self.run_due(now);
        self.finish(now, &[])
    }

    /// Takes one datagram from the underlay. It is decrypted in place, and packets of the output lie in it. An
    /// IPv4-mapped source must be unmapped ([`IpAddr::to_canonical`]).
    pub fn receive<'a>(&'a mut self, now: Instant, from: SocketAddr, datagram: &'a mut [u8]) -> Output<'a> {
        let received = Received { from, range: 0..datagram.len(), segment_size: datagram.len().max(1) };
        self.receive_all(now, datagram, &[received])
    }

    /// Like [`Engine::receive`], for several datagrams in one buffer, as `recvmmsg` and UDP GRO give them.
    pub fn receive_all<'a>(&'a mut self, now: Instant, buffer: &'a mut [u8], received: &[Received]) -> Output<'a> {
        self.begin(now);
        self.forwarder.inbound(&mut self.lane, now, buffer, received);
        self.settle(now);
        self.run_due(now);
        self.finish(now, buffer)
    }

    /// Does what is due by time: to be called at [`Engine::poll_timeout`] at the latest, and as often as one likes.
    pub fn timeout(&mut self, now: Instant) -> Output<'_> {
        self.begin(now);
        self.run_due(now);
        self.finish(now, &[])
    }

    /// Starts a handshake unless there is a tunnel to the peer with this overlay address.
    pub fn connect(&mut self, now: Instant, peer: IpAddr) -> Output<'_> {
        self.control(now, |node| node.connect(now, peer)).1
    }

    /// Calls the control plane: to close tunnels, to replace parts of the configuration, to tell it the addresses of
    /// local interfaces, to look into it.
    pub fn control<T>(&mut self, now: Instant, work: impl FnOnce(&mut Node) -> T) -> (T, Output<'_>) {
        self.begin(now);
        let result = work(&mut self.node);
        (result, self.finish(now, &[]))
    }

    /// When to call [`Engine::timeout`] at the latest, if nothing happens before; `None`: not at all. Every call may
    /// change it.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Instant> {
        let settle = self.forwarder.settle_due(&self.lane);
        [self.node.poll_timeout(), self.lane.early_due(), settle].into_iter().flatten().min()
    }

    /// The control plane, for its read-only views.
    #[must_use]
    pub fn node(&self) -> &Node {
        &self.node
    }

    /// The verified certificate of the peer with this overlay address; `None` if there is no tunnel to it.
    #[must_use]
    pub fn certificate(&self, peer: IpAddr) -> Option<VerifiedCertificate> {
        Some(self.forwarder.tunnels().by_address(peer)?.peer.as_ref().clone())
    }

    /// The forwarding plane, which other threads may ask about tunnels.
    #[must_use]
    pub fn forwarder(&self) -> &Arc<Forwarder> {
        &self.forwarder
    }

    /// Counters by name, for metrics.
    #[must_use]
    pub fn counters(&self) -> BTreeMap<&'static str, u64> {
        self.forwarder.counters()
    }

    /// Sets whether received TCP segments and UDP datagrams of one flow are joined into super-packets, which a TCP
    /// stack handles at a fraction of the cost; see [`Packet::offload`]. Default: neither.
    pub fn set_coalesce(&mut self, tcp: bool, udp: bool) {
        self.lane.set_coalesce(tcp, udp);
    }

    /// Sets the maximum number of datagrams in one of [`Output::batches`]: what the socket's GSO takes. Default: 64.
    pub fn set_max_segments(&mut self, segments: usize) {
        self.lane.set_max_segments(segments);
    }

    /// Frees the memory that traffic needed, to be called after a time without traffic.
    pub fn release_memory(&mut self) {
        self.lane.release_memory();
        (self.transmits, self.packets) = (Vec::new(), Vec::new());
        (self.bypassed, self.events) = (Vec::new(), Vec::new());
    }

    /// Forgets the previous output. Datagrams that waited for their tunnel go before everything that arrives now.
    fn begin(&mut self, now: Instant) {
        self.lane.clear();
        self.verdict = None;
        self.transmits.clear();
        self.packets.clear();
        self.bypassed.clear();
        self.events.clear();
        self.serve_early(now);
    }

    /// Does what is due by time, so that a busy socket does not hold it up.
    fn run_due(&mut self, now: Instant) {
        self.forwarder.settle(&mut self.lane, now);
        if self.node.poll_timeout().is_some_and(|due| due <= now) {
            self.node.handle_timeout(now);
        }
    }

    /// Completes the output. `memory` has the bytes of the lane's packets.
    fn finish<'a>(&'a mut self, now: Instant, memory: &'a [u8]) -> Output<'a> {
        // The control plane may just have made the tunnel for which some datagrams wait.
        if self.lane.early_due().is_some() {
            self.keep(memory);
            self.serve_early(now);
        }
        self.transmits.extend(std::iter::from_fn(|| self.node.poll_transmit()));
        let packets = std::iter::from_fn(|| self.node.poll_packet());
        self.packets.extend(packets.map(|bytes| Built {
            bytes,
            offload: Offload::default(),
            header_len: 0,
            tunnel: None,
        }));
        self.bypassed.extend(std::iter::from_fn(|| self.node.poll_bypass()));
        self.events.extend(std::iter::from_fn(|| self.node.poll_event()));
        Output { engine: self, memory }
    }

    fn serve_early(&mut self, now: Instant) {
        while let Some(memory) = self.forwarder.inbound_early(&mut self.lane, now) {
            self.settle(now);
            self.keep(&memory);
        }
    }

    /// Hands the lane's punts to the control plane.
    fn settle(&mut self, now: Instant) {
        for punt in self.lane.take_punts() {
            self.node.handle_punt(now, punt);
        }
    }

    /// Copies what is in the lane, so that the lane can take more.
    fn keep(&mut self, memory: &[u8]) {
        for delivery in self.lane.deliveries() {
            let mut bytes = Vec::new();
            self.lane.copy_delivery(delivery, memory, &mut bytes);
            let Delivery { offload, header_len, tunnel, .. } = *delivery;
            self.packets.push(Built { bytes, offload, header_len, tunnel });
        }
        for run in self.lane.runs() {
            for datagram in self.lane.arena()[run.range.clone()].chunks(run.segment_size.max(1)) {
                self.transmits.push(Transmit { to: run.to, datagram: datagram.to_vec(), must_be_whole: false });
            }
        }
        self.lane.clear();
    }
}

/// Everything that one call of an [`Engine`] puts out.
#[derive(Debug, Clone, Copy)]
#[must_use = "datagrams in it have to be sent"]
pub struct Output<'a> {
    engine: &'a Engine,
    /// Has the bytes of the lane's packets.
    memory: &'a [u8],
}

/// A datagram to send on the underlay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Datagram<'a> {
    /// Destination.
    pub to: SocketAddr,
    /// Complete UDP payload.
    pub bytes: &'a [u8],
    /// See [`Transmit::must_be_whole`]; `false` where [`crate::Config::path_mtu`] is not set.
    pub must_be_whole: bool,
}

/// Datagrams to one destination, one after the other in memory, as UDP GSO sends them in one system call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Batch<'a> {
    /// Destination.
    pub to: SocketAddr,
    /// Complete UDP payloads.
    pub bytes: &'a [u8],
    /// Length of every datagram but the last.
    pub segment_size: usize,
    /// See [`Transmit::must_be_whole`]; `false` where [`crate::Config::path_mtu`] is not set.
    pub must_be_whole: bool,
}

impl<'a> Output<'a> {
    /// Datagrams to send, in this order.
    pub fn datagrams(self) -> impl Iterator<Item = Datagram<'a>> {
        let cut = |Batch { to, bytes, segment_size, must_be_whole }: Batch<'a>| {
            bytes.chunks(segment_size).map(move |bytes| Datagram { to, bytes, must_be_whole })
        };
        self.batches().flat_map(cut)
    }

    /// The same datagrams, for a socket that can send several in one system call.
    pub fn batches(self) -> impl Iterator<Item = Batch<'a>> {
        let Engine { lane, transmits, .. } = self.engine;
        let runs = lane.runs().iter().map(|run| Batch {
            to: run.to,
            bytes: &lane.arena()[run.range.clone()],
            segment_size: run.segment_size.max(1),
            must_be_whole: false,
        });
        let single = |Transmit { to, datagram, must_be_whole }: &'a Transmit| Batch {
            to: *to,
            bytes: datagram,
            segment_size: datagram.len().max(1),
            must_be_whole: *must_be_whole,
        };
        runs.chain(transmits.iter().map(single))
    }

    /// Overlay packets for this host, in order per flow.
    pub fn packets(self) -> impl Iterator<Item = Packet<'a>> {
        let Engine { lane, packets, forwarder, .. } = self.engine;
        let built = packets.iter().map(|built| Packet {
            head: &built.bytes,
            pieces: &[],
            memory: &[],
            offload: built.offload,
            header_len: built.header_len,
            origin: (forwarder, built.tunnel),
        });
        let delivered = lane.deliveries().iter().map(move |delivery| Packet {
            head: &lane.headers()[delivery.header.clone()],
            pieces: &lane.pieces()[delivery.pieces.clone()],
            memory: self.memory,
            offload: delivery.offload,
            header_len: delivery.header_len,
            origin: (forwarder, delivery.tunnel),
        });
        built.chain(delivered)
    }

    /// Overlay packets that do not belong to the overlay: they are to be sent on the primary network, cut if they are
    /// super-packets. Only under [`Config::capture`].
    #[must_use]
    pub fn bypassed(self) -> &'a [PacketOwned] {
        &self.engine.bypassed
    }

    /// What happened in the control plane.
    #[must_use]
    pub fn events(self) -> &'a [Event] {
        &self.engine.events
    }

    /// Why the packet of [`Engine::send`] was dropped, if it was; of several packets, the last one.
    #[must_use]
    pub fn dropped(self) -> Option<DropReason> {
        match self.engine.verdict {
            Some(Verdict::Drop(reason)) => Some(reason),
            Some(Verdict::Transmit | Verdict::Punt | Verdict::Bypass | Verdict::Deliver) | None => None,
        }
    }

    /// See [`Engine::poll_timeout`].
    #[must_use]
    pub fn next_timeout(self) -> Option<Instant> {
        self.engine.poll_timeout()
    }

    #[cfg(feature = "simulator")]
    pub(crate) fn verdict(self) -> Option<Verdict> {
        self.engine.verdict
    }
}

/// An overlay packet for this host, possibly a super-packet, in one or more slices of memory.
#[derive(Debug, Clone, Copy)]
pub struct Packet<'a> {
    head: &'a [u8],
    pieces: &'a [Range<usize>],
    memory: &'a [u8],
    offload: Offload,
    header_len: u16,
    origin: (&'a Forwarder, Option<LocalIndex>),
}

impl<'a> Packet<'a> {
    /// Its slices. The first one of a super-packet is its IP and transport header.
    pub fn slices(self) -> impl Iterator<Item = &'a [u8]> {
        let head = (!self.head.is_empty()).then_some(self.head);
        head.into_iter().chain(self.pieces.iter().map(move |piece| &self.memory[piece.clone()]))
    }

    /// A copy in one piece.
    #[must_use]
    pub fn to_vec(self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.slices().map(<[u8]>::len).sum());
        self.slices().for_each(|slice| bytes.extend_from_slice(slice));
        bytes
    }

    /// What the packet leaves to its receiver: a super-packet says where to cut it and has a partial checksum (see
    /// [`Delivery::offload`](crate::forward::Delivery::offload)). Only after [`Engine::set_coalesce`] and, under
    /// [`Config::capture`], for super-packets of this host to itself; else there is nothing to do.
    #[must_use]
    pub fn offload(self) -> Offload {
        self.offload
    }

    /// Length of the IP and transport header of a super-packet together, for a virtio-net header; else 0.
    #[must_use]
    pub fn header_len(self) -> u16 {
        self.header_len
    }

    /// The verified certificate of the peer whose tunnel it came by: for a host in a network behind a peer, that of
    /// the peer. `None` if that tunnel has ended since, and for a packet of this node itself.
    #[must_use]
    pub fn sender(self) -> Option<VerifiedCertificate> {
        let (forwarder, tunnel) = self.origin;
        forwarder.certificate(tunnel?)
    }

    /// The tunnel that it came by, for [`Forwarder::certificate`]; `None` for a packet of this node itself.
    #[must_use]
    pub fn tunnel(self) -> Option<LocalIndex> {
        self.origin.1
    }

    /// Calls `each` with every packet that it stands for, checksums completed; a plain packet is the only one.
    pub fn cut(self, mut each: impl FnMut(&[u8])) {
        if self.offload == Offload::default() {
            return each(&self.to_vec());
        }
        cut_packet(&self.to_vec(), self.offload, each);
    }
}
