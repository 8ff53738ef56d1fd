//! Known flows as values, so that another process of this node goes on with them.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use super::{Conntrack, MAX_PAST, lock, make_room};
use crate::counters::Direction;
use crate::firewall::flow_entry::{Entry, Owner};
use crate::firewall::{Filter, Firewall, Peer};
use crate::sync::atomic::Ordering;
use crate::wire::ip::FlowKey;

/// A known flow with a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct HandedOverFlow {
    pub(crate) flow: FlowKey,
    /// Direction of its first packet.
    pub(crate) direction: Direction,
    /// Whether packets went both ways.
    pub(crate) answered: bool,
    /// Time since its last packet.
    pub(crate) idle: Duration,
}

impl Conntrack {
    /// The flows with these peers that have not expired, each with the position of its peer. A peer that is a gateway
    /// of a subnet route with several stands here once more for each such route. Of flows with others nothing is known
    /// but a digest of their names, so they are left out.
    pub(crate) fn flows_with(
        &self,
        peers: &[(usize, Peer<'_>)],
        now: Instant,
        filter: &Filter,
    ) -> Vec<(usize, HandedOverFlow)> {
        let mut positions = HashMap::new();
        for (position, peer) in peers {
            let Owner { owner, rights } = self.owner(peer);
            // Gateways share their flows; the rights tell which of them a flow was last allowed for.
            positions.insert((owner, peer.route.map(|_| rights)), *position);
        }
        let (now, timeouts) = (self.millis(now), filter.timeouts());
        let mut flows = Vec::new();
        for shard in &self.shards {
            for entry in lock(shard).entries() {
                let idle = now.saturating_sub(entry.last_used);
                let of = |rights| positions.get(&(entry.owner, rights));
                let Some(position) = of(None).or_else(|| of(Some(entry.rights))) else { continue };
                if idle < timeouts.of(&entry.flow) {
                    let (flow, direction, answered) = (entry.flow, entry.direction, entry.answered);
                    flows.push((
                        *position,
                        HandedOverFlow { flow, direction, answered, idle: Duration::from_millis(idle) },
                    ));
                }
            }
        }
        flows
    }
}

impl Firewall<'_> {
    /// Goes on with a flow that an earlier process of this node allowed, if the present rules allow it, too. Flows are
    /// to be passed in the order of their age, the oldest first. Returns whether the flow is known now.
    pub(crate) fn take_over(&self, now: Instant, flow: &HandedOverFlow, peer: Peer<'_>) -> bool {
        let HandedOverFlow { flow, direction, answered, idle } = flow;
        let idle = u64::try_from((*idle).min(MAX_PAST).as_millis()).unwrap_or(u64::MAX);
        let is_live = idle < self.filter.timeouts().of(flow);
        if !is_live || self.filter.check_addresses(flow, peer).is_err() || !self.filter.allows(*direction, flow, peer) {
            return false;
        }
        let table = self.conntrack;
        let now = table.millis(now);
        let owner = table.owner(&peer);
        let hash = table.hash(flow) ^ owner.owner;
        let holder = peer.networks.first().map_or(flow.remote, ipnet::IpNet::addr);
        let mut shard = table.shard(hash);
        if shard.find(hash, flow, owner.owner).is_some() {
            return true;
        }
        let is_full = shard.len() >= table.max_per_shard.load(Ordering::Relaxed);
        if is_full && !make_room(&mut shard, now, holder) {
            return false;
        }
        let entry = Entry::new(*flow, owner, *direction, self.filter.generation(), now.saturating_sub(idle));
        shard.insert(hash, holder, Entry { answered: *answered, ..entry });
        true
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use nebula_cert::VerifiedCertificate;

    use super::*;
    use crate::counters::DropReason;
    use crate::firewall::{Policy, PortRange, Rule};
    use crate::forward::testing::verified;
    use crate::tunnel::PeerIdentity;

    const OWN: &str = "10.1.0.1/16";

    #[allow(clippy::disallowed_methods, reason = "a base for virtual time")]
    fn base() -> Instant {
        Instant::now()
    }

    fn filter(inbound: u16, generation: u32) -> Filter {
        let rule = Rule { port: PortRange::Range(inbound, inbound), ..Rule::any() };
        let policy = Policy { inbound: vec![rule], outbound: vec![Rule::any()], ..Policy::default() };
        Filter::new(&policy, &[OWN.parse().unwrap()], &[], generation)
    }

    fn flow(local_port: u16) -> FlowKey {
        let (local, remote) = ("10.1.0.1".parse().unwrap(), "10.1.0.2".parse().unwrap());
        FlowKey { local, remote, local_port, remote_port: 9, protocol: 17, fragment: false }
    }

    fn peer(certificate: &VerifiedCertificate) -> Peer<'_> {
        Peer::with(certificate, PeerIdentity::from(certificate), None)
    }

    fn decide(
        firewall: Firewall<'_>,
        at: Instant,
        direction: Direction,
        flow: &FlowKey,
        peer: Peer<'_>,
    ) -> Result<(), DropReason> {
        firewall.decide(firewall.conntrack.hash(flow), firewall.conntrack.millis(at), direction, flow, peer)
    }

    #[test]
    fn a_flow_goes_on_as_old_as_it_was_if_the_rules_and_the_peer_are_the_same() {
        let (certificate, stranger) = (verified(&["10.1.0.2/16"]), verified(&["10.1.0.3/16"]));
        let (start, old_filter) = (base(), filter(53, 1));
        let old = Conntrack::new(start, 1, 1000);
        let before = Firewall { filter: &old_filter, conntrack: &old };
        let late = start + Duration::from_secs(100);
        for (at, direction, port) in [(start, Direction::Inbound, 53), (late, Direction::Outbound, 2000)] {
            decide(before, at, direction, &flow(port), peer(&certificate)).unwrap();
        }
        decide(before, late, Direction::Inbound, &flow(2000), peer(&certificate)).unwrap();
        let flows = old.flows_with(&[(7, peer(&certificate))], late, &old_filter);
        assert!(flows.len() == 2 && flows.iter().all(|(position, _)| *position == 7));
        let known = |port| flows.iter().find(|(_, known)| known.flow.local_port == port).unwrap().1;
        assert_eq!((known(53).idle, known(53).answered), (Duration::from_secs(100), false));
        assert_eq!((known(2000).idle, known(2000).answered), (Duration::ZERO, true));

        // Another process, with other rules.
        let timeout = Policy::default().udp_timeout;
        for (port, goes_on) in [(53, true), (54, false)] {
            let (new, new_filter) = (Conntrack::new(late, 99, 1000), filter(port, 1));
            let after = Firewall { filter: &new_filter, conntrack: &new };
            assert_eq!(after.take_over(late, &known(53), peer(&certificate)), goes_on);
            assert!(after.take_over(late, &known(2000), peer(&certificate)));
            assert!(!after.take_over(late, &known(2000), peer(&stranger)), "these are not its addresses");
            assert_eq!(new.len(), 1 + usize::from(goes_on));
            let answer = |at| decide(after, at, Direction::Inbound, &flow(2000), peer(&certificate));
            assert_eq!(answer(late + timeout), Err(DropReason::NoRule), "its time is over");
            let reply = |at| after.tracks(at, &flow(53), peer(&certificate));
            assert_eq!(reply(late + timeout - Duration::from_secs(101)), goes_on);
            assert!(!reply(late + timeout - Duration::from_secs(100)), "it is as old as before");
        }
    }
}
