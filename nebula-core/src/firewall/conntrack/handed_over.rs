//! Known flows as values, so that another process of this node goes on with them.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use super::{Conntrack, MAX_PAST, lock};
use crate::counters::Direction;
use crate::firewall::flow_entry::{Entry, Owner};
use crate::firewall::{Filter, Firewall, Occasion, Peer};
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
    /// Whether it was refused when it was last evaluated.
    pub(crate) ended: bool,
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
                    let Entry { flow, direction, answered, ended, .. } = *entry;
                    let idle = Duration::from_millis(idle);
                    flows.push((*position, HandedOverFlow { flow, direction, answered, ended, idle }));
                }
            }
        }
        flows
    }
}

impl Firewall<'_> {
    /// Goes on with a flow that an earlier process of this node knew. One that had ended, or that the present rules do
    /// not allow, has ended but stays known until it expires: otherwise the next packet of the other end would begin it
    /// the other way round. Flows are to be passed in the order of their age, the oldest first. Returns whether the
    /// flow is known now.
    pub(crate) fn take_over(&self, now: Instant, flow: &HandedOverFlow, peer: Peer<'_>) -> bool {
        let HandedOverFlow { flow, direction, answered, ended, idle } = flow;
        let idle = u64::try_from((*idle).min(MAX_PAST).as_millis()).unwrap_or(u64::MAX);
        let is_live = idle < self.filter.timeouts().of(flow);
        if !is_live || self.filter.check_addresses(flow, peer).is_err() {
            return false;
        }
        let ended = *ended || self.filter.judge(*direction, flow, peer, Occasion::KnownFlow).is_err();
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
        if is_full && !table.make_room(&mut shard, now, holder) {
            return false;
        }
        let entry = Entry::new(*flow, owner, *direction, self.filter.generation(), now.saturating_sub(idle));
        shard.insert(hash, holder, Entry { answered: *answered, ended, ..entry });
        true
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use nebula_cert::VerifiedCertificate;

    use super::*;
    use crate::counters::DropReason;
    use crate::firewall::About;
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
        let now = firewall.conntrack.millis(at);
        let about = About { direction, flow, original: None };
        firewall.decide(firewall.conntrack.hash(flow), now, about, peer).map(|_| ())
    }

    #[test]
    fn a_flow_goes_on_as_old_as_it_was_if_the_rules_and_the_peer_are_the_same_and_has_ended_if_rules_refuse_it() {
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
            assert!(after.take_over(late, &known(53), peer(&certificate)));
            assert!(after.take_over(late, &known(2000), peer(&certificate)));
            assert!(!after.take_over(late, &known(2000), peer(&stranger)), "these are not its addresses");
            assert_eq!(new.len(), 2);
            // Even where a rule would allow its other end to begin it.
            let packets = [Direction::Inbound, Direction::Outbound];
            let verdicts = packets.map(|direction| {
                let found = new.find(&flow(53), &peer(&certificate), direction, new.millis(late), &new_filter);
                found.unwrap().1
            });
            let expected = if goes_on { Ok(()) } else { Err(DropReason::NoRule) };
            assert_eq!(verdicts, [expected; 2]);
            let answer = |at| decide(after, at, Direction::Inbound, &flow(2000), peer(&certificate));
            assert_eq!(answer(late + timeout), Err(DropReason::NoRule), "its time is over");
            let reply = |at| after.tracks(at, &flow(53), peer(&certificate));
            assert!(reply(late + timeout - Duration::from_secs(101)));
            assert!(!reply(late + timeout - Duration::from_secs(100)), "it is as old as before");
        }
    }

    #[test]
    fn a_flow_that_had_ended_stays_so_until_whoever_began_it_may_begin_it_again() {
        let certificate = verified(&["10.1.0.2/16"]);
        let (start, old_filter, strict) = (base(), filter(53, 1), filter(54, 2));
        let old = Conntrack::new(start, 1, 1000);
        decide(
            Firewall { filter: &old_filter, conntrack: &old },
            start,
            Direction::Inbound,
            &flow(53),
            peer(&certificate),
        )
        .unwrap();
        let ends = Firewall { filter: &strict, conntrack: &old };
        assert!(decide(ends, start, Direction::Inbound, &flow(53), peer(&certificate)).is_err());
        let flows = old.flows_with(&[(0, peer(&certificate))], start, &strict);
        assert!(flows.len() == 1 && flows[0].1.ended, "{flows:?}");

        // The next process has the rules of before.
        let (new, lenient) = (Conntrack::new(start, 99, 1000), filter(53, 1));
        let after = Firewall { filter: &strict, conntrack: &new };
        assert!(after.take_over(start, &flows[0].1, peer(&certificate)));
        let answer = |firewall| decide(firewall, start, Direction::Outbound, &flow(53), peer(&certificate));
        assert_eq!(answer(after), Err(DropReason::NoRule), "its other end may begin others, but not this one");
        let after = Firewall { filter: &lenient, conntrack: &new };
        assert!(decide(after, start, Direction::Inbound, &flow(53), peer(&certificate)).is_ok());
        assert!(answer(after).is_ok());
    }
}
