//! A peer's known endpoints, merged and ranked (ICE candidates).

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use ipnet::IpNet;

use super::RemoteAllowList;
use super::special::{is_nobodys, local_block};

/// One source's information about where a peer is. A source is a lighthouse, the peer itself, or the configuration.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct KnownEndpoints {
    /// Endpoints at which the peer was reached.
    pub learnt: Vec<SocketAddr>,
    /// Endpoints that the source reported, in its order.
    pub reported: Vec<SocketAddr>,
    /// Overlay addresses of the relays through which the peer can be reached.
    pub relays: Vec<IpAddr>,
}

/// Endpoints of one peer by source. Every list is bounded, so no source can make it grow.
#[derive(Debug, Default)]
pub(crate) struct Candidates {
    learnt: Option<SocketAddr>,
    reported: BTreeMap<IpAddr, Report>,
    /// Relays by source: a lighthouse, or the relay itself, through which the peer was heard.
    relays: BTreeMap<IpAddr, Vec<IpAddr>>,
    refused: BTreeSet<SocketAddr>,
    /// When the peer was lost, if it is expected back.
    lost: Option<Instant>,
}

/// What a lighthouse said last.
#[derive(Debug)]
struct Report {
    endpoints: Vec<SocketAddr>,
    /// Where the lighthouse was.
    from: Place,
}

/// Whether a host with a tunnel is on this machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// It is reached by a loopback address, so loopback means the same machine to it.
    Here,
    /// It is not, or it is behind a relay.
    Elsewhere,
}

impl Place {
    /// Of the host whose tunnel leads to this endpoint.
    pub(crate) fn of(endpoint: Option<SocketAddr>) -> Self {
        if endpoint.is_some_and(|at| at.ip().is_loopback()) { Self::Here } else { Self::Elsewhere }
    }
}

impl Candidates {
    /// The peer proved to be reachable at `endpoint`.
    pub(crate) fn learn(&mut self, endpoint: SocketAddr) {
        self.learnt = Some(endpoint);
        self.refused.clear();
    }

    /// Whether the peer proved to be reachable there.
    pub(crate) fn was_at(&self, endpoint: SocketAddr) -> bool {
        self.learnt == Some(endpoint)
    }

    /// A tunnel to the peer is up.
    pub(crate) fn reached(&mut self) {
        self.lost = None;
    }

    /// The last tunnel to the peer ended in a way that makes its return likely.
    pub(crate) fn expect_back(&mut self, now: Instant) {
        self.lost = Some(now);
    }

    /// How long ago the peer was lost; `None` if it is not expected back, or no longer.
    pub(crate) fn lost_for(&self, now: Instant) -> Option<Duration> {
        let since = now.saturating_duration_since(self.lost?);
        (since < EXPECTED_FOR).then_some(since)
    }

    /// Replaces the endpoints that `lighthouse` reported before. Those that are not believable are kept for the
    /// operator, and because a reload may allow them.
    pub(crate) fn report(&mut self, lighthouse: IpAddr, from: Place, endpoints: Vec<SocketAddr>) {
        self.reported.insert(lighthouse, Report { endpoints, from });
    }

    /// Replaces the relays that `source` named before. Returns whether they changed.
    pub(crate) fn report_relays(&mut self, source: IpAddr, relays: Vec<IpAddr>) -> bool {
        let room = self.relays.len() < MAX_RELAY_SOURCES || self.relays.contains_key(&source);
        let changed = room && self.relays.get(&source).map_or(&[][..], Vec::as_slice) != relays;
        if changed {
            self.relays.insert(source, relays);
        }
        changed
    }

    /// Every relay of the peer, in order of address.
    pub(crate) fn relays(&self) -> BTreeSet<IpAddr> {
        let mut relays = BTreeSet::new();
        relays.extend(self.relays.values().flatten());
        relays
    }

    /// Everything believable, by source; a learnt endpoint is listed under the peer itself.
    pub(crate) fn sources(&self, peer: IpAddr, rules: &Rules<'_>) -> BTreeMap<IpAddr, KnownEndpoints> {
        let mut sources: BTreeMap<IpAddr, KnownEndpoints> = BTreeMap::new();
        for (owner, report) in &self.reported {
            sources.entry(*owner).or_default().reported = report.believed(rules).collect();
        }
        for (owner, relays) in &self.relays {
            sources.entry(*owner).or_default().relays.clone_from(relays);
        }
        if let Some(endpoint) = self.learnt {
            sources.entry(peer).or_default().learnt.push(endpoint);
        }
        sources
    }

    /// Another host answered at `endpoint`: it is not tried again until a handshake succeeds.
    pub(crate) fn refuse(&mut self, endpoint: SocketAddr) {
        if self.refused.len() < MAX_REFUSED {
            self.refused.insert(endpoint);
        }
    }

    /// Whether another host answered there.
    pub(crate) fn is_refused(&self, endpoint: SocketAddr) -> bool {
        self.refused.contains(&endpoint)
    }

    /// All endpoints that anybody named, usable or not.
    pub(crate) fn named(&self) -> impl Iterator<Item = SocketAddr> {
        self.learnt.iter().chain(self.reported.values().flat_map(|report| &report.endpoints)).copied()
    }

    /// All usable endpoints, best first.
    pub(crate) fn ranked(&self, fixed: &[SocketAddr], rules: &Rules<'_>) -> Vec<SocketAddr> {
        let reported = self.reported.values().flat_map(|report| report.believed(rules));
        let certain = self.learnt.iter().chain(fixed).copied().filter(|at| rules.usable(*at));
        let mut usable: Vec<_> = reported.chain(certain).filter(|at| !self.refused.contains(at)).collect();
        usable.sort_unstable_by_key(|at| rank(*at, rules.preferred));
        usable.dedup();
        usable
    }
}

impl Report {
    fn believed(&self, rules: &Rules<'_>) -> impl Iterator<Item = SocketAddr> {
        self.endpoints.iter().copied().filter(|at| rules.believable(*at, self.from))
    }
}

/// What makes an endpoint usable, and better than another.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rules<'a> {
    /// Networks of this node's certificate: an endpoint inside them would be a tunnel in a tunnel.
    pub(crate) overlay: &'a [IpNet],
    /// Preferred underlay networks.
    pub(crate) preferred: &'a [IpNet],
    /// Underlay addresses at which peers may be.
    pub(crate) allowed: &'a RemoteAllowList,
    /// Overlay addresses of the peer in question.
    pub(crate) peer: &'a [IpAddr],
}

impl Rules<'_> {
    /// Whether the peer may be at this endpoint.
    pub(crate) fn usable(&self, endpoint: SocketAddr) -> bool {
        self.reachable(endpoint) && self.allowed.allows(self.peer, endpoint.ip())
    }

    /// Whether a datagram to this endpoint could arrive, and not through the overlay.
    pub(crate) fn reachable(&self, endpoint: SocketAddr) -> bool {
        let address = endpoint.ip();
        endpoint.port() != 0 && !is_nobodys(address) && !self.overlay.iter().any(|network| network.contains(&address))
    }

    /// Whether to believe a report that the peer is at this endpoint. Loopback and link-local addresses are believed
    /// only if an allow list names them: otherwise the reporter could choose which local service gets a datagram. A
    /// lighthouse on this machine is believed about loopback.
    pub(crate) fn believable(&self, endpoint: SocketAddr, from: Place) -> bool {
        self.usable(endpoint) && self.tellable(endpoint, from)
    }

    /// Whether an endpoint that a tunnel uses may be reported to a host.
    pub(crate) fn tellable(&self, endpoint: SocketAddr, to: Place) -> bool {
        let address = endpoint.ip();
        to == Place::Here && address.is_loopback()
            || local_block(address).is_none_or(|block| self.allowed.names(self.peer, address, block))
    }

    /// Sorts out which endpoints of a message are believable. Its number of endpoints is bounded already, and cut
    /// before this, as Go Nebula does: see [`MAX_ENDPOINTS`](crate::wire::messages::MAX_ENDPOINTS).
    pub(crate) fn screen(&self, endpoints: Vec<SocketAddr>, from: Place) -> Screened {
        let mut screened = Screened { believed: Vec::with_capacity(endpoints.len()), refused: Vec::new() };
        for named in endpoints {
            let at = SocketAddr::new(named.ip().to_canonical(), named.port());
            if self.believable(at, from) {
                screened.believed.push(at);
            } else {
                screened.refused.push(at);
            }
        }
        screened
    }
}

impl Screened {
    /// Believes no more than two ports of each address, except of `own`, where the reporter is heard: whoever names a
    /// stranger's address must not have many datagrams sent there.
    pub(crate) fn thin(&mut self, own: Option<IpAddr>) {
        let mut ports: BTreeMap<IpAddr, usize> = BTreeMap::new();
        let believed = std::mem::take(&mut self.believed);
        for at in believed {
            let count = ports.entry(at.ip()).or_default();
            *count += 1;
            if *count <= PORTS_PER_ADDRESS || own == Some(at.ip()) {
                self.believed.push(at);
            } else {
                self.refused.push(at);
            }
        }
    }
}

/// A list of endpoints from the wire, after screening.
#[derive(Debug, Default)]
pub(crate) struct Screened {
    /// Endpoints at which the peer may be.
    pub(crate) believed: Vec<SocketAddr>,
    /// Endpoints to which nobody should be sent.
    pub(crate) refused: Vec<SocketAddr>,
}

/// Sort key: preferred, then IPv6, then public IPv4, then private IPv4; then by address and port.
fn rank(endpoint: SocketAddr, preferred: &[IpNet]) -> (bool, bool, bool, IpAddr, u16) {
    let address = endpoint.ip();
    let private = matches!(address, IpAddr::V4(v4) if v4.is_private());
    let is_preferred = preferred.iter().any(|network| network.contains(&address));
    (!is_preferred, address.is_ipv4(), private, address, endpoint.port())
}

/// A host has one port at each of its addresses, and perhaps one that its router forwards.
const PORTS_PER_ADDRESS: usize = 2;
const MAX_REFUSED: usize = 64;
/// A restart takes less time, even on a machine that restarts its services one after another.
const EXPECTED_FOR: Duration = Duration::from_secs(30);
const MAX_RELAY_SOURCES: usize = 16;

#[cfg(test)]
mod tests {
    use super::*;

    impl Rules<'static> {
        /// Rules that allow everything.
        pub(crate) fn none() -> Self {
            static ALL: std::sync::LazyLock<RemoteAllowList> = std::sync::LazyLock::new(RemoteAllowList::default);
            Self { overlay: &[], preferred: &[], allowed: &ALL, peer: &[] }
        }
    }

    fn endpoints(texts: &[&str]) -> Vec<SocketAddr> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    #[test]
    fn endpoints_are_ranked_preferred_then_ipv6_then_public_then_private() {
        let mut candidates = Candidates::default();
        let lighthouse = "10.0.0.1".parse().unwrap();
        candidates.report(
            lighthouse,
            Place::Elsewhere,
            endpoints(&[
                "10.2.3.4:4242",
                "203.0.113.9:4242",
                "203.0.113.9:1000",
                "[2001:db8::1]:4242",
                "192.168.7.7:1",
            ]),
        );
        let preferred = ["192.168.7.0/24".parse().unwrap()];
        let rules = Rules { preferred: &preferred, ..Rules::none() };
        assert_eq!(
            candidates.ranked(&[], &rules),
            endpoints(&[
                "192.168.7.7:1",
                "[2001:db8::1]:4242",
                "203.0.113.9:1000",
                "203.0.113.9:4242",
                "10.2.3.4:4242"
            ])
        );
    }

    #[test]
    fn endpoints_named_by_several_sources_appear_once() {
        let mut candidates = Candidates::default();
        let at = endpoints(&["203.0.113.9:4242"]);
        candidates.report("10.0.0.1".parse().unwrap(), Place::Elsewhere, at.clone());
        candidates.report("10.0.0.2".parse().unwrap(), Place::Elsewhere, at.clone());
        candidates.learn(at[0]);
        assert_eq!(candidates.ranked(&at, &Rules::none()), at);
    }

    #[test]
    fn a_new_report_replaces_the_old_one_of_the_same_lighthouse() {
        let mut candidates = Candidates::default();
        let lighthouse = "10.0.0.1".parse().unwrap();
        candidates.report(lighthouse, Place::Elsewhere, endpoints(&["203.0.113.1:1"]));
        candidates.report(lighthouse, Place::Elsewhere, endpoints(&["203.0.113.2:1"]));
        assert_eq!(candidates.ranked(&[], &Rules::none()), endpoints(&["203.0.113.2:1"]));
    }

    #[test]
    fn endpoints_inside_the_overlay_are_never_used() {
        let overlay = ["10.42.0.1/16".parse().unwrap()];
        let rules = Rules { overlay: &overlay, ..Rules::none() };
        let fixed = endpoints(&["10.42.9.9:4242", "10.43.9.9:4242"]);
        assert_eq!(Candidates::default().ranked(&fixed, &rules), endpoints(&["10.43.9.9:4242"]));
    }

    #[test]
    fn an_endpoint_where_somebody_else_answered_is_left_out_until_a_handshake_succeeds() {
        let fixed = endpoints(&["203.0.113.1:1", "203.0.113.2:1"]);
        let mut candidates = Candidates::default();
        candidates.refuse(fixed[0]);
        assert_eq!(candidates.ranked(&fixed, &Rules::none()), fixed[1..]);
        candidates.learn(fixed[1]);
        assert_eq!(candidates.ranked(&fixed, &Rules::none()), fixed);
    }

    #[test]
    fn what_is_not_believable_is_remembered_and_not_used() {
        let overlay = ["10.42.0.1/16".parse().unwrap()];
        let rules = Rules { overlay: &overlay, ..Rules::none() };
        let named = endpoints(&["10.42.0.9:1", "127.0.0.1:1", "203.0.113.1:1"]);
        let mut candidates = Candidates::default();
        let lighthouse = "10.42.0.1".parse().unwrap();
        candidates.report(lighthouse, Place::Elsewhere, named.clone());
        assert_eq!(candidates.named().collect::<Vec<_>>(), named);
        assert_eq!(candidates.ranked(&[], &rules), named[2..]);
        let sources = candidates.sources("10.42.0.2".parse().unwrap(), &rules);
        assert_eq!(sources[&lighthouse].reported, named[2..]);
    }

    #[test]
    fn a_lighthouse_on_this_machine_is_believed_about_loopback_and_about_no_other_machine_less() {
        let named = endpoints(&["127.0.0.1:1", "169.254.169.254:80", "203.0.113.1:1", "[::1]:1"]);
        let lighthouse = "10.42.0.1".parse().unwrap();
        let mut candidates = Candidates::default();
        candidates.report(lighthouse, Place::of(endpoints(&["127.0.0.1:4242"]).first().copied()), named.clone());
        assert_eq!(candidates.ranked(&[], &Rules::none()), [named[3], named[0], named[2]]);
        for elsewhere in [endpoints(&["203.0.113.9:4242"]).first().copied(), None] {
            candidates.report(lighthouse, Place::of(elsewhere), named.clone());
            assert_eq!(candidates.ranked(&[], &Rules::none()), [named[2]]);
        }
    }
}
