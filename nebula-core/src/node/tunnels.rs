//! The control plane's state of each live tunnel, beyond what the data path needs.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nebula_cert::{Fingerprint, UnixTime, Version};

use crate::index::{LocalIndex, RemoteIndex};
use crate::relay::RateLimit;
use crate::tunnel::liveness::Liveness;
use crate::tunnel::{Tunnel, TunnelTable};
use crate::{Config, Origin};

/// A live tunnel with its control state.
#[derive(Debug)]
pub(super) struct Live {
    pub(super) tunnel: Arc<Tunnel>,
    pub(super) liveness: Liveness,
    /// The own certificate this tunnel was made with.
    pub(super) own_certificate: Fingerprint,
    /// Time from start to message 2, if this node initiated.
    pub(super) took: Option<Duration>,
    /// Digest of the message 1 that opened it, if this node responded.
    pub(super) opened_by: Option<[u8; 32]>,
    /// When its handshake was completed here; if this node responded, before the peer was heard.
    pub(super) since: Instant,
    /// The endpoint that the tunnel left last, and when.
    pub(super) left: Option<(SocketAddr, Instant)>,
    /// When a traffic check last found traffic.
    pub(super) used: Instant,
    /// This node moved or woke up, sent the peer a test request, and has heard nothing in this tunnel since.
    pub(super) announced: bool,
    /// Send counter when better endpoints were last tried.
    pub(super) promoted_at: u64,
    /// Send counter when the lighthouses were last asked.
    pub(super) asked_at: u64,
    /// When they may be asked again.
    pub(super) ask_after: Instant,
    /// When the relayed peer may be challenged again.
    pub(super) challenge_after: Instant,
    /// Rate limit of the handshakes that this node starts as a relay on behalf of this peer.
    pub(super) introductions: RateLimit,
}

impl Live {
    /// Whether the peer's certificate is no longer acceptable.
    pub(super) fn is_refused(&self, config: &Config, at: UnixTime) -> bool {
        match config.trust.recheck(&self.tunnel.peer, at) {
            Ok(()) => false,
            Err(nebula_cert::Error::Blocked { .. }) => true,
            Err(_) => config.disconnect_invalid,
        }
    }

    /// Whether a new handshake would use a newer certificate, a higher version or fresh counters.
    pub(super) fn is_outdated(&self, config: &Config) -> bool {
        let tunnel = &self.tunnel;
        let Some(current) = config.identity.certificate(tunnel.own_version) else { return true };
        current.fingerprint() != self.own_certificate
            || self.version_to_upgrade_to(config).is_some()
            || tunnel.own_version < config.default_version()
            || tunnel.session.is_worn()
    }

    /// The higher version that both sides hold but this tunnel does not use.
    pub(super) fn version_to_upgrade_to(&self, config: &Config) -> Option<Version> {
        let theirs = self.tunnel.peer.version();
        (theirs > self.tunnel.own_version && config.identity.certificate(theirs).is_some()).then_some(theirs)
    }
}

/// A tunnel whose peer has proved that it holds the keys, about to be installed.
#[derive(Debug)]
pub(crate) struct Established {
    pub(crate) tunnel: Arc<Tunnel>,
    /// Where the peer's last datagram came from.
    pub(crate) from: Origin,
    /// When the handshake was completed here.
    pub(crate) since: Instant,
    /// The own certificate this tunnel was made with.
    pub(crate) own_certificate: Fingerprint,
    /// Digest of message 1, if this node responded.
    pub(crate) opened_by: Option<[u8; 32]>,
    /// Time from start to message 2, if this node initiated.
    pub(crate) took: Option<Duration>,
}

/// All live tunnels.
#[derive(Debug, Default)]
pub(super) struct Tunnels {
    live: BTreeMap<LocalIndex, Live>,
    /// Oldest first.
    by_peer: BTreeMap<IpAddr, Vec<LocalIndex>>,
    by_remote: BTreeSet<(RemoteIndex, LocalIndex)>,
    by_opening: BTreeMap<[u8; 32], LocalIndex>,
}

impl Tunnels {
    pub(super) fn insert(&mut self, live: Live) {
        let index = live.tunnel.local_index;
        for &address in &live.tunnel.peer_addresses {
            let indexes = self.by_peer.entry(address).or_default();
            let is_older = |other: &&LocalIndex| self.live.get(*other).is_some_and(|other| other.since <= live.since);
            let at = indexes.len() - indexes.iter().rev().take_while(|other| !is_older(other)).count();
            indexes.insert(at, index);
        }
        self.by_remote.insert((live.tunnel.remote_index, index));
        if let Some(digest) = live.opened_by {
            self.by_opening.insert(digest, index);
        }
        self.live.insert(index, live);
    }

    pub(super) fn remove(&mut self, index: LocalIndex) -> Option<Live> {
        let live = self.live.remove(&index)?;
        for address in &live.tunnel.peer_addresses {
            if let Some(indexes) = self.by_peer.get_mut(address) {
                indexes.retain(|other| *other != index);
                if indexes.is_empty() {
                    self.by_peer.remove(address);
                }
            }
        }
        self.by_remote.remove(&(live.tunnel.remote_index, index));
        if let Some(digest) = live.opened_by
            && self.by_opening.get(&digest) == Some(&index)
        {
            self.by_opening.remove(&digest);
        }
        Some(live)
    }

    pub(super) fn get(&self, index: LocalIndex) -> Option<&Live> {
        self.live.get(&index)
    }

    pub(super) fn get_mut(&mut self, index: LocalIndex) -> Option<&mut Live> {
        self.live.get_mut(&index)
    }

    /// Number of entries in the lookup tables: by peer, by remote index and by message 1.
    pub(super) fn lookups(&self) -> usize {
        let by_peer: usize = self.by_peer.values().map(Vec::len).sum();
        by_peer + self.by_remote.len() + self.by_opening.len()
    }

    /// Iterates in order of the local indexes.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Live> {
        self.live.values()
    }

    pub(super) fn indexes(&self) -> Vec<LocalIndex> {
        self.live.keys().copied().collect()
    }

    /// Tunnels to the peer with this address, oldest first.
    pub(super) fn of_peer(&self, address: IpAddr) -> &[LocalIndex] {
        self.by_peer.get(&address).map_or(&[], Vec::as_slice)
    }

    /// The tunnel that takes over when the primary one to this peer is gone: the newest.
    pub(super) fn heir(&self, address: IpAddr) -> Option<&Arc<Tunnel>> {
        self.of_peer(address).last().and_then(|index| Some(&self.get(*index)?.tunnel))
    }

    /// Tunnels whose peer chose this index; several peers may choose the same.
    pub(super) fn of_remote(&self, index: RemoteIndex) -> impl Iterator<Item = &Live> {
        let range = (index, LocalIndex(0))..=(index, LocalIndex(u32::MAX));
        self.by_remote.range(range).filter_map(|(_, local)| self.live.get(local))
    }

    /// The tunnel that the message 1 with this digest opened.
    pub(super) fn opened_by(&self, digest: &[u8; 32]) -> Option<&Live> {
        self.by_opening.get(digest).and_then(|index| self.live.get(index))
    }

    /// Whether `tunnel` is newer than the primary one: the peer uses the tunnel that was made last.
    pub(super) fn is_newest(&self, tunnel: &Tunnel, table: &TunnelTable) -> bool {
        let Some(&peer) = tunnel.peer_addresses.first() else { return false };
        let Some(primary) = table.primary(peer) else { return true };
        let age = |index| self.of_peer(peer).iter().position(|other| *other == index);
        age(primary) < age(tunnel.local_index)
    }

    /// The tunnel to remove if there are too many to this peer: the oldest one that is not the primary one.
    pub(super) fn surplus(&self, peer: IpAddr, table: &TunnelTable) -> Option<LocalIndex> {
        let (_newest, older) = self.of_peer(peer).split_last()?;
        if older.len() < MAX_TUNNELS_PER_PEER {
            return None;
        }
        let is_spare = |index: &&LocalIndex| self.get(**index).is_some_and(|live| !table.is_primary(&live.tunnel));
        older.iter().find(is_spare).copied()
    }
}

/// Maximum number of tunnels to one peer: two nodes that call each other make two, and each new certificate one more.
const MAX_TUNNELS_PER_PEER: usize = 5;
