//! Rendezvous: asks lighthouses where peers are, tells them where this node is, and serves as a lighthouse for others.

mod advertised;
mod allow_list;
mod calculated;
mod candidates;
mod notices;
mod pattern;
mod questions;
mod server;
mod settings;
mod special;
mod wanted;

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use ipnet::IpNet;

pub use allow_list::{AllowList, BadPattern, InterfaceRules, LocalAllowList, NoDefault, RemoteAllowList};
pub use calculated::{CalculatedRemotes, Calculation, OtherFamily};
pub use candidates::KnownEndpoints;
pub(crate) use candidates::{Candidates, Place, Rules, Screened};
pub(crate) use notices::Notices;
pub use server::Server;
pub use settings::Lighthouse;
pub(crate) use wanted::Wanted;

use questions::Questions;

/// An address of this host.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct LocalAddress {
    /// The address.
    pub address: IpAddr,
    /// Name of the interface that has it.
    pub interface: String,
}

/// The client's side: where peers may be, and where this node is.
#[derive(Debug, Default)]
pub(crate) struct Client {
    peers: BTreeMap<IpAddr, Candidates>,
    local_addresses: Vec<LocalAddress>,
    questions: Questions,
    /// Number of endpoints refused since the last log line about them, and when that was.
    refused: (usize, Option<Instant>),
}

impl Client {
    /// What is known about a peer, created if needed.
    pub(crate) fn candidates(&mut self, peer: IpAddr) -> &mut Candidates {
        self.peers.entry(peer).or_default()
    }

    /// Endpoints at which to try `peer`, best first; `fixed` comes from the configuration.
    pub(crate) fn endpoints(&self, peer: IpAddr, fixed: &[SocketAddr], rules: &Rules<'_>) -> Vec<SocketAddr> {
        match self.peers.get(&peer) {
            Some(known) => known.ranked(fixed, rules),
            None => Candidates::default().ranked(fixed, rules),
        }
    }

    /// Whether another host answered there in place of the peer.
    pub(crate) fn is_refused(&self, peer: IpAddr, endpoint: SocketAddr) -> bool {
        self.peers.get(&peer).is_some_and(|known| known.is_refused(endpoint))
    }

    /// Number of peers about which something is known.
    pub(crate) fn len(&self) -> usize {
        self.peers.len()
    }

    /// Peers about which something is known.
    pub(crate) fn peers(&self) -> impl Iterator<Item = IpAddr> {
        self.peers.keys().copied()
    }

    /// What is known about a peer, by source.
    pub(crate) fn sources(&self, peer: IpAddr, rules: &Rules<'_>) -> BTreeMap<IpAddr, KnownEndpoints> {
        self.peers.get(&peer).map(|known| known.sources(peer, rules)).unwrap_or_default()
    }

    /// Every endpoint that anybody named for a peer, usable or not; `fixed` comes from the configuration.
    pub(crate) fn named(&self, peer: IpAddr, fixed: &[SocketAddr]) -> Vec<SocketAddr> {
        let known = self.peers.get(&peer).into_iter().flat_map(Candidates::named);
        known.chain(fixed.iter().copied()).collect()
    }

    /// Drops what is known about all peers but those to keep and those that may be back soon.
    pub(crate) fn retain(&mut self, now: Instant, keep: impl Fn(IpAddr) -> bool) {
        self.peers.retain(|peer, known| keep(*peer) || known.lost_for(now).is_some());
    }

    /// The tunnel to `peer` ended in a way that makes its return likely, probably at the same place.
    pub(crate) fn expect_back(&mut self, now: Instant, peer: IpAddr) {
        if let Some(known) = self.peers.get_mut(&peer) {
            known.expect_back(now);
        }
    }

    /// How long ago `peer` was lost, if it may be back soon.
    pub(crate) fn lost_for(&self, now: Instant, peer: IpAddr) -> Option<Duration> {
        self.peers.get(&peer).and_then(|known| known.lost_for(now))
    }

    /// Relays of a peer, in order of address.
    pub(crate) fn relays(&self, peer: IpAddr) -> BTreeSet<IpAddr> {
        self.peers.get(&peer).map(Candidates::relays).unwrap_or_default()
    }

    /// Operator queries.
    pub(crate) fn questions(&mut self) -> &mut Questions {
        &mut self.questions
    }

    /// Counts refused endpoints. Returns how many there were since the last log line if another one is due.
    pub(crate) fn note_refused(&mut self, now: Instant, count: usize) -> Option<usize> {
        let (since, last) = &mut self.refused;
        *since += count;
        if last.is_some_and(|last| now < last + REFUSED_LOG_INTERVAL) {
            return None;
        }
        *last = Some(now);
        Some(std::mem::take(since))
    }

    /// Answers to the last query about a peer, by lighthouse.
    pub(crate) fn answers(&self, peer: IpAddr) -> BTreeMap<IpAddr, KnownEndpoints> {
        self.questions.answers(peer)
    }

    /// See [`Questions::heard_since`].
    pub(crate) fn heard_since(&self, peer: IpAddr, heard: &BTreeMap<IpAddr, u64>) -> Vec<IpAddr> {
        self.questions.heard_since(peer, heard)
    }

    /// Drops what is known about a peer that is gone.
    pub(crate) fn forget(&mut self, peer: IpAddr) {
        self.peers.remove(&peer);
    }

    /// Like [`Client::forget`], unless the peer may be back soon.
    pub(crate) fn forget_unless_expected(&mut self, now: Instant, peer: IpAddr) {
        if self.lost_for(now, peer).is_none() {
            self.forget(peer);
        }
    }

    /// Sets the local addresses. Returns whether they changed.
    pub(crate) fn set_local_addresses(&mut self, addresses: Vec<LocalAddress>) -> bool {
        let changed = self.local_addresses != addresses;
        self.local_addresses = addresses;
        changed
    }

    /// The endpoints to report to lighthouses, the most useful first.
    pub(crate) fn advertised(&self, settings: &Lighthouse, listen_port: u16, rules: &Rules<'_>) -> Vec<SocketAddr> {
        let configured = settings.advertise.iter().map(|at| match at.port() {
            0 => SocketAddr::new(at.ip(), listen_port),
            _ => *at,
        });
        let told = |local: &&LocalAddress| {
            special::local_block(local.address).is_none()
                && settings.local_allow.allows(&local.interface, local.address)
                && rules.reachable(SocketAddr::new(local.address, listen_port))
        };
        let local = advertised::in_order(self.local_addresses.iter().filter(told), rules.preferred);
        advertised::cut(configured.filter(|at| rules.reachable(*at)), local, listen_port)
    }
}

/// Hosts report every ten seconds; the log need not repeat itself that often.
const REFUSED_LOG_INTERVAL: Duration = Duration::from_secs(60);

/// The address by which to name `host` to a peer with these networks: the first inside one of them, else its first.
pub(crate) fn address_for(host: &[IpAddr], networks: &[IpNet]) -> Option<IpAddr> {
    let shared = host.iter().find(|address| networks.iter().any(|network| network.contains(*address)));
    shared.or_else(|| host.first()).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn local(interface: &str, address: &str) -> LocalAddress {
        LocalAddress { address: address.parse().unwrap(), interface: interface.to_owned() }
    }

    #[test]
    fn local_addresses_are_advertised_only_if_their_interface_and_they_themselves_may_be_told() {
        let mut client = Client::default();
        let addresses = [("eth0", "192.168.1.2"), ("eth0", "172.16.0.2"), ("docker0", "192.168.9.2")];
        client.set_local_addresses(addresses.map(|(interface, address)| local(interface, address)).to_vec());
        let settings = Lighthouse {
            advertise: vec!["172.16.0.9:1".parse().unwrap()],
            local_allow: LocalAllowList {
                addresses: AllowList::new([("172.16.0.0/12".parse().unwrap(), false)]).unwrap(),
                interfaces: InterfaceRules::new(["docker.*"], false).unwrap(),
            },
            ..Lighthouse::default()
        };
        let advertised = client.advertised(&settings, 4242, &Rules::none());
        let expected = ["172.16.0.9:1", "192.168.1.2:4242"];
        assert_eq!(advertised, expected.map(|text| text.parse().unwrap()), "what was configured is always told");
    }

    #[test]
    fn configured_endpoints_are_advertised_before_local_addresses() {
        let mut client = Client::default();
        let addresses = ["127.0.0.1", "169.254.1.1", "::1", "fe80::1", "192.168.1.2", "10.42.0.2", "2001:db8::2"];
        client.set_local_addresses(addresses.map(|text| local("eth0", text)).to_vec());
        let settings = Lighthouse {
            advertise: vec!["203.0.113.1:0".parse().unwrap(), "203.0.113.1:99".parse().unwrap()],
            ..Lighthouse::default()
        };
        let overlay = ["10.42.0.2/16".parse().unwrap()];
        let advertised = client.advertised(&settings, 4242, &Rules { overlay: &overlay, ..Rules::none() });
        let expected = ["203.0.113.1:4242", "203.0.113.1:99", "192.168.1.2:4242", "[2001:db8::2]:4242"];
        assert_eq!(advertised, expected.map(|text| text.parse().unwrap()));
    }

    #[test]
    fn a_host_is_named_by_the_address_the_asker_can_route() {
        let host: [IpAddr; 2] = ["fd00::2".parse().unwrap(), "10.42.0.2".parse().unwrap()];
        assert_eq!(address_for(&host, &["10.42.0.7/16".parse().unwrap()]), Some(host[1]));
        assert_eq!(address_for(&host, &["172.16.0.7/16".parse().unwrap()]), Some(host[0]));
    }
}
