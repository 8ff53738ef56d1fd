//! Talks to lighthouses, and serves as one.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Instant;

use nebula_cert::Version;

use super::Node;
use super::outbox::Outbox;
use super::relay_choice::{Offers, RelayChoice};
use super::timer::{Due, Timer};
use super::tunnels::Tunnels;
use crate::counters::{Counter, Direction};
use crate::hole_punch::{Action, HolePunch, PUNCH};
use crate::lighthouse::{self, KnownEndpoints, Place, Screened, address_for};
use crate::tunnel::Tunnel;
use crate::wire::header::{HEADER_LEN, Header, MessageType, TAG_LEN};
use crate::wire::messages::{MAX_RELAYS, Meta, MetaKind};
use crate::{Config, DropReason, Event, Forwarder};

/// What needs a handshake, or leads to one.
impl Node {
    /// Asks every lighthouse where `peer` is. [`Node::whereabouts`] shows the answers as they arrive.
    pub fn inquire(&mut self, now: Instant, peer: IpAddr) {
        self.now = now;
        let heard = self.lighthouses_heard();
        self.lighthouse.questions().ask(now, peer, heard);
        self.ask_lighthouses(now, peer);
        // A lighthouse that does not know the peer does not answer the query; its reply to this test shows that it is
        // up.
        for lighthouse in self.config.lighthouse.hosts.clone() {
            if let Some(tunnel) = self.forwarder.tunnels().by_address(lighthouse) {
                self.outbox.message(&tunnel, MessageType::TestRequest, &[]);
            }
        }
    }

    /// Sends a datagram for a tunnel that does not exist to each endpoint of `peer`, and to where it calls from
    /// although it does not hear the answers, from the port of this node. A Nebula there answers with a recv_error,
    /// which shows that UDP passes in both directions; [`Node::diagnosis`] has the answers.
    pub fn probe(&mut self, now: Instant, peer: IpAddr) {
        self.now = now;
        let mut endpoints = self.candidate_endpoints(peer, &self.lighthouse.answers(peer));
        endpoints.truncate(MAX_PROBED);
        // From where it calls in vain, UDP passes towards this node.
        if let Some(from) = self.journal.unheard_from(peer).filter(|from| !endpoints.contains(from)) {
            endpoints.push(from);
        }
        for endpoint in endpoints {
            let index = u32::from_be_bytes(self.random_bytes()).max(1);
            let mut datagram = Header { kind: MessageType::Data, index, counter: 1 }.to_bytes().to_vec();
            datagram.resize(HEADER_LEN + TAG_LEN, 0);
            self.journal.probed(now, peer, endpoint, index);
            self.outbox.datagram(endpoint, datagram);
        }
    }

    /// Asks every lighthouse where `subject` is, after a handshake where there is no tunnel.
    pub(super) fn ask_lighthouses(&mut self, now: Instant, subject: IpAddr) {
        if !self.config.has_lighthouses() || self.config.is_lighthouse(subject) {
            return;
        }
        for lighthouse in self.config.lighthouse.hosts.clone() {
            if let Some(tunnel) = self.forwarder.tunnels().by_address(lighthouse) {
                self.rendezvous(now).send_query(&tunnel, subject);
            } else {
                self.start_handshake(now, lighthouse, None);
                self.pending.push_query(lighthouse, subject);
            }
        }
    }

    /// Tells every lighthouse where this node is, and schedules the next update.
    pub(super) fn update_lighthouses(&mut self, now: Instant) {
        if !self.config.has_lighthouses() {
            return;
        }
        for lighthouse in self.config.lighthouse.hosts.clone() {
            if let Some(tunnel) = self.forwarder.tunnels().by_address(lighthouse) {
                self.rendezvous(now).send_update(&tunnel);
            } else {
                // The update is sent once the tunnel is up.
                self.start_handshake(now, lighthouse, None);
            }
        }
        self.connect_relays(now);
        if let Some(interval) = self.config.lighthouse.interval {
            self.timer.set_on_grid(Due::LighthouseUpdate, now + interval);
        }
    }

    pub(super) fn handle_lighthouse_message(&mut self, now: Instant, tunnel: &Arc<Tunnel>, body: &[u8]) {
        let Ok(message) = Meta::parse(body) else {
            self.outbox.count_drop(DropReason::BadMessage);
            return;
        };
        self.outbox.counters().add(counters_of(message.kind).0, 1);
        let serves = self.config.lighthouse.am_lighthouse;
        let from_lighthouse = tunnel.peer_addresses.iter().any(|address| self.config.is_lighthouse(*address));
        match (message.kind, message.subject) {
            (MetaKind::HostQuery, Some(subject)) if serves => {
                self.rendezvous(now).answer_query(tunnel, message.version, subject);
            }
            (MetaKind::HostUpdateNotification, _) if serves => self.rendezvous(now).store_update(tunnel, message),
            (MetaKind::HostQueryReply, Some(subject)) if from_lighthouse => {
                self.handle_reply(now, tunnel, subject, message);
            }
            (MetaKind::HostPunchNotification, Some(asker)) if from_lighthouse && self.config.is_own_address(asker) => {
                // An operator of this host may have asked about the own address.
                if !self.lighthouse.questions().is_asked(asker) {
                    self.note_address_elsewhere(now, tunnel, asker, &message.endpoints);
                }
            }
            (MetaKind::HostPunchNotification, Some(asker)) if from_lighthouse => {
                self.rendezvous(now).schedule_punches(tunnel, asker, message.endpoints);
            }
            (MetaKind::HostUpdateNotificationAck, _) if from_lighthouse => {
                self.relays_offered(now, tunnel, &message.relays);
                if let Some(own) = self.config.own_address(message.version).filter(|_| !message.endpoints.is_empty()) {
                    self.note_address_elsewhere(now, tunnel, own, &message.endpoints);
                }
            }
            (MetaKind::HostUpdateNotificationAck | MetaKind::Other(_), _) => {}
            _ => self.outbox.count_drop(DropReason::BadMessage),
        }
    }

    /// Handles a lighthouse's answer about a peer.
    fn handle_reply(&mut self, now: Instant, lighthouse: &Tunnel, subject: IpAddr, reply: Meta) {
        let Some(&source) = lighthouse.peer_addresses.first() else { return };
        let answer = || KnownEndpoints {
            reported: reply.endpoints.clone(),
            relays: reply.relays.clone(),
            ..KnownEndpoints::default()
        };
        self.lighthouse.questions().answer(subject, source, answer);
        // Storing answers that nobody waits for would only take memory.
        if !self.pending.contains(subject) && self.tunnels.of_peer(subject).is_empty() {
            return;
        }
        if let Some(pending) = self.pending.get_mut(subject) {
            pending.answered = true;
        }
        let from = Place::of(lighthouse.endpoint());
        self.rendezvous(now).screen(lighthouse, &[subject], reply.endpoints.clone(), (from, Ports::Any));
        let known = self.lighthouse.candidates(subject);
        known.report(source, from, reply.endpoints);
        let new_relays = known.report_relays(source, reply.relays);
        self.retry_if_endpoints_changed(subject);
        if new_relays {
            self.try_relays(now, subject);
            self.use_other_relays(now, subject);
        }
    }

    /// A lighthouse says that another host has an address of this one, and where.
    fn note_address_elsewhere(&mut self, now: Instant, lighthouse: &Tunnel, own: IpAddr, endpoints: &[SocketAddr]) {
        let Some(&source) = lighthouse.peer_addresses.first() else { return };
        if self.journal.address_elsewhere(now, source, own, endpoints) {
            self.outbox.counters().add(Counter::AddressConflicts, 1);
            let (lighthouse, at) = (lighthouse.peer.name().to_owned(), endpoints.first().copied());
            self.outbox.event(Event::AddressElsewhere { address: own, lighthouse, at });
        }
    }

    /// A live tunnel may have lost a relay, and its peer has others now.
    fn use_other_relays(&mut self, now: Instant, peer: IpAddr) {
        let Some(tunnel) = self.forwarder.tunnels().by_address(peer).filter(|it| it.endpoint().is_none()) else {
            return;
        };
        if let Some(relayed) = self.tunnels.get_mut(tunnel.local_index).and_then(|live| live.relayed.as_mut()) {
            relayed.other_relays();
            self.seek_second_relay(now, &tunnel);
        }
    }

    pub(super) fn punch_due(&mut self, now: Instant) {
        while let Some(action) = self.punches.pop(now) {
            match action {
                Action::Punch(endpoints) => {
                    for endpoint in endpoints {
                        if self.punches.may_punch(now, endpoint.ip()) {
                            self.outbox.datagram(endpoint, PUNCH.to_vec());
                        } else {
                            self.outbox.counters().drop_one(Direction::Outbound, DropReason::EndpointRefused);
                        }
                    }
                }
                Action::Respond(peer) => self.test(now, peer),
            }
        }
        if let Some(next) = self.punches.next() {
            self.timer.set(Due::HolePunch, next);
        }
    }

    /// Sends a test request, after a handshake if there is no tunnel.
    fn test(&mut self, now: Instant, peer: IpAddr) {
        if let Some(tunnel) = self.forwarder.tunnels().by_address(peer) {
            self.outbox.message(&tunnel, MessageType::TestRequest, &[]);
        } else {
            self.start_handshake(now, peer, None);
            self.pending.push_test(peer);
        }
    }

    pub(super) fn rendezvous(&mut self, now: Instant) -> Rendezvous<'_> {
        Rendezvous {
            now,
            config: &self.config,
            tunnels: &self.tunnels,
            client: &mut self.lighthouse,
            server: &mut self.server,
            punches: &mut self.punches,
            timer: &mut self.timer,
            outbox: &mut self.outbox,
            relay_choice: self.relay_choice.as_deref(),
            offers: &self.offers,
            forwarder: &self.forwarder,
        }
    }
}

/// Talks to lighthouses, serves as one, and schedules the punches that they ask for. Borrows what it needs of the node
/// for one call, and starts no handshakes.
#[derive(Debug)]
pub(super) struct Rendezvous<'a> {
    now: Instant,
    config: &'a Config,
    tunnels: &'a Tunnels,
    client: &'a mut lighthouse::Client,
    server: &'a mut lighthouse::Server,
    punches: &'a mut HolePunch,
    timer: &'a mut Timer,
    outbox: &'a mut Outbox,
    relay_choice: Option<&'a RelayChoice>,
    offers: &'a Offers,
    forwarder: &'a Forwarder,
}

impl Rendezvous<'_> {
    pub(super) fn send_query(&mut self, lighthouse: &Tunnel, subject: IpAddr) {
        self.send_meta(lighthouse, &Meta::new(MetaKind::HostQuery, lighthouse.own_version, Some(subject)));
    }

    /// Tells a lighthouse where this node is.
    pub(super) fn send_update(&mut self, lighthouse: &Tunnel) {
        let version = lighthouse.own_version;
        let own = self.config.identity.certificate(version).and_then(|certificate| certificate.networks().first());
        let subject = own.map(ipnet::IpNet::addr).filter(|_| version == Version::V1);
        let mut update = Meta::new(MetaKind::HostUpdateNotification, version, subject);
        let settings = &self.config.lighthouse;
        if !self.config.relay.am_relay {
            update.relays.clone_from(&self.config.relay.relays);
            let chosen = self.relay_choice.map(RelayChoice::advertised).unwrap_or_default();
            update.relays.extend(chosen.into_iter().filter(|relay| !self.config.relay.relays.contains(relay)));
            update.relays.truncate(MAX_RELAYS);
        }
        update.endpoints = self.client.advertised(settings, self.config.listen_port, &self.config.endpoint_rules(&[]));
        self.send_meta(lighthouse, &update);
    }

    fn send_meta(&mut self, tunnel: &Tunnel, message: &Meta) {
        match message.encode() {
            Ok(body) => {
                self.outbox.counters().add(counters_of(message.kind).1, 1);
                self.outbox.message(tunnel, MessageType::Lighthouse, &body);
            }
            Err(error) => tracing::warn!(peer = tunnel.peer.name(), %error, "cannot send a lighthouse message"),
        }
    }

    /// A lighthouse announced that `asker` is about to call from these endpoints.
    fn schedule_punches(&mut self, lighthouse: &Tunnel, asker: IpAddr, endpoints: Vec<SocketAddr>) {
        if self.config.keeps_to_relays(&[asker]) {
            return;
        }
        let limits = (Place::of(lighthouse.endpoint()), Ports::FewExceptAt(None));
        let endpoints = self.screen(lighthouse, &[asker], endpoints, limits);
        let punchy = &self.config.punchy;
        if !endpoints.is_empty() {
            self.punches.schedule(self.now + punchy.delay, Action::Punch(endpoints));
        }
        if punchy.respond {
            self.punches.schedule(self.now + punchy.respond_delay, Action::Respond(asker));
        }
        if let Some(next) = self.punches.next() {
            self.timer.set(Due::HolePunch, next);
        }
    }

    /// As a lighthouse: tells the asker where the subject is, and the subject that the asker will call. If the subject
    /// is unknown, the asker is told as soon as it registers.
    fn answer_query(&mut self, asker: &Arc<Tunnel>, version: Version, subject: IpAddr) {
        let called = self.forwarder.tunnels().by_address(subject);
        let calling = called.as_ref().and_then(|called| address_for(&asker.peer_addresses, called.peer.networks()));
        // Look both up before using either: with very many hosts each lookup waits for memory, and these waits overlap.
        let (wanted, asking) = (self.server.report(subject), calling.and_then(|calling| self.server.report(calling)));
        let Some(known) = self.known_of(called.as_deref(), wanted, asker) else {
            self.server.wanted().ask(self.now, subject, asker.local_index, version);
            return;
        };
        let mut reply = Meta::new(MetaKind::HostQueryReply, version, Some(subject));
        (reply.endpoints, reply.relays) = (known.reported, known.relays);
        self.send_meta(asker, &reply);

        let (Some(called), Some(calling)) = (called, calling) else { return };
        if !self.server.notices().may_tell(self.now, asker.local_index, subject) {
            return;
        }
        let caller = self.forwarder.tunnels().by_address(calling);
        let Some(known) = self.known_of(caller.as_deref(), asking, &called) else { return };
        let mut notice = Meta::new(MetaKind::HostPunchNotification, called.peer.version(), Some(calling));
        notice.endpoints = known.reported;
        self.send_meta(&called, &notice);
    }

    /// As a lighthouse: stores what a host reports about itself.
    fn store_update(&mut self, tunnel: &Arc<Tunnel>, update: Meta) {
        let host = &tunnel.peer_addresses;
        if update.subject.is_some_and(|subject| !host.contains(&subject)) {
            self.outbox.count_drop(DropReason::BadMessage);
            return;
        }
        // Also a host on this machine is not believed about loopback: what it is heard at is known without its report.
        let limits = (Place::Elsewhere, Ports::FewExceptAt(tunnel.endpoint().map(|at| at.ip())));
        let endpoints = self.screen(tunnel, host, update.endpoints, limits);
        let report = KnownEndpoints { reported: endpoints, relays: update.relays, ..KnownEndpoints::default() };
        self.server.store(host, &report);
        let subject = host.first().copied().filter(|_| update.version == Version::V1);
        let mut ack = Meta::new(MetaKind::HostUpdateNotificationAck, update.version, subject);
        ack.relays = self.offer(tunnel);
        ack.endpoints = self.later_holder(tunnel).into_iter().collect();
        self.send_meta(tunnel, &ack);
        for &address in host {
            self.tell_askers(address);
        }
    }

    /// As a lighthouse: the endpoint of a host that registered an address of `host` after it, under another name. A
    /// host that was renamed does not report in its earlier tunnel any more.
    fn later_holder(&self, host: &Tunnel) -> Option<SocketAddr> {
        let tunnels = self.tunnels.of_peer(*host.peer_addresses.first()?);
        if tunnels.len() < 2 {
            return None;
        }
        let since = self.tunnels.get(host.local_index)?.since;
        let others = tunnels.iter().filter_map(|index| self.tunnels.get(*index)).filter(|live| live.since > since);
        let others = others.map(|live| &live.tunnel).filter(|other| {
            other.endpoint() != host.endpoint() && !other.peer.name().eq_ignore_ascii_case(host.peer.name())
        });
        others.filter_map(|other| other.endpoint()).next_back()
    }

    /// As a lighthouse: the relays to offer to a host.
    fn offer(&self, host: &Tunnel) -> Vec<IpAddr> {
        if self.config.relay.groups.is_empty() {
            return Vec::new();
        }
        let is_there = |relay| {
            let tunnel = || self.forwarder.tunnels().by_address(relay);
            self.config.is_own_address(relay) || tunnel().is_some_and(|tunnel| tunnel.endpoint().is_some())
        };
        self.offers.for_host((&host.peer_addresses, host.peer.networks()), is_there)
    }

    /// As a lighthouse: `subject` registered, so the peers that wait for it are told.
    fn tell_askers(&mut self, subject: IpAddr) {
        for (asker, version) in self.server.wanted().take(self.now, subject) {
            if let Some(asker) = self.tunnels.get(asker).map(|live| Arc::clone(&live.tunnel)) {
                self.answer_query(&asker, version, subject);
            }
        }
    }

    /// What this lighthouse reports about a host to another one: the endpoint of its primary tunnel, then those it
    /// reported itself. A link-local tunnel endpoint is left out unless an allow list names it, and a loopback one also
    /// unless the other host is on this machine as well: it is of no use to others.
    fn known_of(
        &self,
        tunnel: Option<&Tunnel>,
        reported: Option<KnownEndpoints>,
        to: &Tunnel,
    ) -> Option<KnownEndpoints> {
        let to = Place::of(to.endpoint());
        let learnt = tunnel.and_then(|tunnel| {
            tunnel.endpoint().filter(|at| self.config.endpoint_rules(&tunnel.peer_addresses).tellable(*at, to))
        });
        if learnt.is_none() && reported.is_none() {
            return None;
        }
        let mut known = reported.unwrap_or_default();
        // Readers cut the list, so nothing is named twice.
        known.reported.retain(|at| Some(*at) != learnt);
        known.reported.splice(0..0, learnt);
        Some(known)
    }

    /// Filters the endpoints that the peer of `tunnel` names for a host, and counts those that nobody should be sent
    /// to.
    fn screen(
        &mut self,
        tunnel: &Tunnel,
        host: &[IpAddr],
        endpoints: Vec<SocketAddr>,
        (from, ports): (Place, Ports),
    ) -> Vec<SocketAddr> {
        let mut screened = self.config.endpoint_rules(host).screen(endpoints, from);
        if let Ports::FewExceptAt(own) = ports {
            screened.thin(own);
        }
        let Screened { believed, refused } = screened;
        let Some(example) = refused.first() else { return believed };
        self.outbox.counters().drop_many(Direction::Inbound, DropReason::EndpointRefused, refused.len() as u64);
        if let Some(since) = self.client.note_refused(self.now, refused.len()) {
            let by = tunnel.peer.name();
            tracing::info!(peer = by, ?host, endpoint = %example, refused = since, "refused endpoints in a lighthouse message");
            let (by, host) = (by.to_owned(), host.to_vec());
            self.outbox.event(Event::EndpointsRefused { by, host, example: *example, refused: since });
        }
        believed
    }
}

/// More endpoints of a peer are not probed.
const MAX_PROBED: usize = 8;
/// How many ports of one address are believed.
#[derive(Debug, Clone, Copy)]
enum Ports {
    Any,
    /// Few, except of the address at which the reporter is heard.
    FewExceptAt(Option<IpAddr>),
}

/// The counters for a kind of lighthouse message: received, sent.
fn counters_of(kind: MetaKind) -> (Counter, Counter) {
    match kind {
        MetaKind::HostQuery => (Counter::LighthouseQueryIn, Counter::LighthouseQueryOut),
        MetaKind::HostQueryReply => (Counter::LighthouseReplyIn, Counter::LighthouseReplyOut),
        MetaKind::HostUpdateNotification => (Counter::LighthouseUpdateIn, Counter::LighthouseUpdateOut),
        MetaKind::HostPunchNotification => (Counter::LighthousePunchIn, Counter::LighthousePunchOut),
        MetaKind::HostUpdateNotificationAck => (Counter::LighthouseAckIn, Counter::LighthouseAckOut),
        MetaKind::Other(_) => (Counter::LighthouseOtherIn, Counter::LighthouseOtherOut),
    }
}
