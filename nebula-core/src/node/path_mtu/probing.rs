//! Sends the probes of a search, and tells the data path what came out.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use super::{Proof, Step};
use crate::counters::{Counter, Direction};
use crate::index::LocalIndex;
use crate::node::Node;
use crate::node::outbox::seal;
use crate::node::path_choice::Carried;
use crate::node::paths::Paths;
use crate::node::timer::Due;
use crate::node::tunnels::Live;
use crate::tunnel::{PathState, Tunnel};
use crate::wire::header::MessageType;
use crate::wire::size_probe::SizeReply;
use crate::{DropReason, Origin, PacketOwned, Punt};

impl Node {
    /// The setting changed: examines every path again, each with its next packet.
    pub(in crate::node) fn examine_all_paths(&mut self) {
        let (on, now) = (self.config.path_mtu.is_some(), self.now);
        for index in self.tunnels.indexes() {
            let Some(live) = self.tunnels.get_mut(index) else { continue };
            live.path_mtu.stop();
            live.tunnel.path_limit.switch(on);
            self.timer.cancel(Due::PathMtu(index));
            self.paths(now).let_go(index);
        }
    }

    /// Has the paths of a new tunnel examined, if that is wanted. Begins with what is known about the path from an
    /// older tunnel to the same peer.
    pub(in crate::node) fn prepare_path_mtu(&self, now: Instant, live: &mut Live) {
        let tunnel = &live.tunnel;
        tunnel.path_limit.switch(self.config.path_mtu.is_some());
        let Some(&peer) = tunnel.peer_addresses.first() else { return };
        let Some(older) = self.tunnels.of_peer(peer).last() else {
            return self.take_over_path(now, peer, live);
        };
        let Some(older) = self.tunnels.get(*older) else { return };
        let is_same_path = tunnel.endpoint().is_some() && tunnel.endpoint() == older.tunnel.endpoint();
        let is_known = !matches!(older.tunnel.path_limit.state(), PathState::Unexamined | PathState::UnderExamination);
        if is_same_path && is_known && older.path_mtu.known().is_some() {
            live.path_mtu.inherit(now, tunnel.session.next_counter(), &older.path_mtu);
            tunnel.path_limit.set(live.path_mtu.state());
        }
    }

    /// Begins with what an earlier process of this node knew about the path.
    fn take_over_path(&self, now: Instant, peer: IpAddr, live: &mut Live) {
        let tunnel = &live.tunnel;
        let Some(path) = tunnel.endpoint().and_then(|at| self.inherited_path(peer, at)) else { return };
        let (Some(mtu), Some(carrier)) = (self.config.path_mtu, self.forwarder.carrier(tunnel)) else { return };
        let sent = tunnel.session.next_counter();
        if path.mtu == mtu && live.path_mtu.take_over(now, sent, path, carrier.overhead()) {
            tunnel.path_limit.set(live.path_mtu.state());
        }
    }

    /// Examines the path of a tunnel again if its traffic since the last time is a reason to.
    pub(in crate::node) fn look_after_path_mtu(&mut self, now: Instant, index: LocalIndex) {
        let Some(live) = self.tunnels.get_mut(index) else { return };
        if live.path_mtu.look(now, Carried::of(&live.tunnel)) {
            self.paths(now).path_mtu_due(index);
        }
    }
}

impl Paths<'_> {
    /// There is traffic by a path that is not examined yet. A packet that waits for that is kept, if there is room.
    pub(in crate::node) fn examine(&mut self, index: LocalIndex, waits: Option<PacketOwned>) {
        let Some(live) = self.tunnels.get_mut(index) else { return };
        if let Some(packet) = waits
            && live.openings.push(packet).is_err()
        {
            self.outbox.counters().drop_one(Direction::Outbound, DropReason::PendingFull);
        }
        if live.tunnel.is_on_trial() {
            // The path is about to change, and is examined then.
            return;
        }
        if live.path_mtu.is_examining() && live.tunnel.path_limit.state() == PathState::UnderExamination {
            return;
        }
        let (Some(mtu), Some(carrier)) = (self.config.path_mtu, self.forwarder.carrier(&live.tunnel)) else {
            live.tunnel.path_limit.set(PathState::Open);
            return self.let_go(index);
        };
        let sent = live.tunnel.session.next_counter();
        let step = live.path_mtu.begin(self.now, sent, mtu, carrier.overhead());
        self.take_step(index, step);
    }

    /// The next step of a search is due.
    pub(in crate::node) fn path_mtu_due(&mut self, index: LocalIndex) {
        let Some(live) = self.tunnels.get_mut(index) else { return };
        if live.tunnel.path_limit.state() == PathState::Unexamined {
            // The path changed, and the next packet will have it examined.
            live.path_mtu.stop();
            return self.let_go(index);
        }
        let step = live.path_mtu.due(self.now, Carried::of(&live.tunnel), live.tunnel.was_sent_to());
        self.take_step(index, step);
    }

    /// A peer that examines the path is about to use it, and waits for answers that this node has to give by it.
    pub(in crate::node) fn examine_with_peer(&mut self, tunnel: &Tunnel) {
        if tunnel.path_limit.claim() {
            self.examine(tunnel.local_index, None);
        }
    }

    /// The peer answered a probe. An answer that came by another path says nothing about the present one.
    pub(in crate::node) fn handle_size_reply(&mut self, tunnel: &Tunnel, from: Origin, reply: SizeReply) {
        if !self.hops.is_path_to(tunnel, from) {
            return;
        }
        let Some(live) = self.tunnels.get_mut(tunnel.local_index) else { return };
        if tunnel.path_limit.state() == PathState::Unexamined {
            return;
        }
        let (sent, is_direct) = (tunnel.session.next_counter(), matches!(from, Origin::Direct(_)));
        let step = match reply {
            SizeReply::Marked(probe) => live.path_mtu.answered(self.now, sent, probe, Proof::SameProgram),
            // A relay returns what may have come from any release.
            SizeReply::Returned(probe) => {
                live.path_mtu.answered(self.now, sent, probe, if is_direct { Proof::Intact } else { Proof::None })
            }
            SizeReply::Garbled => live.path_mtu.refused(self.now, sent),
        };
        if reply != SizeReply::Garbled {
            self.outbox.counters().add(Counter::PathProbesAnswered, 1);
        }
        match step {
            Some(step) => self.take_step(tunnel.local_index, step),
            None => tunnel.path_limit.set(live.path_mtu.state()),
        }
    }

    /// Sends the probes of a step, and publishes the limit as it is now.
    fn take_step(&mut self, index: LocalIndex, step: Step) {
        let Some(live) = self.tunnels.get(index) else { return };
        let tunnel = Arc::clone(&live.tunnel);
        tunnel.path_limit.set(live.path_mtu.state());
        match step.next {
            Some(next) => self.timer.set(Due::PathMtu(index), next),
            None => self.timer.cancel(Due::PathMtu(index)),
        }
        let Some(carrier) = self.forwarder.carrier(&tunnel) else { return };
        for probe in step.probes {
            // Not marked as sent: a probe must not keep an idle tunnel alive.
            if let Some(request) = seal(&tunnel, MessageType::TestRequest, &probe.body()) {
                self.outbox.whole_datagram_by(&carrier, request);
            }
        }
        if tunnel.path_limit.state() != PathState::UnderExamination {
            self.let_go(index);
        }
    }

    /// Sends what waited until the path was examined.
    pub(in crate::node) fn let_go(&mut self, index: LocalIndex) {
        let Some(live) = self.tunnels.get_mut(index) else { return };
        for packet in live.openings.take() {
            if let Some(Punt::PathUnexamined { .. }) = self.outbox.overlay_packet(self.now, packet) {
                // The path changed again. The packet is lost: keeping it could go on for ever.
                live.tunnel.path_limit.forget();
            }
        }
    }
}
