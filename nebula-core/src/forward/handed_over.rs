//! The flows and counters of all lanes as values, so that another process of this node goes on with them.

use std::collections::BTreeMap;
use std::time::Instant;

use nebula_cert::VerifiedCertificate;

use super::Forwarder;
use crate::capture::{HandedOverAffinity, HandedOverCourse};
use crate::counters::Counters;
use crate::firewall::{Firewall, HandedOverFlow, Peer};
use crate::tunnel::{PeerIdentity, addresses_of};

impl Forwarder {
    /// The flows with the holders of these certificates, each with the position of its peer. Of several certificates
    /// of one name, the last one counts.
    pub(crate) fn flows_with(&self, peers: &[&VerifiedCertificate], now: Instant) -> Vec<(usize, HandedOverFlow)> {
        let snapshot = self.snapshot.load();
        let mut owners = Vec::with_capacity(peers.len());
        for (position, certificate) in peers.iter().enumerate() {
            let identity = PeerIdentity::from(*certificate);
            let routes = snapshot.routes.all_shared_with(&addresses_of(certificate));
            for route in std::iter::once(None).chain(routes.into_iter().map(Some)) {
                owners.push((position, Peer::with(certificate, identity, route)));
            }
        }
        self.conntrack.flows_with(&owners, now, &snapshot.filter)
    }

    /// Goes on with the flows of an earlier process that the present rules allow. Returns how many these are.
    pub(crate) fn take_over_flows(
        &self,
        now: Instant,
        mut flows: Vec<(&VerifiedCertificate, PeerIdentity, HandedOverFlow)>,
    ) -> usize {
        let snapshot = self.snapshot.load();
        let firewall = Firewall { filter: &snapshot.filter, conntrack: &self.conntrack };
        flows.sort_by_key(|(.., flow)| std::cmp::Reverse(flow.idle));
        let mut taken = Vec::new();
        for (certificate, identity, flow) in flows {
            let route = snapshot.routes.shared_with(&flow.flow, &addresses_of(certificate));
            if firewall.take_over(now, &flow, Peer::with(certificate, identity, route)) {
                taken.push(flow.flow);
            }
        }
        if snapshot.capture.is_some() {
            // What was in a tunnel must not leave in clear.
            self.translations.seal(&taken, now);
        }
        taken.len()
    }

    /// The translated flows, and the endpoints that Services of this node keep to.
    pub(crate) fn courses(&self, now: Instant) -> (Vec<HandedOverCourse>, Vec<HandedOverAffinity>) {
        (self.translations.courses(now), self.translations.affinities(now))
    }

    /// Goes on with those of an earlier process that the present directory allows. Returns how many flows these are.
    pub(crate) fn take_over_courses(
        &self,
        now: Instant,
        mut courses: Vec<HandedOverCourse>,
        affinities: &[HandedOverAffinity],
    ) -> usize {
        let snapshot = self.snapshot.load();
        let Some(current) = &snapshot.capture else { return 0 };
        courses.sort_by_key(|course| std::cmp::Reverse(course.idle));
        let taken = courses.iter().filter(|course| self.translations.take_over(current, course, now)).count();
        affinities.iter().for_each(|affinity| self.translations.keep_affinity(affinity, now));
        taken
    }

    /// Begins to count where an earlier process stopped. Names that are not known here are left out.
    pub(crate) fn take_over_counters(&self, counters: &BTreeMap<String, u64>) {
        let before = Counters::default();
        before.add_named(counters);
        self.count_from(before);
    }
}
